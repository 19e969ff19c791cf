"""Clients of other people, unchanged, against the server."""
