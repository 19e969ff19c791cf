"""Headers of GGUF files kept for later starts, without the vocabulary.

The vocabulary is most of a header. A header is kept by the state of its file: no program can write to the file
without a change of this state.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.core.errors import BadModelFile
from paceline.model.content_key import settled
from paceline.model.files.gguf_file import GgufFile, GgufTensor, open_gguf
from paceline.model.files.gguf_tokenizer import VocabularyFacts, vocabulary_facts
from paceline.model.files.kept_data import KeptData

if TYPE_CHECKING:
    from paceline.model.files.source_files import SourceFile

LONG = 1 << 12  # longer lists of values are left out
_HEADERS = KeptData("headers")


class KeptHeader(msgspec.Struct, frozen=True):
    """Part of a header that a start reads."""

    metadata: dict[str, Any]
    tensors: dict[str, tuple[int, tuple[int, ...], int]]  # type, shape, first byte
    facts: VocabularyFacts


_as_header = msgspec.msgpack.Decoder(KeptHeader).decode


@lru_cache(maxsize=2)  # a start opens the same file in several places
def open_kept(source: SourceFile) -> GgufFile:
    """Open a file by its kept header, or read and keep that. Raises as `open_gguf`."""
    data = _HEADERS.read(source.state) if source.state else None
    if data is not None:
        kept = _as_header(data)
        tensors = {name: GgufTensor(source.path, *one) for name, one in kept.tensors.items()}
        return GgufFile(source.path, kept.metadata, tensors, kept.facts)
    file = open_gguf(source.path)
    with suppress(BadModelFile):  # the error is raised where the tokenizer is built
        if settled(source.path, source.state):
            _HEADERS.write(source.state, msgspec.msgpack.encode(_header(file)))
    return file


def forget_files() -> None:
    """Drop the headers of opened files, which may hold whole vocabularies."""
    open_kept.cache_clear()


def _header(file: GgufFile) -> KeptHeader:
    short = {
        key: value for key, value in file.metadata.items() if not isinstance(value, list) or len(value) < LONG
    }
    tensors = {name: (one.quant_id, one.shape, one.start) for name, one in file.tensors.items()}
    return KeptHeader(short, tensors, vocabulary_facts(file.metadata))
