"""Process of its own for work that may take any time or memory."""
