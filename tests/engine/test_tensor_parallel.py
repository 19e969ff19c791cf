"""Promise 1 where ranks share target and drafters: texts are those of one rank, whoever has how many."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.backend.cuda import load as cuda
from paceline.backend.cuda import rank_pool
from paceline.backend.cuda.rank_pool import RankPool, pool_on
from paceline.backend.cuda.ranks import captured_together, replayed_together
from paceline.core.errors import EngineDied
from paceline.draft.drafter import DraftWeights, Vocabulary
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.late_loop import LateLoop
from paceline.engine.overlapped_loop import OverlappedLoop
from paceline.engine.request_table import Limits
from paceline.model.heads.config import read_config
from tests.draft.heads import drafter_of, head_values, random_weights, write_head
from tests.engine.rank_requests import requests
from tests.engine.same_text import DRAFTER_NOISE, MAX_LEN, ON_CORES, SHARP, VOCAB, assert_same, run
from tests.tiny import tiny_config, tiny_tokenizer, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.engine.engine import Engine

SIX_HEADS: dict[str, Any] = {"num_heads": 12, "num_kv_heads": 6}  # for two and for three ranks
CONFIG = tiny_config(vocab_size=VOCAB, num_layers=2, eos_ids=(VOCAB - 1,), **SIX_HEADS)
FEW_PAGES = 6
OWN_MODEL, OWN_LAYERS, NGRAM = "draft-model:model=noisy,k=3", "draft-model:layers=1,k=2", "ngram:min=1,max=4,k=4"


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[RankPool]:
    """Three ranks, which targets and drafters of two and of three share."""
    yield (own := pool_on(torch.device("cpu"), 3))
    own.close()


def weights(seed: int = 4) -> dict[str, torch.Tensor]:
    return tiny_weights(CONFIG, seed=seed, embed_scale=SHARP)


def decoder(of: dict[str, torch.Tensor], num_ranks: int) -> Any:
    numbers: Any = {name: weight.numpy() for name, weight in of.items()}
    return cuda.load_decoder(CONFIG, numbers, "f64", "f64", None, ON_CORES, num_ranks=num_ranks)


@cache
def target(num_ranks: int) -> build.Loaded:
    return build.Loaded("tiny", decoder(weights(), num_ranks), tiny_tokenizer(VOCAB), None, "tiny")


@cache
def noisy(num_ranks: int) -> DraftWeights:
    other = weights(5)
    of = {name: weight + DRAFTER_NOISE * other[name] for name, weight in weights().items()}
    return DraftWeights(decoder(of, num_ranks), Vocabulary("noisy", tiny_tokenizer(VOCAB), VOCAB))


def engine_of(draft: str, ranks: int, draft_ranks: int = 1, **changes: Any) -> Engine:
    """An engine whose target and drafters have so many ranks; its pages do not suffice for all rows."""
    config = engine_config(draft, ranks, draft_ranks, **changes)
    return build.assemble(config, target(ranks), lambda *_: noisy(draft_ranks)).engine


def engine_config(draft: str, ranks: int, draft_ranks: int = 1, **changes: Any) -> EngineConfig:
    return EngineConfig(
        draft=draft,
        backend="cuda",
        device="cpu",
        weights="f64",
        kv_tokens=FEW_PAGES * 16,
        limits=Limits(7, MAX_LEN, prefill_tokens=24),
        tensor_parallel=ranks,
        draft_tensor_parallel=draft_ranks,
        **changes,
    )


@cache
def expected() -> Any:
    return run(engine_of("off", 1), requests())


def assert_texts(engine: Engine) -> None:
    assert_same(expected(), run(engine, requests()))
    assert engine.stats().drafter_failures == 0


@pytest.mark.parametrize(
    ("draft", "ranks", "draft_ranks"),
    [
        ("off", 3, 1),
        (NGRAM, 2, 1),
        (OWN_MODEL, 2, 1),
        (OWN_MODEL, 1, 2),
        (OWN_MODEL, 3, 2),
        (OWN_MODEL, 2, 3),
        (OWN_LAYERS, 2, 1),
    ],
)
def test_texts_are_those_of_one_rank(draft: str, ranks: int, draft_ranks: int) -> None:
    engine = engine_of(draft, ranks, draft_ranks)
    assert isinstance(engine.loop, LateLoop)
    assert_texts(engine)
    assert engine.stats().preemptions > 0
    assert draft == "off" or sum(c.accepted for c in engine.stats().drafters.values()) > 0


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_texts_with_heads_whose_layers_are_shared(kind: str, tmp_path: Path) -> None:
    values = head_values(kind, CONFIG)
    head = write_head(tmp_path, values, CONFIG, random_weights(read_config(values, CONFIG)))
    assert_texts(engine_of(f"{drafter_of(kind)}:model={head},k=3", 3, 2))


def test_passes_of_two_groups_never_come_between_one_another() -> None:
    """A thread runs the target's passes, which its ranks share, beside passes of the drafter's."""
    engine = engine_of(OWN_MODEL, 2, 2, overlap="on")
    assert isinstance(engine.loop, OverlappedLoop)
    assert_texts(engine)
    assert engine.stats().overlapped_steps > 0


class FollowedGraph:
    """Stand-in for a graph on cores: ranks replay what they were told while it was captured."""

    def __init__(self, function: Any, inputs: Any) -> None:
        self.function, self.inputs = function, [tensor.clone() for tensor in inputs]
        with captured_together() as self.followed:
            function(*self.inputs)

    def __call__(self, *inputs: Any) -> Any:
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)
        with replayed_together(self.followed):
            return self.function(*self.inputs)


def test_ranks_replay_steps_and_drafting_that_were_captured() -> None:
    engine = engine_of(OWN_MODEL, 2, 3)
    rows: Any = engine.target.rows
    graphs: Any = engine.target.graphs  # type: ignore[attr-defined]
    rows.capture = graphs._capture = FollowedGraph
    assert_texts(engine)
    assert any(one.number for graph in graphs._made.values() for one in graph.followed)
    assert engine.stats().drafters["draft-model"].accepted > 0


def on_ranks_of_its_own(seed: int = 4) -> tuple[Any, RankPool]:
    """A decoder of two ranks, and their processes, which a test may end."""
    with pytest.MonkeyPatch.context() as patch:
        own = RankPool(torch.device("cpu"), 2)
        patch.setattr(rank_pool, "pool_on", lambda *_: own)
        return decoder(weights(seed), 2), own


def test_lost_ranks_of_a_drafter_cost_speculation_only() -> None:
    drafter, own = on_ranks_of_its_own()
    config = engine_config(OWN_MODEL, 1, 2)
    drafts = DraftWeights(drafter, Vocabulary("noisy", tiny_tokenizer(VOCAB), VOCAB))
    engine = build.assemble(config, target(1), lambda *_: drafts).engine
    for request in requests():
        engine.add(request)
    for _ in range(4):
        engine.step()
    os.kill(own.pids[0], signal.SIGKILL)
    texts: dict[str, list[int]] = {}
    while engine.has_work:
        for outcome in engine.step():
            texts.setdefault(outcome.request_id, []).extend(outcome.token_ids)
        engine.check()
    for name, tokens in texts.items():
        assert expected()[name].token_ids[-len(tokens) :] == tokens
    assert engine.stats().drafters["draft-model"].accepted > 0
    assert engine.stats().drafter_failures > 0


def test_a_lost_rank_ends_the_engine_with_a_message() -> None:
    shared, own = on_ranks_of_its_own()
    loaded = replace(target(2), decoder=shared)
    engine = build.assemble(engine_config("off", 2), loaded).engine
    for request in requests()[:3]:
        engine.add(request)
    for _ in range(4):
        engine.step()
    os.kill(own.pids[0], signal.SIGKILL)
    with pytest.raises(EngineDied, match="rank 1 has ended, killed by signal 9"):
        for _ in range(4):
            engine.step()
