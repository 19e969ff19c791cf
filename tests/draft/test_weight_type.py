"""The types in which drafters beside their target keep their weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline.backend.native.load import DRAFT_WEIGHT_TYPES, draft_weight_type
from paceline.core.errors import ConfigError
from tests.draft.heads import head_values, random_weights, write_head
from tests.draft.test_cut_model import write_cut_model
from tests.draft.test_head_drafter import heads_config, requests
from tests.engine.same_text import PLAIN, assert_same, make_engine, plain_answers, run, target

if TYPE_CHECKING:
    from pathlib import Path


def test_floats_stay_floats_and_rounded_ones_have_four_bits() -> None:
    usual = {"int8": "int4_row", "int4": "int4_row", "bf16": "bf16", "f32": "f32"}
    assert {of_target: draft_weight_type(None, of_target) for of_target in usual} == usual
    assert [draft_weight_type(asked, "int8") for asked in DRAFT_WEIGHT_TYPES] == list(DRAFT_WEIGHT_TYPES)


def write_eagle3(folder: Path) -> str:
    config = target().decoder.config
    values = head_values("eagle3", config)
    write_head(folder, values, config, random_weights(heads_config(values)))
    return f"eagle3:model={folder}"


@pytest.mark.parametrize("asked", [None, *DRAFT_WEIGHT_TYPES])
@pytest.mark.parametrize("kind", ["eagle3", "draft-model"])
def test_every_type_drafts_and_the_text_is_the_same(kind: str, asked: str | None, tmp_path: Path) -> None:
    spec = write_eagle3(tmp_path) if kind == "eagle3" else f"draft-model:model={write_cut_model(tmp_path)}"
    engine = make_engine(f"{spec},k=3" + (f",weights={asked}" if asked else ""), PLAIN, types="int8")
    assert_same(plain_answers(requests(), "int8"), run(engine, requests()))
    assert engine.stats().drafter_failures == 0
    assert engine.stats().drafters[kind].drafted > 50
    assert engine.drafting.drafters[kind].report()["weights"].endswith(asked or "int4_row")


@pytest.mark.parametrize(
    ("drafter", "types", "reason"),
    [
        ("eagle3", "int8", "one of int4_row, int8, bf16, f32, not 'int9'.*did you mean 'int8'"),
        ("draft-model", "int8", "not 'int9'"),
        ("eagle3", "f64", "leave out weights=int9"),
        ("draft-model", "f64", "leave out weights=int9"),
        ("layers", "int8", "own layers have the type that --weights says"),
    ],
)
def test_a_type_that_there_is_not_is_refused(drafter: str, types: str, reason: str, tmp_path: Path) -> None:
    specs = {
        "eagle3": lambda: write_eagle3(tmp_path),
        "draft-model": lambda: f"draft-model:model={write_cut_model(tmp_path)}",
        "layers": lambda: "draft-model:layers=1",
    }
    with pytest.raises(ConfigError, match=reason):
        make_engine(f"{specs[drafter]()},weights=int9", PLAIN, types=types)
