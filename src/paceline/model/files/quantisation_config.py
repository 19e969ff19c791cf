"""Quantisation as config.json states it; unknown settings are refused, never ignored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.errors import UnsupportedModel
from paceline.model.files.quantised import ADVICE, AWQ, GPTQ, ORDER, PLAIN, ROWS, WHOLE, ZERO, Quantisation
from paceline.model.files.scaled_tensors import ScaleBlocks

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_MAX_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class _Said:
    """Typed reads of a `quantization_config`, or of a part of it."""

    values: Mapping[str, Any]
    method: str

    def integer(self, key: str, known: Sequence[int], default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or value not in known:
            choices = f"{known[0]} to {known[-1]}" if isinstance(known, range) else ", ".join(map(str, known))
            raise self.refused(f"{key} = {_short(value)}; known: {choices}")
        return value

    def word(self, keys: tuple[str, ...], default: str, known: Collection[str]) -> str:
        """Return the value of the first key that is set."""
        value = str(next((v for key in keys if (v := self.values.get(key)) is not None), default)).lower()
        if value not in known:
            raise self.refused(f"{keys[0]} = {_short(value)}; known: {', '.join(known)}")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise self.refused(f"{key} = {_short(value)}; known: an object")
        return value

    def refuse(self, *keys: str) -> None:
        """Refuse settings that change what numbers mean. Raises `UnsupportedModel`."""
        for key in keys:
            if self.values.get(key):
                raise self.refused(f"{key} = {_short(self.values[key])}")

    def sizes(self, key: str) -> ScaleBlocks:
        """Return blocks by their two sides."""
        value = self.values.get(key)
        sides = value if isinstance(value, list) and len(value) == 2 else [None]
        if not all(type(n) is int and 1 <= n <= _MAX_BLOCK for n in sides):
            raise self.refused(f"{key} = {_short(value)}; known: two sizes, such as [128, 128]")
        return ScaleBlocks(*sides)

    def row_blocks(self) -> ScaleBlocks:
        """Return blocks of `group_size` columns; -1 stands for whole rows."""
        size = self.integer("group_size", range(-1, _MAX_BLOCK + 1))
        if size == 0:
            raise self.refused("group_size = 0; known: -1, and sizes such as 128")
        return ScaleBlocks(1, WHOLE if size < 0 else size)

    def refused(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"quantization_config ({self.method}) has {what}. This is not supported: {ADVICE}")


def _short(value: object) -> str:
    return repr(value)[:80]


_TENSOR, _ROW = ScaleBlocks(WHOLE, WHOLE), ScaleBlocks(1, WHOLE)


def _fp8(said: _Said) -> Quantisation:
    said.word(("fmt",), "e4m3", ("e4m3", "float8_e4m3fn"))
    said.word(("scale_fmt",), "float", ("float",))
    said.word(("expert_dtype",), "fp8", ("fp8",))
    in_blocks = said.values.get("weight_block_size") is not None
    return Quantisation((PLAIN,), (said.sizes("weight_block_size"), _TENSOR) if in_blocks else (_TENSOR, _ROW))


def _modelopt(said: _Said) -> Quantisation:
    said.word(("quant_algo",), "none", ("fp8",))
    return Quantisation((PLAIN,), (_TENSOR, _ROW))


def _gptq_config(said: _Said) -> Quantisation:
    said.refuse("dynamic", "rotation")
    bits = said.integer("bits", (2, 4, 8))
    version = said.word(("checkpoint_format", "format"), "gptq", ("gptq", "gptq_v2"))
    layout = GPTQ.needing("g_idx") if said.values.get("desc_act") else GPTQ
    return Quantisation((layout,), (said.row_blocks(),), (bits,), int(version == "gptq"))


def _awq_config(said: _Said) -> Quantisation:
    said.refuse("dynamic", "rotation")
    said.word(("version", "format"), "gemm", ("gemm",))
    return Quantisation((AWQ,), (said.row_blocks(),), (said.integer("bits", (4,)),))


# compressed-tensors ------------------------------------------------------------------------------

_DENSE = ("dense", "none")
_FORMATS = {"pack-quantized": ROWS, "int-quantized": PLAIN, "float-quantized": PLAIN, "naive-quantized": PLAIN}
_MIXED = "mixed-precision"  # each group names its own format
_STRATEGIES: dict[str, Callable[[_Said], ScaleBlocks]] = {
    "tensor": lambda _: _TENSOR,
    "channel": lambda _: _ROW,
    "group": _Said.row_blocks,
    "block": lambda said: said.sizes("block_structure"),
}
_BITS = {"int": (2, 4, 8), "float": (8,)}


def _compressed(said: _Said) -> Quantisation:
    for key in ("sparsity_config", "transform_config"):
        inner = _Said(said.table(key), f"{said.method}, {key}")
        inner.word(("format",), "none", _DENSE)
        inner.refuse("config_groups")
    outer = said.word(("format",), _MIXED, (*_FORMATS, _MIXED))
    groups = [_compressed_group(said, name, outer) for name in said.table("config_groups")]
    if not groups:
        raise said.refused("no config_groups")
    return Quantisation(
        tuple(dict.fromkeys(layout for g in groups for layout in g.layouts)),
        tuple(dict.fromkeys(blocks for g in groups for blocks in g.blocks)),
        tuple(dict.fromkeys(bits for g in groups for bits in g.bits)),
    )


def _compressed_group(said: _Said, name: str, outer: str) -> Quantisation:
    """Return what one of the config's groups says of its matrices."""
    group = _Said(said.table("config_groups"), f"{said.method}, config_groups").table(name)
    read = _Said(group, f"{said.method}, {name}")
    layout = _FORMATS[read.word(("format",), outer, tuple(_FORMATS))]
    weights = _Said(read.table("weights"), f"{said.method}, weights of {name}")
    bits = weights.integer("num_bits", _BITS[weights.word(("type",), "int", tuple(_BITS))], 8)
    size = weights.values.get("group_size")
    usual = "tensor" if size is None else "channel" if size == -1 else "group"
    blocks = _STRATEGIES[weights.word(("strategy",), usual, tuple(_STRATEGIES))](weights)
    if weights.values.get("symmetric") is False:
        layout = layout.needing(ZERO)
    if weights.values.get("actorder") in ("group", "dynamic", True):
        layout = layout.needing(ORDER)
    return Quantisation((layout,), (blocks,), (bits,))


# By `quant_method`.
_METHODS: dict[str, Callable[[_Said], Quantisation]] = {
    "fp8": _fp8,
    "fbgemm_fp8": lambda _: Quantisation((PLAIN,), (_ROW, _TENSOR)),
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "gptq": _gptq_config,
    "awq": _awq_config,
    "mxfp4": lambda _: Quantisation((), ()),  # only experts are quantised, and expert_parts.py reads them
}
_KEYS = ("quantization_config", "compression_config")


def read_quantisation(config: Mapping[str, Any]) -> Quantisation | None:
    """Return what a config.json says of quantised matrices, None if it says nothing.

    Raises `UnsupportedModel` for unknown settings.
    """
    text = config.get("text_config")
    tables = [config, text if isinstance(text, dict) else {}]
    said = next((v for table in tables for key in _KEYS if (v := table.get(key)) is not None), None)
    if said is None:
        return None
    method = str(said.get("quant_method")).lower() if isinstance(said, dict) else _short(said)
    if method not in _METHODS:
        raise UnsupportedModel(
            f"the folder is quantised by {method[:80]!r}, which is not read: {ADVICE}; known: "
            + ", ".join(_METHODS)
        )
    return _METHODS[method](_Said(said, method))
