"""Draft heads and cut models on a host in float64: pass by pass what the reference's say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from paceline.backend.cuda import load as cuda
from paceline.backend.cuda.tap_store import DeviceTapStore
from paceline.backend.device import Device
from paceline.backend.reference import block_head as reference
from paceline.backend.reference import cut_model as reference_cut
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.seam import Features, FedBack, PassRequest
from paceline.core.errors import ConfigError
from paceline.core.nouns import SamplingSpec, Taps
from paceline.core.params import SamplingParams
from paceline.model.heads.checkpoint import Head
from paceline.model.heads.config import read_config
from paceline.model.heads.cut_model import CutModel
from tests.backend.backends import load_on_host
from tests.draft.heads import draft_ids, head_values, random_weights
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from paceline.backend.seam import PassResult

TARGET = tiny_config(num_layers=3)
WEIGHTS = tiny_weights(TARGET)
IDS = [(7 * i * i + 3 * i) % TARGET.vocab_size for i in range(120)]
# Two rows: their texts, the pages of each, and how many of their tokens are known to the head.
TEXTS = [(IDS[:37], [2, 0, 4]), (IDS[50:61], [5, 1])]
NUM_PAGES = 7
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {}),
    "eagle with norms": ("eagle", {"layernorms": True}),
    "eagle3": ("eagle3", {}),
    "eagle3, norm before fc": ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}),
    "eagle3.1": ("eagle3", {"fc_norm": True, "norm_output": True}),
    "peagle": ("peagle", {}),
}


def spec(position: int, kind: str = "noisy") -> SamplingSpec:
    return SamplingSpec(kind, SamplingParams(temperature=0.7), seed=5, position=position, margin=True)  # type: ignore[arg-type]


def targets() -> tuple[Any, ReferenceDecoder]:
    return load_on_host(TARGET, WEIGHTS, "f64", "f64", None), ReferenceDecoder(TARGET, WEIGHTS, torch.float64)


def both_heads(case: str) -> list[tuple[Any, Any]]:
    """(head, target) on both backends, the reference last."""
    kind, changes = CASES[case]
    config = read_config(head_values(kind, TARGET, **changes), TARGET)
    head = Head(config, random_weights(config), draft_ids(config, TARGET.vocab_size))  # type: ignore[arg-type]
    ours, twin = targets()
    return [
        (cuda.load_runner(head, ours, None, None), ours),
        (reference.load_runner(head, twin, None, None), twin),
    ]


def close(a: Any, b: Any) -> None:
    """The reference rounds features of guesses to float32."""
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def same(results: list[PassResult]) -> None:
    """What two backends say agrees."""
    got, expected = results
    np.testing.assert_array_equal(got.token_ids, expected.token_ids)
    for name in ("logits", "margins", "hidden"):
        a, b = getattr(got, name), getattr(expected, name)
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b)


def tapped(head: Any, target: Any) -> Any:
    """A tap store with the states of both texts' committed tokens."""
    pieces = [(ids, 0, pages) for ids, pages in TEXTS]
    packed = pack(pieces)
    result = run_pass(
        target, replace(packed, wanted=np.empty(0, np.int64)), target.new_kv(NUM_PAGES), (), taps=head.config.taps
    )
    store = head.new_tap_store(NUM_PAGES)
    store.write(Taps(result.taps, packed.cu_len, packed.slots), [len(ids) for ids, _ in TEXTS])
    return store


@pytest.mark.parametrize("case", [c for c, (kind, _) in CASES.items() if kind.startswith("eagle")])
def test_a_head_catches_up_drafts_and_reads_what_it_drafted(case: str) -> None:
    """A pass over known tokens; one over the last known ones; one over guesses; and one over both at once."""
    rounds: list[list[PassResult]] = []
    for head, target in both_heads(case):
        store, kv, said = tapped(head, target), head.new_kv(NUM_PAGES), []

        def run(parts: Any, wanted: Any, specs: Any, **of: Any) -> PassResult:
            packed = replace(pack(parts), wanted=np.array(wanted, np.int64), first_keys=np.array([1, 1]))
            return head.launch(PassRequest(packed, kv, specs, features=Features(store, **of))).wait()  # noqa: B023

        early = [(ids[1:-3], 1, pages) for ids, pages in TEXTS]
        run(early, [], (), pieces=[(i, 0, len(ids) - 4) for i, (ids, _) in enumerate(TEXTS)])
        late = [(ids[-3:], len(ids) - 3, pages) for ids, pages in TEXTS]
        known = [(i, len(ids) - 4, 3) for i, (ids, _) in enumerate(TEXTS)]
        said.append(run(late, [2, 5], [spec(40), spec(41, "logits")], pieces=known))
        guesses = [([11 + i], len(ids), pages) for i, (ids, pages) in enumerate(TEXTS)]
        fed_back = FedBack(said[0].hidden, [1, 0])
        said.append(run(guesses, [0, 1], [spec(42), spec(43)], pieces=[], fed_back=fed_back))
        mixed = [late[0], guesses[1]]
        said.append(
            run(mixed, [2, 3], [spec(1), spec(2)], pieces=known[:1], fed_back=FedBack(said[1].hidden, [1]))
        )
        rounds.append(said)
    for results in zip(*rounds, strict=True):
        same(list(results))


def test_parallel_guesses() -> None:
    results: list[PassResult] = []
    for head, target in both_heads("peagle"):
        store, kv = tapped(head, target), head.new_kv(NUM_PAGES)
        pieces = [([*ids[1:], 300, 300], 1, pages) for ids, pages in TEXTS]
        known = [(i, 0, len(ids) - 1) for i, (ids, _) in enumerate(TEXTS)]
        wanted = np.array([35, 36, 37, 45, 46, 47])
        packed = replace(pack(pieces), wanted=wanted)
        specs = [spec(30 + i, "logits" if i == 2 else "noisy") for i in range(6)]
        results.append(head.launch(PassRequest(packed, kv, specs, features=Features(store, known))).wait())
    same(results)


@pytest.mark.parametrize("case", ["eagle", "eagle3"])
def test_tokens_of_requests_are_written_with_the_targets_rows(case: str) -> None:
    results = []
    for head, target in both_heads(case):
        others = np.setdiff1d(np.arange(TARGET.vocab_size), draft_ids(head.config, TARGET.vocab_size))[[4, 1]]
        store, kv = tapped(head, target), head.new_kv(NUM_PAGES)
        pieces = [(ids[1:], 1, pages) for ids, pages in TEXTS]
        features = Features(store, [(i, 0, len(ids) - 1) for i, (ids, _) in enumerate(TEXTS)])
        packed = replace(pack(pieces), wanted=np.array([35, 45]))
        request = PassRequest(packed, kv, [spec(3, "logits")] * 2, features=features)
        plain = head.launch(request).wait().logits
        head.set_request_tokens(others)
        more = head.launch(request).wait().logits
        assert np.isneginf(plain[:, others]).all()
        assert np.isfinite(more[:, others]).all()
        head.set_request_tokens(others[:0])
        close(head.launch(request).wait().logits, plain)
        results.append(more)
    close(*results)


def test_a_cut_model_writes_some_of_its_targets_tokens() -> None:
    config = replace(TARGET, num_layers=1, intermediate_size=24)
    weights: Any = tiny_weights(config, seed=9)
    ids = np.sort(np.random.default_rng(1).permutation(TARGET.vocab_size)[:200])
    model = CutModel(config, {n: w for n, w in weights.items() if n != "embed"}, ids)
    ours, twin = targets()
    packed = pack([(text, 0, pages) for text, pages in TEXTS])
    drafters: list[Any] = [
        cuda.load_cut_model(model, ours, None, None),
        reference_cut.load_cut_model(model, twin, None, None),
    ]
    specs = [spec(i, "logits" if i % 3 else "noisy") for i in range(len(packed.wanted))]
    for extra in (ids[:0], np.setdiff1d(np.arange(TARGET.vocab_size), ids)[:3]):
        for drafter in drafters:
            drafter.set_request_tokens(extra)
        results = [run_pass(d, packed, d.new_kv(NUM_PAGES), specs, taps=(0, 1)) for d in drafters]
        same(results)
        close(results[0].taps[1], results[1].taps[1])
    assert drafters[0].weight_bytes < ours.weight_bytes
    assert "203 tokens" in drafters[0].describe()


def test_a_drafter_may_have_a_type_of_its_own() -> None:
    kind, changes = CASES["eagle3"]
    config = read_config(head_values(kind, TARGET, **changes), TARGET)
    head = Head(config, random_weights(config), draft_ids(config, TARGET.vocab_size))  # type: ignore[arg-type]
    target = load_on_host(TARGET, WEIGHTS, "bf16", "bf16", None)
    small = cuda.load_runner(head, target, None, "fp8")
    assert small.weight_type == "fp8"
    assert small.weight_bytes < 0.7 * cuda.load_runner(head, target, None, None).weight_bytes
    with pytest.raises(ConfigError, match="no drafters of int9; did you mean 'int4'"):
        cuda.load_runner(head, target, None, "int9")


@pytest.mark.parametrize(
    ("compute", "types", "said"),
    [
        ((8, 0), ("fp8", "auto"), "weights of fp8 or int4 need .* 8.9"),
        ((8, 6), ("int4", "auto"), "weights of fp8 or int4 need .* 8.9"),
        ((8, 9), ("fp8", "fp8"), "fp8 KV needs .* 9.0"),
    ],
)
def test_types_that_a_gpu_does_not_have_are_refused(
    compute: tuple[int, int], types: tuple[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Targets, heads and cut models are refused before their weights are read."""
    target = load_on_host(TARGET, WEIGHTS, *types, None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: compute)
    monkeypatch.setattr(cuda, "torch_device", lambda _: torch.device("cuda", 0))
    config = read_config(head_values("eagle3", TARGET), TARGET)
    head, device = Head(config, {}, None), Device(torch_name="cuda:0")
    for load in (
        lambda: cuda.load_decoder(TARGET, {}, *types, None),
        lambda: cuda.load_runner(head, target, device, None),
        lambda: cuda.load_cut_model(CutModel(TARGET, {}, np.arange(9)), target, device, None),
    ):
        with pytest.raises(ConfigError, match=said):
            load()


# Taps --------------------------------------------------------------------------------------------


def test_taps_are_kept_by_slot_clamped_and_only_as_many_as_counted() -> None:
    store = DeviceTapStore(4, (3, 1), 2, torch.device("cpu"))
    assert store.bytes_per_token == 8
    states = {
        1: torch.arange(14.0, dtype=torch.float64).view(7, 2),
        3: torch.arange(100.0, 114.0, dtype=torch.float64).view(7, 2) * 1000,
    }
    cu_len, slots = np.array([0, 4, 7]), np.array([16, 17, 18, 19, 40, 41, 42])
    store.write(Taps(states, cu_len, slots), [2, 3])  # type: ignore[arg-type]
    pages = np.array([[1, 0, 0], [3, 0, 2]])
    read = store.read(pages, [(0, 0, 3), (1, 40, 2)])
    assert read.dtype == torch.float16
    assert read[:, 2:].tolist() == [[0, 1], [2, 3], [0, 0], [8, 9], [10, 11]]
    assert read[0, 0] == 65504
    assert not read[2].any()
    assert not store.data[43:].any()
