"""The engine's own process, and the server's client to it."""
