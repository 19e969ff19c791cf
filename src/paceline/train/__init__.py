"""Teach draft heads."""
