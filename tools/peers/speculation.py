"""Rows of engines with their own kinds of speculation, one request at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quantize

from paceline.core.errors import UnsupportedModel
from paceline.draft.shipped import shipped_folder
from paceline.model.files.gguf_model import LAYER_NAMES, LAYER_PREFIX, MODEL_NAMES
from paceline.model.heads.cut_model import load_cut_model
from tools.peers.rows import (
    AS_IS,
    FILE,
    LLAMA_CPP,
    LLAMA_CPP_ROWS,
    OPENVINO,
    OPENVINO_ROWS,
    OURS,
    PACELINE,
    PeerRow,
    PeerStudy,
    RequiredRatio,
    names_of,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.model.weights import LoadedModel

DRAFT_MODEL = "draft_model"  # row option with the path of a GGUF file; empty: that of `draft_gguf`
PAIR = "PAIR"  # in options: stands for the file of the pair's draft model
DRAFTS = ("ngram:k=4", "suffix", "draft-model", "eagle3", "auto:suffix+eagle3")
SPECULATING = tuple(
    PeerRow(f"Paceline int8, {draft}", PACELINE, "ours", AS_IS, {"weights": "int8", "draft": draft})
    for draft in DRAFTS
)
_LLAMA_CPP = tuple(
    PeerRow(f"llama.cpp as it is ({FILE}), {name}", LLAMA_CPP, "llama_cpp", AS_IS, {"flash": True, **options})
    for name, options in (
        ("lookup of 2", {"lookup": 2}),
        ("lookup of 10", {"lookup": 10}),
        ("our draft model", {DRAFT_MODEL: "", "max_drafts": 4}),
    )
)
_OPENVINO = (PeerRow(f"OpenVINO as it is ({FILE}), prompt lookup", OPENVINO, "openvino", AS_IS, {"lookup": True}),)
_PLAIN = (OURS[0], LLAMA_CPP_ROWS[0], OPENVINO_ROWS[2])
_OURS = (OURS[0], *SPECULATING)

SPECULATION = PeerStudy(
    rows=(*_PLAIN, *SPECULATING, *_LLAMA_CPP, *_OPENVINO),
    ours=_OURS,
    required=(
        RequiredRatio("plain decoding", names_of(SPECULATING), (OURS[0].name,), {}),
        RequiredRatio(
            "the best of llama.cpp and OpenVINO, with speculation or without",
            names_of(_OURS),
            names_of((*_PLAIN[1:], *_LLAMA_CPP, *_OPENVINO)),
            {"one request": 1.7},
        ),
    ),
)

# A target and a smaller model of its tokenizer: the same two files in both engines.
_PAIR_DRAFTS = {
    "ngram": "ngram:k=4",
    "suffix": "suffix",
    "draft model": f"draft-model:model={PAIR}",
    "auto": f"auto:suffix+draft-model:model={PAIR}",
}
_PAIR_OURS = tuple(
    PeerRow(f"Paceline {weights} with {name}", PACELINE, "ours", AS_IS, {"weights": weights, "draft": draft})
    for weights in ("int8", "file")
    for name, draft in _PAIR_DRAFTS.items()
)
_PAIR_LLAMA_CPP = tuple(
    PeerRow(f"llama.cpp as it is ({FILE}) with {name}", LLAMA_CPP, "llama_cpp", AS_IS, {"flash": True, **options})
    for name, options in (
        ("lookup of 2", {"lookup": 2}),
        ("lookup of 10", {"lookup": 10}),
        ("draft model of 4", {DRAFT_MODEL: PAIR, "max_drafts": 4}),
        ("draft model of 16", {DRAFT_MODEL: PAIR, "max_drafts": 16}),
    )
)
_PAIR_PLAIN = tuple(
    row for row in OURS if row.options["weights"] in ("int8", "file") and row.options["kv"] == "i16"
)
_PAIR_THEIRS = (*_PLAIN[1:], *_PAIR_LLAMA_CPP, *_OPENVINO)
PAIR_STUDY = PeerStudy(
    rows=(*_PAIR_PLAIN, *_PLAIN[1:], *_PAIR_OURS, *_PAIR_LLAMA_CPP, *_OPENVINO),
    ours=(*_PAIR_PLAIN, *_PAIR_OURS),
    required=(
        RequiredRatio("plain decoding", names_of(_PAIR_OURS), names_of(_PAIR_PLAIN), {}),
        RequiredRatio(
            "the best of llama.cpp and OpenVINO, with speculation or without",
            names_of((*_PAIR_PLAIN, *_PAIR_OURS)),
            names_of(_PAIR_THEIRS),
            {"one request": 1.5},
        ),
    ),
)


def with_pair(options: dict[str, Any], draft: Path) -> dict[str, Any]:
    """Return a row's options with the file of the pair's draft model in its place."""
    return {
        name: value.replace(PAIR, str(draft)) if isinstance(value, str) else value
        for name, value in options.items()
    }


def draft_gguf(model: LoadedModel, folder: Path) -> Path:
    """Write the target's shipped draft model as an 8-bit GGUF file, with the target's tables.

    Raises `ConfigError` if none ships, `UnsupportedModel` if the target is no GGUF file of a Llama model.
    """
    if model.path.suffix != ".gguf" or model.config.facts.gguf_arch != "llama":
        raise UnsupportedModel(
            "a draft model is written for llama.cpp from a target that is a GGUF file of a Llama"
        )
    small = load_cut_model(shipped_folder("draft-model", model.fingerprint), model.config)
    target = folder / "draft-model.gguf"
    reader, writer = GGUFReader(model.path), GGUFWriter(target, "llama")
    changed = {"llama.block_count": small.config.num_layers}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in ("general.architecture", "general.file_type"):
            nested = field.types[0] == GGUFValueType.ARRAY
            value = changed.get(key, field.contents())
            writer.add_key_value(key, value, field.types[0], field.types[-1] if nested else None)
    shared = next(t for t in reader.tensors if t.name == MODEL_NAMES["embed"])
    writer.add_tensor(shared.name, np.array(shared.data), raw_dtype=shared.tensor_type)
    heads = {"attn_q": small.config.num_heads, "attn_k": small.config.num_kv_heads}
    for name, tensor in small.weights.items():
        _, *rest = name.split(".", 2)
        values = _interleave_halves(tensor, heads[rest[1]]) if rest and rest[1] in heads else tensor
        _add(writer, _gguf_name(name), np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _gguf_name(name: str) -> str:
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    _, number, short = name.split(".", 2)
    return LAYER_PREFIX.format(layer=number) + LAYER_NAMES[short]


def _interleave_halves(matrix: NDArray[floating], num_heads: int) -> NDArray[floating]:
    """Interleave the two halves of each head: the order of GGUF files of Llama."""
    rows, width = matrix.shape
    return matrix.reshape(num_heads, 2, rows // num_heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _add(writer: GGUFWriter, name: str, values: NDArray[floating]) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values)
        return
    kind = GGMLQuantizationType.Q8_0
    writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
