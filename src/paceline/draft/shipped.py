"""Drafters that ship with the project, found by what the target is."""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "drafters"  # of package data: fingerprint of the target / name of the drafter


def ships(name: str, fingerprint: str) -> bool:
    """Tell whether a drafter ships for a target."""
    return bool(fingerprint) and (FOLDER / fingerprint / name).is_dir()


def shipped_folder(name: str, fingerprint: str) -> Path:
    """Return the folder of the drafter that ships for a target. Raises `ConfigError` if there is none."""
    folder = FOLDER / fingerprint / name
    if not ships(name, fingerprint):
        raise ConfigError(
            f"no {name} ships for this target ({fingerprint}); train one with `paceline train {name}` and name "
            f"its folder, --draft {name}:model=FOLDER, or use --draft ngram, which needs no training"
        )
    return folder
