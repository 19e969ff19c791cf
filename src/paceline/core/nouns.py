"""The nouns every package speaks: what flows between the six verbs of a step.

    admit -> plan -> propose -> score -> judge -> commit
             Plan    Draft      Scores   Verdict  Outcome

`Batch` names rows and upper bounds only. A row's newest token, its length and positions belong to the
backend's per-row state (`backend/rows.py`), so a step can be prepared before the last one's outcome is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, dataclass_transform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float32, floating, int64
    from numpy.typing import NDArray

    from paceline.core.params import SamplingParams, Speculation

PAGE_TOKENS = 16  # KV slots of one page
MOST_MARGIN = 6.0  # logits; a drafter that is surer counts as no more
UNCHOSEN = -1  # in place of a token id that is left to the law
BROKEN = -2  # in place of a token id where no logit is a finite number

T = TypeVar("T")
FinishReason = Literal["stop", "length", "cancelled", "error"]
ChooseKind = Literal["argmax", "noisy", "sampled", "logits"]


@dataclass_transform(frozen_default=True)
def noun(cls: type[T]) -> type[T]:
    """Make a dataclass of which steps make hundreds: frozen to the type checker, and to it alone.

    To make one that watches itself takes five times as long, which was 2 % of a step of sixteen rows.
    Two are equal if they are one.
    """
    return dataclass(slots=True, eq=False)(cls)


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One text to write. A request for n choices becomes n of these, alike but for `choice`."""

    request_id: str
    prompt_ids: tuple[int, ...]  # [prompt_len]
    params: SamplingParams
    seed: int  # 0 <= seed < 2**63
    choice: int = 0
    salt: str = ""  # requests share cached pages only with requests of the same salt
    arrival_s: float = 0.0  # time.monotonic()
    speculation: Speculation | None = None  # None: as the engine is set up

    def check(self) -> None:
        """Assert what every package may rely on."""
        assert self.prompt_ids, "an empty prompt has no last token to continue"
        assert 0 <= self.seed < 1 << 63
        assert 0 <= self.choice < self.params.n


@noun
class Stop:
    """Where a row's drafting ends before its plan does: where hardly more would be kept.

    The chance that a draft is kept, if those before it are, is logistic in the drafter's margin there.
    """

    odds: list[float]  # [k] log-odds at each depth without a margin
    sureness: float  # what a logit of the margin adds to them
    least: list[float]  # [k] chance of all drafts up to one, below which none follows it

    def over(self, margins: Sequence[float]) -> bool:
        """Whether none follows drafts with these margins; never if one of them is not known."""
        alive = 1.0
        for odds, margin in zip(self.odds, margins, strict=False):
            alive /= 1.0 + math.exp(-(odds + self.sureness * min(margin, MOST_MARGIN)))
        return alive < self.least[len(margins) - 1]


@noun
class RowPlan:
    """How far one row may draft in this step."""

    drafter: str | None  # None drafts nothing
    k: int  # at most this many drafts
    stop: Stop | None = None  # for a drafter whose `needs` say that it minds it


@noun
class Plan:
    """What `control` decided for a step. A row that is absent drafts nothing."""

    rows: Mapping[int, RowPlan] = field(default_factory=dict)  # row -> its plan
    prefill_tokens: int | None = None  # at most so many prompt tokens ride along; None: as many as fit
    given_up: tuple[str, ...] = ()  # drafters that may go: they will not be planned with again

    def k(self, row: int) -> int:
        """Return the largest number of drafts for a row."""
        row_plan = self.rows.get(row)
        return 0 if row_plan is None or row_plan.drafter is None else row_plan.k

    def stop(self, row: int) -> Stop | None:
        """Return where a row's drafting ends before that."""
        row_plan = self.rows.get(row)
        return None if row_plan is None else row_plan.stop

    def only(self, drafter: str) -> Plan:
        """Return the plan of one drafter's rows."""
        return Plan({row: p for row, p in self.rows.items() if p.drafter == drafter})

    def check(self) -> None:
        """Assert the bounds of every row's plan."""
        for row_plan in self.rows.values():
            assert row_plan.k >= 0


@noun
class BatchRow:
    """One row's share of a pass: `num_known` tokens that are already committed, then its drafts.

    A row that decodes has one known token, its newest. A prefill chunk has several, or one that is left over, and
    never carries drafts.
    """

    row: int
    request_id: str
    num_known: int  # committed tokens computed in this pass, from the row's own `computed` on
    max_drafts: int  # pages are there for this many
    samples: bool  # the last known token is the row's newest, so the pass yields a token
    max_len: int  # upper bound of the row's length once this pass is committed, whatever its outcome
    num_kept_pages: int = 0  # the row's page list is its first so many pages ...
    new_pages: tuple[int, ...] = ()  # ... followed by these
    decodes: bool = False  # this is a decode pass of the row rather than a piece of its prefill


@dataclass(frozen=True, slots=True, eq=False)
class Admission:
    """A request's birth in a row, or its rebirth after a preemption."""

    row: int
    request: Request
    token_ids: Sequence[int]  # [length] prompt, and what was written before a preemption
    cached_len: int  # leading tokens whose target KV is already there
    pages: tuple[int, ...]  # pages of the cached tokens
    rebirth: bool = False  # it had a row before, and lost it to a preemption


@noun
class Batch:
    """The rows of one step, in the order in which their tokens are packed."""

    step: int
    rows: tuple[BatchRow, ...]
    admissions: tuple[Admission, ...] = ()  # rows born in this step, all of them in `rows`

    @property
    def num_known_tokens(self) -> int:
        """Committed tokens in the pass, drafts not counted."""
        return sum(r.num_known for r in self.rows)

    def check(self) -> None:
        """Assert what every package may rely on."""
        assert len({r.row for r in self.rows}) == len(self.rows), "a row appears twice"
        for r in self.rows:
            assert r.num_known >= 1
            assert r.max_drafts >= 0
            assert not r.decodes or (r.samples and r.num_known == 1)
            assert r.max_drafts == 0 or r.samples, "a chunk that does not reach the newest token has no drafts"


@noun
class RowDraft:
    """Candidate tokens to follow one row's newest token, a chain unless `parents` says otherwise."""

    token_ids: Sequence[int] = ()  # [k]
    drafter: str | None = None
    confidence: Sequence[float] | None = None  # [k] chance that a token is kept if its parent is
    probs: NDArray[floating] | None = None  # [k, vocab] q each token was drawn from; None: q is one-hot
    parents: Sequence[int] | None = None  # [k] index of the parent draft, -1 the newest token; None: a chain

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, k: int) -> RowDraft:
        """Return the first k of its tokens, for a chain."""
        if k >= len(self):
            return self
        confidence = None if self.confidence is None else self.confidence[:k]
        probs = None if self.probs is None else self.probs[:k]
        return RowDraft(self.token_ids[:k], self.drafter, confidence, probs) if k else NO_DRAFT


NO_DRAFT = RowDraft()


@noun
class Draft:
    """What the drafters proposed for a batch, row by row."""

    rows: tuple[RowDraft, ...]  # [num_rows], as in `Batch.rows`

    @property
    def num_tokens(self) -> int:
        """Drafted tokens in all rows."""
        return sum(len(r) for r in self.rows)

    def check(self, batch: Batch) -> None:
        """Assert that the draft keeps within the batch's bounds."""
        assert len(self.rows) == len(batch.rows)
        for drafted, bound in zip(self.rows, batch.rows, strict=True):
            assert len(drafted) <= bound.max_drafts
            assert drafted.probs is None or len(drafted.probs) == len(drafted)
            assert drafted.confidence is None or len(drafted.confidence) == len(drafted)


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """A sparse list of changes to the logits: l[ids] becomes (l / scale if l > 0 else l * scale) + add."""

    ids: NDArray[int64]  # [num_edits], distinct
    scale: NDArray[float32]  # [num_edits], 1 where there is no repetition penalty
    add: NDArray[float32]  # [num_edits], may be -inf


class SamplingSpec(NamedTuple):
    """How the target's own token is chosen at one position. Depends on the request's parameters only."""

    kind: ChooseKind
    params: SamplingParams
    seed: int = 0
    choice: int = 0
    position: int = 0  # index, in the row's tokens, of the token being chosen
    edits: Edits | None = None
    margin: bool = False  # whether it is told, too, how far ahead the token was: a drafter's confidence

    @property
    def wants_logits(self) -> bool:
        """Whether the position's logits come back: to the law, or for log-probabilities beside a chosen token."""
        return self.kind in ("logits", "sampled")


@noun
class Taps:
    """Hidden states that a target pass left behind, of every token in it, for the drafters that read them."""

    states: Mapping[int, NDArray[floating]]  # [num_tokens, hidden] residual stream after so many layers
    cu_len: NDArray[int64]  # [num_rows + 1] row i of the batch owns tokens cu_len[i]:cu_len[i + 1]
    slots: NDArray[int64]  # [num_tokens] the place of each token in every store
    starts: Sequence[int] = ()  # [num_rows] position of each row's first token


@noun
class Scores:
    """What the target says at every scored position: a row's newest token's, then each of its drafts'."""

    cu_len: Sequence[int]  # [num_rows + 1] row i owns positions cu_len[i]:cu_len[i + 1]; none if it samples not
    specs: Sequence[SamplingSpec]  # [num_scored]
    chosen: NDArray[int64]  # [num_scored] target token ids; UNCHOSEN where it is left to the law, or BROKEN
    logits: NDArray[floating] | None = None  # [num_logit_rows, vocab] raw
    logit_idx: NDArray[int64] | None = None  # [num_scored] row of `logits`, -1 where there is none
    taps: Taps | None = None  # None if no drafter asked

    def check(self) -> None:
        """Assert that offsets and lengths agree."""
        assert self.cu_len[0] == 0
        assert all(a <= b for a, b in pairwise(self.cu_len))
        assert self.cu_len[-1] == len(self.specs) == len(self.chosen)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the raw distribution at one emitted token."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()  # most likely first
    top_logprobs: tuple[float, ...] = ()


@noun
class RowVerdict:
    """What one row gains: its kept drafts, then the target's own next token, or BROKEN, which ends it."""

    token_ids: Sequence[int] = ()  # [num_accepted + 1], empty if the row did not sample
    num_accepted: int = 0
    logprobs: Sequence[TokenLogprobs] | None = None  # of each token but BROKEN, if the request asked


@noun
class Verdict:
    """What the law keeps, row by row."""

    rows: tuple[RowVerdict, ...]  # [num_rows], as in `Batch.rows`

    def check(self, batch: Batch, draft: Draft) -> None:
        """Assert that every row gains its accepted drafts and one token of the target's own."""
        for bound, drafted, verdict in zip(batch.rows, draft.rows, self.rows, strict=True):
            assert len(verdict.token_ids) == (verdict.num_accepted + 1 if bound.samples else 0)
            assert 0 <= verdict.num_accepted <= len(drafted)
            kept = list(verdict.token_ids[: verdict.num_accepted])
            assert kept == list(drafted.token_ids[: verdict.num_accepted])


@dataclass(frozen=True, slots=True)
class Figures:
    """What one request cost and what speculation did for it, told in its last outcome."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    decode_passes: int
    decoded_tokens: int  # tokens committed by decode passes; the prefill's token is not one
    drafted_tokens: int
    verified_tokens: int  # drafts after trimming
    accepted_tokens: int
    seed: int
    preemptions: int = 0

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per decode pass, the target's own included, the prefill's token not."""
        return self.decoded_tokens / self.decode_passes if self.decode_passes else 0.0


@noun
class Outcome:
    """What one request gained in a step, after stops: what is streamed to its client."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one for each token, if asked for
    finish_reason: FinishReason | None = None  # None while it runs
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    figures: Figures | None = None  # with the last outcome
    error: str | None = None  # with finish_reason "error"
