"""Scores of prompts, made from the logits of prefill.

A chunk of a scored prompt wants logits of all its tokens. They become log-probabilities at once and are dropped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.backend.sampling import pick
from paceline.core.nouns import SamplingSpec, noun
from paceline.core.request_nouns import PromptScores
from paceline.core.sampling import logprobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backend.rows import Rows
    from paceline.backend.seam import PassResult
    from paceline.core.nouns import Batch


@noun
class PromptPart:
    """Prompt tokens that one row's chunk scores."""

    index: int  # index of the row in its batch
    first: int  # place of the first of these tokens in the prompt
    token_ids: Sequence[int]
    num_top: int
    at: int  # their first place among the pass's wanted tokens


@noun
class ScoringPass:
    """Order of a pass's wanted tokens where some of them score prompts."""

    parts: Sequence[PromptPart]
    places: Sequence[int]  # wanted tokens that the law judges
    specs: Sequence[SamplingSpec]  # specs of these tokens
    all_specs: Sequence[SamplingSpec]  # [num_wanted]

    def split(self, result: PassResult) -> tuple[PassResult, Mapping[int, PromptScores]]:
        """Return what the law judges, and the scores of prompts by row of the batch."""
        judged = pick(result, self.places)
        scores = {part.index: _scores(part, result) for part in self.parts}
        return replace(judged, taps=result.taps, pass_s=result.pass_s, touched=result.touched), scores


def scoring_pass(
    rows: Rows, batch: Batch, scored: Sequence[int], cu_len: Sequence[int], specs: Sequence[SamplingSpec]
) -> ScoringPass:
    """Return the order of wanted tokens: of each row scored tokens, then judged tokens.

    scored: as `Rows.num_scored`. cu_len, specs: as `Rows.specs`.
    """
    parts: list[PromptPart] = []
    places: list[int] = []
    all_specs: list[SamplingSpec] = []
    for index, (r, count) in enumerate(zip(batch.rows, scored, strict=True)):
        if count:
            params, first = rows.params(r.row), rows.computed_len(r.row) + 1
            token_ids = rows.written_tokens(r.row, first, first + count)
            parts.append(PromptPart(index, first, token_ids, params.prompt_logprobs or 0, len(all_specs)))
            all_specs += [SamplingSpec("logits", params)] * count
        judged = specs[cu_len[index] : cu_len[index + 1]]
        places += range(len(all_specs), len(all_specs) + len(judged))
        all_specs += judged
    return ScoringPass(parts, places, specs, all_specs)


def _scores(part: PromptPart, result: PassResult) -> PromptScores:
    assert result.logits is not None
    assert result.logit_idx is not None
    at = result.logit_idx[part.at : part.at + len(part.token_ids)].tolist()
    pairs = zip(at, part.token_ids, strict=True)
    return PromptScores(part.first, [logprobs(result.logits[row], i, part.num_top) for row, i in pairs])
