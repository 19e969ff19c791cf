"""Flags and the dataclass that they are of."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass

import pytest

from paceline.core.flags import add_flags, of_flags


@dataclass(frozen=True)
class Options:
    num_rows: int = 4
    share: float = 0.5
    name: str = "auto"
    keeps: bool = True
    other: str = "own default"


def parser() -> ArgumentParser:
    made = ArgumentParser()
    flags = {"num_rows": "N rows", "share": "SHARE of 100 %%", "name": "A|B a name", "keeps": "keep them"}
    add_flags(made, Options(), flags)
    return made


def test_flags_have_the_defaults_and_the_types_of_the_fields() -> None:
    assert of_flags(Options, parser().parse_args([])) == Options()
    given = parser().parse_args(["--num-rows", "2", "--share", "1", "--name", "7", "--no-keeps"])
    assert of_flags(Options, given) == Options(2, 1.0, "7", keeps=False)
    with pytest.raises(SystemExit):
        parser().parse_args(["--num-rows", "two"])
    assert "--name A|B" in parser().format_help()
    assert "of 100 %" in parser().format_help()


def test_what_is_said_apart_counts_and_what_is_no_field_is_left_out() -> None:
    args = Namespace(num_rows=1, run=print)
    assert of_flags(Options, args, other="said", num_rows=3) == Options(num_rows=3, other="said")
