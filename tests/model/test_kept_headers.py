"""Headers of GGUF files: parsed once, and again when the file has changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import BadModelFile
from paceline.model import content_key
from paceline.model.files import gguf_model, kept_headers
from paceline.model.files.gguf_file import open_gguf
from paceline.model.weights import LoadedModel, load_model, load_template, load_tokenizer
from tests.model.helpers import byte_level_metadata, write_gguf
from tests.tiny import tiny_config, tiny_weights

TEXT = "the engine there"
TEMPLATE = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(content_key, "SETTLED_NS", -1)
    monkeypatch.setattr(kept_headers, "LONG", 100)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files whose headers were parsed, in turn."""
    found: list[Path] = []

    def opened(path: Path) -> Any:
        found.append(path)
        return open_gguf(path)

    monkeypatch.setattr(kept_headers, "open_gguf", opened)
    monkeypatch.setattr(gguf_model, "open_gguf", opened)
    return found


def write(path: Path, **extra: Any) -> Path:
    config = tiny_config()
    return write_gguf(path, config, tiny_weights(config), extra=byte_level_metadata() | TEMPLATE | extra)


def start(path: Path) -> LoadedModel:
    """Open a model as a new process does."""
    kept_headers.forget_files()
    return load_model(path)


def told(model: LoadedModel) -> tuple[Any, ...]:
    template, tokenizer = load_template(model), load_tokenizer(model)
    assert template is not None
    numbers = {name: model.weights[name].tobytes() for name in model.weights}
    sampling = model.text.sampling()
    return model.config, numbers, template.source, model.fingerprint, tokenizer.token_bytes(300), sampling


def test_a_later_start_parses_no_header_and_finds_the_same(tmp_path: Path, parsed: list[Path]) -> None:
    path = write(tmp_path / "m.gguf")
    first = told(start(path))
    assert parsed == [path]
    assert told(start(path)) == first
    assert parsed == [path]
    (kept,) = (tmp_path / "cache" / "headers").iterdir()
    assert b"tokenizer.ggml.model" in kept.read_bytes()
    assert b"tokenizer.ggml.tokens" not in kept.read_bytes(), "no list of the vocabulary"


def test_a_later_start_finds_the_end_tokens_of_harmony(tmp_path: Path, parsed: list[Path]) -> None:
    """A kept header lacks the list that they stand in."""
    vocabulary, texts = byte_level_metadata(), ["<|channel|>", "<|return|>", "<|call|>"]  # beside its <|end|>
    tokens = vocabulary["tokenizer.ggml.tokens"] + texts
    types = vocabulary["tokenizer.ggml.token_type"] + [3] * len(texts)
    extra = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    extra["tokenizer.ggml.eos_token_id"] = tokens.index("<|end|>")
    config = tiny_config(vocab_size=len(tokens))
    path = write_gguf(tmp_path / "m.gguf", config, tiny_weights(config), extra=vocabulary | extra)
    first, later = start(path).config.eos_ids, start(path).config.eos_ids
    assert parsed == [path]
    assert first == later == (tokens.index("<|return|>"), tokens.index("<|call|>"))


def test_a_later_start_finds_the_ends_of_turns(tmp_path: Path) -> None:
    """One end is the template's, which no key names; the others are those of a list."""
    keys = {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eos_token_ids": [1, 7]}
    keys["tokenizer.chat_template"] = "{{ messages[0].content }}<|end|>"  # the vocabulary's last, 319
    path = write(tmp_path / "m.gguf", **keys)
    assert start(path).config.eos_ids == start(path).config.eos_ids == (1, 7, 319)


def test_a_text_needs_no_header_either_while_the_tokenizer_is_kept(tmp_path: Path, parsed: list[Path]) -> None:
    path = write(tmp_path / "m.gguf")
    ids = load_tokenizer(start(path)).encode(TEXT)
    assert load_tokenizer(start(path)).encode(TEXT) == ids
    assert parsed == [path]
    for file in (tmp_path / "cache" / "tokenizers").iterdir():
        file.unlink()
    assert load_tokenizer(start(path)).encode(TEXT) == ids
    assert parsed == [path, path], "the lists are read from the file"


def test_a_replaced_file_is_parsed(tmp_path: Path, parsed: list[Path]) -> None:
    path = write(tmp_path / "m.gguf")
    assert start(path).config.max_context != 77
    before = path.stat()
    write(path, **{"llama.context_length": 77})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert start(path).config.max_context == 77
    assert parsed == [path, path]


def test_a_tokenizer_of_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    start(path)
    model = start(path)
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    write(path, **{"tokenizer.ggml.tokens": [*tokens[:-1], "another"]})
    with pytest.raises(BadModelFile, match="start again"):
        model.text.tokenizer()


def test_a_broken_kept_header_is_parsed_anew(tmp_path: Path, parsed: list[Path]) -> None:
    path = write(tmp_path / "m.gguf")
    first = told(start(path))
    (kept,) = (tmp_path / "cache" / "headers").iterdir()
    good = kept.read_bytes()
    for broken in (b"", good[:-1], b"\0" * len(good)):
        kept.write_bytes(broken)
        assert told(start(path)) == first
        assert kept.read_bytes() == good
    assert parsed == [path] * 4


def test_a_file_that_changed_just_now_is_not_kept(
    tmp_path: Path, parsed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_key, "SETTLED_NS", 3600 * 10**9)
    path = write(tmp_path / "m.gguf")
    start(path)
    start(path)
    assert parsed == [path, path]
