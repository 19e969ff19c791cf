"""A comparison as a command."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable


def told(compare: Callable[[Namespace], int], args: Namespace) -> int:
    """Return a comparison's exit status; what the user can mend is told in a line."""
    try:
        return compare(args)
    except PacelineError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
