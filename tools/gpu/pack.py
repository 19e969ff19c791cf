"""`scripts/on-gpu --pack DIR`: all that a run needs on a machine without network.

The machine has a GPU, Python 3.12, PyTorch and transformers.

DIR/wheels/   wheels of Paceline for Python 3.12 and of its dependencies that images with PyTorch lack
DIR/tools/    the phases
DIR/run       installs the wheels into a folder of its own and runs the phases
DIR/COMMIT    what was packed
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from contextlib import suppress
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PYTHON = (3, 12)
MAX_BYTES = 60 << 20
# Packages that images with PyTorch and transformers have.
USUAL = frozenset(
    """
    anyio certifi click filelock fsspec h11 hf-xet httpx huggingface-hub idna jinja2 markdown-it-py markupsafe
    mdurl numpy packaging prometheus-client pygments pyyaml regex requests rich safetensors sniffio tokenizers
    torch tqdm transformers triton typing-extensions urllib3
    """.split()  # noqa: SIM905 - one name after another is easier to read
)
# Systems whose wheels are taken, the newest first.
PLATFORMS = (
    "manylinux_2_34_x86_64",
    "manylinux_2_31_x86_64",
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
SOURCES = ("src", "csrc", "CMakeLists.txt", "pyproject.toml")
RUN = Path(__file__).with_name("run_packed.sh")


class PackError(Exception):
    """Something is missing here; the message says what to do."""


def pack(folder: Path, root: Path) -> int:
    """Fill a folder and print its sizes and the command; return the exit status."""
    try:
        _fill(folder, root)
        total = _report(folder)
    except PackError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if total > MAX_BYTES:
        sys.stderr.write(
            f"error: {total / 2**20:.1f} MiB are more than {MAX_BYTES >> 20}; the largest are above\n"
        )
        return 1
    sys.stdout.write(
        f'There, with DIR for where it lies:  bash DIR/{RUN.stem.split("_")[0]} --out "${{OUT:-results}}"\n'
    )
    return 0


def _fill(folder: Path, root: Path) -> None:
    clear(folder, "COMMIT")
    bring_code(folder, root)
    shutil.copy2(RUN, folder / "run")


def clear(folder: Path, mark: str) -> None:
    """Remove a pack, which holds the file `mark`. Raises `PackError`."""
    if folder.exists() and any(folder.iterdir()) and not (folder / mark).exists():
        raise PackError(f"{folder} is not empty, and no pack: name another folder")
    shutil.rmtree(folder, ignore_errors=True)


def bring_code(folder: Path, root: Path) -> None:
    """Write wheels, `tools` and the commit to a new folder. Raises `PackError`."""
    python, wheels = find_python(), folder / "wheels"
    wheels.mkdir(parents=True)
    lighten(build_wheel(python, root), wheels)
    for name in fetch_missing(python, needed(root), wheels):
        sys.stdout.write(f"with {name}\n")
    shutil.copytree(root / "tools" / "gpu", folder / "tools" / "gpu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(root / "tools" / "__init__.py", folder / "tools")
    described = _run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], "git does not know this checkout"
    )
    (folder / "COMMIT").write_text(described, encoding="utf-8")


def _report(folder: Path) -> int:
    """Print the sizes of what was packed; return their sum."""
    sizes = {p.relative_to(folder): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    wheels = {path: size for path, size in sizes.items() if path.suffix == ".whl"}
    for path, size in sorted(wheels.items(), key=lambda item: -item[1]):
        sys.stdout.write(f"{size / 2**20:8.2f} MiB  {path}\n")
    total = sum(sizes.values())
    sys.stdout.write(
        f"{(total - sum(wheels.values())) / 2**20:8.2f} MiB  all else\n{total / 2**20:8.2f} MiB  in all\n"
    )
    return total


# The wheel ----------------------------------------------------------------------------------------


def find_python() -> Path:
    """Return a Python of the version that is packed for. Raises `PackError`."""
    wanted = f"{PYTHON[0]}.{PYTHON[1]}"
    candidates = [os.environ.get(f"PYTHON{PYTHON[0]}{PYTHON[1]}"), shutil.which(f"python{wanted}"), sys.executable]
    candidates += map(str, sorted((Path.home() / ".pyenv" / "versions").glob(f"{wanted}.*/bin/python")))
    for candidate in filter(None, candidates):
        check = f"import sys, venv; sys.exit(sys.version_info[:2] != {PYTHON})"
        with suppress(OSError, subprocess.SubprocessError):
            tried = subprocess.run([candidate, "-c", check], capture_output=True, timeout=30, check=False)  # noqa: S603
            if tried.returncode == 0:
                return Path(candidate)
    raise PackError(
        f"packing needs Python {wanted} with its venv module: install it (on Debian and Ubuntu: apt-get install "
        f"python{wanted} python{wanted}-venv; with pyenv: pyenv install {wanted}), or set "
        f"PYTHON{PYTHON[0]}{PYTHON[1]}=/path/to/python{wanted}"
    )


def build_wheel(python: Path, root: Path) -> Path:
    """Return Paceline's wheel for that Python, built anew if the sources have changed. Raises `PackError`."""
    place = root / "build" / "on-gpu"
    made = place / _hash(root)
    if found := sorted(made.glob("paceline-*.whl")):
        return found[0]
    env = place / "env" / "bin" / "python"
    if not env.exists():
        _run([str(python), "-m", "venv", str(place / "env")], "no environment could be made")
    sys.stdout.write("Building the wheel; the first time this takes some minutes.\n")
    sys.stdout.flush()
    _run(
        [str(env), "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(made), str(root)],
        "the wheel was not built",
    )
    return sorted(made.glob("paceline-*.whl"))[0]


def lighten(wheel: Path, folder: Path) -> None:
    """Copy a wheel without the default model's drafters: models by shape have none."""
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(folder / wheel.name, "w", zipfile.ZIP_DEFLATED) as light:
        for name in whole.namelist():
            if not name.startswith("paceline/drafters/"):
                light.writestr(whole.getinfo(name), whole.read(name))


def _hash(root: Path) -> str:
    """Return a hash of all that the wheel is made of."""
    digest = hashlib.sha256()
    for name in SOURCES:
        files = [root / name] if (root / name).is_file() else sorted((root / name).rglob("*"))
        for path in files:
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# Dependencies -------------------------------------------------------------------------------------


def needed(root: Path) -> list[str]:
    """Return the requirements of the project that a usual image does not meet."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [text for text in project["dependencies"] if normal(text) not in USUAL]


def normal(requirement: str) -> str:
    """Return the normal name of a requirement's package."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    if match is None:
        raise PackError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def fetch_missing(python: Path, requirements: Sequence[str], wheels: Path) -> Iterator[str]:
    """Fetch wheels of requirements and of their needs; yield the names. Raises `PackError`."""
    waiting, seen = list(requirements), set(USUAL) | {"paceline"}
    while waiting:
        requirement = waiting.pop(0)
        if (name := normal(requirement)) in seen:
            continue
        seen.add(name)
        before = set(wheels.iterdir())
        _run(_download(python, requirement, wheels), f"no wheel of {requirement} was found")
        (wheel,) = set(wheels.iterdir()) - before
        waiting += needs_of(wheel)
        yield wheel.name


def _download(python: Path, requirement: str, wheels: Path) -> list[str]:
    tags = [part for platform in PLATFORMS for part in ("--platform", platform)]
    version = f"{PYTHON[0]}.{PYTHON[1]}"
    target = ["--only-binary=:all:", "--implementation", "cp", "--python-version", version, *tags]
    return [str(python), "-m", "pip", "download", "--quiet", "--no-deps", *target, "-d", str(wheels), requirement]


def needs_of(wheel: Path) -> list[str]:
    """Return what a wheel requires on Linux, its extras left out."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        headers = Parser().parsestr(archive.read(name).decode("utf-8"), headersonly=True)
    found = []
    for text in headers.get_all("Requires-Dist") or ():
        requirement, _, marker = text.partition(";")
        if not re.search(r"\bextra\b|python_version\s*<|win32|windows|darwin|pypy", marker, re.IGNORECASE):
            found.append(requirement.strip())
    return found


def _run(command: Sequence[str], problem: str) -> str:
    """Return the output of a command. Raises `PackError`."""
    env = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout  # noqa: S603
    except subprocess.CalledProcessError as error:
        raise PackError(f"{problem}: {error.stderr.strip()[-1500:]}") from None
    except OSError as error:
        raise PackError(f"{problem}: {error}") from None
