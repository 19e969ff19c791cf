"""The target on a device, which gathers, scores, judges and commits without the host.

The host enqueues a pass from bounds alone, and usually takes in its record one step later. From the record the law
on the host comes to the same verdict, which brings the host's rows up to date.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from paceline.backend.cuda.device_memory import enough_memory, on_device
from paceline.backend.cuda.device_rows import DeviceRows
from paceline.backend.cuda.record import begin_record
from paceline.backend.cuda.step_graphs import StepGraphs
from paceline.backend.sampling import logit_rows
from paceline.backend.target import Backend
from paceline.core.nouns import NO_DRAFT, PAGE_TOKENS, UNCHOSEN, Draft, RowDraft, Scores, Taps
from paceline.core.sampling import choose_token

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.cuda.decoder import CudaDecoder
    from paceline.backend.cuda.kv_store import DeviceKV
    from paceline.backend.cuda.record import DeviceSpan, Record
    from paceline.backend.cuda.step_graphs import Progress, StepOutputs
    from paceline.backend.pass_thread import PassThread
    from paceline.backend.rows import Rows
    from paceline.backend.target import PendingPass, ReadyPass
    from paceline.core.nouns import Batch


class LateTarget(Backend):
    """Target whose rows are on its device; steps need not wait for outcomes. See `Backend`."""

    rows: DeviceRows
    decoder: CudaDecoder
    kv: DeviceKV
    late = True
    scores_prompts = False  # records of its passes hold only rows that sample

    def __init__(self, decoder: CudaDecoder, rows: Rows, num_pages: int) -> None:
        assert isinstance(rows, DeviceRows)
        device = decoder.setup.device
        rows.move_to(device, num_pages, captures=device.type != "cpu")
        super().__init__(decoder, rows, num_pages)
        self.graphs = StepGraphs(self, rows.capture)

    def prepare(self, prefill_tokens: int, progress: Progress | None = None) -> None:
        """Capture the graphs of all steps, and run a step of the greatest length."""
        longest = min(prefill_tokens, self.kv.num_slots) + self.rows.num_rows
        with on_device(self.rows.device):
            with enough_memory("the graphs of its steps"):
                self.graphs.capture_all(progress)
            with enough_memory(f"a step of --prefill-tokens {prefill_tokens}"):
                self.graphs.run_longest(longest)

    def request(self, batch: Batch, draft: Draft) -> ReadyPass:
        """Send drafts made on the host; the device has the others."""
        pairs = () if draft.is_empty else zip(batch.rows, draft.rows, strict=True)
        if known := [(r.row, d.token_ids) for r, d in pairs if d.token_ids and not d.is_bound]:
            self.rows.put_drafts(known)
        return LatePass(self, batch, draft, self.rows.take_draftings())


@dataclass(frozen=True, slots=True, eq=False)
class LatePass:
    """Pass over rows on the device, which it reads when it runs. See `ReadyPass`."""

    target: LateTarget
    batch: Batch
    draft: Draft  # a bound stands for drafts that the host does not know
    draftings: Sequence[DeviceSpan] = ()  # the draftings for this pass, on the device

    masks: ClassVar[None] = None  # the law chooses the tokens of rows with a grammar

    def launch(self, thread: PassThread | None = None) -> PendingPass:
        """Enqueue the pass, its judgement and its record. Waits for nothing."""
        if thread is None:
            record = self._launched()
            return PendingRecord(self, lambda: record)
        begun = thread.start(self._launched)
        return PendingRecord(self, partial(begun.result, None))

    def _launched(self) -> Record:
        with on_device(self.target.rows.device):  # drafters of this process may use another device
            return self._enqueue()

    def _enqueue(self) -> Record:
        target, batch = self.target, self.batch
        counts = [0] * len(batch.rows) if self.draft.is_empty else [len(d.token_ids) for d in self.draft.rows]
        record = begin_record(target.rows.device, self.draftings)
        block, longest = target.rows.step_block(batch, counts)
        num_known, num_drafts, num_wanted = (int(block[index].sum()) for index in (1, 2, 3))
        budget = self.draft.budget
        if budget is not None and budget < num_drafts:
            record.keep("num_made", target.graphs.cut_to_budget(block, budget))
            num_drafts = budget
        num_pages = -(-longest // PAGE_TOKENS)
        out = target.graphs.run(block, num_known + num_drafts, num_wanted + num_drafts, num_pages)
        if out.taps:
            record.keep("cu_len", out.cu_len)
            record.keep("slots", out.slots)
        if (here := self.chosen_here()) and len(out.hidden):
            record.keep("logits", target.decoder.logits(_hidden_of(out, here)))  # not in graphs: logits are large
        record.keep("chosen", out.chosen)
        record.keep("num_drafts", out.num_drafts)
        record.keep("drafts", out.drafts)
        record.keep("margins", out.margins)
        record.end(out.taps)
        return record

    def chosen_here(self) -> list[tuple[int, int]]:
        """Return the sampled rows whose tokens the host chooses.

        Each is (index in the batch, bound of its drafts).
        """
        here = self.target.rows.rows_chosen_here
        if not here:
            return []
        rows = enumerate(zip(self.batch.rows, self.draft.rows, strict=True))
        return [(index, len(d)) for index, (r, d) in rows if r.samples and r.row in here]


def _hidden_of(out: StepOutputs, rows: list[tuple[int, int]]) -> torch.Tensor:
    """Return the states of `LatePass.chosen_here` rows. [sum of 1 + bounds, hidden]"""
    owners = [index for index, count in rows for _ in range(1 + count)]
    places = [place for _, count in rows for place in range(1 + count)]
    sent = torch.tensor([owners, places]).to(out.hidden.device, non_blocking=True)
    return out.hidden[(out.first_place[sent[0]] + sent[1]).clamp(max=len(out.hidden) - 1)]


class PendingRecord:
    """A pass whose record will come; see `PendingPass`."""

    def __init__(self, asked: LatePass, record: Callable[[], Record]) -> None:
        self._asked, self._record = asked, record
        self._scores: Scores | None = None
        self.pass_s = self.draft_s = 0.0

    def wait(self) -> Scores:
        """Wait for the record; return its scores. The host's rows must know all earlier outcomes."""
        if self._scores is None:
            record = self._record()
            record.wait()
            self.pass_s, self.draft_s = record.seconds, record.draft_s
            self._scores = _scores(self._asked, record)
        return self._scores


def _scores(asked: LatePass, record: Record) -> Scores:
    """Return the scores of a record, with the drafts that it tells of."""
    batch, rows = asked.batch, asked.target.rows
    counts = record["num_drafts"][: len(batch.rows)].tolist()
    draft = made = asked.draft
    if not draft.is_empty:
        draft = made = _drafts(asked.draft, record, counts)
    if "num_made" in record:
        made = _drafts(asked.draft, record, record["num_made"].tolist())
    here = asked.chosen_here()
    judged_here = bool(here) or rows.law_needs_probs  # such a law reads specs of greedy rows, too
    cu_len, specs = rows.specs(batch, draft) if judged_here else (_places(batch, counts), [])
    chosen = record["chosen"][: cu_len[-1]]
    logits: list[NDArray[floating]] = []
    done = 0
    for index, bound in here:
        block = record["logits"][done : done + 1 + len(draft.rows[index])]
        done += 1 + bound
        for at, row in zip(range(cu_len[index], cu_len[index + 1]), block, strict=True):
            chosen[at] = UNCHOSEN if specs[at].wants_logits else choose_token(row, specs[at])
            if specs[at].wants_logits:
                logits.append(row)
    taps = _taps(asked, record) if record.taps else None
    if not logits:
        return Scores(cu_len, specs, chosen, taps=taps, draft=draft, made=made)
    return Scores(cu_len, specs, chosen, np.stack(logits), logit_rows(specs), taps, draft, made)


def _drafts(asked: Draft, record: Record, counts: Sequence[int]) -> Draft:
    """Return the first `counts[i]` drafts of each row, wherever they were made."""
    bounds = enumerate(zip(asked.rows, counts, strict=True))
    return Draft(tuple(_known(d, record, i, count) if d.is_bound else d.first(count) for i, (d, count) in bounds))


def _taps(asked: LatePass, record: Record) -> Taps:
    """Return the hidden states of a record's tokens, which stay on the device."""
    starts = [asked.target.rows.computed_len(r.row) for r in asked.batch.rows]
    return Taps(record.taps, record["cu_len"][: len(starts) + 1], record["slots"], starts)


def _places(batch: Batch, counts: Sequence[int]) -> list[int]:
    """Return the offsets of rows among the scored positions, as `Scores.cu_len`."""
    sampled = [1 + count if r.samples else 0 for r, count in zip(batch.rows, counts, strict=True)]
    return list(accumulate(sampled, initial=0))


def _known(bound: RowDraft, record: Record, index: int, count: int) -> RowDraft:
    """Return a row's drafts as the device made them."""
    if not count:
        return NO_DRAFT
    margins = record["margins"][index, :count]
    confidence = None if np.isnan(margins).any() else (1 / (1 + np.exp(-margins))).tolist()
    return RowDraft(record["drafts"][index, :count].tolist(), bound.drafter, confidence)
