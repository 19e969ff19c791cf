"""A wheel holds the package with its data, its licences and one compiled module, and nothing else."""

from __future__ import annotations

import pytest
from tools.wheel import package_files, problems

BUILT = "paceline/kernels/_ext.cpython-311-x86_64-linux-gnu.so"
GOOD = {
    *("paceline/__init__.py", "paceline/py.typed", BUILT),
    *("paceline-0.1.0.dist-info/METADATA", "paceline-0.1.0.dist-info/licenses/LICENSE"),
    "paceline-0.1.0.dist-info/licenses/NOTICE",
}
EXPECTED = {"paceline/__init__.py", "paceline/py.typed"}


def test_the_package_has_its_types_prompts_and_drafters():
    found = package_files()
    assert {"paceline/py.typed", "paceline/kernels/_ext.pyi"} <= found
    assert "paceline/bench/builtin_prompts.jsonl" in found
    assert sum(name.endswith("/model.safetensors") for name in found) >= 2
    assert not any(name.endswith((".so", ".pyc")) for name in found)


def test_a_whole_wheel_passes():
    assert list(problems(GOOD, EXPECTED)) == []


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (GOOD - {"paceline/py.typed"}, "missing: paceline/py.typed"),
        (GOOD - {BUILT}, "0 compiled modules, not one"),
        (GOOD | {BUILT.replace("311", "312")}, "2 compiled modules, not one"),
        (GOOD | {"tests/tiny.py"}, "does not belong there: tests/tiny.py"),
        (GOOD | {"tools/lock.py"}, "does not belong there: tools/lock.py"),
        (GOOD - {"paceline-0.1.0.dist-info/licenses/NOTICE"}, "missing: *.dist-info/licenses/NOTICE"),
    ],
)
def test_a_mistake_is_named(names, problem):
    assert list(problems(names, EXPECTED)) == [problem]
