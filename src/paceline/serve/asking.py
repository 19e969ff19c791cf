"""Base of `LLM` and `AsyncLLM`: prompts, parameters and options."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, RequestError, suggest
from paceline.core.params import SamplingParams, Speculation
from paceline.core.sampling_defaults import default_params
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.kv_event_options import events_config
from paceline.engine.assembly.speculative_config import options_of
from paceline.engine.request_table import Limits
from paceline.serve.api.continuation import check_scores, check_told, told_answers, told_text
from paceline.serve.prompts import Prompts, TokenPrompt, requests_of, seed_of
from paceline.serve.results import OpenAnswer

if TYPE_CHECKING:
    from paceline.core.request_nouns import Request
    from paceline.engine.assembly.build import Progress

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Prompt = str | Sequence[int] | TokenPrompt


class Asking:
    """Conversion of a caller's prompts and parameters to requests of one model."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    @property
    def prompts(self) -> Prompts:
        """Conversion of prompts to token ids."""
        raise NotImplementedError

    @cached_property
    def default_params(self) -> SamplingParams:
        """Parameters of calls that give none: the model's own, else usual ones.

        `SamplingParams()` itself is neutral: temperature 1, no filter.
        """
        return default_params(self.prompts.sampling)

    def _prompt(self, prompt: Any) -> TokenPrompt:
        prompts = self.prompts
        if isinstance(prompt, TokenPrompt):
            return prompt
        if isinstance(prompt, str):
            return prompts.to_continue(prompts.of_text(prompt))
        if _are_ids(prompt) and all(i >= 0 for i in prompt):
            return prompts.to_continue(prompts.of_ids(prompt))
        raise RequestError(f"a prompt must be a text or token ids, not {type(prompt).__name__}", "prompt")

    def _or_default(self, params: object) -> SamplingParams:
        """Return parameters, the default ones for None. Raises `RequestError` for any other type."""
        if params is None:
            return self.default_params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}")
        return params

    def _fitting(self, prompt_ids: Sequence[int], params: object) -> SamplingParams:
        """Return parameters, the default ones with the max_tokens that fit. Raises `RequestError`."""
        asked = self._or_default(params)
        room = self.prompts.room(prompt_ids)
        return replace(asked, max_tokens=room) if params is None and asked.max_tokens > room else asked

    def _one_for_each(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if not isinstance(params, list | tuple):
            return [self._or_default(params)] * count
        if len(params) != count:
            raise RequestError(f"{count} prompts need one SamplingParams or {count}, not {len(params)}")
        return [self._or_default(each) for each in params]

    def _requests(
        self,
        prompt: TokenPrompt,
        params: SamplingParams,
        told: Sequence[tuple[int, ...]],
        speculation: Speculation | None = None,
    ) -> list[Request]:
        """Return one prompt's requests; the default max_tokens shrinks to what fits.

        told: tokens of each answer that the caller has. Raises `RequestError`.
        """
        check_scores(told, scores=params.prompt_logprobs is not None)
        room = self.prompts.room(prompt.ids)
        if params is self.default_params and params.max_tokens > room:
            params = replace(params, max_tokens=room)
        self.prompts.check_room(prompt.ids, params.max_tokens)  # now, before any prompt is answered
        name = f"llm-{next(self._numbers)}"
        requests = requests_of(name, prompt, params, seed_of(params), speculation=speculation)
        requests = [replace(request, told=ids) for request, ids in zip(requests, told, strict=True)]
        for request in requests:
            if request.told:
                check_told(request, self.prompts.vocab_size or self.prompts.tokenizer.vocab_size)
        return requests

    def _open_answer(self, request: Request) -> OpenAnswer:
        """Return an answer that begins with what its caller has.

        Raises `RequestError` if that ends it already.
        """
        prompts = self.prompts
        text = told_text(request, prompts.tokenizer, prompts.vocab_size) if request.told else ""
        return OpenAnswer(request.told, text)


def as_list(prompts: Prompt | Iterable[Prompt]) -> Sequence[Prompt]:
    """Return one or several prompts as a list. Raises `RequestError` for any other type."""
    if isinstance(prompts, str | TokenPrompt):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts must be one or several, not {type(prompts).__name__}", "prompt")
    items = list(prompts)  # first, since looking at an iterator's items would use it up
    return [items] if items and all(isinstance(p, int) for p in items) else items  # type: ignore[list-item, return-value]


def as_told(answer_ids: Any, num_answers: int) -> list[tuple[int, ...]]:
    """Return the tokens that a caller has of each answer. Raises `RequestError`."""
    given = () if answer_ids is None else answer_ids
    if not (_are_ids(given) or (isinstance(given, Sequence) and all(map(_are_ids, given)))):
        raise RequestError("answer_ids must be token ids, or a list of them for each answer", "answer_ids")
    return told_answers(given, num_answers)


def _are_ids(given: object) -> bool:
    """Return whether all are integers; True and False are none."""
    return isinstance(given, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in given)


def as_messages(prompt: Any) -> Sequence[Message] | None:
    """Return the argument if it is a conversation, else None."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return prompt if is_list and prompt and all(isinstance(m, Mapping) for m in prompt) else None


def config_of(model: str, options: Mapping[str, Any], others: Iterable[str] = ()) -> EngineConfig:
    """Return an engine's config from options of `EngineConfig` and `Limits` by name. Raises `ConfigError`.

    `speculative_config` is vLLM's, a mapping or JSON, in place of `draft`; so is `kv_events_config`. others: names
    that the caller takes beside them, for the error about an unknown one.
    """
    options = dict(options)
    if (given := options.pop("speculative_config", None)) is not None:
        draft, profile = options_of(given, options.get("draft"), options.get("profile"))
        options |= {"draft": draft, "profile": profile}
    if (given := options.pop("kv_events_config", None)) is not None:
        options["kv_events"] = events_config(given)
    own = {f.name for f in fields(EngineConfig)} - {"model", "limits"}
    limits = {f.name for f in fields(Limits)}
    for name in options:
        if name not in own | limits:
            raise ConfigError(f"unknown option {name!r}{suggest(name, own | limits | set(others))}")
    config = EngineConfig(model=model, **{k: v for k, v in options.items() if k in own})
    given = {k: v for k, v in options.items() if k in limits}
    return replace(config, limits=replace(config.usual_limits, **given))


@contextmanager
def visible(progress: Progress | None) -> Iterator[Progress | None]:
    """Yield the progress callback, or on a terminal a bar if there is none."""
    if progress is not None or not sys.stderr.isatty():
        yield progress
        return
    from paceline.serve.terminal.banner import LoadingBar

    with LoadingBar() as bar:
        yield bar
