"""Masks that a native pass reads before it chooses, against the choice from whole rows of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline import kernels
from paceline.backend.native.load import pack_decoder
from paceline.backend.seam import PassRequest
from paceline.core.nouns import BROKEN, UNCHOSEN, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_token
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

VOCAB, LENGTH = 1000, 60
CONFIG = tiny_config("llama", vocab_size=VOCAB)
IDS = np.random.default_rng(7).integers(0, VOCAB, LENGTH).tolist()
LOGITS = SamplingSpec("logits", SamplingParams(temperature=0.0))
KINDS = [
    SamplingSpec("argmax", SamplingParams(temperature=0.0)),
    SamplingSpec("noisy", SamplingParams(temperature=0.9), seed=3),
    SamplingSpec("sampled", SamplingParams(temperature=0.9, top_p=0.7, logprobs=1), seed=4),
    LOGITS,
]


def random_words() -> np.ndarray:
    """Rows that allow nothing, few tokens of some tiles, or half of all. [LENGTH, 32]"""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 32, (LENGTH, 32)).astype(np.uint32)
    kept = rng.random((LENGTH, 32)) < np.array([0.0, 0.1, 1.0] * (LENGTH // 3))[:, None]
    words[~kept] = 0
    words[:, -1] &= (1 << VOCAB % 32) - 1
    return words.view(np.int32)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_pass_chooses_under_masks_as_from_whole_rows(threads: int) -> None:
    decoder = pack_decoder(CONFIG, tiny_weights(CONFIG, dtype=torch.float32), kernels.ThreadPool(threads))
    specs = [KINDS[i % 4]._replace(position=i) for i in range(LENGTH)]
    words, masked = random_words(), np.array([i % 5 != 0 for i in range(LENGTH)], np.uint8)
    packed, told = pack([(IDS, 0, range(4))]), np.zeros_like(words)
    masks = kernels.Masks(told, masked)
    pending = decoder.launch(PassRequest(packed, decoder.new_kv(4), specs, masks=masks))
    told[:] = words  # the pass has begun, and waits for them
    masks.open()
    chosen = pending.wait().token_ids.tolist()
    rows = run_pass(decoder, packed, decoder.new_kv(4), [LOGITS] * LENGTH).logits
    for i, (row, spec) in enumerate(zip(rows, specs, strict=True)):
        expected = choose_token(row, spec._replace(mask=words[i] if masked[i] else None))
        assert chosen[i] == (UNCHOSEN if spec.kind == "logits" else expected)
    assert BROKEN in chosen  # where nothing was allowed


def test_a_pass_that_is_dropped_before_its_masks_came_ends() -> None:
    decoder = pack_decoder(CONFIG, tiny_weights(CONFIG, dtype=torch.float32), kernels.ThreadPool(2))
    packed = pack([(IDS[:5], 0, [0])])
    masks = kernels.Masks(np.zeros((5, 32), np.int32), np.ones(5, np.uint8))
    decoder.launch(PassRequest(packed, decoder.new_kv(1), [KINDS[0]] * 5, masks=masks))
    del decoder


@pytest.mark.parametrize(("rows", "width"), [(4, 32), (5, 31), (6, 32)])
def test_masks_of_another_size_are_refused(rows: int, width: int) -> None:
    decoder = pack_decoder(CONFIG, tiny_weights(CONFIG, dtype=torch.float32), kernels.ThreadPool(1))
    masks = kernels.Masks(np.zeros((rows, width), np.int32), np.ones(rows, np.uint8))
    packed = pack([(IDS[:5], 0, [0])])
    with pytest.raises(ValueError, match="mask"):
        decoder.launch(PassRequest(packed, decoder.new_kv(1), [KINDS[0]] * 5, masks=masks)).wait()
