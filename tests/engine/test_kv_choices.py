"""The type of KV where memory decides, and keys of what is kept."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from paceline.core.errors import BadModelFile, ConfigError
from paceline.engine.assembly import build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.kv_choices import choose_kv_type, kv_share
from paceline.engine.request_table import Limits
from paceline.model.config import Heads
from paceline.model.content_key import content_key
from paceline.model.files.source_files import SourceFile, file_state
from paceline.model.shapes import SHAPES
from paceline.model.weights import load_model
from tests.model.helpers import write_gguf
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from pathlib import Path

MODEL = SHAPES["llama-3.1-8b"]  # 8.0 billion weights, 131072 bytes of KV in 16 bits a token
TINY = "shape:num_layers=2,hidden_size=64,intermediate_size=96,vocab_size=300"


def chosen(free: float, monkeypatch: pytest.MonkeyPatch, **options: object) -> tuple[str, str]:
    """Type and reason where so many GB are free before the weights are loaded."""
    monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda: int(free * 1e9))
    config = EngineConfig(backend="native", **options)  # type: ignore[arg-type]
    return choose_kv_type(config, MODEL, kv_share(config))


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
    assert chosen(16, monkeypatch, kv_tokens=15_000, sharers=4) == ("i16", "")
    assert chosen(16, monkeypatch, kv_tokens=16_000, sharers=4)[0] == "i8", "each has a quarter"


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


def test_a_later_engine_has_the_first_ones_kv_though_less_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [30_000_000]
    monkeypatch.setattr("paceline.backend.registry.available_bytes", lambda: free[0])
    config = EngineConfig(model=TINY, backend="native", draft="off", limits=Limits(8, 4096), sharers=2)
    first = build.build(config)
    free[0] = 3_000_000
    alone, equal = build.build(config), build.build(first.settled.pin(config)) if first.settled else None
    assert equal is not None
    assert alone.max_len < first.max_len == equal.max_len
    assert alone.promise != first.promise == equal.promise
    assert equal.settled == first.settled


def test_other_backends_have_one_type() -> None:
    with pytest.raises(ConfigError, match="has no --kv i8"):
        _ = EngineConfig(backend="reference", kv="i8")
    assert EngineConfig(backend="reference", kv="auto").kv_type == "f32"


def test_the_key_of_a_model_is_of_every_byte_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(100_000))
    file = SourceFile(path, file_state(path))
    first = content_key([file])
    path.write_bytes(bytes(70_001) + b"\1" + bytes(29_998))  # as long
    assert content_key([file]) != first
    path.write_bytes(bytes(100_000))
    os.utime(path, (2, 2))
    assert content_key([file]) == first, "times tell nothing"
    assert (
        len({content_key([file]), content_key([file, file]), content_key([file, "text"]), content_key(["text"])})
        == 4
    )


def test_pages_on_disk_are_for_the_files_that_were_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    config = tiny_config()
    path = write_gguf(tmp_path / "model.gguf", config, tiny_weights(config))
    model = load_model(path)
    assert build._content(model) == build._content(load_model(path))
    path.write_bytes(path.read_bytes())
    with pytest.raises(BadModelFile, match="start again"):
        build._content(model)
    path.unlink()
    with pytest.raises(BadModelFile, match="cannot be read"):
        build._content(model)
