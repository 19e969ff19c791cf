"""Nothing in a pass waits for the device: it runs on tensors without numbers, where a look at one raises.

Nor does a captured function send numbers of the host: a graph would refuse them, or keep those of its capture.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.backend.cuda import load as cuda
from paceline.backend.cuda.block_head import CudaBlockHead
from paceline.backend.cuda.device_pass import DevicePass
from paceline.backend.cuda.device_weights import Setup, WeightReader
from paceline.backend.cuda.graphs import Uncaptured
from paceline.backend.cuda.output_matrix import DraftOutput, OutputMatrix
from paceline.backend.seam import LateDraft
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.model.config import Rope, Sliding
from paceline.model.heads.checkpoint import Head
from paceline.model.heads.config import read_config
from tests.backend.backends import load_on_host
from tests.draft.heads import CORRECTED, draft_ids, drafter_of, head_values, random_weights, trained_head
from tests.engine.same_text import PLAIN, make_engine, target
from tests.tiny import PLAIN_FAMILIES, tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SLIDING = Sliding(9, frozenset({0, 2}), Rope(theta=1e4))


WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal"}


class OnDeviceAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what a graph cannot hold: looks at numbers, and numbers of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} waits for the device"
        if name in ("lift_fresh", "lift"):
            assert args[0].dim() == 0, "a tensor of the host's numbers"
        if name in ("index_put", "index_put_"):
            assert args[2].dim(), "a number for indexed places is sent by the host; index_fill_ takes it along"
        if name in ("index", "index_put", "index_put_"):
            assert all(each is None or each.dtype == torch.int64 for each in args[1]), "a mask as an index"
        return func(*args, **(kwargs or {}))


class Watched(Uncaptured[Any]):
    """Stand-in for a graph whose function must be one that a graph can hold."""

    begun = ended = 0  # an engine goes on without a drafter that raises

    def __init__(self, function: Callable[..., Any], inputs: Any) -> None:
        def watched(*own: torch.Tensor) -> Any:
            Watched.begun += 1
            with on_device_alone(), pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch, "from_numpy", None)
                result = function(*own)
            Watched.ended += 1
            return result

        super().__init__(watched, inputs)


def on_device_alone() -> OnDeviceAlone:
    return OnDeviceAlone()  # type: ignore[no-untyped-call]


def fake_pass() -> DevicePass:
    """Twelve tokens of three rows, of which nobody knows where."""
    return DevicePass(
        token_ids=torch.zeros(12, dtype=torch.int64),
        positions=torch.zeros(12, dtype=torch.int64),
        slots=torch.zeros(12, dtype=torch.int64),
        cu_len=torch.zeros(4, dtype=torch.int64),
        pages=torch.zeros(3, 5, dtype=torch.int64),
        wanted=torch.zeros(4, dtype=torch.int64),
        first_keys=torch.zeros(3, dtype=torch.int64),
    )


def test_a_look_at_a_number_would_be_found() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.zeros(3).sum().item()


def test_numbers_of_the_host_would_be_found() -> None:
    numbers, places = torch.zeros(3), torch.tensor([0, 2])

    def set_indexed() -> None:
        numbers[places] = 0

    wrong: list[Callable[[], object]] = [
        set_indexed,
        lambda: torch.tensor([1, 2]),
        lambda: numbers[numbers > 0],
        numbers.sum().item,
    ]
    for act in wrong:
        with pytest.raises(AssertionError), on_device_alone():
            act()
    with on_device_alone():
        numbers.index_fill_(0, places, 0.5)
        numbers[:2] = 1.0
        assert torch.where(numbers > 0.7, numbers, 0).shape == (3,)


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
def test_a_targets_pass_never_waits(family: str) -> None:
    config = tiny_config(family, num_layers=3, sliding=SLIDING if family.startswith("gemma") else None)
    decoder = load_on_host(config, tiny_weights(config), "f64", "f64", None)
    kv = decoder.new_kv(8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden, taps = decoder.forward(fake_pass(), kv, taps=(0, 3))
        assert decoder.logits(hidden).shape == (4, config.vocab_size)
    assert taps[3].shape == (12, config.hidden_size)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "block", CORRECTED])
def test_a_heads_pass_never_waits(kind: str) -> None:
    target = tiny_config(num_layers=3)
    config = read_config(head_values(kind, target), target)
    weights: Any = random_weights(config)
    decoder = load_on_host(target, tiny_weights(target), "f64", "f64", None)
    head = cuda.load_runner(Head(config, weights, draft_ids(config, 320)), decoder, None, None)
    kv, store = head.new_kv(8), head.new_tap_store(8)
    slots = torch.from_numpy(np.arange(12))
    with FakeTensorMode(allow_non_fake_inputs=True):
        tapped = {tap: torch.zeros(12, target.hidden_size, dtype=torch.float64) for tap in config.taps}
        store.put(slots, tapped)
        features = head.fuse(torch.zeros(12, config.tapped_size, dtype=torch.float16))
        if isinstance(head, CudaBlockHead):
            head.store_context(fake_pass(), features, kv)
            states = head.run_block(replace(fake_pass(), last_keys=torch.zeros(12, dtype=torch.int64)), kv)
            assert states.shape == (4, config.layers.hidden_size)
            return
        normed, fed_back = head.read_out(head.run_layers(fake_pass(), features, kv))
        assert normed.shape == fed_back.shape == (12, config.layers.hidden_size)


class SentAtOnce(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses copies to a device for which the host waits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, named = func(*args, **(kwargs or {})), kwargs or {}
        if func.overloadpacket.__name__ == "_to_copy" and args[0].is_cpu and not found.is_cpu:
            assert named.get("non_blocking"), "the host waits for a copy"
        return found


@pytest.mark.parametrize("kind", ["bf16", "fp8"])
def test_tokens_of_requests_are_sent_without_waiting(kind: str) -> None:
    """Drafting calls for them before it is launched, while the device computes the step before."""
    device = torch.device("meta")
    with SentAtOnce():  # type: ignore[no-untyped-call]
        reader = WeightReader({}, Setup(device, kind, "auto", fast=False))
        rows = torch.empty(50, 128, device=device)
        target = OutputMatrix(reader.packed(rows, kind), 50)
        output = DraftOutput(reader, rows[:9], np.arange(9), target, 8)
        output.set_request_tokens(np.array([20, 30]))
        assert output.num_tokens == 11
        with pytest.raises(AssertionError, match="waits for a copy"):
            torch.zeros(3).to(device)


LOOKUPS = ["ngram:k=3", "suffix:k=3", "oracle:k=3,head=ngram,file="]


HEADS = ["eagle3", "peagle", CORRECTED]


@pytest.mark.parametrize("draft", ["off", *LOOKUPS, "draft-model:model=noisy,k=3", *HEADS])
def test_a_step_and_its_drafting_never_wait(draft: str, tmp_path: Path) -> None:
    """Orders, gathering, the pass, choices, the verdict, the rows' advance; and all passes of the drafter."""
    spec = draft if ":" in draft or draft == "off" else _trained(draft)
    if spec.endswith("file="):
        file = tmp_path / "recorded.jsonl"
        file.write_text(json.dumps({"token_ids": [40] * 30}))
        spec += str(file)
    engine = make_engine(spec, PLAIN, types="cuda")
    for index in range(3):
        prompt = tuple(range(40, 49 + index))
        engine.add(Request(str(index), prompt, SamplingParams(max_tokens=30, ignore_eos=True), seed=index))
    for _ in range(5):
        engine.step()
    target: Any = engine.target
    batch = engine.scheduler.schedule(engine.plan())
    with FakeTensorMode(allow_non_fake_inputs=True):
        for drafter in engine.drafting.drafters.values():
            drafts = [LateDraft(r.row, 3, 7, 60) for r in batch.rows]
            drafter.program.draft(drafts)  # type: ignore[attr-defined]
        block, _ = target.rows.step_block(batch, [r.max_drafts for r in batch.rows])
        num_tokens = sum(1 + r.max_drafts for r in batch.rows)
        assert len(target.graphs.cut_to_budget(block, 2)) == len(batch.rows)
        outputs = target.graphs.run(block, num_tokens, num_tokens, 8)
    assert len(outputs.chosen) >= num_tokens


@pytest.mark.parametrize("draft", ["off", *LOOKUPS[:2], "draft-model:model=noisy,k=3", *HEADS])
def test_a_graph_can_hold_a_step_and_its_drafting(draft: str) -> None:
    spec = draft if ":" in draft or draft == "off" else _trained(draft)
    engine = make_engine(spec, PLAIN, types="cuda")
    rows: Any = engine.target.rows
    graphs: Any = engine.target.graphs  # type: ignore[attr-defined]
    rows.capture = graphs._capture = Watched
    Watched.begun = Watched.ended = 0
    for index in range(3):
        params = SamplingParams(max_tokens=8, temperature=index * 0.5, ignore_eos=True)
        engine.add(Request(str(index), (40, 41, 42, 40, 41), params, seed=index))
    for _ in range(6):
        engine.step()
    block = np.array([[0, 1, 2], [1, 1, 1], [3, 3, 3], [1, 1, 1]])
    assert len(graphs.cut_to_budget(block, 2)) == 3
    assert Watched.begun == Watched.ended > 5 + 3 * (draft != "off")


def _trained(kind: str) -> str:
    return f"{drafter_of(kind)}:model={trained_head(kind, target().decoder)},k=3"  # type: ignore[arg-type]
