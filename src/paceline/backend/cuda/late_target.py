"""The target on a device: passes are gathered, scored, judged and committed there, without a word to the host.

The host enqueues a pass from bounds alone and takes in its record when it likes: one step later, as a rule. The
record holds what the law on the host needs to come to the same verdict, which brings the host's rows level.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.backend.cuda.buckets import bucket
from paceline.backend.cuda.choice import choose
from paceline.backend.cuda.device_rows import DeviceRows, advance, gather
from paceline.backend.cuda.judge import judge
from paceline.backend.cuda.record import Record, begin_record
from paceline.backend.sampling import logit_rows
from paceline.backend.target import Backend
from paceline.core.nouns import NO_DRAFT, PAGE_TOKENS, UNCHOSEN, Draft, RowDraft, Scores, Taps
from paceline.core.sampling import choose_token

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.cuda.attention import DeviceKV
    from paceline.backend.cuda.decoder import CudaDecoder
    from paceline.backend.cuda.device_rows import Gathered
    from paceline.backend.pass_thread import PassThread
    from paceline.backend.rows import Rows
    from paceline.backend.target import PendingPass, ReadyPass
    from paceline.core.nouns import Batch


class LateTarget(Backend):
    """A target whose rows are on its device. See `Backend`; the verbs above need not wait for outcomes."""

    rows: DeviceRows
    decoder: CudaDecoder
    kv: DeviceKV
    late = True

    def __init__(self, decoder: CudaDecoder, rows: Rows, num_pages: int) -> None:
        assert isinstance(rows, DeviceRows)
        rows.move_to(decoder.setup.device)
        super().__init__(decoder, rows, num_pages)

    def request(self, batch: Batch, draft: Draft) -> ReadyPass:
        """Gather a pass on the device. Drafts of unknown tokens are those that the device has made."""
        rows, counts = self.rows, [len(d) for d in draft.rows]
        known = [(r.row, d.token_ids) for r, d in zip(batch.rows, draft.rows, strict=True) if not _unknown(d)]
        rows.put_drafts([row for row, _ in known], [token_ids for _, token_ids in known])
        num_tokens = batch.num_known_tokens + sum(counts)
        num_wanted = sum(1 + count for r, count in zip(batch.rows, counts, strict=True) if r.samples)
        width = -(-max(r.max_len for r in batch.rows) // PAGE_TOKENS)
        gathered = gather(
            rows.on_device,
            rows.step_rows(batch, counts, len(batch.rows)),
            bucket(num_tokens),
            bucket(num_wanted) if num_wanted else 0,
            self.kv.num_slots,
            width,
        )
        return LatePass(self, batch, draft, gathered)


def _unknown(draft: RowDraft) -> bool:
    return bool(len(draft)) and draft.token_ids[0] == UNCHOSEN


@dataclass(frozen=True, slots=True, eq=False)
class LatePass:
    """A pass that was gathered on the device; see `ReadyPass`."""

    target: LateTarget
    batch: Batch
    draft: Draft  # unknown drafts are bounds
    gathered: Gathered

    def launch(self, thread: PassThread | None = None) -> PendingPass:
        """Enqueue the pass, its judgement and its record. Waits for nothing."""
        if thread is None:
            record = self._enqueue()
            return PendingRecord(self, lambda: record)
        begun = thread.start(self._enqueue)
        return PendingRecord(self, partial(begun.result, None))

    @torch.inference_mode()
    def _enqueue(self) -> Record:
        target, g = self.target, self.gathered
        rows, d = target.rows.on_device, g.step
        record = begin_record(d.rows.device)
        hidden, taps = target.decoder.forward(g.tokens, target.kv, taps=target.taps)
        for sink in target.rows.tap_sinks:
            sink(taps, g.tokens.slots)
        drafts, margins = rows.drafts[d.rows], rows.margins[d.rows]
        if len(g.tokens.wanted):
            logits = target.decoder.logits(hidden)
            chosen, _ = choose(logits, g.specs)
            token_ids, num_tokens = judge(chosen, g.first_place, g.num_drafts, drafts, d.samples > 0)
            record.keep("logits", self._logits_for_host(logits))
        else:  # chunks of prefill alone
            chosen = d.rows.new_empty(0)
            token_ids, num_tokens = d.rows.new_zeros(len(d.rows), 1), torch.zeros_like(d.rows)
        advance(rows, g, token_ids, num_tokens)
        if taps:
            record.keep("cu_len", g.tokens.cu_len)
            record.keep("slots", g.tokens.slots)
        for name, tensor in (("chosen", chosen), ("num", g.num_drafts), ("drafts", drafts), ("margins", margins)):
            record.keep(name, tensor)
        record.end(taps)
        return record

    def _logits_for_host(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of rows whose tokens the host chooses, [sum of 1 + bounds, vocab]."""
        owners: list[int] = []
        places: list[int] = []
        for index, count in self.chosen_here():
            owners += [index] * (1 + count)
            places += range(1 + count)
        if not owners:
            return logits[:0]
        sent = torch.tensor([owners, places]).to(logits.device, non_blocking=True)
        return logits[(self.gathered.first_place[sent[0]] + sent[1]).clamp(max=len(logits) - 1)]

    def chosen_here(self) -> list[tuple[int, int]]:
        """Return (index in the batch, bound of its drafts) of sampled rows whose tokens the host chooses."""
        here = self.target.rows.chosen_here
        rows = enumerate(zip(self.batch.rows, self.draft.rows, strict=True))
        return [(index, len(d)) for index, (r, d) in rows if r.samples and here(r.row)]


class PendingRecord:
    """A pass whose record will come; see `PendingPass`."""

    def __init__(self, asked: LatePass, record: Callable[[], Record]) -> None:
        self._asked, self._record = asked, record
        self._scores: Scores | None = None
        self.pass_s = 0.0

    def wait(self) -> Scores:
        """Wait for the record; return its scores. The host's rows must know all earlier outcomes."""
        if self._scores is None:
            record = self._record()
            record.wait()
            self.pass_s = record.seconds
            self._scores = _scores(self._asked, record)
        return self._scores


def _scores(asked: LatePass, record: Record) -> Scores:
    """Return the scores of a record, with the drafts that it tells of."""
    batch, rows = asked.batch, asked.target.rows
    counts = record["num"].tolist()
    draft = Draft(
        tuple(
            _known(d, record, index, counts[index]) if _unknown(d) else d
            for index, d in enumerate(asked.draft.rows)
        )
    )
    cu_len, specs = rows.specs(batch, draft)
    chosen = record["chosen"][: cu_len[-1]]
    logits: list[NDArray[floating]] = []
    done = 0
    for index, bound in asked.chosen_here():
        block = record["logits"][done : done + 1 + len(draft.rows[index])]
        done += 1 + bound
        for at, row in zip(range(cu_len[index], cu_len[index + 1]), block, strict=True):
            chosen[at] = UNCHOSEN if specs[at].wants_logits else choose_token(row, specs[at])
            if specs[at].wants_logits:
                logits.append(row)
    starts = [rows.computed_len(r.row) for r in batch.rows]
    taps = Taps(record.taps, record["cu_len"], record["slots"], starts) if record.taps else None
    if not logits:
        return Scores(cu_len, specs, chosen, taps=taps, draft=draft)
    return Scores(cu_len, specs, chosen, np.stack(logits), logit_rows(specs), taps, draft)


def _known(bound: RowDraft, record: Record, index: int, count: int) -> RowDraft:
    """Return a row's drafts as the device has made them."""
    if not count:
        return NO_DRAFT
    margins = record["margins"][index, :count]
    confidence = None if np.isnan(margins).any() else (1 / (1 + np.exp(-margins))).tolist()
    return RowDraft(record["drafts"][index, :count].tolist(), bound.drafter, confidence)
