"""What a pass reads of the rows: the compiled gathering says what the readable one does."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from paceline import kernels
from paceline.backend.rows import Rows
from paceline.core.nouns import Batch, BatchRow, Edits, RowVerdict, SamplingSpec, Verdict
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Admission, Request
from tests.oracles import rows as oracle
from tests.oracles.specs import read_specs

PARTS = ("token_ids", "positions", "slots", "cu_len", "pages", "wanted")


def _filled(random: Random) -> Rows:
    rows = Rows(5, 200, frozenset())
    rows.token_ids[:] = np.array(
        [[random.randrange(1000) for _ in range(rows.token_ids.shape[1])] for _ in range(5)]
    )
    rows.pages[:] = np.array([[random.randrange(90) for _ in range(rows.pages.shape[1])] for _ in range(5)])
    return rows


@pytest.mark.parametrize("number", range(30))
def test_spans_are_packed_as_the_readable_twin_packs_them(number: int) -> None:
    random = Random(number)
    rows = _filled(random)
    spans = []
    for row in random.sample(range(5), random.randint(0, 5)):
        start, guesses = (
            random.randrange(150),
            [random.randrange(1000) for _ in range(random.choice([0, 0, 1, 7]))],
        )
        spans.append((row, start, random.randint(0 if guesses else 1, 40), random.choice([list, tuple])(guesses)))
    wanted = [random.randint(0, known + len(guesses)) for _, _, known, guesses in spans]
    ahead = random.choice([0, 3, 20])
    fast, slow = rows.pack(spans, wanted, ahead), oracle.pack(rows, spans, wanted, ahead)
    for part in PARTS:
        one, other = getattr(fast, part), getattr(slow, part)
        assert one.dtype == other.dtype == np.int64
        assert one.shape == other.shape
        assert (one == other).all(), part


@pytest.mark.parametrize(
    "span", [(5, 0, 1, ()), (-1, 0, 1, ()), (0, -1, 1, ()), (0, 260, 9, ()), (0, 0, -1, [1, 2])]
)
def test_a_span_that_no_row_has_is_refused(span: tuple[int, int, int, list[int]]) -> None:
    with pytest.raises(ValueError, match="row"):
        _filled(Random(0)).pack([span], [0])


def _choose(random: Random) -> SamplingSpec:
    kind = random.choice(["argmax", "noisy", "logits", "sampled"])
    temperature = 0 if kind == "argmax" else random.choice([0.7, 1])
    params = SamplingParams(temperature=temperature, top_k=random.randrange(9), top_p=random.choice([0.5, 1]))
    ids = np.array(sorted(random.sample(range(60), random.randrange(9))), np.int64)
    scale, add = (np.array([random.random() for _ in ids], np.float32) for _ in range(2))
    edits = random.choice([None, Edits(ids, scale, add)])
    return SamplingSpec(
        kind, params, random.getrandbits(63), random.randrange(64), random.randrange(1 << 20), edits
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("number", range(30))
def test_how_tokens_are_chosen_is_read_as_the_readable_twin_reads_it(number: int) -> None:
    random = Random(number)
    specs = [_choose(random) for _ in range(random.randint(0, 8))]
    fast, slow = kernels.read_specs(specs, 40), read_specs(specs, 40)
    assert fast.as_lists() == slow.as_lists()
    assert fast.num_logit_rows == slow.num_logit_rows == sum(c.wants_logits for c in specs)


@pytest.mark.parametrize("number", range(20))
def test_rows_advance_as_the_readable_twin_advances_them(number: int) -> None:
    random = Random(number)
    fast, slow, gained = _filled(Random(number)), _filled(Random(number)), []
    for row in random.sample(range(5), random.randint(1, 5)):
        request = Request(str(row), (1, 2, 3), SamplingParams(presence_penalty=random.choice([0.0, 0.5])), seed=1)
        for rows in (fast, slow):
            rows.apply(Batch(1, (), (Admission(row, request, (1, 2, 3), 0, ()),)))
        token_ids = random.choice([[], [5], (6, 7, 7, 9)])
        gained.append((BatchRow(row, str(row), random.randint(1, 3), 8, True, 40), RowVerdict(token_ids)))
    batch, verdict = Batch(2, tuple(r for r, _ in gained)), Verdict(tuple(v for _, v in gained))
    fast.commit(batch, verdict)
    oracle.commit(slow, batch, verdict)
    for one, other in ((getattr(fast, n), getattr(slow, n)) for n in ("token_ids", "length", "computed")):
        assert (one == other).all()
    for r, _ in gained:
        ours, theirs = (kernels.read_specs([rows.spec_after(r.row, [8])], 40).as_lists() for rows in (fast, slow))
        assert ours == theirs


def test_a_row_that_is_full_gains_nothing() -> None:
    rows = _filled(Random(0))
    rows.length[2] = rows.token_ids.shape[1] - 1
    with pytest.raises(ValueError, match="no room"):
        rows.commit(Batch(1, (BatchRow(2, "2", 1, 1, True, 40),)), Verdict((RowVerdict([4, 5], 1),)))
