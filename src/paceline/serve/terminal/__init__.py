"""Commands that talk to a model in the terminal."""
