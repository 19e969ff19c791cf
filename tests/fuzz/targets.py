"""Readers under fuzzing: each takes bytes, and may raise nothing but Paceline's own errors."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.control.files import from_json
from paceline.core.errors import PacelineError
from paceline.model.config import ModelConfig
from paceline.model.files import gguf_model, hf
from paceline.model.files.gguf_file import open_gguf
from paceline.model.files.quantisation_config import read_quantisation
from paceline.model.files.quantised import joined_tensors
from paceline.model.files.safetensors_file import open_safetensors
from paceline.model.files.tokenizer_file import parse_tokenizer
from paceline.model.heads.checkpoint import load_head
from paceline.model.template import ChatTemplate
from paceline.model.template_source import TemplateSource
from paceline.model.tokenizer import Tokenizer
from paceline.model.weights import LazyWeights, canonical_names
from paceline.serve import app  # noqa: F401 (with the bodies of all routes)
from paceline.serve.api.errors import ApiError
from paceline.serve.api.fields import Body
from paceline.serve.api.parse import Serving, chat_job, completion_job
from paceline.serve.prompts import Prompts
from tests.fuzz.border import call_kernels

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[1] / "data"
MAX_TENSORS = 64  # that are read of one file
TEXT = "The cat sat, 12345 times;\n\u00e9 \U0001f600 "
HEAD_TARGET = ModelConfig(
    family="llama",
    vocab_size=64,
    num_layers=4,
    hidden_size=16,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_context=512,
    tie_embeddings=True,
)


@cache
def folder() -> Path:
    """A folder in memory where there is one."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="paceline-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))


def _file(name: str, data: bytes) -> Path:
    path = folder() / name
    path.write_bytes(data)
    return path


def gguf(data: bytes) -> None:
    """Read header, configuration, tensors and tokenizer of a GGUF file."""
    file = open_gguf(_file("model.gguf", data))
    for tensor in list(file.tensors.values())[:MAX_TENSORS]:
        tensor.read()
        tensor.four_bit()
    with contextlib.suppress(PacelineError):
        config = gguf_model.config_from_gguf(file)
        layer_names = gguf_model.layer_names(config)
        names = canonical_names(config, gguf_model.MODEL_NAMES, layer_names, gguf_model.LAYER_PREFIX)
        gguf_model.tensors_for(file, config, names)
    text = gguf_model.GgufText(file)
    with contextlib.suppress(PacelineError):
        text.template()
    _use(Tokenizer(text.tokenizer()))


def safetensors(data: bytes) -> None:
    """Read all tensors of a safetensors file."""
    for tensor in list(open_safetensors(_file("model.safetensors", data)).values())[:MAX_TENSORS]:
        with contextlib.suppress(PacelineError):
            tensor.read()
        with contextlib.suppress(PacelineError):
            tensor.read_integers()
        tensor.halves()


def quantised(data: bytes) -> None:
    """Join and read all matrices of a quantised folder: a length and a `quantization_config`, then its tensors."""
    said, tensors = _config_and_tensors(data)
    stored = open_safetensors(_file("model.safetensors", tensors))
    matrices = LazyWeights(joined_tensors(read_quantisation({"quantization_config": said}), stored))
    for name in list(matrices)[:MAX_TENSORS]:
        with contextlib.suppress(PacelineError):
            matrices.four_bit(name)
            _ = matrices[name]


def _config_and_tensors(data: bytes) -> tuple[object, bytes]:
    """Split bytes into a JSON value, None if it is none, and the rest."""
    length = int.from_bytes(data[:4], "little")
    try:
        return json.loads(data[4 : 4 + length]), data[4 + length :]
    except (ValueError, RecursionError):
        return None, data[4 + length :]


def tokenizer(data: bytes) -> None:
    """Read a tokenizer.json, and use it."""
    path = _file("tokenizer.json", data)
    _use(Tokenizer(parse_tokenizer(hf.read_json(path), path)))


def _use(found: Tokenizer) -> None:
    found.min_num_tokens(TEXT)
    ids = found.encode(TEXT)
    found.encode_within(TEXT)
    for number in (*ids[:64], 0, found.vocab_size, 1 << 31):
        found.token_bytes(number)
    found.decode(ids)


def head(data: bytes) -> None:
    """Read a head: four bytes that say how long its config.json is, that, and its tensors."""
    length = int.from_bytes(data[:4], "little")
    _file("config.json", data[4 : 4 + length])
    _file("model.safetensors", data[4 + length :])
    load_head(folder(), HEAD_TARGET)


def profile(data: bytes) -> None:
    """Read a profile of a machine."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        return
    from_json(values)


@cache
def _prompts() -> Prompts:
    values = json.loads(tokenizer_json())
    path = Path("tokenizer.json")
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    return Prompts(
        Tokenizer(parse_tokenizer(values, path)), ChatTemplate(TemplateSource(template, {})), 16384, 320
    )


def tokenizer_json() -> bytes:
    """A tokenizer of single bytes."""
    from tests.tiny import tiny_raw_tokenizer

    return tiny_raw_tokenizer(320).to_str().encode()


def bodies(data: bytes) -> None:
    """Read a body as that of every route, and make the jobs of those that are one."""
    for kind in _kinds(Body):
        for lenient in (False, True):
            with contextlib.suppress(PacelineError):
                kind.decode(data, lenient=lenient)
    for job in (chat_job, completion_job):
        with contextlib.suppress(PacelineError, ApiError):
            job(data, Serving(_prompts(), ("tiny",)), 0.0)


def _kinds(kind: type[Body]) -> list[type[Body]]:
    """Return the bodies of all routes: every class below one, whichever module it is in."""
    return [found for below in kind.__subclasses__() for found in (below, *_kinds(below))]


TARGETS: dict[str, Callable[[bytes], None]] = {
    "gguf": gguf,
    "safetensors": safetensors,
    "quantised": quantised,
    "tokenizer": tokenizer,
    "head": head,
    "profile": profile,
    "bodies": bodies,
    "border": call_kernels,
}


def run(name: str, data: bytes) -> None:
    """Give bytes to a target. Raises what must not happen."""
    with contextlib.suppress(PacelineError):
        TARGETS[name](data)
