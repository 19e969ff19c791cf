"""Parameters of a request: `SamplingParams` and `Speculation`, checked when made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from paceline.core.errors import RequestError

MAX_TOKENS = 1 << 20  # an answer longer than this is a mistake
MAX_CHOICES = 64  # largest `n`
MAX_TOP_LOGPROBS = 20  # as OpenAI
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_BIASED = 1024
MAX_TOKEN_ID = (1 << 31) - 1
MAX_SEED = (1 << 63) - 1
MAX_ASKED_K = 64  # drafts of a step; above what any drafter makes
MAX_GRAMMAR_CHARS = 256 << 10  # most characters of a schema, regular expression or grammar
MAX_GRAMMAR_CHOICES = 1024
GRAMMAR_KINDS = ("json_schema", "regex", "lark")
MAX_SHOWN_CHARS = 64  # most characters of a refused value in its error message
MAX_SHOWN_BITS = 200  # most bits of a refused integer that is shown: 60 digits

BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 10.0),
    "top_k": (0, MAX_TOKEN_ID),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "min_tokens": (0, MAX_TOKENS),
    "max_tokens": (0, MAX_TOKENS),
    "logprobs": (0, MAX_TOP_LOGPROBS),
    "prompt_logprobs": (0, MAX_TOP_LOGPROBS),
    "seed": (0, MAX_SEED),
    "n": (1, MAX_CHOICES),
}
_INTEGERS = frozenset({"top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "seed", "n"})


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that an answer must fit, by masks. Raises `RequestError`."""

    kind: str  # json_schema, regex, or lark: the dialect of llguidance
    text: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise RequestError(
                f"a grammar is one of {', '.join(GRAMMAR_KINDS)}, not {shown(self.kind)}", "grammar"
            )
        if not isinstance(self.text, str) or not 0 < len(self.text) <= MAX_GRAMMAR_CHARS:
            raise RequestError(f"a grammar must be a text of 1 to {MAX_GRAMMAR_CHARS} characters", "grammar")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Return the grammar of JSON that fits a schema, a mapping or its text."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the schema is not JSON: {error}", "grammar") from None
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of texts that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """Return the grammar of one of a few texts."""
        fits = not isinstance(choices, str) and 0 < len(choices) <= MAX_GRAMMAR_CHOICES
        if not fits or not all(isinstance(c, str) and c for c in choices):
            raise RequestError(f"a choice takes 1 to {MAX_GRAMMAR_CHOICES} texts, none empty", "grammar")
        return cls("lark", "start: " + " | ".join(json.dumps(c) for c in choices))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return a context-free grammar in the Lark dialect of llguidance."""
        return cls("lark", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request. Every number is bounded; a bad one raises `RequestError`.

    The target's logits pass, in this order, through repetition, frequency and presence penalty,
    `logit_bias`, the ban of stop tokens before `min_tokens`, `temperature`, then the filters `top_k`,
    `top_p` and `min_p`. At temperature 0 the largest logit wins, the lowest id on ties.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None  # None: drawn, and returned in the response
    stop: tuple[str, ...] = ()  # may be given as one string, a list or None
    stop_token_ids: tuple[int, ...] = ()  # may be given as a list or None
    include_stop: bool = False  # keep the stop string at the end of the text
    min_tokens: int = 0
    max_tokens: int = 256  # 0: the answer is empty, and the request ends with its prefill
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives beside the chosen token; None: no log-probabilities
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, but for the first
    n: int = 1
    grammar: Grammar | None = None  # that the answer must fit

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            _check_number(name, getattr(self, name), low, high)
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _mapping("logit_bias", self.logit_bias))
        _check_switch("include_stop", self.include_stop)
        _check_switch("ignore_eos", self.ignore_eos)
        self._check_stops()
        self._check_bias()
        self._check_grammar()
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0; 1 keeps every token", "top_p")
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) exceeds max_tokens ({self.max_tokens})", "min_tokens"
            )

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS or len(self.stop_token_ids) > MAX_STOPS:
            raise RequestError(f"at most {MAX_STOPS} stops are allowed", "stop")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                raise RequestError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")
        for token_id in self.stop_token_ids:
            _check_token_id("stop_token_ids", token_id)

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_BIASED:
            raise RequestError(f"logit_bias may name at most {MAX_BIASED} tokens", "logit_bias")
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id)
            _check_number("logit_bias", bias, -100.0, 100.0)

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        if not isinstance(self.grammar, Grammar):
            raise RequestError(f"grammar must be a Grammar, not {type(self.grammar).__name__}", "grammar")
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos and a grammar exclude each other: a grammar says where to end", "ignore_eos"
            )

    @property
    def greedy(self) -> bool:
        """True if the largest logit wins, without noise."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """True if logits depend on the tokens so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def filtered(self) -> bool:
        """True if a filter may remove tokens. Greedy needs none: filters keep the largest logit."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


def _stops(given: object) -> tuple[str, ...]:
    """Return stop strings as a tuple; one string becomes one stop. Raises `RequestError`."""
    return (given,) if isinstance(given, str) else _tuple("stop", given)


def _tuple(name: str, given: object) -> tuple[Any, ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise RequestError(f"{name} must be a list, not {type(given).__name__}", name)
    return tuple(given)


def _mapping(name: str, given: object) -> Mapping[Any, Any]:
    if given is None:
        return MappingProxyType({})
    if not isinstance(given, Mapping):
        raise RequestError(f"{name} must map token ids to numbers, not be {type(given).__name__}", name)
    return given


def _check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be True or False, not {shown(value)}", name)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if value is None and name in ("logprobs", "prompt_logprobs", "seed"):
        return
    kind = int if name in _INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        wanted = "an integer" if name in _INTEGERS else "a number"
        raise RequestError(f"{name} must be {wanted}, not {type(value).__name__}", name)
    if not low <= value <= high:  # true of NaN, too; an int may be too long for a float
        raise RequestError(f"{name} must be between {_plain(low)} and {_plain(high)}, not {shown(value)}", name)


def shown(value: object) -> str:
    """Return a user's value as text for an error message, shortened if it is long."""
    if isinstance(value, int) and value.bit_length() > MAX_SHOWN_BITS:  # Python refuses to print very long ones
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_SHOWN_CHARS else value[:MAX_SHOWN_CHARS] + "...")
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def _plain(bound: float) -> str:
    """Return a bound as text: 1048576 not as 1.04858e+06, and 2.0 as 2."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _check_token_id(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKEN_ID:
        raise RequestError(f"{name}: {shown(value)} is not a token id", name)


def check_token_ids(
    prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int, told: Sequence[int] = ()
) -> None:
    """Raise `RequestError` if a request names tokens that a vocabulary does not have."""
    for what, name, text in (("prompt", "prompt", prompt_ids), ("answer so far (answer_ids)", "answer_ids", told)):
        if not all(0 <= token_id < vocab_size for token_id in text):
            raise RequestError(f"the {what} has token ids outside the vocabulary of {vocab_size}", name)
    for name, token_ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if any(token_id >= vocab_size for token_id in token_ids):
            raise RequestError(f"{name} names tokens outside the vocabulary of {vocab_size}", name)


AUTO, OFF = "auto", "off"
TYPICAL = "typical"  # the law that changes texts
MAX_NAME_CHARS = 64
MIN_TPOT_MS, MAX_TPOT_MS = 1e-3, 1e6
MAX_CHANGE_BUDGET = 0.5  # a text with more changed tokens is hardly the target's


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation wanted by a request, within the engine's limits.

    Changes speed, never text, but for `law` and `budget`.
    """

    draft: str = AUTO  # the engine's own choice; `off`; or the name of one of its drafters
    k: int | None = None  # upper bound of the drafts in a step
    tpot_ms: float | None = None  # target time per output token, for a controller that knows costs
    details: bool = False  # notes of every pass come with the outcomes
    law: str | None = None  # name of the law by which drafts are kept; None: the engine's
    budget: float | None = None  # of the law `typical`: largest share of changed tokens; None: the engine's

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft", _draft(self.draft))
        if self.law is not None and (not isinstance(self.law, str) or not 0 < len(self.law) <= MAX_NAME_CHARS):
            raise RequestError("speculation.law must be the name of a law", "speculation")
        self._check("budget", self.budget, (int, float), (0.0, MAX_CHANGE_BUDGET))
        self._check("k", self.k, int, (0, MAX_ASKED_K))
        if not isinstance(self.details, bool):
            raise RequestError(
                f"speculation.details must be true or false, not {shown(self.details)}", "speculation"
            )
        self._check("tpot_ms", self.tpot_ms, (int, float), (MIN_TPOT_MS, MAX_TPOT_MS))

    def _check(self, name: str, value: Any, kind: Any, bounds: tuple[float, float]) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, kind) or not bounds[0] <= value <= bounds[1]:
            wanted = f"{'an integer' if kind is int else 'a number'} between {bounds[0]:g} and {bounds[1]:g}"
            raise RequestError(f"speculation.{name} must be {wanted}, not {shown(value)}", "speculation")

    @property
    def steers(self) -> bool:
        """True if it sets a drafter, K or a time per token."""
        return self.draft != AUTO or self.k is not None or self.tpot_ms is not None

    @property
    def keeps_text(self) -> bool:
        """False if it asks for another text than it would get without drafts."""
        return self.law != TYPICAL

    @property
    def most(self) -> int:
        """Upper bound of the drafts in a step; read by `kernels.draft_bounds`."""
        return 0 if self.draft == OFF else MAX_ASKED_K if self.k is None else self.k


def _draft(given: object) -> str:
    """Return the name of a drafter, AUTO for None. Raises `RequestError`."""
    name = AUTO if given is None else given
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise RequestError("speculation.draft must be auto, off or the name of a drafter", "speculation")
    return name
