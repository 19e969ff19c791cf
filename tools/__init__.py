"""Developers' tools, run from the root of a clone as `python -m tools.NAME`. They are not in the wheel."""
