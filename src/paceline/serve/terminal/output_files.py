"""Checks of output files before the work begins, since commands write them at its end."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.errors import ConfigError


def check_file(flag: str, name: str | None) -> None:
    """Raise `ConfigError` if a flag's file cannot be written. None or empty: not given."""
    if not name:
        return
    path = Path(name)
    if path.is_dir():
        raise ConfigError(f"{flag}: {name!r} is a folder; name a file in it")
    if path.exists():
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{flag}: cannot write to {name!r}")
        if not path.is_file():
            return  # a pipe or device, whose folder does not matter
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag}: cannot write into the folder {str(path.parent)!r}")


def check_picture(flag: str, name: str | None) -> None:
    """Raise `ConfigError` if a flag's picture cannot be drawn or written. None: not given."""
    if not name:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ConfigError(f"{flag} needs matplotlib: pip install 'paceline[plot]'") from None
    check_file(flag, name)
    known = FigureCanvasBase.get_supported_filetypes()
    if Path(name).suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"{flag}: the name of a picture ends in one of {', '.join(sorted(known))}, not {name!r}")
