"""Formats and configs of draft heads and of models cut from a target."""
