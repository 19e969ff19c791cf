"""A whole model and a head by the kernels, in Triton's interpreter; `test_decoder` runs this."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from paceline.backend.cuda import load as cuda
from paceline.backend.cuda.device_rows import DeviceRows
from paceline.backend.cuda.kernel_launch import interpreted
from paceline.backend.cuda.row_tensors import RowTensors
from paceline.backend.reference import block_head as reference
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.seam import CorrectRequest, Features, FedBack, HintRule, LateDraft, PassRequest
from paceline.core.nouns import SamplingSpec, Taps
from paceline.core.params import SamplingParams
from paceline.model.config import Rope, Sliding
from paceline.model.heads.checkpoint import Head
from paceline.model.heads.config import read_config
from tests.backend.backends import load_on_host
from tests.draft.heads import CORRECTED, draft_ids, head_values, random_weights
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

HOST = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 320 for i in range(60)]
PIECES = [(IDS[:19], 0, [0, 1]), (IDS[30:31], 0, [2]), (IDS[40:43], 0, [3])]
KINDS = [
    SamplingSpec("argmax", SamplingParams(temperature=0.0), margin=True),
    SamplingSpec("noisy", SamplingParams(temperature=0.9), seed=5, margin=True),
    SamplingSpec("logits", SamplingParams()),
]


def near(a: Any, b: Any, bound: float = 2e-4) -> None:
    assert np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max() < bound


def test_a_model_by_kernels_says_what_the_reference_says() -> None:
    """Windows, norms of heads, norms after blocks, gelu and biases at once; then one token more."""
    assert interpreted()
    config = tiny_config(
        "gemma3_text",
        num_layers=2,
        sliding=Sliding(9, frozenset({0}), Rope(theta=1e4)),
        biases=frozenset({"attn_q", "attn_o", "mlp_up"}),
    )
    weights = tiny_weights(config, dtype=torch.float32)
    ours, twin = load_on_host(config, weights, "f32", "f32", None), ReferenceDecoder(config, weights)  # type: ignore[arg-type]
    stores = ours.new_kv(5), twin.new_kv(5)
    for pieces in (PIECES, [(IDS[:1], 19, [0, 1]), (IDS[1:3], 1, [2])]):
        packed = pack(pieces)
        specs = [KINDS[i % 3]._replace(position=i) for i in range(len(packed.wanted))]
        got, expected = (
            run_pass(d, packed, kv, specs, taps=(0, 1, 2)) for d, kv in zip((ours, twin), stores, strict=True)
        )
        np.testing.assert_array_equal(got.token_ids, expected.token_ids)
        near(got.logits, expected.logits)
        for tap in (0, 1, 2):
            near(got.taps[tap], expected.taps[tap])


def test_a_head_by_kernels_says_what_the_reference_says() -> None:
    config = tiny_config(num_layers=3)
    weights: Any = tiny_weights(config, dtype=torch.float32)
    of_head = read_config(head_values("eagle3", config), config)
    head = Head(of_head, random_weights(of_head), draft_ids(of_head, config.vocab_size))  # type: ignore[arg-type]
    ours, twin = load_on_host(config, weights, "f32", "f32", None), ReferenceDecoder(config, weights)
    results = []
    for load, target in ((cuda.load_runner, ours), (reference.load_runner, twin)):
        runner: Any = load(head, target, None, None)  # type: ignore[operator]
        packed, store = pack(PIECES[:1]), runner.new_tap_store(3)
        result = run_pass(target, packed, target.new_kv(3), [KINDS[0]] * 19, taps=of_head.taps)
        store.write(Taps(result.taps, packed.cu_len, packed.slots), [19])
        entries = replace(pack([(IDS[1:19], 1, [0, 1])]), wanted=np.array([16, 17]), first_keys=np.array([1]))
        features = Features(store, [(0, 0, 18)])
        results.append(runner.launch(PassRequest(entries, runner.new_kv(3), KINDS[:2], features=features)).wait())
    got, expected = results
    np.testing.assert_array_equal(got.token_ids, expected.token_ids)
    near(got.hidden, expected.hidden, 3e-3)  # taps are kept in half precision


def test_a_block_head_by_kernels_says_what_the_reference_says() -> None:
    """Context, then blocks of which one begins in it and one without; a guess, and the one behind it."""
    config = tiny_config(num_layers=3)
    weights: Any = tiny_weights(config, dtype=torch.float32)
    of_head = read_config(head_values(CORRECTED, config), config)
    block = of_head.block
    assert block is not None
    head = Head(of_head, random_weights(of_head), draft_ids(of_head, config.vocab_size))  # type: ignore[arg-type]
    ours, twin = load_on_host(config, weights, "f32", "f32", None), ReferenceDecoder(config, weights)
    results: list[list[Any]] = []
    for load, target in ((cuda.load_runner, ours), (reference.load_runner, twin)):
        runner: Any = load(head, target, None, None)  # type: ignore[operator]
        packed, store, kv = pack(PIECES[:1]), runner.new_tap_store(4), runner.new_kv(4)
        result = run_pass(target, packed, target.new_kv(4), [KINDS[0]] * 19, taps=of_head.taps)
        store.write(Taps(result.taps, packed.cu_len, packed.slots), [19])
        features = Features(store, [(0, 0, 19)])
        runner.launch(PassRequest(replace(packed, wanted=packed.wanted[:0]), kv, (), features=features)).wait()
        masks = [of_head.mask_token_id] * (block.size - 1)
        asked = pack([([5, *masks], 19, [0, 1]), ([6, *masks], 0, [3])])
        hidden = runner.launch(PassRequest(replace(asked, wanted=np.array([0, 1, 6, 7])), kv, ())).wait().hidden
        before, state = [5, 6], FedBack(np.zeros((2, block.state_size), np.float32), range(2))
        results.append([])
        for place in (0, 1):
            result = runner.correct(CorrectRequest(hidden, [place, 2 + place], KINDS[:3:2], before, state))
            before, state = [8, 9], FedBack(result.hidden, range(2))
            results[-1].append(result)
    for got, expected in zip(*results, strict=True):
        assert got.token_ids[0] == expected.token_ids[0]
        ids = head.token_ids
        near(got.logits[:, ids], expected.logits[:, ids], 3e-3)
        near(got.margins, expected.margins, 3e-3)
        near(got.hidden, expected.hidden, 3e-3)


def by_torch_alone(stack: ExitStack) -> None:
    """Let PyTorch do the work of all kernels."""
    for name, module in list(sys.modules.items()):
        if name.startswith("paceline.backend.cuda.") and hasattr(module, "uses_kernels"):
            stack.enter_context(patch.object(module, "uses_kernels", lambda tensor: False))


def test_a_block_program_by_kernels_drafts_what_it_drafts_without() -> None:
    """Two rows and one of padding, whose blocks begin near a page's end and go on in spare ones."""
    config = tiny_config(num_layers=3)
    weights: Any = tiny_weights(config, dtype=torch.float32)
    of_head = read_config(head_values(CORRECTED, config), config)
    head = Head(of_head, random_weights(of_head), draft_ids(of_head, config.vocab_size))  # type: ignore[arg-type]
    runner: Any = cuda.load_runner(head, load_on_host(config, weights, "f32", "f32", None), None, None)
    taps = torch.randn(5 * 16, of_head.tapped_size, generator=torch.Generator().manual_seed(2)).half()
    found = []
    for by_kernels in (True, False):
        with ExitStack() as stack:
            if not by_kernels:
                by_torch_alone(stack)
            rows = DeviceRows(2, 64, frozenset())
            rows.on_device = state = RowTensors.empty(2, 64, HOST)
            state.pages[:2, :2], state.pages[2] = torch.tensor([[0, 2], [3, 1]]), 4
            state.length.copy_(torch.tensor([30, 9, 1]))
            state.token_ids[:2, :30] = torch.tensor([IDS[:30], IDS[30:]])
            state.temperature.copy_(torch.tensor([0.0, 0.8, 0.0]))
            store = runner.new_tap_store(4)
            store.data.copy_(taps)
            program = runner.late_program(rows, runner.new_kv(4 + 1 + 3), store, HintRule(1, 1))
            program.draft([LateDraft(0, 4, 30, 30), LateDraft(1, 4, 9, 9)])
            found.append((state.drafts[:2, :4], state.margins[:2, :4], state.num_drafts[:2]))
    (ids, margins, counts), (same_ids, same_margins, same_counts) = found
    assert counts.tolist() == same_counts.tolist() == [4, 4]
    assert ids.tolist() == same_ids.tolist()
    near(margins, same_margins)
