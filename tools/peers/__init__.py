"""Paceline beside other engines, measured in turns in one run: `scripts/compare-peers`.

Each row of the table is a worker process of its own, in the environment of its engine, that speaks JSON lines
(`protocol`). One driver (`compare`) lets them compute one at a time; whoever is not asked is stopped by a signal.
"""
