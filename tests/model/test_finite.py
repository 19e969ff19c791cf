"""Tensors that hold no numbers are refused in every form in which a file gives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from paceline.core.errors import BadModelFile
from paceline.model.files.finite import Finite
from paceline.model.files.gguf_file import GgufTensor
from paceline.model.files.safetensors_file import StoredTensor
from paceline.model.files.stored import Held

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.model.files.stored import Stored

# Bits of the largest number, of infinity and of a NaN, in types of files.
FLOATS = {
    "BF16": ("<u2", 0x7F7F, 0x7F80, 0x7F81),
    "F16": ("<u2", 0x7BFF, 0x7C00, 0x7E00),
    "F32": ("<u4", 0x7F7FFFFF, 0x7F800000, 0x7FC00000),
    "F64": ("<u8", 0x7FEF << 48 | (1 << 48) - 1, 0x7FF0 << 48, 0x7FF8 << 48),
}


@dataclass(frozen=True)
class Form:
    """A way to read a tensor."""

    name: str

    def of(self, tensor: Stored) -> object:
        return getattr(Finite(tensor, "'x'"), self.name)()


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("negative", [False, True])
def test_floats_are_refused_from_infinity_on(kind: str, negative: bool, tmp_path: Path) -> None:
    unsigned, largest, infinity, nan = FLOATS[kind]
    size = np.dtype(unsigned).itemsize
    sign = negative << 8 * size - 1
    tensor = StoredTensor(tmp_path / "x", kind, (2, 2), 0, 4 * size)
    forms = [Form("read"), Form("raw"), *([Form("halves")] if size == 2 else [])]
    for form in forms:
        tensor.path.write_bytes(np.array([0, 1, sign | largest, 2], unsigned).tobytes())
        assert form.of(tensor) is not None
        for bits in (infinity, nan):
            tensor.path.write_bytes(np.array([0, 1, 2, sign | bits], unsigned).tobytes())
            with pytest.raises(BadModelFile, match="NaN or infinity in 'x'"):
                form.of(tensor)


@pytest.mark.parametrize("scale", [1.0, np.inf, np.nan])
def test_scales_of_blocks_are_refused(scale: float, tmp_path: Path) -> None:
    block = np.float16(scale).tobytes() + np.arange(16, dtype=np.uint8).tobytes()
    path = tmp_path / "x"
    path.write_bytes(block)
    tensor = GgufTensor(path, 2, (1, 32), 0)
    for form in (Form("read"), Form("raw"), Form("four_bit")):
        if scale == 1.0:
            assert form.of(tensor) is not None
            continue
        with pytest.raises(BadModelFile, match="'x'"):
            form.of(tensor)
    assert Finite(tensor, "").kind == "Q4_0"


def test_a_form_that_a_tensor_lacks_is_none() -> None:
    tensor = Finite(Held(np.ones((2, 3), np.float32)), "")
    assert (tensor.raw(), tensor.four_bit(), tensor.halves(), tensor.kind) == (None,) * 4
    assert tensor.shape == tensor.read().shape == (2, 3)


def test_bytes_of_an_unknown_kind_are_left_to_their_reader(tmp_path: Path) -> None:
    tensor = StoredTensor(tmp_path / "x", "F8_E4M3", (2,), 0, 2)
    tensor.path.write_bytes(b"\x7f\x7f")
    raw = Finite(tensor, "").raw()
    assert raw is not None
    assert raw.kind == "F8_E4M3"
