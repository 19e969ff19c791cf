"""Check the files of a Paceline wheel; `scripts/wheel` runs this on its build.

Usage: python -m tools.wheel FILE.whl
"""

from __future__ import annotations

import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SOURCE = Path(__file__).resolve().parents[1] / "src"
EXTENSION = "paceline/kernels/_ext.*.so"
LICENSES = ("*.dist-info/licenses/LICENSE", "*.dist-info/licenses/NOTICE")
OUTPUTS = ("*/__pycache__/*", "*.pyc", EXTENSION)  # left in a source tree by running or building


def main(argv: list[str]) -> int:
    """Print the problems of a wheel and return 1 if there are any."""
    with zipfile.ZipFile(argv[0]) as wheel:
        found = list(problems(wheel.namelist(), package_files()))
    sys.stdout.writelines(f"{problem}\n" for problem in found)
    return 1 if found else 0


def package_files() -> set[str]:
    """Return the names of the package's files, data included, as a wheel has them."""
    files = {p.relative_to(SOURCE).as_posix() for p in (SOURCE / "paceline").rglob("*") if p.is_file()}
    return {name for name in files if not any(fnmatch(name, pattern) for pattern in OUTPUTS)}


def problems(names: Iterable[str], expected: set[str]) -> Iterable[str]:
    """Yield what is missing among a wheel's files `names`, and what does not belong."""
    found = set(names)
    built = {name for name in found if fnmatch(name, EXTENSION)}
    about = {name for name in found if name.partition("/")[0].endswith(".dist-info")}
    yield from (f"missing: {name}" for name in sorted(expected - found))
    yield from (f"does not belong there: {name}" for name in sorted(found - expected - built - about))
    if len(built) != 1:
        yield f"{len(built)} compiled modules, not one"
    yield from (f"missing: {p}" for p in LICENSES if not any(fnmatch(name, p) for name in about))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
