"""Runs on disk as they are made: a comparison takes hours, and goes on where it stopped."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Json = dict[str, Any]


class Results:
    """The runs of a comparison, each known by what it is of."""

    def __init__(self, file: Path, settings: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        """Take up a file with the same settings. Raises `ConfigError` if it is of another comparison."""
        self.file, self._document = file, {**head, "settings": dict(settings), "runs": []}
        if file.exists():
            self._document |= {"runs": _runs(file, self._document["settings"])}

    @property
    def runs(self) -> list[Json]:
        """All runs so far."""
        found: list[Json] = self._document["runs"]
        return found

    def once(self, key: Mapping[str, Any], run: Callable[[], Json]) -> Json:
        """Return the run of a key: as it was recorded, or made and recorded now."""
        known = next((r for r in self.runs if all(r.get(name) == value for name, value in key.items())), None)
        if known is None:
            known = {**key, **run()}
            self.runs.append(known)
            self.write()
        return known

    def write(self, **more: Any) -> None:
        """Write the file, whole, with what else is known now."""
        self._document |= more
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(self._document, indent=1) + "\n", encoding="utf-8")
        part.replace(self.file)


def _runs(file: Path, settings: Json) -> list[Json]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["settings"] != json.loads(json.dumps(settings)):
            raise ConfigError(f"--json {file} is of other settings; name another file, or the same settings")
        runs: list[Json] = found["runs"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--json {file} is no comparison to go on with: {error}") from None
    return runs
