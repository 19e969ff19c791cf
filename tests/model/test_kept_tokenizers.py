"""Tokenizers that are kept, shared, and whole only when a text becomes ids."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import tokenizers

from paceline.core.errors import BadModelFile, ModelNotFound
from paceline.model import weights
from paceline.model.files import kept_data, kept_headers
from paceline.model.files.gguf_tokenizer import tokenizer_from_gguf
from paceline.model.files.kept_tokenizers import TokenTable, keep_tokenizer, kept_table, kept_tokenizer, read_kept
from paceline.model.files.tokenizer_file import FolderText
from paceline.model.template_source import TemplateSource
from paceline.model.tokenizer import Tokenizer, raw_spelling
from paceline.model.weights import TextSource, load_model, load_tokenizer, tokenizer_json
from paceline.serve.tokenizer_cache import TokenizerCache
from paceline.serve.worker.messages import Language, Ready
from tests.model.helpers import byte_level_metadata, write_gguf
from tests.model.test_tokenizer import piece_metadata
from tests.tiny import tiny_config, tiny_raw_tokenizer, tiny_weights

TEXT = "the engine there, and another one"
TABLE = TokenTable.of(raw_spelling(tiny_raw_tokenizer()))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """Two models with the same tokenizer."""
    config = tiny_config()
    return [
        write_gguf(tmp_path / f"{seed}.gguf", config, tiny_weights(config, seed), extra=byte_level_metadata())
        for seed in (0, 1)
    ]


def test_a_kept_tokenizer_reads_and_writes_as_the_first(models: list[Path]) -> None:
    model = load_model(models[0])
    built = load_tokenizer(model)
    ids, text = built.encode(TEXT), tokenizer_json(built)
    del built
    later = load_tokenizer(model)
    assert later.decode(ids) == TEXT
    assert later._whole is not None, "no text was encoded yet"
    assert tokenizer_json(later) == text
    assert later._whole is not None
    assert later.encode(TEXT) == ids
    assert later._whole is None
    assert later.min_num_tokens(TEXT) == load_tokenizer(model).min_num_tokens(TEXT) > 0


@pytest.mark.parametrize("raw", [tiny_raw_tokenizer(), tokenizer_from_gguf(piece_metadata())])
def test_a_table_of_tokens_tells_what_the_library_does(raw: tokenizers.Tokenizer) -> None:
    whole = raw_spelling(raw)
    table = TokenTable.of(whole)
    assert (table.num_tokens, table.strips_space, table.special) == (
        whole.num_tokens,
        whole.strips_space,
        whole.special,
    )
    every = range(-2, whole.num_tokens + 2)
    assert list(map(table.bytes_of, every)) == list(map(whole.bytes_of, every))


def test_a_broken_table_is_written_anew(models: list[Path], tmp_path: Path) -> None:
    model = load_model(models[0])
    ids = load_tokenizer(model).encode(TEXT)
    (path,) = (tmp_path / "cache" / "token-tables").iterdir()
    good = path.read_bytes()
    for broken in (b"", good[:-1], good.replace(b"the", b"teh")):
        path.write_bytes(broken)
        assert kept_table(model.text.tokenizer_digest()) is None
        assert load_tokenizer(model).decode(ids) == TEXT
        assert path.read_bytes() == good


def test_models_with_one_tokenizer_share_it(models: list[Path]) -> None:
    first, second = map(load_model, models)
    before = len(weights._TOKENIZERS)  # other tests may hold some
    ours, theirs = load_tokenizer(first), load_tokenizer(second)
    assert ours.pieces is theirs.pieces
    assert ours.ending((1,), None).eos_ids == (1,)
    del ours, theirs
    gc.collect()
    assert len(weights._TOKENIZERS) <= before


def test_added_tokens_without_a_row_are_left_out(models: list[Path], tmp_path: Path) -> None:
    """As that of images in Gemma 3 1B, whose tokenizer is that of the larger ones."""
    values = json.loads(tiny_raw_tokenizer().to_str())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    values["added_tokens"].append({"id": 320, "content": "<image>", "special": True, **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))

    def opened(num_rows: int) -> Tokenizer:
        model = load_model(models[0])
        config = replace(model.config, vocab_size=num_rows, eos_ids=())
        return load_tokenizer(replace(model, config=config, text=FolderText(tmp_path, num_rows)))

    assert opened(321).encode("<image>") == [320]
    assert opened(320).vocab_size == 320
    assert opened(320).decode(opened(320).encode("<image>")) == "<image>"
    with pytest.raises(BadModelFile, match="different models"):
        opened(300)
    (tmp_path / "chat_template.jinja").write_text("<image>{{ messages }}")
    with pytest.raises(BadModelFile, match="template writes '<image>'"):
        FolderText(tmp_path, 320).tokenizer()


class CountedText:
    """Text of a model, and how often its tokenizer was digested."""

    is_kept: ClassVar[bool] = True

    def __init__(self, text: TextSource) -> None:
        self.template, self.sampling, self.tokenizer = text.template, text.sampling, text.tokenizer
        self.num_digests = 0
        self._digest = text.tokenizer_digest

    def tokenizer_digest(self) -> str:
        self.num_digests += 1
        return self._digest()


def test_a_start_digests_a_kept_tokenizer_once(models: list[Path]) -> None:
    model = load_model(models[0])
    text = tokenizer_json(load_tokenizer(model))
    gc.collect()
    counted = CountedText(model.text)
    tokenizer = load_tokenizer(replace(model, text=counted))
    assert tokenizer_json(tokenizer) == text
    assert tokenizer.ending((1,), None).digest == model.text.tokenizer_digest()
    assert counted.num_digests == 1


def test_a_broken_one_is_built_anew(models: list[Path], tmp_path: Path) -> None:
    model = load_model(models[0])
    ids = load_tokenizer(model).encode(TEXT)
    (path,) = (tmp_path / "cache" / "tokenizers").iterdir()
    good = path.read_bytes()
    for broken in (b"", good[:-1], good + b" ", good.replace(b"the", b"teh"), b"\xff" * 100):
        path.write_bytes(broken)
        assert kept_tokenizer(model.text.tokenizer_digest()) is None
        assert load_tokenizer(model).encode(TEXT) == ids
        assert path.read_bytes() == good


def test_a_tokenizer_whose_file_is_gone_is_built_from_the_model(models: list[Path], tmp_path: Path) -> None:
    model = load_model(models[0])
    ids = load_tokenizer(model).encode(TEXT)
    later, last = load_tokenizer(model), load_tokenizer(load_model(models[1]))
    (path,) = (tmp_path / "cache" / "tokenizers").iterdir()
    path.unlink()
    kept_headers.forget_files()
    assert later.encode(TEXT) == ids
    path.unlink()  # it was kept again
    config = tiny_config()
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"][:-1], "another"]
    extra = byte_level_metadata() | {"tokenizer.ggml.tokens": tokens}
    write_gguf(models[0], config, tiny_weights(config, 0), extra=extra)
    with pytest.raises(ModelNotFound, match="start again"):
        last.encode(TEXT)


def test_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kept_data, "MAX_KEPT", 3)
    text = tiny_raw_tokenizer().to_str().encode()
    for number in range(5):
        keep_tokenizer(f"digest {number}", text, TABLE)
    assert len(list((tmp_path / "cache" / "tokenizers").iterdir())) == 3
    kept = read_kept("digest 4")
    assert kept is not None
    assert kept.to_str().encode() == text


def test_the_ones_used_longest_ago_go_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kept_data, "MAX_KEPT", 2)
    for age, digest in enumerate(("used", "unused")):
        keep_tokenizer(digest, b"text", TABLE)
        (newest,) = [p for p in (tmp_path / "cache" / "tokenizers").iterdir() if p.stat().st_mtime > 1e9]
        os.utime(newest, (1e8 + age, 1e8 + age))
    assert kept_tokenizer("used") == b"text"
    keep_tokenizer("new", b"text", TABLE)
    assert [kept_tokenizer(digest) for digest in ("used", "unused", "new")] == [b"text", None, b"text"]


def test_no_room_costs_a_message_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    keep_tokenizer("digest", b"text", TABLE)
    assert "not kept" in caplog.text


@pytest.mark.parametrize("other", [False, True])
def test_the_server_makes_its_tokenizer_while_the_engine_loads(other: bool) -> None:
    """Also if the engine that becomes ready has another one."""
    text = tiny_raw_tokenizer().to_str().encode()
    ready = Ready("tiny", 256, 320, text, (319,), None, None, ())

    async def scenario() -> None:
        cache = TokenizerCache()
        cache.expect(Language(tiny_raw_tokenizer(400).to_str().encode() if other else text, None, (319,), None))
        prompts = await cache.of(ready)
        assert prompts.tokenizer.vocab_size == 320
        assert (prompts.max_len, prompts.vocab_size, prompts.tokenizer.eos_ids) == (256, 320, (319,))
        cache.expect(Language.of(ready))
        assert cache._expected is None, "a restarted engine of the same model needs nothing new"
        cache.close()

    asyncio.run(scenario())


def test_a_tokenizer_that_cannot_be_made_fails_when_it_is_needed() -> None:
    async def scenario() -> None:
        cache = TokenizerCache()
        cache.expect(Language(b"{}", None, (319,), None))
        with pytest.raises(Exception, match=r"version|missing|model"):
            await cache.of(Ready("tiny", 256, 320, b"{}", (319,), None, None, ()))
        cache.close()

    asyncio.run(scenario())


def test_a_template_that_is_not_valid_fails_when_it_is_needed() -> None:
    """`expect` has tried the template already, together with the tokenizer."""
    text, template = tiny_raw_tokenizer().to_str().encode(), TemplateSource("{% if %}", {})

    async def scenario() -> None:
        cache = TokenizerCache()
        cache.expect(Language(text, template, (319,), None))
        with pytest.raises(BadModelFile, match="chat template is not valid"):
            await cache.of(Ready("tiny", 256, 320, text, (319,), None, template, ()))
        cache.close()

    asyncio.run(scenario())
