"""Scenarios that compare `auto` with fixed choices on real runs."""
