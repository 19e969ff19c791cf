"""Drafts made on the device are those of the host's drafters, hints from the text included."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.backend.cuda.graphs import Uncaptured
from paceline.control.fixed import FixedK
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.drafter_pool import DrafterPool
from paceline.model.heads.config import read_config
from tests.draft.heads import CORRECTED, drafter_of, head_values, random_weights, trained_head, write_head
from tests.engine.same_text import (
    PLAIN,
    RestlessK,
    Settings,
    assert_same,
    make_engine,
    plain_answers,
    run,
    target,
)

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.nouns import Verdict
    from paceline.engine.engine import Engine


def requests(temperature: float) -> list[Request]:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    return [Request(str(i), tuple(range(40 + 7 * i, 60 + 9 * i)), params, seed=i) for i in range(3)]


Drafted = dict[str, list[tuple[tuple[int, ...], list[float]]]]


def drafts_of(engine: Engine, asked: list[Request]) -> Drafted:
    """Return each request's drafts in order, and the confidence of each."""
    found: Drafted = {r.request_id: [] for r in asked}
    judge = engine.judge

    def noted(drafted: Any, scored: Any) -> Verdict:
        verdict = judge(drafted, scored)
        for r, d in zip(drafted.batch.rows, drafted.draft.rows, strict=True):
            if r.decodes:
                found[r.request_id].append((tuple(d.token_ids), list(d.confidence or ())))
        return verdict

    engine.judge = noted  # type: ignore[method-assign]
    run(engine, asked)
    return found


def share_of_same(host: Drafted, device: Drafted) -> float:
    """Return the share of drafts that are the same on both, with the confidence of each token."""
    pairs = [pair for name in host for pair in zip(host[name], device[name], strict=False)]
    # Bounds near an answer's end trail by a step on the device: so it may draft more, and learn more.
    lengths = [sum(len(draft) for drafts in found.values() for draft, _ in drafts) for found in (host, device)]
    assert lengths[1] >= 0.9 * lengths[0] > 0
    same = 0
    for (one, sure), (other, as_sure) in pairs:
        count = min(len(one), len(other))
        same += one[:count] == other[:count] and sure[:count] == pytest.approx(as_sure[:count], abs=1e-6)
    return same / len(pairs)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "block", CORRECTED, "noisy"])
def test_a_program_on_the_device_drafts_as_the_host_does(kind: str, temperature: float) -> None:
    spec = f"draft-model:model={kind},k=3"
    if kind != "noisy":
        spec = f"{drafter_of(kind)}:model={trained_head(kind, target().decoder)},k=3"  # type: ignore[arg-type]
    asked, found = requests(temperature), []
    for types in ("f64", "cuda"):
        engine = make_engine(spec, PLAIN, types=types)
        found.append(drafts_of(engine, asked))
    # The vocabulary of a request's own tokens trails, too, and so may a draft.
    assert share_of_same(*found) >= 0.95


@pytest.mark.parametrize("size", [1, 2, 20])
def test_blocks_longer_than_a_page_and_of_one_query_are_those_of_the_host(size: int, tmp_path: Path) -> None:
    """Padded as in a graph: rows that nobody has write blocks, too."""
    mine = target().decoder.config
    values = head_values(CORRECTED, mine, block_size=size)
    write_head(tmp_path, values, mine, random_weights(read_config(values, mine)))
    asked, found = requests(0.8), []
    for types in ("f64", "cuda"):
        engine = make_engine(f"block:model={tmp_path},k=16", PLAIN, types=types)
        if types == "cuda":
            rows: Any = engine.target.rows
            graphs: Any = engine.target.graphs  # type: ignore[attr-defined]
            rows.capture = graphs._capture = Uncaptured
        found.append(drafts_of(engine, asked))
        assert engine.stats().drafter_failures == 0
    assert max(len(draft) for draft, _ in found[1]["0"]) == min(size, 16)
    assert share_of_same(*found) >= 0.95


@pytest.mark.parametrize("hole", [False, True], ids=["cached", "hole"])
@pytest.mark.parametrize("kind", ["eagle3", "block", CORRECTED])
def test_drafts_behind_cached_pages_are_those_of_the_host(kind: str, hole: bool) -> None:
    """Texts that end beside and at a page's border go on; in a hole nobody took taps."""
    spec = f"{drafter_of(kind)}:model={trained_head(kind, target().decoder)},k=4"  # type: ignore[arg-type]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    first = [Request(str(i), tuple(range(40 + i, 66 + 2 * i)), params, seed=i) for i in range(6)]
    found, texts = [], {}
    for types in ("f64", "cuda"):
        engine = make_engine(spec, Settings(prefix_cache=True), types=types)
        kept = engine.drafting, engine.controller
        if hole:
            engine.drafting, engine.controller = DrafterPool([], 320), FixedK()
        texts = run(engine, first)
        engine.drafting, engine.controller = kept
        longer = [(*r.prompt_ids, *texts[r.request_id].token_ids, 41) for r in first]
        again = [Request(f"again {i}", ids, replace(params, max_tokens=20), i) for i, ids in enumerate(longer)]
        found.append(drafts_of(engine, again))
        assert engine.stats().cached_tokens > 100
        assert bool(engine.stats().untapped_tokens) == hole
        assert engine.stats().drafter_failures == 0
    assert share_of_same(*found) >= 0.95


@pytest.mark.parametrize("kind", [CORRECTED, pytest.param("block", marks=pytest.mark.nightly)])
def test_texts_stay_with_few_pages_and_depths_that_change(kind: str) -> None:
    """Requests that are preempted come back in other pages; rows without drafts fall behind."""
    engine = make_engine(
        f"{drafter_of(kind)}:model={trained_head(kind, target().decoder)}",  # type: ignore[arg-type]
        Settings(num_rows=5, num_pages=12, prefill_tokens=64, prefix_cache=True),
        types="cuda",
    )
    engine.controller = RestlessK(drafter_of(kind), 4, seed=2)
    params = [SamplingParams(temperature=t, max_tokens=60, ignore_eos=True) for t in (0.0, 0.5, 1.0)]
    asked = [Request(str(i), (*range(40, 56), 40 + i), params[i % 3], seed=i) for i in range(5)]
    assert_same(plain_answers(asked), run(engine, asked))
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.drafters[drafter_of(kind)].accepted > 5
    assert stats.drafter_failures == stats.untapped_tokens == 0
