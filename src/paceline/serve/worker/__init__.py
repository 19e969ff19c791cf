"""Process of the engine, and the server's client to it."""
