"""Fetch the libraries of the page by `npm pack` and check them against their manifest.

    python -m tools.vendor_page                       fetch the pinned versions; every hash must be as recorded
    python -m tools.vendor_page --renew               take the newest versions and record them
    python -m tools.vendor_page --renew uplot@1.6.32  take this version of one of them

The files are copied as they are: no build step. Needs only the standard library and npm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).resolve().parents[1] / "src/paceline/serve/observe/page/vendor"
MANIFEST = VENDOR / "manifest.json"
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Library:
    """A package, and the files of it that the page uses."""

    package: str
    files: dict[str, str]
    licences: dict[str, str]


LIBRARIES = (
    Library(
        "preact",
        {"preact.mjs": "dist/preact.mjs", "hooks.mjs": "hooks/dist/hooks.mjs"},
        {"licences/preact.txt": "LICENSE"},
    ),
    Library("@preact/signals", {"signals.mjs": "dist/signals.mjs"}, {"licences/signals.txt": "LICENSE"}),
    Library(
        "@preact/signals-core",
        {"signals-core.mjs": "dist/signals-core.mjs"},
        {"licences/signals-core.txt": "LICENSE"},
    ),
    Library("htm", {"htm.mjs": "dist/htm.mjs"}, {"licences/htm.txt": "LICENSE"}),
    Library(
        "uplot",
        {"uplot.mjs": "dist/uPlot.esm.js", "uplot.css": "dist/uPlot.min.css"},
        {"licences/uplot.txt": "LICENSE"},
    ),
    Library("marked", {"marked.mjs": "lib/marked.esm.js"}, {"licences/marked.txt": "LICENSE"}),
    Library(
        "dompurify",
        {"purify.mjs": "dist/purify.es.mjs"},
        {"licences/dompurify.txt": "LICENSE", "licences/dompurify-mpl.txt": "LICENSE-MPL"},
    ),
)


def recorded() -> dict[str, dict[str, Any]]:
    """Return the manifest's entries by package; empty if there is none."""
    if not MANIFEST.exists():
        return {}
    return {entry["package"]: entry for entry in json.loads(MANIFEST.read_text(encoding="utf-8"))}


def fetch(library: Library, version: str, folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return a manifest entry and the files of one version of a library."""
    command = ["npm", "pack", "--json", "--ignore-scripts", f"{library.package}@{version}"]
    told = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=300).stdout  # noqa: S603 - packages are listed above
    packed = json.loads(told)
    about = (list(packed.values()) if isinstance(packed, dict) else packed)[0]
    with tarfile.open(folder / about["filename"]) as archive:
        package = json.loads(_member(archive, "package.json"))
        wanted = library.files | library.licences
        contents = {name: _member(archive, inside) for name, inside in wanted.items()}
    entry = {
        "package": library.package,
        "version": package["version"],
        "licence": package["license"],
        "integrity": about["integrity"],  # of the whole package
        "files": [
            {"file": name, "from": inside, "sha256": sha256(contents[name])} for name, inside in wanted.items()
        ],
    }
    return entry, contents


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.extractfile(f"package/{name}")
    if member is None:
        raise ValueError(f"{name} is no plain file")
    data = member.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"{name} is larger than {MAX_FILE_BYTES} bytes")
    return data


def sha256(data: bytes) -> str:
    """Return the hash that the manifest records."""
    return hashlib.sha256(data).hexdigest()


def main(argv: list[str]) -> int:
    """Fetch all libraries; return 1 and change nothing if one is not as recorded."""
    parser = argparse.ArgumentParser(prog="scripts/vendor-page", description=__doc__)
    parser.add_argument("--renew", nargs="*", metavar="PACKAGE@VERSION", help="record versions; without: newest")
    asked = parser.parse_args(argv).renew
    known, renewed = recorded(), dict(spec.rsplit("@", 1) for spec in asked or ())
    entries, wrong = [], list[str]()
    contents: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for library in LIBRARIES:
            before = known.get(library.package)
            version = renewed.get(library.package) or (
                "latest" if asked == [] or not before else before["version"]
            )
            entry, files = fetch(library, version, Path(folder))
            if before and before["version"] == entry["version"] and before != entry:
                wrong.append(f"{library.package} {entry['version']} is not what the manifest records")
            entries.append(entry)
            contents |= files
            sys.stdout.write(f"{library.package} {entry['version']} ({entry['licence']})\n")
    sys.stdout.writelines(f"error: {problem}\n" for problem in wrong)
    if wrong:
        return 1
    for name, data in contents.items():
        (VENDOR / name).parent.mkdir(parents=True, exist_ok=True)
        (VENDOR / name).write_bytes(data)
    MANIFEST.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
