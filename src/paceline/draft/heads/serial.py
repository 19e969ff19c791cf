"""EAGLE-1 and EAGLE-3: heads that draft token by token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.backend.seam import FedBack
from paceline.draft.autoregressive import draft_steps
from paceline.draft.heads.head_drafter import HeadDrafter
from paceline.draft.hints import USUAL_GAINS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backend.seam import HeadRunner, PassRequest, PassResult, Span, StepLimit
    from paceline.core.nouns import SamplingSpec
    from paceline.draft.autoregressive import Chain
    from paceline.draft.drafter import Target
    from paceline.draft.heads.asked_head import AskedHead
    from paceline.model.heads.checkpoint import Head


class SerialHeadDrafter(HeadDrafter):
    """Token-by-token drafter: an entry's output stands for the next entry's feature."""

    hint_gain = 1.5
    recycled_gains = USUAL_GAINS

    def __init__(self, asked: AskedHead, target: Target, head: Head, runner: HeadRunner) -> None:
        super().__init__(asked, target, head, runner)
        self._hidden: object = None  # of the newest guesses, `PassResult.hidden`
        self._hidden_rows: dict[int, int] = {}  # row -> its row of `_hidden`
        self._wants_second = False  # some chain of this step hands out second choices
        self.needs = replace(self.needs, branches=0 if self._dense else asked.branches)

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        self._wants_second = any(chain.branches for chain in chains.values())
        all_steps = self._run_steps if self._head.capabilities.multi_step else None
        draft_steps(self._rows, chains, starts, self._run, all_steps, dense=self._dense)

    def _run_steps(
        self, spans: Sequence[Span], specs: Sequence[SamplingSpec], steps: Sequence[StepLimit]
    ) -> PassResult:
        ahead = max(limit.depth for limit in steps) - 1
        return self._launch(self._request(spans, [1] * len(spans), specs, steps, ahead=ahead))

    def _run(self, spans: Sequence[Span], specs: Sequence[SamplingSpec]) -> PassResult:
        guessing = [row for row, _, _, guesses in spans if guesses]
        fed_back = FedBack(self._hidden, [self._hidden_rows[row] for row in guessing]) if guessing else None
        result = self._launch(self._request(spans, [1] * len(spans), specs, fed_back=fed_back))
        self._hidden = result.hidden
        self._hidden_rows = {row: index for index, (row, *_) in enumerate(spans)}
        return result

    def _launch(self, request: PassRequest) -> PassResult:
        return self._head.launch(replace(request, wants_second=True) if self._wants_second else request).wait()
