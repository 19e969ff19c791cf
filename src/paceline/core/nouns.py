"""The nouns every package speaks: what flows between the six verbs of a step.

    plan -> admit -> propose -> score -> judge -> commit
    Plan    Batch    Draft      Scores   Verdict  Outcome

`Batch` names rows and upper bounds only. A row's newest token, its length and positions belong to the
backend's per-row state (`backend/rows.py`), so a step can be prepared before the last one's outcome is known.
`Outcome` is a noun of a request, as is `Request` itself: see `request_nouns.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, dataclass_transform

from msgspec import Struct

from paceline.core.tree import Branches, chain_and_branches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float32, floating, int32, int64
    from numpy.typing import NDArray

    from paceline.core.params import SamplingParams
    from paceline.core.request_nouns import Admission, PromptScores, TokenLogprobs

PAGE_TOKENS = 16  # KV slots of one page
WHOLE_TEXT = 1 << 40  # tokens that a drafter may read: any number
MOST_MARGIN = 6.0  # logits; larger margins of a draft count as this one
UNCHOSEN = -1  # instead of a token id: the law chooses the token
BROKEN = -2  # instead of a token id: no logit is a finite number

T = TypeVar("T")
ChooseKind = Literal["argmax", "noisy", "sampled", "logits"]


@dataclass_transform(frozen_default=True)
def noun(cls: type[T]) -> type[T]:
    """Dataclass decorator for objects made by the hundred per step: frozen for type checkers only.

    A dataclass frozen at run time takes five times as long to create, which was 2 % of a step of sixteen rows.
    Objects are equal only to themselves.
    """
    return dataclass(slots=True, eq=False)(cls)


@noun
class Stop:
    """Rule that ends a row's draft early, where a further draft would hardly be kept.

    The chance that a draft is kept, if those before it are, is logistic in the drafter's margin at its token.
    """

    odds: list[float]  # [k] log-odds at each depth for a margin of 0
    sureness: float  # log-odds added for each logit of the margin
    least: list[float]  # [k] least chance that all drafts up to a depth are kept, for another draft to follow

    def over(self, margins: Sequence[float]) -> bool:
        """True if no draft should follow drafts with these margins. NaN (unknown) gives False."""
        alive = 1.0
        for odds, margin in zip(self.odds, margins, strict=False):
            alive /= 1.0 + math.exp(-(odds + self.sureness * min(margin, MOST_MARGIN)))
        return alive < self.least[len(margins) - 1]


@noun
class RowPlan:
    """Bounds of one row's drafting in a step."""

    drafter: str | None  # None: no drafts
    k: int  # upper bound of its drafts, those of branches not counted
    stop: Stop | None = None  # for drafters whose `needs` say that they honour it
    branches: int = 0  # upper bound of its tokens in branches, for drafters whose `needs` say that they make any


@noun
class Plan:
    """A step's plan, made by `control`. Rows that are absent draft nothing."""

    rows: Mapping[int, RowPlan] = field(default_factory=dict)  # row -> its plan
    prefill_tokens: int | None = None  # upper bound of prompt tokens in the pass; None: the scheduler's
    given_up: tuple[str, ...] = ()  # drafters to unload: no later plan uses them
    budget: int | None = None  # drafts to verify in the step, the likeliest; None: all, or as `trim` says

    def k(self, row: int) -> int:
        """Return the upper bound of a row's drafts."""
        row_plan = self.rows.get(row)
        return 0 if row_plan is None or row_plan.drafter is None else row_plan.k

    def drafter(self, row: int) -> str | None:
        """Return the drafter of a row, None if it drafts nothing."""
        row_plan = self.rows.get(row)
        return None if row_plan is None else row_plan.drafter

    def stop(self, row: int) -> Stop | None:
        """Return the rule by which a row's draft ends early, if any."""
        row_plan = self.rows.get(row)
        return None if row_plan is None else row_plan.stop

    def branches(self, row: int) -> int:
        """Return the upper bound of a row's tokens in branches."""
        row_plan = self.rows.get(row)
        return 0 if row_plan is None else row_plan.branches

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

    A row that decodes has one known token, its newest. A prefill chunk has one or more, and never carries drafts.
    """

    row: int
    request_id: str
    num_known: int  # committed tokens computed in this pass, from the row's own `computed` on
    max_drafts: int  # upper bound; pages are held for them
    samples: bool  # the last known token is the row's newest, so the pass yields a token
    max_len: int  # upper bound of the row's length once this pass is committed, whatever its outcome
    num_kept_pages: int = 0  # the row's page list is its first `num_kept_pages` pages ...
    new_pages: tuple[int, ...] = ()  # ... followed by these
    decodes: bool = False  # True: a decode pass of the row; False: a chunk of its prefill
    chunk_end: int = 0  # tokens of the row that are computed after this chunk of prefill


@noun
class Batch:
    """The rows of one step, in the order in which their tokens are packed."""

    step: int
    rows: tuple[BatchRow, ...]
    admissions: tuple[Admission, ...] = ()  # requests that get a row in this step; their rows are in `rows`

    @property
    def num_known_tokens(self) -> int:
        """Committed tokens in the pass, without drafts."""
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
    """Candidate tokens after one row's newest token: a chain, and perhaps branches that leave it.

    All fields but the last are the chain's.
    """

    token_ids: Sequence[int] = ()  # [k]
    drafter: str | None = None
    confidence: Sequence[float] | None = None  # [k] chance that a token is kept if those before it are
    probs: NDArray[floating] | None = None  # [k, vocab] q each token was drawn from; None: q is one-hot
    branches: Branches | None = None  # None: there are none

    @classmethod
    def tree(cls, token_ids: Sequence[int], parents: Sequence[int], drafter: str | None = None) -> RowDraft:
        """Return a tree. parents: [num_tokens] index of a token's parent, -1 the newest token."""
        chain, _, branches = chain_and_branches(token_ids, parents)
        return cls(chain, drafter, branches=branches)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_bound(self) -> bool:
        """True of drafts that only the device knows: the host bounds their number."""
        return len(self.token_ids) > 0 and self.token_ids[0] == UNCHOSEN

    @property
    def num_branch_tokens(self) -> int:
        """Tokens beside the chain."""
        return 0 if self.branches is None else len(self.branches.token_ids)

    def num_alike(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens of the chain equal these."""
        pairs = zip(self.token_ids, token_ids, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def first(self, k: int) -> RowDraft:
        """Return the first k tokens of the chain, and the branches beside them."""
        if k >= len(self):
            return self
        confidence = None if self.confidence is None else self.confidence[:k]
        probs = None if self.probs is None else self.probs[:k]
        branches = None if self.branches is None else self.branches.cut(len(self), k)
        return RowDraft(self.token_ids[:k], self.drafter, confidence, probs, branches) if k else NO_DRAFT


NO_DRAFT = RowDraft()


@noun
class Draft:
    """Drafts for a batch, row by row."""

    rows: tuple[RowDraft, ...]  # [num_rows], as in `Batch.rows`
    budget: int | None = None  # drafts of these to verify, where a device has made them and chooses; None: all
    branched: bool = False  # True where some row has branches
    failed: frozenset[str] = frozenset()  # drafters that were asked and failed
    unfitted: Mapping[int, RowDraft] | None = None  # by index, drafts before they were changed to fit a grammar

    @property
    def is_empty(self) -> bool:
        """True if no row was drafted for."""
        return self.rows.count(NO_DRAFT) == len(self.rows)

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
            assert drafted.branches is None or (self.branched and drafted.branches.fits(len(drafted)))


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """Sparse changes of the logits."""

    ids: NDArray[int64]  # [num_edits], distinct; l[ids] becomes (l / scale if l > 0 else l * scale) + add
    scale: NDArray[float32]  # [num_edits], 1 where there is no repetition penalty
    add: NDArray[float32]  # [num_edits], may be -inf


class SamplingSpec(NamedTuple):
    """Rule of the target's own choice at one position, a function of the request alone."""

    kind: ChooseKind
    params: SamplingParams
    seed: int = 0
    choice: int = 0
    position: int = 0  # index, in the row's tokens, of the token being chosen
    edits: Edits | None = None
    margin: bool = False  # also return by how many logits the token is ahead: a drafter's confidence
    mask: NDArray[int32] | None = (
        None  # [ceil(vocab / 32)] a bit for each token, lowest first: 1 if it may be chosen
    )

    @property
    def wants_logits(self) -> bool:
        """True if the position's logits are returned, to the law or for log-probabilities."""
        return self.kind in ("logits", "sampled")


@noun
class Taps:
    """Hidden states of every token of a target pass, for the drafters that read them."""

    states: Mapping[int, NDArray[floating]]  # number of layers -> [num_tokens, hidden] residual stream after them
    cu_len: NDArray[int64]  # [num_rows + 1] row i of the batch owns tokens cu_len[i]:cu_len[i + 1]
    slots: NDArray[int64]  # [num_tokens] slot of each token in every store
    starts: Sequence[int] = ()  # [num_rows] position of each row's first token


@noun
class Scores:
    """The target's choice at each scored position: a row's newest token, then its drafts."""

    cu_len: Sequence[int]  # [num_rows + 1] row i owns positions cu_len[i]:cu_len[i + 1], none in a chunk
    specs: Sequence[SamplingSpec]  # [num_scored]; a late target leaves them out where there are no logits
    chosen: NDArray[int64]  # [num_scored] target token ids, UNCHOSEN or BROKEN
    logits: NDArray[floating] | None = None  # [num_logit_rows, vocab] raw
    logit_idx: NDArray[int64] | None = None  # [num_scored] row of `logits`, -1 without one
    taps: Taps | None = None  # None if no drafter reads them
    draft: Draft | None = None  # the scored draft, if a device has made it; None: it is the one asked for
    made: Draft | None = None  # all drafts that the device has made and that may be scored
    prompts: Mapping[int, PromptScores] | None = None  # by row of the batch; None: no prompt is scored
    touched: tuple[float, ...] = ()  # experts of the pass, as `PassResult.touched`

    def check(self) -> None:
        """Assert that offsets and lengths agree."""
        assert self.cu_len[0] == 0
        assert all(a <= b for a, b in pairwise(self.cu_len))
        assert self.cu_len[-1] == len(self.chosen)
        assert len(self.specs) in {0, len(self.chosen)}


class Mismatches(NamedTuple):
    """Drafts of a row that are not the target's own choices, under the law `typical`."""

    places: tuple[int, ...]  # among the drafts, ascending
    gaps: tuple[float, ...]  # nats by which the target's likeliest token is likelier than each
    num_kept: int  # the first so many are kept: each changes a token of the text. The next one ends the draft

    def changed(self, num_tokens: int) -> tuple[int, float]:
        """Return how many of a row's first tokens are changed, and their gaps' sum."""
        pairs = zip(self.places[: self.num_kept], self.gaps, strict=False)
        gaps = [gap for place, gap in pairs if place < num_tokens]
        return len(gaps), sum(gaps)


class RowVerdict(Struct, frozen=True, eq=False, gc=False):
    """Gain of one row: kept drafts, then the target's next token, or a final BROKEN.

    A struct takes a third of a noun's time to make.
    """

    token_ids: Sequence[int] = ()  # [num_accepted + 1], empty if the row did not sample
    num_accepted: int = 0
    logprobs: Sequence[TokenLogprobs] | None = None  # of each token but BROKEN, if the request asked
    mismatches: Mismatches | None = None  # None under a lossless law
    off_chain: tuple[int, ...] = ()  # indices, in the branches, of the kept drafts behind those of the chain

    @property
    def num_on_chain(self) -> int:
        """Kept drafts of the chain."""
        return self.num_accepted - len(self.off_chain)


@noun
class Verdict:
    """Tokens that the law keeps, row by row."""

    rows: tuple[RowVerdict, ...]  # [num_rows], as in `Batch.rows`

    def check(self, batch: Batch, draft: Draft) -> None:
        """Assert that every row gains its accepted drafts and one token of the target's own."""
        for bound, drafted, verdict in zip(batch.rows, draft.rows, self.rows, strict=True):
            assert len(verdict.token_ids) == (verdict.num_accepted + 1 if bound.samples else 0)
            assert 0 <= verdict.num_accepted <= len(drafted)
            kept = list(verdict.token_ids[: verdict.num_accepted])
            beside = [drafted.branches.token_ids[i] for i in verdict.off_chain] if drafted.branches else []
            assert kept == [*drafted.token_ids[: verdict.num_on_chain], *beside]
