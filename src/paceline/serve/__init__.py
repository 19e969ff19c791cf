"""The outside world: OpenAI-compatible server, tokenizing, streaming, processes, the Python API."""
