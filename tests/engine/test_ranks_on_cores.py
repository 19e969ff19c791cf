"""Promise 1 where ranks on cores share the target: texts are those of one rank, with any drafter."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from paceline.backend.native.ranked import load_decoder
from paceline.core.nouns import PAGE_TOKENS
from paceline.draft.drafter import DraftWeights, Vocabulary
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.kv_choices import kv_room, row_bytes
from paceline.engine.request_table import Limits
from paceline.model.heads.config import read_config
from tests.draft.heads import drafter_of, head_values, random_weights, write_head
from tests.engine.rank_requests import requests
from tests.engine.same_text import DRAFTER_NOISE, MAX_LEN, SHARP, STAIRCASE, VOCAB, assert_same, run
from tests.tiny import tiny_config, tiny_tokenizer, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.engine.engine import Engine

CONFIG = tiny_config(
    vocab_size=VOCAB,
    eos_ids=(VOCAB - 1,),
    hidden_size=128,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
)
FEW_PAGES = 6


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    yield
    target.cache_clear()


def decoder(num_ranks: int, noise: float = 0.0) -> Any:
    own, other = (tiny_weights(CONFIG, seed=seed, embed_scale=SHARP) for seed in (4, 5))
    weights = {name: (one + noise * other[name]).numpy() for name, one in own.items()}
    return load_decoder(CONFIG, weights, "int8", "i16", 1, num_ranks=num_ranks)


@cache
def target(num_ranks: int) -> build.Loaded:
    return build.Loaded("tiny", decoder(num_ranks), tiny_tokenizer(VOCAB), None, "tiny")


@cache
def noisy() -> DraftWeights:
    return DraftWeights(decoder(1, DRAFTER_NOISE), Vocabulary("noisy", tiny_tokenizer(VOCAB), VOCAB))


def engine_of(draft: str, ranks: int) -> Engine:
    """An engine whose pages do not suffice for all rows."""
    config = EngineConfig(
        draft=draft,
        backend="native",
        weights="int8",
        kv="i16",
        kv_tokens=FEW_PAGES * 16,
        limits=Limits(7, MAX_LEN, prefill_tokens=24),
        profile=STAIRCASE if draft.startswith("auto") else None,
        tensor_parallel=ranks,
    )
    return build.assemble(config, target(ranks), lambda *_: noisy()).engine


@cache
def expected() -> Any:
    return run(engine_of("off", 1), requests())


def assert_texts(engine: Engine, *, drafted: bool = True) -> None:
    assert_same(expected(), run(engine, requests()))
    assert engine.stats().drafter_failures == 0
    assert not drafted or sum(c.accepted for c in engine.stats().drafters.values()) > 0


@pytest.mark.parametrize(
    "draft",
    [
        "off",
        "ngram:min=1,max=4,k=4",
        "draft-model:model=noisy,k=3",
        "draft-model:layers=1,k=2",
        "auto:suffix+draft-model:model=noisy,k=4",
    ],
)
def test_texts_of_two_ranks_are_those_of_one(draft: str) -> None:
    engine = engine_of(draft, 2)
    assert_texts(engine, drafted=draft != "off")
    assert engine.stats().preemptions > 0


def test_texts_with_a_head_on_rank_0(tmp_path: Path) -> None:
    values = head_values("eagle3", CONFIG)
    head = write_head(tmp_path, values, CONFIG, random_weights(read_config(values, CONFIG)))
    assert_texts(engine_of(f"{drafter_of('eagle3')}:model={head},k=3", 2), drafted=False)


def test_kv_of_all_ranks_counts_as_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE_TOKENS * target(1).decoder.new_kv(1).bytes_per_token
    monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda: 40 * page)
    drafter, of_rows = cast("Any", SimpleNamespace(row_numbers=lambda *_: 1000)), set[int]()
    for ranks in (1, 2):
        config = EngineConfig(backend="native", kv="i16", limits=Limits(7, MAX_LEN), tensor_parallel=ranks)
        assert kv_room(config, config.limits, target(ranks).decoder).num_pages == 20
        assert engine_of("off", ranks).kv_bytes == FEW_PAGES * page
        of_rows.add(row_bytes(config, target(ranks).decoder, "", [drafter], 7))
    assert len(of_rows) == 1
