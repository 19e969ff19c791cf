"""The type of KV where memory decides, and keys of what is kept."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from paceline.core.errors import ConfigError
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.kv_choices import choose_kv_type
from paceline.engine.scheduler import Limits
from paceline.model.config import Heads
from paceline.model.content_key import content_key
from paceline.model.shapes import SHAPES

if TYPE_CHECKING:
    from pathlib import Path

MODEL = SHAPES["llama-3.1-8b"]  # 8.0 billion weights, 131072 bytes of KV in 16 bits a token
TINY = "shape:num_layers=2,hidden_size=64,intermediate_size=96,vocab_size=300"


def chosen(free: float, monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[str, str]:
    """Type and reason where so many GB are free before the weights are loaded."""
    monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda: int(free * 1e9))
    return choose_kv_type(EngineConfig(backend="native", **options), MODEL, 0.5)  # type: ignore[arg-type]


def test_eight_bits_where_sixteen_would_not_hold_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(17, monkeypatch) == ("i16", "")
    kind, why = chosen(16, monkeypatch)
    assert kind == "i8"
    assert why == "32768 tokens in i16 take 4096 MiB, and there are 3800 for them"
    assert chosen(16, monkeypatch, kv="auto")[0] == "i8"
    assert chosen(16, monkeypatch, kv="i16") == ("i16", "")
    assert chosen(16, monkeypatch, limits=Limits(max_len=8192)) == ("i16", "")
    assert chosen(2, monkeypatch)[0] == "i8"


def test_tokens_that_are_asked_for_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(16, monkeypatch, kv_tokens=60_000) == ("i16", "")
    assert chosen(16, monkeypatch, kv_tokens=70_000)[0] == "i8"
    assert chosen(16, monkeypatch, kv_tokens=70_000, weights="int4") == ("i16", "")


def test_heads_that_integers_do_not_take_have_floats() -> None:
    wide = replace(MODEL, global_heads=Heads(8, 512))
    config = EngineConfig(backend="native")
    assert choose_kv_type(config, wide, 0.5) == ("f16", "integers take heads of 256 numbers, not 512")
    assert choose_kv_type(replace(config, kv="i8"), wide, 0.5) == ("i8", "")


def test_the_banner_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda: 1 << 20)
    config = EngineConfig(model=TINY, backend="native", draft="off", limits=Limits(2, 512), kv_tokens=4096)
    built = build.build(config)
    (line,) = [c for c in built.choices if c.what == "kv type"]
    assert line.value == "i8"
    assert "4096 tokens in i16 take" in line.why
    assert "--kv sets it" in line.why
    assert "i8 KV" in next(c.value for c in built.choices if c.what == "backend")
    for kind in ("i16", "i8"):
        asked = build.build(replace(config, kv=kind))
        assert not [c for c in asked.choices if c.what == "kv type"]


def test_other_backends_have_one_type() -> None:
    with pytest.raises(ConfigError, match="has no --kv i8"):
        _ = EngineConfig(backend="reference", kv="i8")
    assert EngineConfig(backend="reference", kv="auto").kv_type == "f32"


def test_a_changed_file_has_another_key(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(100_000))
    os.utime(path, (1, 1))
    first = content_key(path)
    assert content_key(path) == first
    path.write_bytes(b"\1" + bytes(99_999))  # as long, and as old by its time
    os.utime(path, (1, 1))
    assert content_key(path) != first
    path.write_bytes(bytes(100_000))
    os.utime(path, (2, 2))
    assert content_key(path) != first
    path.write_bytes(b"")
    assert content_key(path) != first


def test_a_folder_and_a_shape_have_keys(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    first = content_key(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert content_key(tmp_path) != first
    assert content_key(TINY) == TINY  # type: ignore[arg-type]
