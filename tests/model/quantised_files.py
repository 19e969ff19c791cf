"""Packers of quantised formats for tests: random matrices, and whole folders of tiny models."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from paceline.model.files import hf
from paceline.model.weights import canonical_names
from tests.oracles import quantised as twin
from tests.oracles.quantised import AWQ_PLACES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig

    Made = tuple[dict[str, NDArray], dict[str, Any]]  # parts by the ends of their names, quantization_config


def _draw(shape: tuple[int, ...], top: int, seed: int = 0) -> NDArray:
    return np.random.default_rng(seed).integers(0, top, shape)


def _scales(shape: tuple[int, ...]) -> NDArray:
    return np.random.default_rng(1).uniform(0.001, 0.02, shape).astype(np.float16)


def _order(columns: int, width: int) -> NDArray:
    return (np.random.default_rng(2).permutation(columns) // width).astype(np.int32)


def words(numbers: NDArray, bits: int, places: tuple[int, ...] | None = None) -> NDArray:
    """Pack numbers [n, m] along their last axis into 32-bit words."""
    per = 32 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per))).astype(np.uint64)
    shifts = np.array(places or range(per), np.uint64) * np.uint64(bits)
    packed = (padded.reshape(len(numbers), -1, per) << shifts).sum(axis=-1)
    return packed.astype(np.uint32).view(np.int32)


def pack_gptq(numbers: NDArray, zeros: NDArray, scales: NDArray, bits: int, version: int) -> dict[str, NDArray]:
    """numbers [out, in], zeros and scales [out, blocks]; version 1 stores zeros less one."""
    stored = (zeros.T - (2 - version)) % (1 << bits)
    return {"qweight": words(numbers, bits).T, "qzeros": words(stored, bits), "scales": scales.T}


def pack_awq(numbers: NDArray, zeros: NDArray, scales: NDArray) -> dict[str, NDArray]:
    return {
        "qweight": words(numbers.T, 4, AWQ_PLACES),
        "qzeros": words(zeros.T, 4, AWQ_PLACES),
        "scales": scales.T,
    }


def pack_rows(numbers: NDArray, zeros: NDArray | None, scales: NDArray, bits: int) -> dict[str, NDArray]:
    """Numbers and zeros from 0, as they lie in the words."""
    parts = {
        "weight_packed": words(numbers, bits),
        "weight_scale": scales,
        "weight_shape": np.array(numbers.shape),
    }
    return parts if zeros is None else parts | {"weight_zero_point": words(zeros.T, bits).T}


def gptq(out: int, columns: int, *, bits: int, size: int, ordered: bool = False, version: int = 1) -> Made:
    width = columns if size < 0 else size
    blocks = (out, -(-columns // width))
    zeros = _draw(blocks, (1 << bits) - 1, 3) + 1 if version == 1 else _draw(blocks, 1 << bits, 3)
    parts = pack_gptq(_draw((out, columns), 1 << bits), zeros, _scales(blocks), bits, version)
    if ordered:
        parts["g_idx"] = _order(columns, width)
    said = {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": ordered}
    return parts, said | ({} if version == 1 else {"checkpoint_format": "gptq_v2"})


def awq(out: int, columns: int, *, size: int) -> Made:
    blocks = (out, columns // (columns if size < 0 else size))
    parts = pack_awq(_draw((out, columns), 16), _draw(blocks, 16, 3), _scales(blocks))
    return parts, {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm", "zero_point": True}


def compressed(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def packed_rows(
    out: int, columns: int, *, bits: int, size: int, zeros: bool = False, ordered: bool = False
) -> Made:
    width = columns if size < 0 else size
    blocks = (out, -(-columns // width))
    parts = pack_rows(
        _draw((out, columns), 1 << bits), _draw(blocks, 1 << bits, 3) if zeros else None, _scales(blocks), bits
    )
    if ordered:
        parts["weight_g_idx"] = _order(columns, width)
    weights = {"num_bits": bits, "type": "int", "symmetric": not zeros, "group_size": size}
    weights |= {"strategy": "channel" if size < 0 else "group", "actorder": "group" if ordered else None}
    return parts, compressed("pack-quantized", weights)


def int8(shape: tuple[int, int], strategy: str, block: tuple[int, int], *, zeros: bool = False) -> Made:
    blocks = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    parts = {"weight": (_draw(shape, 256) - 128).astype(np.int8), "weight_scale": _scales(blocks)}
    if strategy == "tensor":
        parts["weight_scale"] = parts["weight_scale"].reshape(1)
    if zeros:
        parts["weight_zero_point"] = (
            (_draw(blocks, 256, 3) - 128).astype(np.int8).reshape(parts["weight_scale"].shape)
        )
    weights = {"num_bits": 8, "type": "int", "symmetric": not zeros, "strategy": strategy}
    size = block[1] if strategy == "group" else None
    return parts, compressed("int-quantized", weights | {"group_size": size})


def fp8(shape: tuple[int, int], block: tuple[int, int]) -> Made:
    """Codes that are numbers, and float32 scales of blocks, which the matrix's end may cut."""
    codes = _draw(shape, 127) + 128 * _draw(shape, 2, 3)
    blocks = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    parts = {"weight": codes.astype(np.uint8), "weight_scale": _scales(blocks).astype(np.float32)}
    return parts, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}


# Whole folders -----------------------------------------------------------------------------------

SIZE = 32
KEEP_FOUR_BITS = ("awq", "gptq", "packed")
KINDS = (*KEEP_FOUR_BITS, "gptq-order", "int8", "fp8")


def _rounded(matrix: NDArray, top: int) -> tuple[NDArray, NDArray, NDArray]:
    """Numbers, zeros and scales of a matrix in blocks of `SIZE` columns."""
    blocks = matrix.reshape(len(matrix), -1, SIZE)
    low, high = np.minimum(blocks.min(axis=2), -1e-3), np.maximum(blocks.max(axis=2), 1e-3)
    scales = ((high - low) / top).astype(np.float16)
    zeros = np.clip(np.round(-low / scales), 1, top)
    numbers = np.clip(np.round(blocks / scales[:, :, None]) + zeros[:, :, None], 0, top)
    return numbers.reshape(matrix.shape).astype(int), zeros.astype(int), scales


def _quantised(matrix: NDArray, kind: str) -> tuple[dict[str, NDArray], NDArray]:
    """Return the parts of a matrix, and the weights that they mean."""
    numbers, zeros, scales = _rounded(matrix, 15)
    if kind == "awq":
        parts = pack_awq(numbers, zeros, scales)
        return parts, twin.awq_slow(parts, SIZE)
    if kind == "packed":
        parts = pack_rows(numbers, zeros, scales, 4)
        return parts, twin.rows_slow(parts, 4, SIZE)
    if kind == "int8":
        scale = (np.abs(matrix).max(axis=1, keepdims=True) / 127).astype(np.float32)
        parts = {"weight": np.round(matrix / scale).astype(np.int8), "weight_scale": scale}
        return parts, twin.plain_slow(parts, 1, matrix.shape[1], is_float=False)
    if kind == "fp8":
        scale = np.full((1, 1), np.abs(matrix).max() / 448, np.float32)
        codes = torch.from_numpy(matrix / scale).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        parts = {"weight": codes, "weight_scale": scale}
        return parts, twin.plain_slow(parts, *matrix.shape, is_float=True)
    order = np.arange(matrix.shape[1]) // SIZE
    if kind == "gptq-order":
        order = _order(matrix.shape[1], SIZE)
        places = np.argsort(order, kind="stable")
        sorted_numbers, zeros, scales = _rounded(matrix[:, places], 15)
        numbers = np.empty_like(sorted_numbers)
        numbers[:, places] = sorted_numbers
    parts = pack_gptq(numbers, zeros, scales, 4, 1) | {"g_idx": order.astype(np.int32)}
    return parts, twin.gptq_slow(parts, 4, SIZE, 1)


_SAID: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": SIZE},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": SIZE},
    "gptq-order": {"quant_method": "gptq", "bits": 4, "group_size": SIZE, "desc_act": True},
    "packed": compressed(
        "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": SIZE, "symmetric": False}
    ),
    "int8": compressed("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "fp8": {"quant_method": "fp8", "weight_block_size": None},
}


def write_folder(
    folder: Path, config: ModelConfig, weights: Mapping[str, torch.Tensor], kind: str
) -> dict[str, NDArray]:
    """Write a model with the matrices of its layers quantised; return what these mean, by canonical name."""
    from tests.model.test_safetensors import config_json

    names = canonical_names(config, hf.MODEL_NAMES, hf.LAYER_NAMES, hf.LAYER_PREFIX)
    tensors, meant = {}, {}
    for name, tensor in weights.items():
        if not name.startswith("layers.") or tensor.ndim == 1:
            tensors[names[name]] = tensor.contiguous()
            continue
        parts, meant[name] = _quantised(tensor.numpy(), kind)
        for end, part in parts.items():
            tensors[names[name].removesuffix("weight") + end] = torch.from_numpy(np.ascontiguousarray(part))
        if kind == "fp8":
            tensors[names[name]] = tensors[names[name]].view(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json(config, quantization_config=_SAID[kind])))
    return meant
