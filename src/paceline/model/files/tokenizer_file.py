"""Tokenizer and chat template of a folder.

A tokenizer.json that would take endless time, endless memory or the process is refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import tokenizers

from paceline.core.errors import BadModelFile
from paceline.model.files.hf import read_json
from paceline.model.template_source import MAX_TEMPLATE_CHARS, TemplateSource
from paceline.model.tokenizer import WHOLE_TEXTS, is_panic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

log = logging.getLogger(__name__)

MAX_STEPS = 64  # most steps of a part, such as the normalizer
MAX_WRITTEN_CHARS = 64  # most that one step writes in place of what it finds, or before a text
MAX_GROWTH = 64  # most by which all steps of a part may lengthen a text, as a factor
MAX_PATTERN_CHARS = 1 << 13
MAX_TEMPLATE_PIECES = 64  # most tokens that are put around a text
_LISTS = ("normalizers", "pretokenizers", "processors", "decoders")


@dataclass(frozen=True, slots=True)
class FolderText:
    """Tokenizer and chat template of a folder."""

    folder: Path
    num_rows: int | None = None  # rows of the embedding; None: not known
    is_kept: ClassVar[bool] = True

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Read tokenizer.json without the added tokens that have no row in the embedding.

        Gemma 3 270M and 1B list the larger models' token of images. Raises `ModelNotFound`, `BadModelFile`.
        """
        path = self.folder / "tokenizer.json"
        values = read_json(path)
        if isinstance(added := values.get("added_tokens"), list):
            values["added_tokens"] = [token for token in added if self._has_row(token)]
        return parse_tokenizer(values, path)

    def _has_row(self, token: object) -> bool:
        """Return False for a useless token. Raises `BadModelFile` if the template writes it."""
        number, text = (token.get("id"), token.get("content")) if isinstance(token, dict) else (None, None)
        if self.num_rows is None or not isinstance(number, int) or number < self.num_rows:
            return True
        source = self.template()
        if source is not None and str(text) in source.text:
            raise BadModelFile(f"{self.folder}: the chat template writes {text!r}, for which the model has no row")
        return False

    def tokenizer_digest(self) -> str:
        """Return a digest of tokenizer.json, or of its place, and of the rows."""
        path = self.folder / "tokenizer.json"
        found = hashlib.sha256(path.read_bytes() if path.is_file() else str(path).encode())
        found.update(f" {self.num_rows}".encode())
        return found.hexdigest()

    def sampling(self) -> Mapping[str, object]:
        """Return what generation_config.json says. Raises `BadModelFile`."""
        path = self.folder / "generation_config.json"
        return read_json(path) if path.is_file() else {}

    def template(self) -> TemplateSource | None:
        """Return chat_template.jinja, else what tokenizer_config.json or chat_template.json has, else None.

        Raises `BadModelFile` for a file that cannot be read as text or JSON.
        """
        path = self.folder / "tokenizer_config.json"
        values = read_json(path) if path.is_file() else {}
        special = {key: _content(values.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
        own = self.folder / "chat_template.jinja"
        if own.is_file():
            if own.stat().st_size > MAX_TEMPLATE_CHARS:
                raise BadModelFile(f"{own} is longer than any real chat template")
            try:
                return TemplateSource(own.read_text(encoding="utf-8"), special)
            except UnicodeDecodeError:
                raise BadModelFile(f"{own} is not UTF-8 text; download it again or convert it") from None
        text, beside = _default_template(values.get("chat_template")), self.folder / "chat_template.json"
        if text is None and beside.is_file():  # models of text and images have this file
            text = _default_template(read_json(beside).get("chat_template"))
        return None if text is None else TemplateSource(text, special)


def _content(token: object) -> str:
    """Return a special token from a string, or from an object with the key `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else ""


def _default_template(value: object) -> str | None:
    """Return a template from a string, or the one named "default" from a list."""
    if isinstance(value, list):
        named = (t for t in reversed(value) if isinstance(t, dict) and t.get("name") == "default")
        value = next((t.get("template") for t in named), None)
    return value if isinstance(value, str) else None


def parse_tokenizer(values: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in a file. Raises `BadModelFile`."""
    if values.get("truncation") is not None or values.get("padding") is not None:
        log.warning(WHOLE_TEXTS)
        values = {**values, "truncation": None, "padding": None}
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if why := _bomb(values.get(part)):
            raise BadModelFile(f"{path}: its {part} {why}; no real tokenizer does that")
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(values, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception
        raise BadModelFile(f"{path} is no proper tokenizer: {str(error)[:200]}") from None
    except BaseException as error:
        if not is_panic(error):
            raise
        raise BadModelFile(f"{path} is no proper tokenizer: the library gave up on it") from None


def _bomb(part: object) -> str:
    """Return what a part does that is not allowed; an empty text if all is."""
    growth = 1.0
    for number, step in enumerate(_steps(part)):
        if number >= MAX_STEPS:
            return f"has more than {MAX_STEPS} steps"
        pattern = step.get("pattern")
        found = pattern.get("String", pattern.get("Regex")) if isinstance(pattern, dict) else pattern
        if isinstance(found, str) and not 0 < len(found) <= MAX_PATTERN_CHARS:
            return f"looks for a pattern of {len(found)} characters"
        for key in ("content", "prepend", "replacement", "prefix", "cleanup"):
            if isinstance(written := step.get(key), str) and len(written) > MAX_WRITTEN_CHARS:
                return f"writes {len(written)} characters at once"
        if step.get("type") == "Replace" and isinstance(content := step.get("content"), str):
            plain = isinstance(pattern, dict) and isinstance(pattern.get("String"), str)
            growth *= max(1.0, len(content) / (len(str(found)) if plain else 1))
        pieces = [step.get(name) for name in ("single", "pair")]
        if any(isinstance(p, list) and len(p) > MAX_TEMPLATE_PIECES for p in pieces):
            return f"puts more than {MAX_TEMPLATE_PIECES} tokens around a text"
    return f"makes texts {growth:.0f} times as long" if growth > MAX_GROWTH else ""


def _steps(part: object) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part, with those inside of sequences."""
    stack = [part]
    while stack:
        step = stack.pop()
        if isinstance(step, dict):
            yield step
            for name in _LISTS:
                if isinstance(inner := step.get(name), list):
                    stack.extend(reversed(inner))
