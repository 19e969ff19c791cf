"""Logs of every process: lines of text, or with PACELINE_LOG_FORMAT=json one JSON object a line.

A record may carry `fields`, a mapping that JSON adds to the object, and `timed`: its text begins with the time.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

LEVEL, FORMAT = "PACELINE_LOG_LEVEL", "PACELINE_LOG_FORMAT"
FORMATS = ("text", "json")
MAX_CHARS = 16_384  # most characters of a message or a traceback
CLEAR_LINE = "\r\x1b[2K"  # clears a terminal's line, where another process may show a progress bar


def configure(process: str = "") -> None:
    """Set up the log of this process.

    process: its name; empty for the one that users start.
    """
    handler = _Stderr(process)
    handler.setFormatter(JsonLines(process) if os.environ.get(FORMAT) == "json" else _Text(process))
    logging.basicConfig(level=os.environ.get(LEVEL, "WARNING").upper(), handlers=[handler])


class _Stderr(logging.Handler):
    """Writes to the `sys.stderr` of the moment, which a progress bar may replace."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._before = CLEAR_LINE if process and sys.stderr.isatty() else ""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as one line, in one call."""
        try:
            sys.stderr.write(f"{self._before}{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass  # nobody reads standard error any more
        except Exception:
            self.handleError(record)


class _Text(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"{process}: %(message)s" if process else "%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        text, at = super().format(record), time.localtime(record.created)
        return f"{time.strftime('%H:%M:%S', at)} {text}" if getattr(record, "timed", False) else text


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process or "server"

    def format(self, record: logging.LogRecord) -> str:
        """Return the object, without line breaks."""
        found: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage()[:MAX_CHARS],
        }
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)[-MAX_CHARS:]
        return json.dumps(found | getattr(record, "fields", {}), default=str)


def timed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the `extra` of a record that is written with its time. fields: for JSON."""
    return {"fields": fields, "timed": True}
