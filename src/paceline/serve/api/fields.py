"""Decoding of request bodies, and what becomes of fields that other servers know.

A field that cannot change the text is accepted. A field that would change it is refused by name, unless its value
asks for nothing. `null` counts as absent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import msgspec
from msgspec import Struct, inspect

from paceline.core.errors import RequestError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_MESSAGE_CHARS = 300  # of an error message that quotes the client
MAX_IGNORED = 64  # unknown fields of one body: null ones below the top, and as many others if they are ignored
KindT = TypeVar("KindT")
_types_read: set[type] = set()
_reading_types = Lock()

# Fields that are accepted without effect -> what they are about. None can change the text.
WITHOUT_EFFECT = {
    "cache_control": "caching; prompts are cached by themselves",
    "cache_prompt": "caching; prompts are cached by themselves",
    "id_slot": "the place of a request in another server",
    "keep_alive": "how long a model stays loaded; here it stays",
    "metadata": "a note of the client",
    "prediction": "a hint for speed; drafters need none",
    "priority": "order of requests; here the order of arrival",
    "prompt_cache_key": "caching; `cache_salt` keeps caches apart",
    "prompt_cache_options": "caching; prompts are cached by themselves",
    "prompt_cache_retention": "caching; pages stay while there is room",
    "request_id": "a note of the client",
    "return_progress": "reports of another server",
    "rid": "a note of the client",
    "safety_identifier": "a note of the client",
    "session_id": "a note of the client",
    "spaces_between_special_tokens": "special tokens, which the text leaves out",
    "timings_per_token": "reports of another server; `usage.speculation` tells more",
    "trace_id": "a note of the client",
    "user": "a note of the client",
    "user_profile_id": "a note of the client",
}

# Fields that are not supported -> the values that ask for nothing, which are accepted.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (),
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "dry_allowed_length": (),
    "dry_base": (),
    "dry_multiplier": (0,),
    "dry_penalty_last_n": (),
    "dry_sequence_breakers": (),
    "dynatemp_exponent": (1,),
    "dynatemp_range": (0,),
    "early_stopping": (False,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": ([],),
    "lora_path": (),
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": (),
    "mirostat_tau": (),
    "modalities": (["text"],),
    "n_keep": (0,),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "parallel_tool_calls": (True, False),
    "penalize_nl": (False,),
    "reasoning_effort": ("none",),
    "repeat_last_n": (),
    "samplers": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "smoothing_factor": (0,),
    "store": (False,),
    "suffix": ("",),
    "tfs_z": (1,),
    "thinking_token_budget": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "truncate_prompt_tokens": (),
    "truncation": ("disabled",),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "xtc_probability": (0,),
    "xtc_threshold": (),
}

# Names that other servers give to a field -> its name here.
OTHER_NAMES = {
    "max_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "stop_sequences": "stop",
    "top_n_tokens": "top_logprobs",
}
# Options of loading a model, which some clients send with each request.
OF_LOADING = frozenset({"num_ctx", "num_gpu", "num_thread", "num_batch", "n_ctx", "use_mmap", "use_mlock", "numa"})


class Body(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request's body. Fields that stand in the tables above need not be declared."""

    without_effect: ClassVar[Mapping[str, str]] = WITHOUT_EFFECT
    neutral_values: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_VALUES

    def check(self) -> None:
        """Raise `RequestError` for what the types cannot express."""

    @classmethod
    def decode(cls, data: bytes, *, lenient: bool = False) -> tuple[Self, tuple[str, ...]]:
        """Return the body in `data` and the names that were ignored.

        Raises `RequestError` that names the field. lenient: unknown fields are ignored, not refused.
        """
        try:
            body, ignored = cls._of(data, lenient)
        except msgspec.ValidationError as error:
            raise _explained(str(error), cls) from None
        except msgspec.DecodeError as error:
            raise RequestError(f"the body is not valid JSON: {error}") from None
        except UnicodeDecodeError:
            raise RequestError("the body is not valid UTF-8") from None
        except RecursionError:
            raise RequestError("the body is nested too deeply") from None
        body.check()
        return body, ignored

    @classmethod
    def _of(cls, data: bytes, lenient: bool) -> tuple[Self, tuple[str, ...]]:
        try:
            return msgspec.json.decode(data, type=read_once(cls)), ()
        except msgspec.ValidationError as error:
            if _UNKNOWN.search(str(error)) is None:
                raise
        values = msgspec.json.decode(data)
        ignored, num_null = cls._without_unknown(values, lenient), 0
        while True:
            try:
                return msgspec.convert(values, cls), tuple(dict.fromkeys(ignored))
            except msgspec.ValidationError as error:
                if num_null < MAX_IGNORED and _drop(values, str(error), only_null=True) is not None:
                    num_null += 1
                    continue
                name = _drop(values, str(error)) if lenient and len(ignored) < MAX_IGNORED else None
                if name is None:
                    raise
                ignored.append(name)

    @classmethod
    def _without_unknown(cls, values: dict[str, Any], lenient: bool) -> list[str]:
        """Check and remove the fields that are not declared; return the unknown ones."""
        unknown: list[str] = []
        for name in [name for name in values if name not in cls.__struct_fields__]:
            if name in cls.neutral_values:
                _check_neutral(name, values[name], cls.neutral_values[name])
            elif name not in cls.without_effect and values[name] is not None:
                if not lenient or len(unknown) >= MAX_IGNORED:
                    raise _unknown_field(name, cls)
                unknown.append(name)
            del values[name]
        return unknown


def read_once(kind: type[KindT]) -> type[KindT]:
    """Return a type that msgspec has read, by one thread at a time.

    Bodies are decoded in threads. Where two of them are the first to decode to a type, msgspec 0.22 may end the
    process by a segmentation fault when garbage is collected.
    """
    if kind not in _types_read:
        with _reading_types:
            msgspec.json.Decoder(kind)
        _types_read.add(kind)
    return kind


def _check_neutral(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value is None or any(_same(value, known) for known in allowed):
        return
    values = ", ".join(msgspec.json.encode(v).decode() for v in allowed)
    hint = f"; leave it out or send {values}" if allowed else "; leave it out"
    raise RequestError(f"{name} is not supported yet{hint}", name)


def _same(value: Any, known: Any) -> bool:
    """Return True for equal values; 0 may be written as 0.0, not as false."""
    return isinstance(value, bool) == isinstance(known, bool) and bool(value == known)


# Unknown fields --------------------------------------------------------------------------------------

_AT = re.compile(r"(?: - at `\$\.(\w+)[^`]*|required field `(\w+))`$")
_PATH = re.compile(r" - at `\$([^`]*)`$")
_STEP = re.compile(r"\.(\w+)|\[([^\]]*)\]")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


def _unknown_field(name: str, kind: type[Body]) -> RequestError:
    if len(name) >= 64:
        return RequestError(f"the body contains an unknown field of {len(name)} characters")
    message = f"Object contains unknown field `{name}`"
    if name in OTHER_NAMES and OTHER_NAMES[name] in kind.__struct_fields__:
        return RequestError(f"{message}; its name here is {OTHER_NAMES[name]!r}", name)
    if name in OF_LOADING:
        return RequestError(f"{message}; the server is told at its start how to load the model", name)
    return RequestError(message + suggest(name, kind.__struct_fields__), name)


def _explained(message: str, kind: type[Body]) -> RequestError:
    at, unknown = _AT.search(message), _UNKNOWN.search(message)
    if unknown and not _PATH.search(message):
        return _unknown_field(unknown[1], kind)
    text = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
    place = _PATH.search(message) if message.startswith("Invalid enum value") else None
    if place and (allowed := _choices(kind, place[1])):
        text += f"; allowed: {', '.join(allowed)}"
    return RequestError(text, (at[1] or at[2])[:64] if at else None)


def _choices(kind: type[Body], path: str) -> list[str]:
    """Return the values allowed at one of msgspec's paths; none if it lists none."""
    found = list(_single([inspect.type_info(kind)]))
    for name, _ in _STEP.findall(path):
        found = list(_single(inner for each in found for inner in _types_in(each, name)))
    values = [repr(value) for each in found if isinstance(each, inspect.LiteralType) for value in each.values]
    return values + ["an object"] * any(isinstance(each, inspect.StructType) for each in found)


def _single(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for each in types:
        if isinstance(each, inspect.UnionType):
            yield from _single(each.types)
        else:
            yield each


def _types_in(kind: inspect.Type, name: str) -> list[inspect.Type]:
    """Return, as a list, the type of a struct's field or of a container's items."""
    if isinstance(kind, inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == name]
    if isinstance(kind, inspect.DictType):
        return [kind.value_type]
    return [kind.item_type] if isinstance(kind, inspect.ListType) else []


def _drop(values: Any, message: str, *, only_null: bool = False) -> str | None:
    """Remove an unknown field below the top and return its name. only_null: only if null."""
    unknown, path = _UNKNOWN.search(message), _PATH.search(message)
    if unknown is None or path is None:
        return None
    found = [values]
    for name, _ in _STEP.findall(path[1]):
        found = [inner for each in found for inner in _inner(each, name)]
    holders = [each for each in found if isinstance(each, dict) and unknown[1] in each]
    if only_null:
        holders = [each for each in holders if each[unknown[1]] is None]
    for holder in holders:
        del holder[unknown[1]]
    return unknown[1] if holders else None


def _inner(value: Any, name: str) -> list[Any]:
    """Return a field as a list, or without a name every item."""
    if isinstance(value, dict):
        return [value[name]] if name in value else [] if name else list(value.values())
    return value if isinstance(value, list) and not name else []
