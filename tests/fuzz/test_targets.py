"""A little fuzzing of every target in each run of the tests; `scripts/fuzz` does the rest."""

from __future__ import annotations

import contextlib
import os
import random
import traceback

import pytest

from paceline.core.errors import PacelineError
from tests.fuzz import border, targets
from tests.fuzz.seeds import changed, seeds

FEW, MANY = 60, 20_000  # inputs


@pytest.mark.parametrize("name", [name for name in targets.TARGETS if name != "border"])
def test_changed_inputs_are_refused_or_harmless(name: str) -> None:
    for seed in range(FEW):
        draw = random.Random(seed)
        targets.run(name, changed(draw.choice(seeds(name)), draw))


@pytest.mark.parametrize("name", [name for name in targets.TARGETS if name != "border"])
def test_some_seeds_are_taken(name: str) -> None:
    """Seeds that are refused at once leave the code behind that without any input."""
    taken = 0
    for data in seeds(name):
        with contextlib.suppress(PacelineError):
            targets.TARGETS[name](data)
            taken += 1
    assert taken
    assert name != "profile" or taken == len(seeds(name))


def test_good_arguments_are_taken() -> None:
    """Ones of an older signature would be refused before any line of ours."""
    for name in border.names():
        function, good = border.with_good_arguments(name)
        if isinstance(good, dict):
            function(**good)
        elif good:
            function(*good)


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
