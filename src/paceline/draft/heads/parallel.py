"""P-EAGLE: heads that make all drafts in one pass.

Mask tokens with a learnt feature stand for the tokens that are not known yet. So a guess does not depend on the
guess before it. A head with a relay sends it a message, after the pass and for a part of its cost.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from paceline.backend.sampling import pick, with_hint
from paceline.backend.seam import FedBack, HintRule, RelayRequest
from paceline.draft.autoregressive import draft_steps, extend
from paceline.draft.heads.head_drafter import HeadDrafter
from paceline.draft.hints import MAX_MATCH, MIN_MATCH, RecycledGains

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backend.seam import HeadRunner, PassRequest, PassResult, RowView, Span, StepLimit
    from paceline.core.nouns import SamplingSpec
    from paceline.draft.autoregressive import Chain
    from paceline.draft.drafter import Target
    from paceline.draft.heads.asked_head import AskedHead
    from paceline.model.heads.checkpoint import Head


BLIND_GAIN = 8.0  # of hints to guesses that do not know those before them
_REACH = MAX_MATCH  # tokens of a path per token matched: as many as are drafted
_LEAST_SHARE = 0.05  # a path goes on while so few of its places do


class ParallelHeadDrafter(HeadDrafter):
    """Drafts all tokens in one pass."""

    hint_gain = 0.0  # none by guesses

    def __init__(self, asked: AskedHead, target: Target, head: Head, runner: HeadRunner) -> None:
        super().__init__(asked, target, head, runner)
        assert head.config.mask_token_id is not None, "the config of a parallel head names it"
        self._mask = head.config.mask_token_id

    @classmethod
    def late_rule(cls) -> HintRule:
        """Return the rule of hints that do not know the guesses."""
        if cls.hint_gain:
            return super().late_rule()
        return HintRule(MIN_MATCH, MAX_MATCH, BLIND_GAIN, reach=_REACH, least_share=_LEAST_SHARE)

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        result, first = self._run(chains, starts)
        wanting = list(chains.values())
        while wanting:
            picked = pick(result, [first[c.row] + len(c.token_ids) for c in wanting])
            extend(self._rows, wanting, partial(_already_run, picked), dense=self._dense)
            wanting = [c for c in wanting if c.goes_on]

    def _run(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> tuple[PassResult, dict[int, int]]:
        """Run the pass. Returns its result for all guesses, and where each row's begin.

        Under penalties a choice waits for the guesses before it, as they are counted.
        """
        specs: list[SamplingSpec] = []
        first: dict[int, int] = {}
        for row in starts:
            first[row] = len(specs)
            masks = [self._mask] * (chains[row].depth - 1)
            for spec in hinted(self._rows.row_specs(row, masks), self._rows, row, BLIND_GAIN):
                waits = self._dense or spec.params.penalised
                specs.append(spec._replace(kind="logits" if waits else spec.kind, margin=True))
        known = [(row, start, self._rows.known_len(row) - start) for row, start in starts.items()]
        request = self._masked(known, [chains[row].depth for row in starts], specs)
        return self._head.launch(request).wait(), first

    def _masked(
        self,
        known: Sequence[tuple[int, int, int]],
        depths: Sequence[int],
        specs: Sequence[SamplingSpec],
        steps: Sequence[StepLimit] = (),
    ) -> PassRequest:
        """Return a pass over known tokens (row, start, count) and masks for further guesses."""
        spans: list[Span] = [
            (*part, [self._mask] * (depth - 1)) for part, depth in zip(known, depths, strict=True)
        ]
        return self._request(spans, depths, specs, steps)


def hinted(specs: Sequence[SamplingSpec], rows: RowView, row: int, gain: float) -> list[SamplingSpec]:
    """Return specs of a row's next drafts with hints, where none knows those before it.

    The tokens that followed the text's end before are hints to all of them, place by place, as far as known.
    """
    tail = rows.tokens(row)[-MAX_MATCH:]
    found, _, match = rows.text(row).propose(tail, len(specs), MIN_MATCH, MAX_MATCH, _REACH, _LEAST_SHARE)
    some = [with_hint(c, token_id, gain * math.log(match)) for c, token_id in zip(specs, found, strict=False)]
    return [*some, *specs[len(some) :]]


def _already_run(result: PassResult, _: Sequence[SamplingSpec]) -> PassResult:
    """Stand for a pass that has been run."""
    return result


class RelayHeadDrafter(ParallelHeadDrafter):
    """Drafts all tokens in one pass, with a message to each from those before it."""

    hint_gain = 6.0
    recycled_gains = RecycledGains(pair=6.0, far_pair=2.0, token=3.0)

    def __init__(self, asked: AskedHead, target: Target, head: Head, runner: HeadRunner) -> None:
        super().__init__(asked, target, head, runner)
        self._hidden: object = None  # of the places of all guesses, `PassResult.hidden`
        self._first: dict[int, int] = {}  # row -> its first place there
        self._messages: object = None  # to the newest guesses, `PassResult.hidden` of the relay
        self._message_rows: dict[int, int] = {}  # row -> its row there

    def _draft(self, chains: Mapping[int, Chain], starts: Mapping[int, int]) -> None:
        all_steps = self._run_steps if self._head.capabilities.multi_step else None
        draft_steps(self._rows, chains, starts, partial(self._run_next, chains), all_steps, dense=self._dense)

    def _run_steps(
        self, spans: Sequence[Span], specs: Sequence[SamplingSpec], steps: Sequence[StepLimit]
    ) -> PassResult:
        depths = [limit.depth for limit in steps]
        return self._head.launch(self._masked([span[:3] for span in spans], depths, specs, steps)).wait()

    def _run_next(
        self, chains: Mapping[int, Chain], spans: Sequence[Span], specs: Sequence[SamplingSpec]
    ) -> PassResult:
        """Choose the next guess of each row, see `RunSpans`."""
        number = len(chains[spans[0][0]].token_ids)  # of each one's guesses so far: they go on together
        if number == 0:
            return self._run_first(spans, specs, [chains[row].depth for row, *_ in spans])
        rows = [row for row, *_ in spans]
        newest = [guesses[-1] for *_, guesses in spans]
        messages = FedBack(self._messages, [self._message_rows[row] for row in rows])
        first = [self._first[row] for row in rows]
        places = [place + number for place in first]
        result = self._head.relay(RelayRequest(self._hidden, first, places, specs, (newest, messages)))
        self._keep_messages(rows, result)
        return result

    def _run_first(
        self, spans: Sequence[Span], specs: Sequence[SamplingSpec], depths: Sequence[int]
    ) -> PassResult:
        """Run the pass, keep its output at every place, and choose each row's first guess."""
        for_all = [spec for spec, depth in zip(specs, depths, strict=True) for _ in range(depth)]
        result = self._head.launch(self._masked([span[:3] for span in spans], depths, for_all)).wait()
        rows = [row for row, *_ in spans]
        first = [sum(depths[:index]) for index in range(len(depths))]
        self._hidden = result.hidden
        self._first = dict(zip(rows, first, strict=True))
        self._keep_messages(rows, self._head.relay(RelayRequest(result.hidden, first, first, ())))
        return pick(result, first)

    def _keep_messages(self, rows: Sequence[int], result: PassResult) -> None:
        self._messages = result.hidden
        self._message_rows = {row: index for index, row in enumerate(rows)}
