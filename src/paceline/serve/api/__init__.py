"""HTTP routes and their formats."""
