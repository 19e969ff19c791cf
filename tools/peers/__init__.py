"""Paceline beside other engines, interleaved in one run: `scripts/compare-peers`.

Each row of the table is a worker process in the environment of its engine; it answers JSON lines (`protocol`). One
driver (`compare`) lets one worker compute at a time and stops all others by a signal.
"""
