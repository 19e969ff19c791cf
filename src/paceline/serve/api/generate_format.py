"""Body and response of POST /generate, in SGLang's form: token ids in and out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from msgspec import Meta, Struct

from paceline.core.errors import RequestError
from paceline.core.params import MAX_BIASED, Grammar, SamplingParams
from paceline.engine.wire import Salt, TokenId
from paceline.serve.api.continuation import check_scores, check_told, text_so_far
from paceline.serve.api.fields import NEUTRAL_VALUES, WITHOUT_EFFECT, Body
from paceline.serve.api.openai_format import ResponseMeta, changed_usage
from paceline.serve.api.parse import Job
from paceline.serve.api.schema import (
    MAX_ANSWERS,
    MAX_PROMPTS,
    SpeculationBody,
    Stop,
    sampling_of,
    seed_asked,
    seeds_of_prompts,
)
from paceline.serve.api.tool_calls.scan import MarkerText
from paceline.serve.prompts import requests_of, seed_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.request_nouns import Outcome, Request, TokenLogprobs
    from paceline.model.tokenizer import Tokenizer
    from paceline.serve.api.openai_format import Json, PartialAnswer
    from paceline.serve.api.parse import Serving
    from paceline.serve.prompts import Prompts

PREFIX = "gen-"  # of the ids of roll-outs' requests
USUAL_TOKENS = 128  # of an answer, as in SGLang
RollOutId = Annotated[str, Meta(min_length=1, max_length=96)]
OneOrMany = Annotated[list[TokenId | list[TokenId]], Meta(max_length=1 << 24)]  # ids, or lists of them; not mixed


class RollOutSampling(Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling parameters by SGLang's names."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_BIASED)] | None = None
    sampling_seed: int | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=64)] | None = None
    no_stop_trim: bool | None = None  # keep the stop string in the text
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # accepted without effect: ids are what counts
    n: int | None = None
    json_schema: str | None = None
    regex: str | None = None

    def params(self, room: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """Return the sampling parameters. room: for the answer, in tokens. Raises `RequestError`."""
        max_tokens = min(USUAL_TOKENS, room) if self.max_new_tokens is None else self.max_new_tokens
        return sampling_of(
            self,
            seed=seed_asked(self.sampling_seed),
            include_stop=self.no_stop_trim,
            min_tokens=self.min_new_tokens,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=self._grammar(),
        )

    def _grammar(self) -> Grammar | None:
        if self.json_schema is not None:
            return Grammar.json_schema(self.json_schema)
        return None if self.regex is None else Grammar.regex(self.regex)


class GenerateBody(Body, frozen=True, kw_only=True):
    """The body of POST /generate."""

    without_effect: ClassVar[Mapping[str, str]] = {k: v for k, v in WITHOUT_EFFECT.items() if k != "rid"}
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_VALUES | {"image_data": ([],)}

    text: str | Annotated[list[str], Meta(max_length=MAX_PROMPTS)] | None = None
    input_ids: OneOrMany | None = None
    sampling_params: RollOutSampling | None = None
    rid: RollOutId | Annotated[list[RollOutId], Meta(max_length=MAX_PROMPTS)] | None = None
    answer_ids: OneOrMany | None = None  # ours: tokens of the answer so far, which goes on behind them
    return_logprob: bool | None = None
    logprob_start_len: int | None = None  # -1: scores of the answer only; 0: of the prompt, too
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    cache_salt: Salt | None = None
    speculation: SpeculationBody | None = None

    def check(self) -> None:
        """Raise `RequestError` for what the types cannot express."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("send either text or input_ids", "input_ids")
        if self.logprob_start_len not in (None, -1, 0):
            raise RequestError("logprob_start_len is -1 (the answer) or 0 (the prompt, too)", "logprob_start_len")
        if self.logprob_start_len == 0 and self.stream:
            raise RequestError("logprob_start_len and stream exclude each other", "logprob_start_len")

    @property
    def is_batch(self) -> bool:
        """True if the response is a list."""
        return isinstance(self.text, list) or isinstance((self.input_ids or [0])[0], list)

    def prompts(self, prompts: Prompts) -> list[tuple[int, ...]]:
        """Return the prompts' token ids. Raises `RequestError`."""
        texts = [self.text] if isinstance(self.text, str) else self.text
        if texts is not None:
            return [prompts.of_text(text) for text in texts]
        return [prompts.of_ids(ids) for ids in _each("input_ids", self.input_ids)]

    def told(self, count: int, n: int) -> list[tuple[int, ...]]:
        """Return the answers so far, one for each prompt; empty ones if there are none."""
        told = [tuple(ids) for ids in _each("answer_ids", self.answer_ids)] or [()] * count
        if len(told) != count:
            raise RequestError(f"{count} prompts need as many answer_ids, not {len(told)}", "answer_ids")
        if n > 1 and any(told):
            raise RequestError("an answer goes on by itself: send n = 1, and its own seed", "answer_ids")
        return told

    def names(self, count: int) -> list[str]:
        """Return the names by which answers are aborted, one for each prompt."""
        given = [self.rid] if isinstance(self.rid, str) else self.rid
        if given is not None and (len(given) != count or len(set(given)) != count):
            raise RequestError(f"{count} prompts need as many different rids", "rid")
        return given or [secrets.token_hex(16) for _ in range(count)]


def named(request_id: str) -> str | None:
    """Return the rid of a roll-out's request; None for a request of another route."""
    return request_id.removeprefix(PREFIX).rsplit("-", 2)[0] if request_id.startswith(PREFIX) else None


def _each(name: str, given: list[int | list[int]] | None) -> list[list[int]]:
    """Return one or several lists of ids as several. Raises `RequestError` for a mixture."""
    lists = [ids for ids in given or () if isinstance(ids, list)]
    single = [token_id for token_id in given or () if isinstance(token_id, int)]
    if (lists and single) or len(lists) > MAX_PROMPTS:
        raise RequestError(f"{name} are token ids, or at most {MAX_PROMPTS} lists of them", name)
    return lists or ([single] if single else [])


@dataclass(frozen=True, slots=True, eq=False)
class GenerateFormat:
    """Form of roll-outs."""

    tokenizer: Tokenizer
    requests: Sequence[Request]
    names: Sequence[str]  # [num_answers] rid of each
    scored: bool  # answers carry log-probabilities
    texts: bool  # log-probabilities name texts of tokens
    skips: bool  # the text leaves special tokens out
    prefix = PREFIX
    kind = "generate"
    chunk_kind = "generate"

    def choice(self, index: int, answer: PartialAnswer) -> Json:
        """Return what an answer has gained so far, without told tokens."""
        ids = list(answer.token_ids)
        text = answer.text if self.skips else self._with_special(index, answer)
        return {"text": text, "output_ids": ids, "meta_info": self._about(index, answer)}

    def _with_special(self, index: int, answer: PartialAnswer) -> str:
        """Return an answer's text with special tokens; the last only with `include_stop`."""
        request, ids, last = self.requests[index], answer.token_ids, answer.last
        by_token = last is not None and last.finish_reason == "stop" and not isinstance(last.stop_reason, str)
        if by_token and not request.params.include_stop:
            ids = ids[:-1]
        tokenizer, told = self.tokenizer, request.told
        special = {i: tokenizer.token_text(i) for i in (*told, *ids) if tokenizer.is_special(i)}
        text = MarkerText(tokenizer, special, request.within)
        if told:
            text.push(text_so_far(request, tokenizer, told), told)
        return text.push(answer.text, ids)

    def delta(self, index: int, answer: PartialAnswer, outcome: Outcome) -> Json | None:
        """Return None: chunks carry answers as far as they have come, see `RollOutResponder`."""

    def _about(self, index: int, answer: PartialAnswer) -> Json:
        request, figures = self.requests[index], answer.last and answer.last.figures
        num_tokens = len(request.told) + answer.num_tokens
        about: Json = {
            "id": self.names[index],
            "finish_reason": self._ending(answer, num_tokens),
            "prompt_tokens": len(request.prompt_ids),
            "completion_tokens": answer.num_tokens,
            "answer_tokens": num_tokens,
            "cached_tokens": figures.cached_tokens if figures else 0,
            "seed": request.seed,
            "choice": request.choice,
        }
        if figures and figures.weights:
            about["weight_version"] = figures.weights[-1][1]
            about["weight_versions"] = [{"start": start, "version": version} for start, version in figures.weights]
        if figures:
            about["spec_accept_length"] = round(figures.acceptance_length, 4)
            about |= changed_usage([figures]) | ({"resumed_inexact": True} if figures.inexact else {})
        if self.scored:
            scores = answer.logprobs or []
            about["output_token_logprobs"] = [self._entry(entry) for entry in scores]
            if request.params.logprobs:
                about["output_top_logprobs"] = self._tops(scores)
        if answer.prompt_logprobs is not None:
            first = [None, request.prompt_ids[0], None]
            about["input_token_logprobs"] = [first, *(self._entry(entry) for entry in answer.prompt_logprobs)]
            if request.params.prompt_logprobs:
                about["input_top_logprobs"] = [None, *self._tops(answer.prompt_logprobs)]
        return about

    @staticmethod
    def _ending(answer: PartialAnswer, num_tokens: int) -> Json | None:
        if answer.last is None or answer.last.finish_reason is None:
            return None
        kind, matched = answer.last.finish_reason, answer.last.stop_reason
        more: dict[str, Json] = {
            "stop": {"matched": answer.token_ids[-1] if matched is None and answer.token_ids else matched},
            "length": {"length": num_tokens},
            "abort": {"message": "aborted; send these output_ids as answer_ids to go on"},
        }
        return {"type": kind} | more.get(kind, {})

    def _entry(self, entry: TokenLogprobs) -> list[Any]:
        return self._triple(entry.token_id, entry.logprob)

    def _tops(self, scores: Sequence[TokenLogprobs]) -> list[list[Any]]:
        pairs = (zip(entry.top_ids, entry.top_logprobs, strict=True) for entry in scores)
        return [[self._triple(*pair) for pair in top] for top in pairs]

    def _triple(self, token_id: int, logprob: float) -> list[Any]:
        return [logprob, token_id, self.tokenizer.token_text(token_id) if self.texts else None]


def generate_job(data: bytes, serving: Serving, arrival_s: float) -> Job:
    """Return the job of a body of POST /generate. Raises `RequestError`."""
    body, ignored = GenerateBody.decode(data, lenient=serving.lenient)
    prompts, asked = serving.prompts, body.sampling_params or RollOutSampling()
    all_ids = body.prompts(prompts)
    scored = bool(body.return_logprob)
    logprobs = (body.top_logprobs_num or 0) if scored else None
    first = logprobs if body.logprob_start_len == 0 else None
    params = [asked.params(prompts.room(ids), logprobs, first) for ids in all_ids]
    if not all_ids or len(all_ids) * params[0].n > MAX_ANSWERS:
        raise RequestError(f"one request may ask for 1 to {MAX_ANSWERS} answers (prompts times n)", "n")
    for ids, own in zip(all_ids, params, strict=True):
        prompts.check_room(ids, own.max_tokens)
    n, seed, name = params[0].n, seed_of(params[0]), secrets.token_hex(12)
    told, names = body.told(len(all_ids), n), body.names(len(all_ids))
    check_scores(told, scores=first is not None)
    seeds, salt = seeds_of_prompts(seed, all_ids), body.cache_salt or ""
    speculation = body.speculation.checked() if body.speculation else None
    unique = [f"{PREFIX}{one}-{secrets.token_hex(6)}" for one in names]  # a rid may be sent again
    requests = [
        replace(request, told=told[i])
        for i, (ids, own) in enumerate(zip(all_ids, params, strict=True))
        for request in requests_of(unique[i], prompts.to_continue(ids), own, seeds[i], salt, speculation)
    ]
    for request in requests:
        if request.told:
            check_told(request, prompts.vocab_size or prompts.tokenizer.vocab_size)
    form = GenerateFormat(
        tokenizer=prompts.tokenizer,
        requests=requests,
        names=[one for one in names for _ in range(n)],
        scored=scored,
        texts=bool(body.return_text_in_logprobs),
        skips=asked.skip_special_tokens is not False,
    )
    return Job(
        meta=ResponseMeta(f"{PREFIX}{name}", int(time.time()), serving.names[0], seed),
        format=form,
        requests=requests,
        n=n,
        stream=bool(body.stream),
        arrival_s=arrival_s,
        ignored=ignored,
        grammar_field="sampling_params" if params[0].grammar else "",
        law=serving.law_of(requests[0]),
        repeats=serving.repeats(requests[0]),
        many=body.is_batch or n > 1,
    )
