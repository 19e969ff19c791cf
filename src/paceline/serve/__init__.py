"""The outside world: server, processes, Python API."""
