"""Drafting several steps in one call to the kernels against one step at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from paceline import kernels
from paceline.backend.native.cut_model import NativeCutModel
from paceline.backend.native.decoder import NativeDecoder
from paceline.backend.native.head import NativeHead
from paceline.backend.native.load import pack_decoder
from paceline.backend.seam import Capabilities, StepLimit
from paceline.control.acceptance import logit
from paceline.core.nouns import UNCHOSEN, RowPlan, SamplingSpec, Stop
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_token
from paceline.model.heads.config import read_config
from tests.draft.heads import CORRECTED, drafter_of, head_values, random_weights, write_head
from tests.draft.test_cut_model import write_cut_model
from tests.draft.test_head_drafter import requests
from tests.engine.same_text import PLAIN, make_engine, run, target
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.core.nouns import Batch, Draft, Plan


def head(folder: Path, kind: str, **changes: Any) -> str:
    config = target("int8").decoder.config
    values = head_values(kind, config, **changes)
    write_head(folder, values, config, random_weights(read_config(values, config), seed=3))
    return f"{drafter_of(kind)}:model={folder},k=5"


SPECS: dict[str, Callable[[Path], str]] = {
    "eagle3": lambda folder: head(folder, "eagle3"),
    "eagle": lambda folder: head(folder, "eagle"),
    "block": lambda folder: head(folder, "block"),
    "corrected": lambda folder: head(folder, CORRECTED),
    "small": lambda folder: f"draft-model:model={write_cut_model(folder)},k=5",
    "first layers": lambda _: "draft-model:layers=1,k=5",
}


STOP = Stop((0.0, -0.5, 0.5, 0.0, 0.0), 0.8, (0.55, 0.3, 0.3, 0.2, 0.0))


def drafts(spec: str, stop: Stop | None = None) -> list[tuple[list[int], list[float]]]:
    """Serve greedy, sampled, filtered and penalised requests; return everything that was proposed, in order.

    stop: where every row's drafting ends.
    """
    engine = make_engine(spec, PLAIN, types="int8")
    (drafter,) = engine.drafting.drafters.values()
    propose, found = drafter.propose, []

    def recorded(batch: Batch, plan: Plan) -> Draft:
        stopped = {row: RowPlan(p.drafter, p.k, stop) for row, p in plan.rows.items()}
        draft = propose(batch, replace(plan, rows=stopped))
        found.extend((list(row.token_ids), list(row.confidence or ())) for row in draft.rows)
        return draft

    drafter.propose = recorded  # type: ignore[method-assign]
    asked = requests(8, max_tokens=24)
    filtered = [replace(r, request_id=f"{r.request_id}f", params=replace(r.params, top_p=0.9)) for r in asked[:3]]
    run(engine, [*asked, *filtered])
    assert engine.stats().drafter_failures == 0
    return found


@pytest.mark.parametrize("stop", [None, STOP], ids=["planned depth", "stops"])
@pytest.mark.parametrize("name", SPECS)
def test_both_draft_the_same(
    name: str, stop: Stop | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS[name](tmp_path)
    all_steps = drafts(spec, stop)
    for executor in (NativeHead, NativeCutModel, NativeDecoder):
        monkeypatch.setattr(executor, "capabilities", Capabilities())
    apart = drafts(spec, stop)
    assert [ids for ids, _ in all_steps] == [ids for ids, _ in apart]
    assert sum(len(ids) for ids, _ in all_steps) > 100
    for _, sure in all_steps if stop else ():
        margins = logit(np.array(sure)).tolist()
        assert not any(stop.over(margins[:n]) for n in range(1, len(margins)))
    lengths = {len(ids) for ids, _ in all_steps}
    assert len(lengths) > 3 if stop else max(lengths) == 5
    for (_, ours), (_, theirs) in zip(all_steps, apart, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


# The border --------------------------------------------------------------------------------------

GREEDY = SamplingSpec("argmax", SamplingParams(temperature=0))
CONFIG = tiny_config(num_layers=2)


def draft_steps(
    depths: list[int],
    specs: list[SamplingSpec] | None = None,
    weight: float = 1.0,
    stops: tuple[Stop | None, ...] = (None, None),
    pointers: tuple[kernels.TokenHints | None, ...] = (None, None),
    wanted: tuple[int, ...] = (2, 3),
) -> np.ndarray:
    weights = tiny_weights(CONFIG, dtype=torch.float32)
    weights["final_norm"] = weights["final_norm"] * weight
    decoder = pack_decoder(CONFIG, weights, kernels.ThreadPool(1), "f32", "f32")
    packed = replace(pack([([5, 6, 7], 0, [1]), ([9], 0, [2])]), wanted=np.array(wanted))
    limits = [StepLimit(*of) for of in zip(depths, stops, pointers, strict=False)]
    return run_pass(decoder, packed, decoder.new_kv(3), specs or [GREEDY] * sum(depths), steps=limits).token_ids


@pytest.mark.parametrize("wanted", [(1, 3), (2,), (3, 2), (1, 2, 3)])
def test_a_row_wants_its_last_token_only(wanted: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="a row wants one token"):
        draft_steps([2, 2], wanted=wanted)


def test_rows_go_as_deep_as_each_was_asked() -> None:
    deep, shallow = draft_steps([4, 2]), draft_steps([1, 6])
    assert (deep >= 0).all()
    assert deep[0] == shallow[0]
    np.testing.assert_array_equal(deep[4:], shallow[1:3])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_second_choice_is_the_choice_without_the_first(temperature: float) -> None:
    """Under the noise of its place, too."""
    kind = "noisy" if temperature else "argmax"
    params = SamplingParams(temperature=temperature)
    specs = [SamplingSpec(kind, params, 3, position=3 + n, margin=True) for n in range(4)]
    weights = tiny_weights(CONFIG, dtype=torch.float32)
    decoder = pack_decoder(CONFIG, weights, kernels.ThreadPool(2), "f32", "f32")
    packed = replace(pack([([5, 6, 7], 0, [1])]), wanted=np.array([2]))
    found = run_pass(decoder, packed, decoder.new_kv(3), specs, steps=[StepLimit(4)], wants_second=True)
    assert found.second_ids is not None
    text = [5, 6, 7, *found.token_ids.tolist()]
    wants = [SamplingSpec("logits", params)] * len(text)
    logits = run_pass(decoder, pack([(text, 0, [1])]), decoder.new_kv(3), wants).logits
    assert logits is not None
    for step, spec in enumerate(specs):
        row = logits[2 + step].copy()
        assert choose_token(row, spec) == text[3 + step]
        row[text[3 + step]] = -np.inf
        assert choose_token(row, spec) == found.second_ids[step]


def test_a_broken_row_ends_there() -> None:
    found = draft_steps([3, 2], weight=np.nan)
    assert (found[[0, 3]] < UNCHOSEN).all()
    assert (found[[1, 2, 4]] == UNCHOSEN).all()


def pointer_to(text: list[int], gain: float) -> kernels.TokenHints:
    index = kernels.TextIndex(len(text))
    index.extend(np.array(text))
    return kernels.TokenHints(index, np.array(text[-4:]), gain, 2, 32)


def test_a_pointer_leads_a_row_on_from_what_was_chosen() -> None:
    """The row's next drafts are tokens of its own text, each found by the tokens before it."""
    plain = draft_steps([4, 2])
    text = [6, 7, 20, 21, 22, 6, 7]  # ends as the row does
    np.testing.assert_array_equal(
        draft_steps([4, 2], pointers=(pointer_to(text, 1e4), None)), [20, 21, 22, 6, *plain[4:]]
    )
    np.testing.assert_array_equal(draft_steps([4, 2], pointers=(pointer_to(text, 0.0), None)), plain)
    elsewhere = pointer_to([int(plain[0]), int(plain[1]), 30, 8, 9], 1e4)  # the first two choices are its own
    np.testing.assert_array_equal(draft_steps([3, 2], pointers=(elsewhere, None))[:3], [*plain[:2], 30])


def test_what_lies_outside_the_vocabulary_is_not_pointed_to() -> None:
    text = [6, 7, CONFIG.vocab_size + 5, 6, 7]
    np.testing.assert_array_equal(draft_steps([2, 2], pointers=(pointer_to(text, 1e4), None)), draft_steps([2, 2]))


@pytest.mark.parametrize(
    ("gain", "bounds", "reason"),
    [(np.nan, (2, 32), "gain"), (1.0, (1, 32), "min_match"), (1.0, (5, 4), "min_match")],
)
def test_a_pointer_that_cannot_be_is_refused(gain: float, bounds: tuple[int, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kernels.TokenHints(kernels.TextIndex(8), np.array([1, 2]), gain, *bounds)


def test_a_row_leaves_where_its_stop_says() -> None:
    at_once, never, later = (
        Stop((0.0,) * 4, 1.0, least) for least in ((1.0,) * 4, (0.0,) * 4, (0.0, 1.0, 1.0, 1.0))
    )
    whole = draft_steps([4, 3])
    np.testing.assert_array_equal(draft_steps([4, 3], stops=(never, None)), whole)
    found = draft_steps([4, 3], stops=(at_once, later))
    np.testing.assert_array_equal(found, [whole[0], *[UNCHOSEN] * 3, *whole[4:6], UNCHOSEN])


@pytest.mark.parametrize(
    ("depths", "kind", "reason"),
    [
        ([4, 0], "argmax", "deep"),
        ([15, 1], "argmax", "beyond"),
        ([4], "argmax", "depth"),
        ([2, 2], "logits", "choose"),
    ],
)
def test_the_border_refuses_what_does_not_fit(depths: list[int], kind: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        draft_steps(depths, [GREEDY._replace(kind=kind)] * sum(depths))
