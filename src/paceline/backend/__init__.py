"""Execution of models: the seam, its registry, and one folder for each backend."""
