"""The lock files of the scripts' installs hold what pyproject.toml asks for, each release with hashes."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools.lock import FOLDER, ROOT, _release

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RUNTIME = PROJECT["project"]["dependencies"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
PIN = re.compile(r"^([a-z0-9-]+)==([^ ]+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)\n", re.MULTILINE)


def pins(name: str) -> dict[str, str]:
    """The releases of a lock file; fails on a line that is not one with hashes."""
    text = (FOLDER / f"{name}.txt").read_text()
    left = PIN.sub("", text)
    assert all(line.startswith(("# ", "-r runtime.txt")) for line in left.splitlines()), left
    included = pins("runtime") if "-r runtime.txt" in left else {}
    return included | {name: version for name, version, _ in PIN.findall(text)}


@pytest.mark.parametrize(
    ("name", "requirements"),
    [
        ("runtime", RUNTIME),
        ("dev", [*RUNTIME, *EXTRAS["dev"], *EXTRAS["plot"]]),
        ("build", PROJECT["build-system"]["requires"]),
        ("ray", EXTRAS["ray"]),
    ],
)
def test_each_requirement_is_pinned_to_a_release_it_allows(name, requirements):
    found = pins(name)
    for requirement in map(Requirement, requirements):
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), requirement


def test_what_is_in_two_files_is_the_same_release():
    dev, build = pins("dev"), pins("build")
    assert {n: v for n, v in build.items() if n in dev} == {n: dev[n] for n in build.keys() & dev.keys()}
    assert not pins("ray").keys() & dev.keys(), "what is there already is not installed again"


def test_torch_is_pinned_apart_within_what_its_extra_allows():
    assert "torch" not in pins("dev")
    pin = Requirement((FOLDER / "torch.txt").read_text().splitlines()[-1])
    [extra] = map(Requirement, EXTRAS["torch"])
    assert extra.specifier.contains(str(pin.specifier).removeprefix("=="))


@pytest.mark.parametrize(
    ("filename", "version"),
    [
        ("gguf-0.19.0-py3-none-any.whl", "0.19.0"),
        ("tokenizers-0.23.3.tar.gz", "0.23.3"),
        ("pyzmq-0.4.src.tar.gz", None),
        ("ruff-0.1.exe", None),
    ],
)
def test_a_release_is_read_from_a_file_name(filename, version):
    assert _release(filename) == version
