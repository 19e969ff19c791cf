"""Runs on disk as they are made, so that a long comparison can resume."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Json = dict[str, Any]


# Fields that are the same for all runs of a file: figures of two builds or machines are not one comparison.
SHARED_FIELDS = ("git", "version", "machine", "model", "backend")


class ResultFile:
    """The runs of a comparison, each found by its key."""

    def __init__(self, file: Path, settings: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        """Resume a file with the same settings, build and machine, or begin a new one.

        head: the first fields of the file. Raises `ConfigError` if the file is of another comparison.
        """
        self.file = file
        self._document: Json = {**head, "settings": dict(settings), "runs": []}
        if file.exists():
            self._document |= {"runs": _runs(file, self._document)}

    @property
    def runs(self) -> list[Json]:
        """All runs so far."""
        found: list[Json] = self._document["runs"]
        return found

    def once(self, key: Mapping[str, Any], run: Callable[[], Json]) -> Json:
        """Return the recorded run of a key, or make and record it."""
        known = next((r for r in self.runs if all(r.get(name) == value for name, value in key.items())), None)
        if known is None:
            known = {**key, **run()}
            self.runs.append(known)
            self.write()
        return known

    def write(self, **more: Any) -> None:
        """Replace the file, with further fields."""
        self._document |= more
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self._document, indent=1) + "\n", encoding="utf-8")
        part.replace(self.file)


def _runs(file: Path, document: Json) -> list[Json]:
    """Return a file's runs. Raises `ConfigError` if it is of another comparison than `document`."""
    try:
        found, ours = json.loads(file.read_text(encoding="utf-8")), json.loads(json.dumps(document))
        changed = _changed(found["settings"], ours["settings"])
        if changed:
            raise ConfigError(f"--json {file} is of other settings: {changed}; name another file, or the same")
        changed = _changed(*({name: head.get(name) for name in SHARED_FIELDS} for head in (found, ours)))
        if changed:
            raise ConfigError(
                f"--json {file} is of another build, machine or model: {changed}; name another file, as such runs "
                "are not comparable"
            )
        runs: list[Json] = found["runs"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"--json {file} is no comparison to go on with: {error}") from None
    return runs


def _changed(theirs: Json, ours: Json) -> str:
    """Return the differences in words; empty if there are none."""
    found = []
    for name in sorted({**theirs, **ours}):
        was, now = theirs.get(name), ours.get(name)
        if was != now and isinstance(was, dict) and isinstance(now, dict):
            found.append(_changed(was, now))
        elif was != now:
            found.append(f"{name} (was {was}, is {now})")
    return ", ".join(found)
