"""Files that are no files, and tokenizers that would never come back."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.control.files import read_profile
from paceline.control.trace_files import read_head
from paceline.core.errors import BadModelFile, ConfigError, ModelError, ModelNotFound, RequestError
from paceline.model.files.tokenizer_file import FolderText
from paceline.model.tokenizer import Tokenizer
from paceline.model.weights import load_model
from tests.serve.conftest import PATIENCE_S
from tests.tiny import tiny_raw_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = "the cat sat on the mat and the dog sat on the log"


def written(folder: Path, **changes: Any) -> Path:
    values = json.loads(tiny_raw_tokenizer(320).to_str()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return folder


def opened(folder: Path) -> Tokenizer:
    return Tokenizer(FolderText(folder).tokenizer())


TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 10**9},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "!",
}


@pytest.mark.parametrize(
    "changes", [{"truncation": TRUNCATION}, {"truncation": TRUNCATION | {"stride": 9}}, {"padding": PADDING}]
)
def test_a_tokenizer_neither_cuts_nor_pads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    """M2: truncation and padding of a file are switched off before the first use, and the log says so."""
    expected = opened(written(tmp_path)).encode(TEXT)
    assert not caplog.records
    assert opened(written(tmp_path, **changes)).encode(TEXT) == expected
    assert "truncation and padding are switched off" in caplog.text


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Prepend", "prepend": "a" * 1_000_000}},
        {"normalizer": replace({"String": "a"}, "a" * 1_000_000)},
        {"normalizer": replace({"String": ""}, "a")},
        {"normalizer": sequence(*[replace({"String": "a"}, "aa")] * 40)},
        {"normalizer": sequence(*[replace({"Regex": "a"}, "aa")] * 40)},
        {"normalizer": sequence(sequence(*[replace({"String": "a"}, "a")] * 100))},
        {"decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "b" * 1000)]}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * 10_000,
                "pair": [],
                "special_tokens": {},
            }
        },
        {"model": {"type": "BPE"}},
        {"normalizer": {"type": "Unheard of"}},
    ],
)
def test_a_tokenizer_that_is_a_bomb_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """L2: steps that grow texts without end are refused when they are read."""
    with pytest.raises(BadModelFile, match=r"tokenizer\.json"):
        opened(written(tmp_path, **changes))


def test_a_tokenizer_that_gives_up_refuses_one_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """L2: an error of the library's own kind, which is no `Exception`, is one request's error."""
    slow = {"type": "Split", "pattern": {"Regex": "(a|a|aa)+$"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = opened(written(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": [slow, byte_level]}))
    for text in ("a" * 40 + "b", "a" * 5000 + "b"):
        with pytest.raises(RequestError, match="tokenizer cannot take this text"):
            tokenizer.encode(text)
    assert tokenizer.encode("b")
    assert "panicked" in capfd.readouterr().err


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


NO_FILES = [fifo, Path.mkdir, link_to("/dev/zero"), link_to("/dev/full"), link_to("nowhere")]


@pytest.mark.parametrize("make", NO_FILES)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "model.gguf"])
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, model: Path, name: str, make: Callable[[Path], None]
) -> None:
    """L3: a pipe, a folder, a device or a dead link in place of a model's file."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    found: list[BaseException] = []

    def load() -> None:
        try:
            loaded = load_model(folder / name if name.endswith("gguf") else folder)
            loaded.text.tokenizer()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert found, "it waits or was taken"
    assert isinstance(found[0], ModelError | ModelNotFound), repr(found[0])


@pytest.mark.parametrize("path", ["/dev/full", "/dev/zero", "/", "/nowhere"])
def test_a_profile_that_is_no_file_is_refused(path: str) -> None:
    """L3: `--profile /dev/full` is a clear error, as for every file that is read at the start."""
    with pytest.raises(ConfigError, match=path):
        read_profile(Path(path))
    with pytest.raises(ConfigError, match=path):
        read_head(Path(path))
