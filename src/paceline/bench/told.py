"""What is run as `python -m` ends as commands do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Callable


def told(work: Callable[[], int]) -> int:
    """Return the exit status of some work; what the user can mend is told in a line, and 1."""
    try:
        return work()
    except PacelineError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
