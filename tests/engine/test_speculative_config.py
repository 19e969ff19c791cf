"""vLLM's speculative config becomes --draft and --profile, and each key has its line."""

from __future__ import annotations

import argparse
import json
import logging
from typing import Any

import pytest

from paceline import cli
from paceline.core.errors import ConfigError
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.engine.assembly.config import DEFAULT_DRAFT
from paceline.engine.assembly.speculative_config import BY_AUTO, KNOWN, LEFT_OUT, OPTIONS, SWITCHES, translate
from paceline.serve.asking import config_of


@pytest.mark.parametrize(
    ("config", "draft"),
    [
        ({"method": "ngram", "num_speculative_tokens": 5}, "ngram:k=5"),
        ({"model": "ngram", "num_speculative_tokens": 5}, "ngram:k=5"),
        ({"model": "[ngram]", "prompt_lookup_max": 4}, "ngram:max=4,min=4"),
        ({"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 5}, "ngram:min=2,max=5"),
        ({"method": "ngram", "prompt_lookup_min": 12}, "ngram:min=12,max=12"),
        ({"method": "suffix"}, "suffix"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 1.5}, "suffix:reach=1.5"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 0.2}, "suffix:share=0.2"),
        ({"method": "eagle3", "model": "some/head", "num_speculative_tokens": 3}, "eagle3:model=some/head,k=3"),
        ({"method": "eagle3", "model": "h", "parallel_drafting": True}, "peagle:model=h"),
        ({"method": "dspark", "model": "h", "num_speculative_tokens": 5}, "block:model=h,k=5"),
        ({"model": "z/Qwen3-4B-DFlash-b16"}, "block:model=z/Qwen3-4B-DFlash-b16"),
        ({"method": "eagle3", "model": "h", "parallel_drafting": False}, "eagle3:model=h"),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, "eagle3:model=yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
        ({"model": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B"}, "eagle:model=yuhuili/EAGLE-LLaMA3.1-Instruct-8B"),
        ({"model": "facebook/opt-125m", "num_speculative_tokens": 5}, "draft-model:model=facebook/opt-125m,k=5"),
        (
            {"method": "draft_model", "model": "m", "use_heterogeneous_vocab": True},
            "draft-model:model=m,vocabulary=tokens",
        ),
        ({"method": "ngram", "draft_tensor_parallel_size": 1, "revision": None}, "ngram"),
        ({"method": "ngram", "disable_by_batch_size": 4}, "auto:ngram"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "ngram"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 16, 3], [17, 64, 0]]}, "auto:ngram"),
        ({"method": "ngram", "num_speculative_tokens_per_batch_size": {"1-16": 3, "64-128": 0}}, "auto:ngram"),
        ({"method": "suffix", "enable_adaptive_verification": True}, "auto:suffix"),
    ],
)
def test_a_config_is_a_draft_option(config: dict[str, Any], draft: str) -> None:
    for given in (config, json.dumps(config)):
        found = translate(given)
        assert found.draft == draft
        assert found.profile is None
        set_keys = [key for key, value in config.items() if value is not None]
        assert [line.partition(":")[0] for line in found.lines[:-1]] == set_keys
        assert found.lines[-1] == f"that is --draft {draft}"


def test_every_key_has_a_fate() -> None:
    assert set(KNOWN) == {"method", *OPTIONS, *BY_AUTO, *SWITCHES, *LEFT_OUT}
    for key, why in LEFT_OUT.items():
        assert translate({"method": "ngram", key: 1}).lines[1] == f"{key}: left out: {why}"
    assert translate({"method": "ngram", "model": "x"}).lines[1] == "model: left out: ngram has no model"


def test_a_file_of_the_proposal_is_a_profile() -> None:
    found = translate({"method": "eagle3", "num_speculative_tokens": 5, "dynamic_config_path": "table.json"})
    assert (found.draft, found.profile) == ("auto:eagle3:k=5", "table.json")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"method": ', "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "must be a JSON object"),
        ({}, "there is no method None here"),
        ({"method": "medusa"}, "there is no method 'medusa' here; known"),
        ({"method": "eagel3"}, "did you mean 'eagle3'"),
        ({"method": ["ngram"]}, "there is no method"),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"method": "ngram", "tensor_parallel_size": 2}, "did you mean 'draft_tensor_parallel_size'"),
        ({"method": "ngram", "num_speculative_tokens": 40}, "between 1 and 16"),
        ({"method": "ngram", "num_speculative_tokens": True}, "must be a number"),
        ({"method": "ngram", "num_speculative_tokens": 4.0}, "must be a number"),
        ({"method": "eagle3", "model": "a,k=9"}, "a name without commas"),
        ({"method": "eagle3", "model": 3}, "a name without commas"),
        ({"method": "ngram", "parallel_drafting": True}, "goes with method eagle3"),
        ({"method": "eagle3", "use_heterogeneous_vocab": True}, "goes with method draft_model"),
        ({"method": "eagle3", "parallel_drafting": 1}, "must be a bool"),
        ({"method": "ngram", "dynamic_config_path": 3}, "must be a str"),
        ({"method": "eagle"}, "wants model=FOLDER"),
    ],
)
def test_what_cannot_be_had_is_said(config: str | dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        translate(config)


def parsed(*argv: str) -> argparse.Namespace:
    parser = cli._Parser(prog="paceline", allow_abbrev=False)
    add_engine_arguments(parser)
    return cli.parse(parser, list(argv), {})


CONFIG = '{"method": "ngram", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1}'


def test_the_command_line_takes_it_and_prints_what_came_of_each_key(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = engine_config(parsed("--speculative-config", CONFIG))
    assert config.draft == "ngram:k=3"
    assert [record.getMessage().removeprefix("--speculative-config: ") for record in caplog.records] == [
        "method: drafter ngram",
        "num_speculative_tokens: k=3",
        f"draft_tensor_parallel_size: left out: {LEFT_OUT['draft_tensor_parallel_size']}",
        "that is --draft ngram:k=3",
    ]


def test_two_options_that_say_the_same_are_refused() -> None:
    for draft in ("off", "auto", "ngram"):
        with pytest.raises(ConfigError, match="both name the drafter"):
            engine_config(parsed("--speculative-config", CONFIG, "--draft", draft))
    table = '{"method": "ngram", "dynamic_config_path": "table.json"}'
    assert engine_config(parsed("--speculative-config", table)).profile == "table.json"
    with pytest.raises(ConfigError, match="give one of them"):
        engine_config(parsed("--speculative-config", table, "--profile", "other.json"))
    auto = '{"method": "ngram", "disable_by_batch_size": 8}'
    assert engine_config(parsed("--speculative-config", auto, "--profile", "own.json")).profile == "own.json"


def test_without_either_the_default_holds() -> None:
    assert engine_config(parsed()).draft == DEFAULT_DRAFT


def test_python_takes_it_too() -> None:
    config = config_of("default", {"speculative_config": {"method": "suffix"}, "num_rows": 4})
    assert (config.draft, config.limits.num_rows) == ("suffix", 4)
    with pytest.raises(ConfigError, match="both name the drafter"):
        config_of("default", {"speculative_config": {"method": "suffix"}, "draft": "off"})
