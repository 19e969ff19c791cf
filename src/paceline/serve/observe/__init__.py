"""Metrics of a running server."""
