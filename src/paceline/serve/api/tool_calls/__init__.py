"""Answers read as reasoning, content and calls of tools."""
