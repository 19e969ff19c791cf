"""What the native kernels refuse at their border, and what is told before it comes to that."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from paceline import kernels
from paceline.backend.native.decoder import NativeDecoder
from paceline.backend.native.load import pack_decoder
from paceline.backend.seam import Packed
from paceline.core.errors import ConfigError
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from tests.fuzz import border
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

GREEDY = SamplingSpec("logits", SamplingParams(temperature=0.0))


def native(family: str, types: str, kv: str = "f32", **changes: Any) -> NativeDecoder:
    config = tiny_config(family, **changes)
    return pack_decoder(config, tiny_weights(config, dtype=torch.float32), kernels.ThreadPool(1), types, kv)


@pytest.mark.parametrize(
    ("changes", "types", "advice"),
    [
        ({"head_dim": 272}, ("int8", "i16"), "--kv f16"),
        ({"head_dim": 272}, ("f32", "i8"), "--kv f16"),
        ({"intermediate_size": 65600}, ("int8", "f32"), "--weights bf16"),
        ({"num_heads": 1024, "head_dim": 66}, ("int8", "f32"), "--weights bf16"),
        ({"hidden_size": 65600}, ("int4", "f32"), "--weights bf16"),
    ],
)
def test_too_wide_for_whole_numbers_is_told_before_weights_are_read(
    changes: dict[str, int], types: tuple[str, str], advice: str
) -> None:
    with pytest.raises(ConfigError, match=advice):
        pack_decoder(tiny_config(**changes), {}, kernels.ThreadPool(1), *types)


@pytest.mark.parametrize("types", [("int8", "f16"), ("int4", "f32"), ("bf16", "f32")])
def test_the_widest_that_types_take(types: tuple[str, str]) -> None:
    wide = {"head_dim": 272} if types[0] == "int8" else {"intermediate_size": 65600}
    decoder = native("llama", *types, **wide)
    run_pass(decoder, pack([([1, 2], 0, [0])]), decoder.new_kv(1), [GREEDY] * 2)


def test_a_store_too_large_to_count_is_refused() -> None:
    for num_layers, num_pages, heads in ((2, 1 << 39, (1 << 20, 64)), (1 << 12, 1 << 38, (8, 64))):
        with pytest.raises(ValueError, match="larger than any memory"):
            kernels.KVStore("f32", num_pages, [heads] * num_layers)


BAD = {
    "token_ids": (np.array([0, 320]), "vocabulary"),
    "slots": (np.array([0, 32]), "slot"),
    "positions": (np.array([0, 16]), "position"),
    "cu_len": (np.array([0, 3]), "cu_len"),
    "pages": (np.array([[2]]), "page"),
    "wanted": (np.array([2]), "wanted"),
    "first_keys": (np.array([1]), "first key"),
    "copies": (np.array([[2, 3]]), "copy"),
}


@pytest.mark.parametrize("field", BAD)
def test_the_border_refuses_what_could_crash(field: str) -> None:
    decoder = native("llama", "int8")
    fields = {
        "token_ids": np.array([1, 2]),
        "positions": np.array([0, 1]),
        "slots": np.array([0, 1]),
        "cu_len": np.array([0, 2]),
        "pages": np.array([[0]]),
        "wanted": np.array([1]),
        "first_keys": np.array([0]),
        "copies": np.array([[0, 5]]),
    }
    kv = decoder.new_kv(2)
    run_pass(decoder, Packed(**fields), kv, [GREEDY])
    value, message = BAD[field]
    for wrong in (value, -value - 1):
        with pytest.raises(ValueError, match=message if wrong is value else None):
            run_pass(decoder, Packed(**(fields | {field: wrong})), kv, [GREEDY])
    with pytest.raises(TypeError):
        run_pass(decoder, Packed(**(fields | {field: fields[field].astype(np.int32)})), kv, [GREEDY])
    far = {"cu_len": np.array([0, 10**6, 2]), "pages": np.array([[0], [1]]), "first_keys": np.array([0, 0])}
    with pytest.raises(ValueError, match="must not fall"):  # before positions are read up to there
        run_pass(decoder, Packed(**(fields | far)), kv, [GREEDY])
    with pytest.raises(ValueError, match="another model"):
        run_pass(decoder, Packed(**fields), native("qwen3", "f32", head_dim=24).new_kv(2), [GREEDY])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": [(3, 8), (2, 8)]}, "fit each other"),
        ({"heads": [(2, 10), (2, 8)]}, "larger than the largest"),
        ({"heads": [(2, 8)]}, "every layer"),
        ({"kv_layers": [1, 0]}, "come first"),
        ({"kv_layers": [0]}, "every layer"),
        ({"head": border._matrix(border.VOCAB + 1, border.HIDDEN)}, "more rows than there are tokens"),
        ({"input_vectors": {}}, "norm"),
        ({"input_vectors": {"input_norm": np.ones(5, np.float32)}}, "shape"),
    ],
)
def test_layers_that_do_not_fit_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kernels.Decoder(**(border._decoder_arguments() | changes))


GAINS = """
from types import SimpleNamespace as Some
K.append_gains(z(4, 32), {}, {}, (Some(row=0, num_known={}),), (Some(token_ids=(1,)),))
"""
MATRICES = "m = K.pack(np.ones((32, 32), np.float32), 'int8')\n"
DECODER = """
from tests.fuzz import border
good = border._decoder_arguments()
K.Decoder(**(good | CHANGES))
"""
BLOCKS = """
from tests.fuzz import border
good = border._block_arguments()
K.Decoder(**(good | {'corrector_matrices': good['corrector_matrices'] | {'NAME': None}}))
"""


@pytest.mark.parametrize(
    "code",
    [
        "K.pack_spans(z(4, 32), z(4, 2), [(0, 0, 1, [])], [1], (2**64 - 1) // 3, z(64), z(1, 2))",
        "K.pack_spans(z(4, 32), z(4, 2), [(0, 0, 1, [])], [1], (2**64 - 1) // 3 + 1, z(64), z(1, 2))",
        "K.pack_spans(z(4, 32), z(4, 2), [(0, 2**63 - 1, 1, [])], [1], 1, z(5), z(1, 2))",
        "K.PageMemory(2**63 - 1).halves(1)",
        GAINS.format("np.full(4, 2**63 - 1)", "z(4)", 0),
        GAINS.format("z(4)", "z(4) + 1", 2**63 - 1),
        "K.read_halves(np.zeros((16, 8), np.uint16), z(4, 2), [(0, 1, 2**63 - 1)], np.zeros((3, 8), np.float32))",
        DECODER.replace(
            "CHANGES", "{'layers': [(good['layers'][0][0] | {'attn_q': None}, good['layers'][0][1])]}"
        ),
        DECODER.replace("CHANGES", "{'fusing_matrices': {'fc': None}}"),
        BLOCKS.replace("NAME", "before"),
        BLOCKS.replace("NAME", "out"),
        BLOCKS.replace("NAME", "joint"),
        "K.time_products(K.ThreadPool(1), [None], 1, 1)",
        f"{MATRICES}K.time_products(K.ThreadPool(1), [m, None], 1, 1)",
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29)); K.ThreadPool(1024)",
        "K.KVStore('i16', 4, [(2, 8)] * 4097)",
        "K.RecycledTokens().learn([1, 2, 3], np.arange(3), 2**64 - 1, 5)",
        "border._online().compiled.prices((4, 0, 64, 64), np.full(2, 2**62), 1, 1, 3)",
    ],
)
def test_what_ended_the_process_is_refused(code: str) -> None:
    """L1: wrapping sizes, None in place of a matrix, threads that the system does not give."""
    if "RLIMIT_AS" in code and "asan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer's own memory does not fit within this limit")
    refused = "(ValueError, TypeError, MemoryError, RuntimeError)"
    lines = [
        "import resource, numpy as np",
        "from paceline import kernels as K",
        "from tests.fuzz import border",
        "z = lambda *s: np.zeros(s, np.int64)",
        f"try: exec({code!r})",
        f"except {refused}: raise SystemExit(3)",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert done.returncode == 3, done.stderr[-500:]


@pytest.mark.parametrize("sliding", [[2], [1, 0], [0, 0], [-1], [0, 1]])
def test_sliding_layers_of_a_store_are_named_once_and_alike(sliding: list[int]) -> None:
    with pytest.raises((ValueError, TypeError)):
        kernels.KVStore("i16", 4, [(2, 8), (1, 8)], sliding)


def test_layers_beside_sliding_ones_are_alike() -> None:
    assert kernels.KVStore("i16", 4, [(2, 8), (1, 8), (1, 8)], [0]).num_pages == 4
    with pytest.raises(ValueError, match="layers beside sliding ones have equal heads"):
        kernels.KVStore("i16", 4, [(2, 8), (2, 8), (1, 8)], [0])


def test_parts_of_no_page_are_not_dropped() -> None:
    for sliding in ([], [0]):
        kv = kernels.KVStore("i16", 4, [(2, 8)] * 2, sliding)
        for drop in (kv.drop_window, kv.drop_rest):
            drop(3)
            with pytest.raises(ValueError, match="no such page"):
                drop(4)
