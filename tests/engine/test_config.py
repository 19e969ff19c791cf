"""What an engine cannot be made from is a `ConfigError`, whatever its type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.engine.assembly import build
from paceline.engine.assembly import config as config_module
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits

TINY = "shape:num_layers=2,hidden_size=64,intermediate_size=96,vocab_size=300"


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


@pytest.mark.parametrize(
    ("quota", "options", "threads"),
    [
        (4.0, {}, 4),
        (1.5, {}, 2),
        (4.0, {"sharers": 4}, 1),  # replicas of one container
        (4.0, {"sharers": 16}, 1),
        (4.0, {"backend": "native", "tensor_parallel": 2}, 2),
        (4.0, {"threads": 8}, 8),
        (8.0, {}, None),  # as many as cores
        (65536.0, {}, None),
    ],
)
def test_threads_are_as_many_as_the_control_group_has_time_for(
    quota: float, options: dict[str, Any], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "core_quota", lambda: quota)
    monkeypatch.setattr(config_module, "usable_cores", lambda: frozenset(range(8)))
    config = EngineConfig(**options)
    assert config.within_quota().threads == threads
    assert config.num_threads == (threads or 8)


def test_an_engine_in_a_small_container_has_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "core_quota", lambda: 1.0)
    monkeypatch.setattr(config_module, "usable_cores", lambda: frozenset({0, 1}))
    built = build.build(EngineConfig(model=TINY, backend="native", draft="off", limits=Limits(2, 64)))
    (line,) = [choice for choice in built.choices if choice.what == "threads"]
    assert (line.value, line.why) == ("1", "what its control group has time for")
