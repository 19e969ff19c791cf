"""A real drafter with an oracle's drafts, which are kept as often as asked.

Weights by shape are random, so nothing that a drafter guesses would be kept. The text does not depend on drafts: a
recording of plain decoding is the perfect draft. As `draft/lookup/oracle.py`, but in place of another drafter's
guesses, on the device where that drafts there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.core import noise
from paceline.core.nouns import UNCHOSEN
from paceline.draft.lookup.oracle import OracleConfig, OracleDrafter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.cuda.device_rows import DeviceRows
    from paceline.core.nouns import Batch, Draft, Plan, Request, Scores, Verdict
    from paceline.draft.drafter import Drafter
    from paceline.engine.engine import Engine


def chances_of(acceptance: Sequence[float]) -> list[float]:
    """Return the chance of a draft at each depth if those before it are kept."""
    before = [1.0, *acceptance]
    return [kept / alive for alive, kept in zip(before, acceptance, strict=False)]


def spoil(engine: Engine, answers: Sequence[NDArray[int64]], acceptance: Sequence[float]) -> None:
    """Replace what an engine's drafters guess. answers: plain texts of requests 0, 1, ..."""
    for name, drafter in engine.drafting.drafters.items():
        engine.drafting.drafters[name] = SpoiltDrafter(drafter, engine, answers, acceptance)


class SpoiltDrafter:
    """Runs a drafter and replaces its guesses; see `Drafter`."""

    def __init__(
        self, inner: Drafter, engine: Engine, answers: Sequence[NDArray[int64]], acceptance: Sequence[float]
    ) -> None:
        self.name, self.needs = inner.name, inner.needs
        self._inner, self._answers = inner, answers
        chances = chances_of(acceptance)
        rows, vocab_size = engine.target.rows, engine.target.config.vocab_size
        rates = "+".join(f"{chance:.6f}" for chance in chances)
        config = OracleConfig(k=inner.needs.max_k, file="recorded", rates=rates)
        self._on_host = OracleDrafter(config, rows.view, vocab_size, answers)
        late = inner.needs.late
        self._on_device = _DeviceRecording(rows, answers, config.chances, vocab_size) if late else None  # type: ignore[arg-type]

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Begin a row, and its recording."""
        self._inner.admit(row, request, valid_lens)
        self._on_host.admit(row, request, valid_lens)
        if self._on_device is not None:
            self._on_device.admit(row, request)

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Have the drafter draft, and put the recording in its place."""
        draft = self._inner.propose(batch, plan)
        depths = {r.row: len(d) for r, d in zip(batch.rows, draft.rows, strict=True) if len(d)}
        if self._on_device is None:
            return self._on_host.propose(batch, plan)
        assert all(token_id == UNCHOSEN for d in draft.rows for token_id in d.token_ids)
        self._on_device.write(depths)
        return draft

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Trim."""
        self._inner.commit(batch, scores, verdict)

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Return what the drafter holds."""
        return self._inner.valid_lens(row)

    def release(self, row: int) -> None:
        """Forget the row."""
        self._inner.release(row)
        self._on_host.release(row)

    def forget(self) -> None:
        """Drop what the drafter learnt."""
        self._inner.forget()

    def report(self) -> Mapping[str, Any]:
        """Tell what was chosen."""
        return self._inner.report()


class _DeviceRecording:
    """Recorded answers on the device, by row."""

    def __init__(
        self, rows: DeviceRows, answers: Sequence[NDArray[int64]], chances: NDArray[Any], vocab_size: int
    ) -> None:
        device, length = rows.device, max(map(len, answers)) + len(chances)
        self._rows, self._vocab_size, self._length = rows, vocab_size, length
        self._recorded = answers
        self._answers = torch.zeros(rows.num_rows, length, dtype=torch.int64, device=device)
        self._uniform = torch.ones(rows.num_rows, length, dtype=torch.float64, device=device)
        self._start = torch.zeros(rows.num_rows, dtype=torch.int64, device=device)
        self._chances = torch.from_numpy(chances).to(device)

    def admit(self, row: int, request: Request) -> None:
        """Write a request's answer into a row."""
        answer = self._recorded[int(request.request_id) % len(self._recorded)]
        key = noise.key(request.seed, request.choice, noise.Lane.DRAFT, position=0)
        uniform = noise.leading(key, np.arange(len(answer))).astype(np.float64) * 2.0**-32
        self._answers[row, : len(answer)].copy_(torch.from_numpy(answer), non_blocking=True)
        self._uniform[row, : len(answer)].copy_(torch.from_numpy(uniform), non_blocking=True)
        self._start[row] = len(request.prompt_ids)

    def write(self, depths: Mapping[int, int]) -> None:
        """Write the drafts of rows. depths: row -> how many."""
        if not depths:
            return
        state = self._rows.on_device
        sent = torch.tensor([list(depths), list(depths.values())]).to(state.length.device, non_blocking=True)
        rows, deepest = sent[0], max(depths.values())
        ahead = torch.arange(deepest, device=rows.device)
        place = (state.length[rows] - self._start[rows])[:, None] + ahead
        place = place.clamp(0, self._length - 1)
        right = self._answers[rows[:, None], place]
        kept = self._uniform[rows[:, None], place] < self._chances[:deepest]
        state.drafts[rows, :deepest] = torch.where(kept, right, (right + 1) % self._vocab_size)
        state.margins[rows, :deepest] = torch.nan
        state.num_drafts.index_copy_(0, rows, sent[1])
