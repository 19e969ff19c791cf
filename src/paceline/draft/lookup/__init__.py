"""Lookup drafters: tokens only, no weights."""
