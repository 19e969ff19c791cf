"""One prepared run on a GPU: `scripts/on-gpu`.

`run` starts each phase in a process of its own and gathers what the phases have written; `pack` makes a folder
with all that a machine without network needs. On a host every phase runs over tiny shapes (`--dry`).
"""
