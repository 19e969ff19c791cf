"""Token ids and scores of prompts in responses, as vLLM's clients expect them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.request_nouns import Outcome, TokenLogprobs
    from paceline.model.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON lacks; as OpenAI

Json = dict[str, Any]


def token_name(tokenizer: Tokenizer, token_id: int, as_ids: bool) -> str:
    """Return a token's text, or its id where the client asked for ids."""
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)


def prompt_entries(tokenizer: Tokenizer, scored: Sequence[TokenLogprobs]) -> list[Json | None]:
    """Return vLLM's `prompt_logprobs`: null for the first token, then id -> entry for each."""
    return [None, *(_entry(tokenizer, each) for each in scored)]


def _entry(tokenizer: Tokenizer, scored: TokenLogprobs) -> Json:
    ranks = {token_id: rank for rank, token_id in enumerate(scored.top_ids, 1)}
    pairs = {scored.token_id: scored.logprob} | dict(zip(scored.top_ids, scored.top_logprobs, strict=True))
    return {
        str(token_id): {
            "logprob": max(logprob, MIN_LOGPROB),
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, logprob in pairs.items()
    }


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """Fields beyond OpenAI's that a request asked for."""

    tokenizer: Tokenizer
    prompts: Sequence[Sequence[int]]  # [num_prompts] token ids
    n: int  # answers to each
    ids: bool  # the response carries token ids of prompts and answers
    scores: bool  # the response carries scores of prompts
    at_top: bool  # fields of the prompt stand beside `choices`, as in chats

    def whole(self, body: Json, answers: Sequence[Any]) -> None:
        """Add the fields to a whole response. answers: `PartialAnswer` of each choice."""
        for index, (choice, answer) in enumerate(zip(body["choices"], answers, strict=True)):
            holder = body if self.at_top else choice
            if self.ids:
                choice["token_ids"] = answer.token_ids
                holder["prompt_token_ids"] = list(self.prompts[index // self.n])
            if self.scores and answer.prompt_logprobs is not None:
                holder["prompt_logprobs"] = prompt_entries(self.tokenizer, answer.prompt_logprobs)

    def chunk(self, body: Json, outcome: Outcome, first: bool) -> None:
        """Add token ids to a stream's chunk, whose first also has the prompt's."""
        (choice,) = body["choices"]
        if self.ids:
            choice["token_ids"] = list(outcome.token_ids)
        if self.ids and first:
            holder = body if self.at_top else choice
            holder["prompt_token_ids"] = list(self.prompts[choice["index"] // self.n])
