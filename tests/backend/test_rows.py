"""The per-row state: what a pass reads, and how rows advance."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from paceline.backend.reference.decoder import choose_from
from paceline.backend.rows import Rows
from paceline.backend.sampling import draw
from paceline.core.nouns import UNCHOSEN, Batch, BatchRow, Draft, RowDraft, RowVerdict, Verdict
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Admission, Request
from paceline.core.sampling import choose_ahead, choose_token, distribution


def _rows() -> tuple[Rows, Batch]:
    """Row 2 in prefill at token 16 of 20, row 0 decoding at length 5 with room for two drafts."""
    rows = Rows(4, 64, frozenset({9}))
    params = SamplingParams(max_tokens=30, temperature=0.7)
    long, short = (
        Request("long", tuple(range(20)), params, seed=1),
        Request("short", (1, 2, 3, 4, 5), params, seed=2),
    )
    births = (
        Admission(row=2, request=long, token_ids=long.prompt_ids, cached_len=16, pages=(7,)),
        Admission(row=0, request=short, token_ids=short.prompt_ids, cached_len=4, pages=()),
    )
    batch = Batch(
        1,
        (
            BatchRow(
                2, "long", num_known=3, max_drafts=0, samples=False, max_len=20, num_kept_pages=1, new_pages=(3,)
            ),
            BatchRow(
                0, "short", num_known=1, max_drafts=2, samples=True, max_len=8, num_kept_pages=0, new_pages=(5,)
            ),
        ),
        births,
    )
    rows.apply(batch)
    return rows, batch


def test_pack_gives_every_token_its_place() -> None:
    rows, batch = _rows()
    packed = rows.pack_batch(batch, Draft((RowDraft(), RowDraft([8, 7], "any"))))
    assert packed.token_ids.tolist() == [16, 17, 18, 5, 8, 7]
    assert packed.positions.tolist() == [16, 17, 18, 4, 5, 6]
    assert packed.slots.tolist() == [48, 49, 50, 84, 85, 86]
    assert packed.cu_len.tolist() == [0, 3, 6]
    assert packed.pages.tolist() == [[7, 3], [5, 0]]
    assert packed.wanted.tolist() == [3, 4, 5]
    packed.check(num_slots=200, vocab_size=20)


def test_a_prompt_is_scored_in_its_own_chunks_alone() -> None:
    """While it decodes, and once it has ended, passes have no scores."""
    rows, batch = _rows()
    request = Request("scored", (1, 2, 3), SamplingParams(prompt_logprobs=0), seed=3)
    rows.apply(Batch(2, (), (Admission(1, request, request.prompt_ids, cached_len=0, pages=()),)))
    chunk = BatchRow(1, "scored", num_known=3, max_drafts=0, samples=True, max_len=4)
    decodes = BatchRow(1, "scored", num_known=1, max_drafts=0, samples=True, max_len=5, decodes=True)
    assert rows.num_scored(Batch(2, (*batch.rows, chunk))) == [0, 0, 2]
    assert not rows.num_scored(Batch(3, (*batch.rows, decodes)))
    assert not rows.num_scored(batch)


def test_commit_appends_and_counts_what_is_computed() -> None:
    rows, batch = _rows()
    rows.commit(batch, Verdict((RowVerdict(), RowVerdict([8, 6], num_accepted=1))))
    assert rows.tokens(0).tolist() == [1, 2, 3, 4, 5, 8, 6]
    assert (rows.computed[0], rows.computed[2]) == (6, 19)
    rows.check()


def test_positions_of_choices_count_the_drafts_before_them() -> None:
    rows, batch = _rows()
    cu_len, specs = rows.specs(batch, Draft((RowDraft(), RowDraft([8, 7], "any"))))
    assert cu_len == [0, 0, 3]
    assert [c.position for c in specs] == [5, 6, 7]
    assert {c.seed for c in specs} == {2}


KINDS = {
    "argmax": SamplingParams(temperature=0.0),
    "noisy": SamplingParams(temperature=0.8, presence_penalty=0.4),
    "sampled": SamplingParams(temperature=0.8, top_p=0.7, logprobs=2),
}


def _rows_with(params: SamplingParams) -> Rows:
    rows = Rows(1, 64, frozenset())
    request = Request("r", (1, 2, 3), params, seed=4)
    rows.apply(Batch(1, (), (Admission(0, request, (1, 2, 3, 4), 0, ()),)))
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_a_drafter_that_is_the_target_draws_what_the_target_chooses(kind: str) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    specs = _rows_with(KINDS[kind]).row_specs(0, [5, 6])
    assert {c.kind for c in specs} == {kind}
    chosen = choose_from(logits, specs)
    own = [choose_token(row.numpy(), c) for row, c in zip(logits, specs, strict=True)]
    assert (chosen.logits is None) == (chosen.logit_idx is None) == (kind != "sampled")
    assert chosen.token_ids.tolist() == ([UNCHOSEN] * 3 if kind == "sampled" else own)
    drawn = draw(partial(choose_from, logits), specs, [0, 1, 2], dense=False)
    assert drawn.token_ids == own
    ahead = [choose_ahead(row.numpy(), c)[1] for row, c in zip(logits, specs, strict=True)]
    assert drawn.margins == pytest.approx(ahead)


def test_a_dense_draw_returns_the_distribution_it_drew_from() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    specs = _rows_with(KINDS["sampled"]).row_specs(0, [])
    drawn = draw(partial(choose_from, logits), specs, [0], dense=True)
    token_ids, probs = drawn.token_ids, drawn.probs
    assert probs is not None
    assert drawn.margins is None
    assert probs[0].shape == (40,)
    assert probs[0].sum() == pytest.approx(1.0)
    assert probs[0][token_ids[0]] > 0
    ids, expected = distribution(logits[0].numpy(), specs[0])
    assert probs[0][ids] == pytest.approx(expected)
