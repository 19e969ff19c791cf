"""What an engine cannot be made from is a `ConfigError`, whatever its type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threads": "2"}, "--threads must be an integer, not str"),
        ({"threads": True}, "--threads must be an integer, not bool"),
        ({"kv_tokens": 64.0}, "--kv-tokens must be an integer, not float"),
        ({"limits": Limits(max_len="9")}, "--max-len must be an integer, not str"),  # type: ignore[arg-type]
        ({"limits": Limits(num_rows=None)}, "--max-rows must be an integer, not None"),  # type: ignore[arg-type]
        ({"limits": 4}, "--limits must be a Limits, not int"),
        ({"draft": None}, "--draft must be a string, not None"),
        ({"draft": Path("off")}, "--draft must be a string"),
        ({"draft_device": 1}, "--draft-device must be a string, not int"),
        ({"law": ["coupled"]}, "--law must be a string, not list"),
        ({"weights": 8}, "--weights must be a string, not int"),
        ({"model": None}, "--model must be a string, not None"),
        ({"prefix_cache": "no"}, "--prefix-cache must be a bool, not str"),
        ({"threads": 0}, "--threads must be between 1 and 1024, not 0"),
    ],
)
def test_options_of_a_wrong_type_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**options)


def test_files_may_be_paths() -> None:
    config = EngineConfig(model=Path("folder"), trace=Path("trace.jsonl"))  # type: ignore[arg-type]
    assert (config.model, config.trace) == ("folder", "trace.jsonl")  # strings, as other processes are sent them
