"""Developers' tools, not in the wheel: `python -m tools.NAME` from a clone's root."""
