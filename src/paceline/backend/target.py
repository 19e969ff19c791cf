"""The target: a decoder, its KV and the rows whose tokens it scores; launched passes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from paceline.backend.branches import NUM_BRANCH_PAGES, BranchPages
from paceline.backend.prompt_scores import scoring_pass
from paceline.backend.seam import PassRequest
from paceline.core.nouns import Scores, Taps, noun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.backend.branches import CopiesPages
    from paceline.backend.pass_thread import PassThread
    from paceline.backend.prompt_scores import ScoringPass
    from paceline.backend.row_grammars import PassMasks
    from paceline.backend.rows import Rows
    from paceline.backend.seam import Decoder, Executor, PassResult, Pending
    from paceline.core.nouns import Batch, Draft, Verdict


class PendingPass(Protocol):
    """A target pass that was launched."""

    pass_s: float  # seconds that the pass took, once it was waited for
    draft_s: float  # seconds that its drafts took on the device; 0: the host made them

    def wait(self) -> Scores:
        """Return the scores, as often as asked. Raises what went wrong in the pass."""


class ReadyPass(Protocol):
    """Target pass over a batch and its drafts, with all that it reads of rows."""

    @property
    def masks(self) -> PassMasks | None:
        """Room for the masks that the pass chooses under, None without masks."""

    def launch(self, thread: PassThread | None = None) -> PendingPass:
        """Launch the pass. thread: runs it whole, beside the caller."""


@noun
class HostPass:
    """A target pass that was gathered on the host."""

    decoder: Decoder
    request: PassRequest
    cu_len: Sequence[int]  # as `Scores.cu_len`
    starts: Sequence[int]  # as `Taps.starts`
    scoring: ScoringPass | None = None  # None: no prompt is scored
    masks: PassMasks | None = None

    def launch(self, thread: PassThread | None = None) -> PendingPass:
        """Launch a pass that touches no row, see `ReadyPass`."""
        start = perf_counter()
        if thread is None:
            return PendingScores(self, self.decoder.launch(self.request), start)
        result = thread.start(partial(_run, self.decoder, self.request)).result
        return PendingScores(self, Deferred(result), start)


class Deferred:
    """A pass that runs when it is waited for; see `Pending`."""

    __slots__ = ("_result", "_run")

    def __init__(self, run: Callable[[], PassResult]) -> None:
        self._run = run
        self._result: PassResult | None = None

    def wait(self) -> PassResult:
        """Run the pass, once."""
        if self._result is None:
            self._result = self._run()
        return self._result


class PendingScores:
    """Scores of a target pass that was launched."""

    __slots__ = ("_asked", "_launched_s", "_pending", "_scores", "draft_s", "pass_s")

    def __init__(self, asked: HostPass, pending: Pending, launched_s: float) -> None:
        self._asked, self._pending = asked, pending
        self._launched_s = launched_s  # clock at the launch
        self._scores: Scores | None = None
        self.pass_s = self.draft_s = 0.0  # as in `PendingPass`

    def wait(self) -> Scores:
        """Return the scores, as often as asked. Raises what went wrong in the pass."""
        if self._scores is None:
            if self._asked.masks is not None:
                self._asked.masks.open()  # nobody fills in masks from now on, so the pass may choose
            result = self._pending.wait()
            wall_s = perf_counter() - self._launched_s
            self.pass_s = wall_s if result.pass_s is None else result.pass_s
            self._scores = _scores(self._asked, result)
        return self._scores


class Backend:
    """Executes the target. Owns every row's outcome-dependent state (`rows`) and the target's KV."""

    late: ClassVar[bool] = False  # the next pass of a row may be gathered before the host knows this one's outcome
    scores_prompts: ClassVar[bool] = True  # takes requests that ask for log-probabilities of their prompts

    def __init__(self, decoder: Decoder, rows: Rows, num_pages: int) -> None:
        self.decoder = decoder
        self.config = decoder.config
        self.rows = rows
        takes_branches = decoder.capabilities.branches
        self.asynchronous = decoder.capabilities.asynchronous  # a pass without a thread goes on beside the caller
        self.kv = decoder.new_kv(num_pages + (NUM_BRANCH_PAGES if takes_branches else 0))
        self.branches = BranchPages(cast("CopiesPages", self.kv), num_pages) if takes_branches else None
        self.taps: tuple[int, ...] = ()  # layers whose hidden states drafters read, in every pass

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of target KV per token."""
        return self.kv.bytes_per_token

    def prepare(self, prefill_tokens: int, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Make ready for the first pass, once the drafters are there.

        prefill_tokens: most prefill tokens of a step. progress: see `build`.
        """

    def request(self, batch: Batch, draft: Draft) -> ReadyPass:
        """Gather a pass over the known tokens and the drafts of a batch."""
        scored = self.rows.num_scored(batch)
        packed = self.rows.pack_batch(batch, draft, scored)
        if draft.branched:
            assert self.branches is not None, "branches come to decoders that take them"
            packed = self.branches.pack(batch, draft, packed)
        takes_masks = bool(self.rows.grammars.states) and self.decoder.capabilities.masks and not scored
        cu_len, specs = self.rows.specs(batch, draft, masks=takes_masks)
        starts = [self.rows.computed_len(r.row) for r in batch.rows] if self.taps else ()
        scoring = scoring_pass(self.rows, batch, scored, cu_len, specs) if scored else None
        asked = specs if scoring is None else scoring.all_specs
        masks = self.rows.grammars.room(batch, specs, cu_len) if takes_masks else None
        shared = None if masks is None else masks.shared
        request = PassRequest(packed, self.kv, asked, taps=self.taps, masks=shared)
        return HostPass(self.decoder, request, cu_len, starts, scoring, masks)

    def commit(self, batch: Batch, verdict: Verdict) -> None:
        """Advance the rows by what was kept."""
        self.rows.commit(batch, verdict)


def _run(executor: Executor, request: PassRequest) -> PassResult:
    """Run a pass and measure the seconds that it takes."""
    start = perf_counter()
    result = executor.launch(request).wait()
    return replace(result, pass_s=perf_counter() - start)


def _scores(asked: HostPass, result: PassResult) -> Scores:
    packed, specs, prompts = asked.request.packed, asked.request.specs, None
    if asked.scoring is not None:
        specs = asked.scoring.specs
        result, prompts = asked.scoring.split(result)
    # Rows of branches come behind these. Without branches `packed` may hold handles of the backend.
    cu_len = packed.cu_len if packed.copies is None else packed.cu_len[: len(asked.cu_len)]
    taps = Taps(result.taps, cu_len, packed.slots, asked.starts) if result.taps else None
    return Scores(
        asked.cu_len,
        specs,
        result.token_ids,
        result.logits,
        result.logit_idx,
        taps,
        prompts=prompts,
        touched=result.touched,
    )
