"""vLLM's `--speculative-config`, translated to `--draft` and `--profile`, with a line about each of its keys.

The keys are those of vLLM 0.32, and some of older versions. A key becomes an option, or is left out for a reason
that is said, or is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from paceline.core.errors import ConfigError, suggest
from paceline.core.flags import json_of
from paceline.draft.registry import AUTO, config_class, parse_drafters

log = logging.getLogger(__name__)

FLAG = "--speculative-config"
METHODS = {  # vLLM's method -> drafter
    "ngram": "ngram",
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "suffix",
    "draft_model": "draft-model",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "dflash": "block",
    "dspark": "block",
    **dict.fromkeys(("mtp", "mimo_mtp", "glm4_moe_mtp"), "mtp"),
}
SWITCHES = {  # key -> method -> the drafter that the method becomes if the key is set
    "parallel_drafting": {"eagle3": "peagle"},
    "use_heterogeneous_vocab": {"draft_model": "draft-model"},
}
IN_NAMES = ("eagle3", "eagle", "dflash", "dspark")  # methods that a model's name may contain
NUMBER = (int, float)
OPTIONS: dict[str, tuple[str, tuple[type, ...]]] = {  # key -> option of the drafter, types of its value
    "model": ("model", (str,)),
    "num_speculative_tokens": ("k", (int,)),
    "prompt_lookup_min": ("min", (int,)),
    "prompt_lookup_max": ("max", (int,)),
    "suffix_decoding_max_spec_factor": ("reach", NUMBER),
    "suffix_decoding_min_token_prob": ("share", NUMBER),
}
CHOOSES = "chooses K for every row and step from what steps cost"
TABLE_FILE = "dynamic_config_path"
BY_AUTO = {  # key -> what `auto` does in its place
    "num_speculative_tokens_per_batch_size": f"{CHOOSES}; the table is not kept, --profile takes times of steps",
    TABLE_FILE: CHOOSES,
    "disable_by_batch_size": f"{CHOOSES}, 0 where drafts do not pay",
    "enable_adaptive_verification": f"{CHOOSES}, and does not verify doubtful drafts",
}
VOCABULARY = "use_heterogeneous_vocab"
ONE_LAW = "under --law coupled every token is the target's own choice, whatever was drafted"
AS_TARGET = "a drafter is loaded and run as its target is"
NOT_HERE = "it is about kernels and buffers that are not here"
LEFT_OUT = {  # key -> why it is left out
    "draft_tensor_parallel_size": "--draft-tensor-parallel says it",
    "rejection_sample_method": f"{ONE_LAW}; --law block is block verification",
    "draft_sample_method": f"{ONE_LAW}; drafts share its noise",
    "acceptance_method": ONE_LAW,
    "synthetic_acceptance_rates": "--draft oracle has drafts kept at given rates",
    "synthetic_acceptance_length": "--draft oracle has drafts kept at given rates",
    "max_model_len": "draft-model:max_len=N says it",
    "disable_logprobs": "log-probabilities are those of the text, with drafts or without",
    "disable_log_stats": "statistics are always kept",
    "suffix_decoding_max_tree_depth": "a path is as long as its match and k allow",
    "suffix_decoding_max_cached_requests": "past answers are shared by salt, as suffix:shared=TOKENS says",
    **dict.fromkeys(("quantization", "revision", "code_revision", "draft_load_config"), AS_TARGET),
    **dict.fromkeys(("kv_cache_dtype", "enforce_eager", "moe_backend", "attention_backend"), AS_TARGET),
    **dict.fromkeys(("disable_padded_drafter_batch", "disable_eagle_block_drop", "dspark_draft_topk"), NOT_HERE),
    **dict.fromkeys(("use_local_argmax_reduction", "index_share_for_mtp_iteration"), NOT_HERE),
}
KNOWN = ("method", *OPTIONS, *BY_AUTO, *SWITCHES, *LEFT_OUT)


class Translation(NamedTuple):
    """A speculative config in this engine's options."""

    draft: str  # value of --draft
    profile: str | None  # value of --profile
    lines: tuple[str, ...]  # for the log: one line about each key, and one about the whole


def options_of(given: str | Mapping[str, Any], draft: str | None, profile: str | None) -> tuple[str, str | None]:
    """Return --draft and --profile for a speculative config; log a line about each key.

    draft, profile: the flags given beside it. Raises `ConfigError`, also if the config gives one of them, too.
    """
    if draft is not None:
        raise ConfigError(f"{FLAG} and --draft both name the drafter; give one of them")
    found = translate(given)
    if profile and found.profile:
        raise ConfigError(f"{FLAG} has {TABLE_FILE}, and --profile is given too; give one of them")
    for line in found.lines:
        log.warning("%s: %s", FLAG, line)
    return found.draft, profile or found.profile


def translate(given: str | Mapping[str, Any]) -> Translation:
    """Return what a config asks for, JSON or a mapping. Raises `ConfigError`."""
    config = _parsed(given)
    drafter, fates = _drafter(config)
    auto = any(config.get(key) for key in BY_AUTO)
    bounds = f", for lookups: others draft as deep as {AUTO} finds worth it" if auto else ""
    known, options = {f.name for f in fields(config_class(drafter))}, dict[str, Any]()
    for key, value in config.items():
        if key in OPTIONS:
            option = OPTIONS[key][0]
            if option in known:
                options[option] = _checked(key, value)
            fate = f"{option}={value}{bounds if option == 'k' else ''}"
            fates[key] = fate if option in known else f"left out: {drafter} has no {option}"
        elif key in BY_AUTO:
            fates[key] = f"--draft {AUTO} {BY_AUTO[key]}" if value else "off"
        elif key in LEFT_OUT:
            fates[key] = f"left out: {LEFT_OUT[key]}"
    for one, other in (("min", "max"), ("max", "min")):
        if one in options:  # as in vLLM: where only one is given, the other is the same
            options.setdefault(other, options[one])
    if config.get(VOCABULARY):
        options["vocabulary"] = "tokens"
    listed = ",".join(f"{option}={value}" for option, value in options.items())
    draft = (f"{AUTO}:" if auto else "") + (f"{drafter}:{listed}" if listed else drafter)
    parse_drafters(draft)  # raises if a value is out of bounds
    lines = (*(f"{key}: {fates[key]}" for key in config), f"that is --draft {draft}")
    return Translation(draft, config.get(TABLE_FILE), lines)


def _parsed(given: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are set. Raises `ConfigError`, also for unknown keys."""
    values = json_of(FLAG, given, KNOWN, 'a JSON object, such as {"method": "ngram"}')
    config = {key: value for key, value in values.items() if value is not None}
    for key, kind in (*((key, bool) for key in SWITCHES), (TABLE_FILE, str)):
        if not isinstance(config.get(key, kind()), kind):
            raise ConfigError(f"{FLAG}: {key} must be a {kind.__name__}, not {config[key]!r}")
    return config


def _drafter(config: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the drafter, and a line about each key that names it."""
    method, model = config.get("method"), str(config.get("model", ""))
    if method is None and model:
        by_name = next((known for known in IN_NAMES if known in model.lower()), "draft_model")
        method = model if model in METHODS else by_name
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"{FLAG}: there is no method {method!r} here{suggest(str(method), METHODS)}")
    drafter, fates = METHODS[method], dict.fromkeys(SWITCHES, "off")
    for key, drafters in SWITCHES.items():
        if config.get(key):
            if method not in drafters:
                raise ConfigError(f"{FLAG}: {key} goes with method {', '.join(drafters)} here, not {method}")
            drafter = drafters[method]
            fates[key] = f"drafter {drafter}"
    return drafter, fates | {"method": f"drafter {drafter}"}


def _checked(key: str, value: object) -> object:
    """Return a value that can stand in a drafter's spec. Raises `ConfigError`."""
    kinds = OPTIONS[key][1]
    if isinstance(value, bool) or not isinstance(value, kinds) or (isinstance(value, str) and "," in value):
        wanted = "a name without commas" if str in kinds else f"a number ({kinds[0].__name__})"
        raise ConfigError(f"{FLAG}: {key} must be {wanted}, not {value!r}")
    return value
