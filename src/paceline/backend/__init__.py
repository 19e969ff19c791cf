"""What executes a model: the seam, its registry, and one folder for each backend."""
