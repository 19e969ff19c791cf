"""Drafts made on the device are those of the host's drafters, hints from the text included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from paceline.core.nouns import Request
from paceline.core.params import SamplingParams
from tests.draft.heads import RELAY, drafter_of, trained_head
from tests.engine.same_text import PLAIN, make_engine, run, target

if TYPE_CHECKING:
    from paceline.core.nouns import Verdict
    from paceline.engine.engine import Engine


def requests(temperature: float) -> list[Request]:
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True)
    return [Request(str(i), tuple(range(40 + 7 * i, 60 + 9 * i)), params, seed=i) for i in range(3)]


def drafts_of(engine: Engine, asked: list[Request]) -> dict[str, list[tuple[tuple[int, ...], int]]]:
    """Return each request's drafts in order, and how many of each were kept."""
    found: dict[str, list[tuple[tuple[int, ...], int]]] = {r.request_id: [] for r in asked}
    judge = engine.judge

    def noted(drafted: Any, scored: Any) -> Verdict:
        verdict = judge(drafted, scored)
        for r, d, v in zip(drafted.batch.rows, drafted.draft.rows, verdict.rows, strict=True):
            if r.decodes:
                found[r.request_id].append((tuple(d.token_ids), v.num_accepted))
        return verdict

    engine.judge = noted  # type: ignore[method-assign]
    run(engine, asked)
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", RELAY, "noisy"])
def test_a_program_on_the_device_drafts_as_the_host_does(kind: str, temperature: float) -> None:
    spec = f"draft-model:model={kind},k=3"
    if kind != "noisy":
        spec = f"{drafter_of(kind)}:model={trained_head(kind, target().decoder)},k=3"  # type: ignore[arg-type]
    asked, found = requests(temperature), []
    for types in ("f64", "cuda"):
        engine = make_engine(spec, PLAIN, types=types)
        found.append(drafts_of(engine, asked))
    host, device = found
    pairs = [pair for name in host for pair in zip(host[name], device[name], strict=False)]
    # Bounds near an answer's end trail by a step on the device, so that it may draft more of the same.
    same = sum(all(a == b for a, b in zip(one, other, strict=False)) for (one, _), (other, _) in pairs)
    # The vocabulary of a request's own tokens trails, too, and so may a draft.
    assert same >= 0.95 * len(pairs) > 0
