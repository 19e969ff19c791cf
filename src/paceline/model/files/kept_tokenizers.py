"""Tokenizers kept as JSON, so that a later start need not build them."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from paceline.model.files.packed_cache import build_mark
from paceline.model.files.pull import cache_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_KEPT = 32
MAX_BYTES = 256 << 20
_SUM_CHARS = 64  # of the SHA-256 before the text

log = logging.getLogger(__name__)


def kept_tokenizer(digest: str) -> str | None:
    """Return a tokenizer's JSON, None if it is not kept or broken.

    digest: of what it is built from.
    """
    path = _path(digest)
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        data = path.read_bytes()
        if hashlib.sha256(data[_SUM_CHARS:]).hexdigest().encode() != data[:_SUM_CHARS]:
            return None
        text = data[_SUM_CHARS:].decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    with suppress(OSError):
        os.utime(path)  # the oldest used go first
    return text


def keep_tokenizer(digest: str, text: str) -> None:
    """Keep a tokenizer's JSON, and no more than `MAX_KEPT`."""
    path, data = _path(digest), text.encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(data).hexdigest().encode() + data)
        Path(file.name).replace(path)
        for old in list(_newest_first(path.parent))[MAX_KEPT:]:
            old.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the tokenizer is not kept for the next start: %s", error)


def read_kept(digest: str) -> tokenizers.Tokenizer | None:
    """Build the kept tokenizer; None if it was removed meanwhile."""
    text = kept_tokenizer(digest)
    return None if text is None else tokenizers.Tokenizer.from_str(text)


def _path(digest: str) -> Path:
    code = f"{digest} {build_mark()} {tokenizers.__version__}"
    return cache_folder() / "tokenizers" / f"{hashlib.sha256(code.encode()).hexdigest()[:32]}.json"


def _newest_first(folder: Path) -> Iterator[Path]:
    found = []
    for path in folder.iterdir():
        with suppress(OSError):  # removed meanwhile
            found.append((path.stat().st_mtime, path))
    return (path for _, path in sorted(found, reverse=True))
