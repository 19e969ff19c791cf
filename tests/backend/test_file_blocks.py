"""Matrices in a file's own blocks: values kept, products as the twin's, the same bits for any rows and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from tools.measure.quality import QualityText, log_probs

from paceline import kernels
from paceline.backend.native import load as native
from paceline.backend.native.packing import choose_weights, matrix_type
from paceline.backend.registry import BACKENDS, FILE
from paceline.core.errors import ConfigError
from paceline.model.weights import LoadedModel, load_model
from tests.model.helpers import write_gguf
from tests.oracles.blocks import dequantised, file_block, product, random_blocks
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from pathlib import Path

    from numpy import float32, uint8
    from numpy.typing import NDArray

KINDS = kernels.kept_names()
OUT = 70  # two whole panels and part of one


def packed(kind: str, rows: NDArray[uint8], width: int) -> kernels.Matrix:
    return kernels.pack_blocks(kernels.ThreadPool(1), rows.reshape(-1), kind, len(rows), width, kind)


def multiplied(matrix: kernels.Matrix, x: NDArray[float32], out: int = OUT, threads: int = 1) -> NDArray[float32]:
    found = np.empty((len(x), out), np.float32)
    kernels.multiply(kernels.ThreadPool(threads), matrix, x, found)
    return found


def widths(kind: str) -> tuple[int, ...]:
    return (256, 768) if file_block(kind) == 256 else (32, 96, 896)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_the_files(kind: str) -> None:
    rng = np.random.default_rng(1)
    for width in widths(kind):
        rows = random_blocks(rng, kind, OUT, width)
        matrix, found = packed(kind, rows, width), np.empty((OUT, width), np.float32)
        for index in range(OUT):
            matrix.row(index, found[index])
        np.testing.assert_allclose(found, dequantised(kind, rows), rtol=2e-7, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_the_twins(kind: str) -> None:
    rng = np.random.default_rng(2)
    for width in widths(kind):
        rows = random_blocks(rng, kind, OUT, width)
        x = rng.standard_normal((13, width), np.float32)
        x[3] = 0.0
        x[4, 5] = 300.0  # an outlier
        expected = product(kind, rows, x)
        found = multiplied(packed(kind, rows, width), x)
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_others(kind: str) -> None:
    """Few rows read a panel at once, many in parts."""
    rng = np.random.default_rng(3)
    width = 2048 if file_block(kind) == 256 else 2080
    matrix = packed(kind, random_blocks(rng, kind, OUT, width), width)
    x = rng.standard_normal((100, width), np.float32)
    whole = multiplied(matrix, x, threads=2)
    for count in range(1, 14):
        np.testing.assert_array_equal(multiplied(matrix, x[40 : 40 + count]), whole[40 : 40 + count])


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_costs_its_own_32_inputs(kind: str) -> None:
    """Other inputs keep steps that are up to 16 times as fine."""
    rng = np.random.default_rng(5)
    width = widths(kind)[-1]
    rows = random_blocks(rng, kind, OUT, width)
    weights = dequantised(kind, rows).astype(np.float64)
    x = rng.standard_normal((4, width), np.float32)
    x[:, ::256] = 64.0
    one_scale = np.rint(x / 64.0 * 127) / 127 * 64.0
    found, coarse = multiplied(packed(kind, rows, width), x) - x @ weights.T, (one_scale - x) @ weights.T
    assert found.std() < 0.5 * coarse.std()  # the square root of an eighth, and a little


def test_extreme_values_stay_exact() -> None:
    """The largest values, scales and activations of one sign: sums reach their bounds."""
    for kind in KINDS:
        width = widths(kind)[-1]
        rows = np.full_like(random_blocks(np.random.default_rng(0), kind, 32, width), 0x7F)
        clean = dequantised(kind, rows)
        if not np.isfinite(clean).all():  # a scale of 0x7F7F is no number in float16
            blocks = rows.reshape(32, width // file_block(kind), -1)
            blocks[..., :2] = blocks[..., -2:] = np.array([0.5], np.float16).view(np.uint8)
        x = np.full((2, width), 3.0, np.float32)
        x[1] = -3.0
        expected = product(kind, rows, x)
        found = multiplied(packed(kind, rows, width), x, 32)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_border_refuses_what_is_no_block() -> None:
    rows = random_blocks(np.random.default_rng(7), "Q6_K", 32, 256)
    with pytest.raises(ValueError, match="do not fit"):
        packed("Q6_K", rows[:, :-1].copy(), 256)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.pack_blocks(kernels.ThreadPool(1), rows.reshape(-1), "Q6_K", 32, 128, "Q6_K")
    with pytest.raises(ValueError, match="no blocks of this name"):
        kernels.pack_blocks(kernels.ThreadPool(1), rows.reshape(-1), "Q6_K", 32, 256, "Q4_K")
    with pytest.raises(ValueError, match="are kept"):
        kernels.pack(np.zeros((32, 256), np.float32), "Q4_K")
    with pytest.raises(ValueError, match="only read"):
        packed("Q6_K", rows, 256).put_row(0, np.zeros(256, np.float32))


_DIGEST = """
import hashlib, numpy as np
from paceline import kernels
from tests.backend.test_file_blocks import KINDS, OUT, multiplied, packed, widths
from tests.oracles.blocks import product, random_blocks
rng = np.random.default_rng(4)
digest = hashlib.sha256()
for kind in KINDS:
    width = widths(kind)[-1]
    rows, x = random_blocks(rng, kind, OUT, width), rng.standard_normal((9, width), np.float32)
    expected, found = product(kind, rows, x), multiplied(packed(kind, rows, width), x)
    assert np.abs(found - expected).max() < 2e-6 * np.abs(expected).max(), kind
    digest.update(found.tobytes())
print(kernels.isa(), digest.hexdigest())
"""


def _digest(isa: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _DIGEST], env=os.environ | {"PACELINE_ISA": isa}, capture_output=True, check=False
    )
    if b"no instruction set of this machine" in done.stderr:
        pytest.skip(f"this machine cannot run {isa}")
    assert not done.returncode, done.stderr
    name, digest = done.stdout.decode().split()
    return name, digest


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx2vnni"])
def test_other_instruction_sets_agree(isa: str) -> None:
    """The twin holds on each; where sums and products are fused alike, the bits are the same."""
    name, digest = _digest(isa)
    if name == "avx2" and kernels.isa() in ("avx512", "amx"):
        assert digest == _digest(kernels.isa())[1]


# Whole models ------------------------------------------------------------------------------------


def written(folder: Path, quant: Type | None) -> LoadedModel:
    config = tiny_config(hidden_size=64, intermediate_size=96, num_heads=4, head_dim=16)
    return load_model(write_gguf(folder / "m.gguf", config, tiny_weights(config, dtype=torch.float32), quant))


@pytest.mark.parametrize("quant", [Type.Q8_0, Type.Q5_0, Type.Q4_0, Type.BF16, None])
def test_a_file_is_computed_as_it_is(quant: Type | None, tmp_path: Path) -> None:
    """As float32 of the same file, but for the rounding of activations."""
    model, text = written(tmp_path, quant), QualityText(tuple(range(40)), 39)
    found, exact = (
        log_probs(native.load_decoder(model.config, model.weights, kind, "f32", 1), text) for kind in (FILE, "f32")
    )
    divergence = (np.exp(exact) * (exact - found)).sum(axis=1).mean()
    assert abs(divergence) < (1e-3 if quant in (Type.Q8_0, Type.Q5_0, Type.Q4_0) else 1e-12)


def test_types_of_matrices(tmp_path: Path) -> None:
    model = written(tmp_path, Type.Q5_0)
    assert matrix_type(model.weights, "layers.0.attn_q", FILE) == "Q5_0"
    assert matrix_type(model.weights, "embed", "int8") == "int8"
    assert matrix_type({}, "embed", FILE) == "f32"  # no file


@pytest.mark.parametrize(("quant", "kind"), [(Type.Q5_0, FILE), (Type.Q4_0, "int8"), (None, "int8")])
def test_auto_keeps_blocks_that_kernels_know(quant: Type | None, kind: str, tmp_path: Path) -> None:
    model = written(tmp_path, quant)
    expected = "int8" if kernels.isa() == "amx" else kind
    assert choose_weights(model.config, model.weights)[0] == expected
    chosen, why = BACKENDS["native"].settled_weights("auto", model.config, model.weights)
    assert chosen == expected
    assert why.startswith("auto: ")
    assert BACKENDS["native"].settled_weights(None, model.config, model.weights) == ("int8", "the default")


def test_a_backend_without_a_chooser_has_no_auto() -> None:
    with pytest.raises(ConfigError, match="no --weights auto"):
        BACKENDS["reference"].weight_type("auto")
