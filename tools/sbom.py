"""Write a bill of materials from the locks.

`python -m tools.sbom [LOCK...]` writes CycloneDX 1.6 as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

LOCKS = Path(__file__).parents[1] / "scripts" / "requirements"
USUAL = ("runtime.txt",)  # what a user of the server installs
PINNED = re.compile(r"([A-Za-z0-9._-]+)==([^\s;\\]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def components(lock: Path) -> list[dict[str, Any]]:
    """Return the packages of a lock, with the hashes of all their files."""
    found = []
    for line in lock.read_text().replace("\\\n", " ").splitlines():
        if pinned := PINNED.match(line.strip()):
            name, version = pinned.groups()
            hashes = [{"alg": "SHA-256", "content": digest} for digest in HASH.findall(line)]
            purl = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version}"
            entry = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
            files = [
                {"type": "distribution", "url": f"https://pypi.org/project/{name}/{version}/", "hashes": hashes}
            ]
            found.append(entry | {"externalReferences": files})
    return found


def bill(locks: list[Path]) -> dict[str, Any]:
    """Return the bill of some locks."""
    listed = {entry["purl"]: entry for lock in locks for entry in components(lock)}
    about = {
        "component": {"type": "application", "name": "paceline", "licenses": [{"license": {"id": "Apache-2.0"}}]}
    }
    fixed = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    return fixed | {"metadata": about, "components": [listed[purl] for purl in sorted(listed)]}


def main() -> int:
    """Write the bill to standard output."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("locks", nargs="*", type=Path, help=f"default: {', '.join(USUAL)}")
    locks = parser.parse_args().locks or [LOCKS / name for name in USUAL]
    json.dump(bill(locks), sys.stdout, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
