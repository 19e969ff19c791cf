"""The HTTP routes and their formats."""
