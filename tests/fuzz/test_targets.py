"""A little fuzzing of every target in each run of the tests; `scripts/fuzz` does the rest."""

from __future__ import annotations

import os
import random
import traceback

import pytest

from tests.fuzz import targets
from tests.fuzz.seeds import changed, seeds

FEW, MANY = 60, 20_000  # inputs


@pytest.mark.parametrize("name", [name for name in targets.TARGETS if name != "border"])
def test_changed_inputs_are_refused_or_harmless(name: str) -> None:
    for seed in range(FEW):
        draw = random.Random(seed)
        targets.run(name, changed(draw.choice(seeds(name)), draw))


def in_a_child(first: int, count: int) -> int:
    """Call the kernels with inputs of these seeds in a child; return how it ended."""
    child = os.fork()
    if child == 0:
        try:
            for seed in range(first, first + count):
                draw = random.Random(seed)
                targets.run("border", changed(draw.choice(seeds("border")), draw))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def test_the_border_refuses_nonsense() -> None:
    """L1: calls with arguments that are slightly or wholly wrong."""
    assert in_a_child(0, FEW) == 0


@pytest.mark.nightly
def test_the_border_refuses_much_nonsense() -> None:
    for first in range(0, MANY, 500):
        assert in_a_child(first, 500) == 0, f"seeds {first} to {first + 500}"
