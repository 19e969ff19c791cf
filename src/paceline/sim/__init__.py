"""The simulator: serving without a model, on measured costs."""
