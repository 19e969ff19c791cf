"""Request life: scheduler, pages, rows, the step."""
