"""Process of its own for work on text from outside that may take any time or memory."""
