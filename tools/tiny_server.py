"""Serve the tests' tiny model until told to stop; the first line is the URL.

python -m tools.tiny_server
"""

from __future__ import annotations

import signal
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from tests.serve.conftest import running, write_model

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def tiny_server(*flags: str) -> Iterator[str]:
    """Serve the tiny model while the context lasts; give the URL."""
    with tempfile.TemporaryDirectory() as folder, running(write_model(Path(folder)), *flags) as server:
        yield server.url


def main() -> int:
    """Entry point."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with tiny_server(*sys.argv[1:]) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main())
