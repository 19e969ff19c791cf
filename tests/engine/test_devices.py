"""Options of a backend with devices: checked against what its registry entry declares, and its own defaults."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.backend.device import Device
from paceline.backend.registry import BACKENDS
from paceline.backend.seam import Capabilities
from paceline.bench.doctor import device_checks
from paceline.bench.session import model_and_backend
from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.params import SamplingParams
from paceline.engine.assembly import build
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.assembly.kv_choices import choose_num_pages, kv_bytes, step_bytes
from paceline.engine.request_table import Limits
from paceline.model.shapes import SHAPES
from paceline.serve.asking import config_of
from tests.backend.backends import load_on_host
from tests.draft.heads import trained_head
from tests.engine.same_text import (
    MAX_LEN,
    SHARP,
    VOCAB,
    Request,
    assert_same,
    plain_answers,
    run,
    target,
)
from tests.tiny import tiny_config, tiny_tokenizer, tiny_weights

GPU, HOST = Device(torch_name="cuda"), Device(torch_name="cpu")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "native", "device": "cpu"}, "--device cpu: the native backend runs on this machine's cores"),
        ({"backend": "reference", "device": "cuda:0"}, "the reference backend runs on this machine's cores"),
        ({"backend": "cuda", "device": "cuda:64"}, "--device cuda:64: the cuda backend runs on cuda, cuda:N, cpu"),
        ({"backend": "cuda", "device": "cuda:-1"}, "runs on cuda, cuda:N, cpu"),
        ({"backend": "cuda", "device": "cuda:"}, "runs on cuda"),
        ({"backend": "cuda", "device": "cpu:1"}, "runs on cuda"),
        ({"backend": "cuda", "device": "mps"}, "runs on cuda"),
        ({"backend": "cuda", "device": 0}, "--device must be a string, not int"),
        ({"backend": "cuda", "numerics": "exakt"}, "has no --numerics exakt; did you mean 'exact'"),
        ({"backend": "native", "numerics": "fast"}, "computes in one way only: leave out --numerics fast"),
        ({"backend": "cuda", "kv": "f16"}, "the cuda backend has no --kv f16"),
        ({"backend": "cuda", "weights": "f64", "kv": "fp8"}, "the cuda backend has no --kv fp8"),
        ({"backend": "auto", "weights": "f65"}, "has no --weights f65"),
        ({"backend": "cud"}, "unknown backend 'cud'; did you mean 'cuda'"),
        ({"backend": 3}, "--backend must be a string, not int"),
    ],
)
def test_what_a_backend_has_not_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**options)


def test_types_devices_and_limits_are_the_backends_own() -> None:
    config = EngineConfig(backend="cuda")
    assert (config.weight_type, config.kv_type, config.numerics_mode) == ("bf16", "bf16", "exact")
    assert config.placement.target == GPU
    assert config.usual_limits == Limits(256, 8192, 4096)
    assert EngineConfig(backend="cuda", device="cpu").usual_limits == Limits()
    assert EngineConfig(backend="cuda", weights="fp8", kv="fp8", numerics="fast").numerics_mode == "fast"
    assert EngineConfig(backend="cuda", device="cuda:1").placement.target == Device(torch_name="cuda:1")
    plain = EngineConfig(backend="native")
    assert (plain.numerics_mode, plain.placement.target, plain.usual_limits) == (None, None, Limits())


def test_flags_override_the_usual_limits_one_by_one() -> None:
    parser = ArgumentParser()
    add_engine_arguments(parser)
    read = partial(lambda *words: engine_config(parser.parse_args(words)).limits)
    assert read("--backend", "cuda") == Limits(256, 8192, 4096)
    assert read("--backend", "cuda", "--max-rows", "8") == Limits(8, 8192, 4096)
    assert read("--backend", "cuda", "--device", "cpu", "--max-len", "99") == Limits(max_len=99)
    assert read("--backend", "native") == Limits()
    with pytest.raises(ConfigError, match="--max-rows must be between"):
        read("--max-rows", "0")
    assert config_of("default", {"backend": "cuda", "max_len": 64}).limits == Limits(256, 64, 4096)
    with pytest.raises(ConfigError, match="--backend must be a string"):
        config_of("default", {"backend": 7})


def test_kv_takes_its_share_of_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less with drafters, which need weights and stores of their own; no other bound than what rows could use."""
    monkeypatch.setattr("paceline.backend.cuda.device_memory.free_bytes", lambda device: 16 * 1000 * 1000)
    config, limits = EngineConfig(backend="cuda", draft="off"), Limits(256, 8192)

    def chosen(config: EngineConfig, bytes_per_token: int) -> tuple[int, str]:
        return choose_num_pages(config, limits, kv_bytes(config) // (bytes_per_token * PAGE_TOKENS))

    assert chosen(config, 1) == (256 * 512, "room for 256 requests of 8192 tokens")
    assert chosen(config, 1000) == (900, "up to 90% of the free memory")
    assert chosen(replace(config, draft="ngram"), 1000) == (500, "up to 50% of the free memory")
    with pytest.raises(ConfigError, match="no memory left for the KV cache"):
        chosen(config, 1 << 20)


def test_kv_leaves_steps_the_memory_that_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of the largest graph, states of the longest step, and graphs: 1.5 GiB of an 8 billion model."""
    free = [17 << 29]  # as on a card of 24 GB
    monkeypatch.setattr("paceline.backend.cuda.device_memory.free_bytes", lambda device: free[0])
    model, config = SHAPES["llama-3.1-8b"], EngineConfig(backend="cuda", draft="off")
    decoder: Any = SimpleNamespace(config=model, capabilities=Capabilities(token_buckets=(1, 1024)))
    room = step_bytes(config, config.usual_limits, decoder)
    assert room == 1024 * 128256 * 4 + 4096 * 2 * (3 * 14336 + 5 * 4096) + (1 << 29)
    assert kv_bytes(config, of_steps=room) == free[0] - room < int(0.9 * free[0])
    assert kv_bytes(replace(config, sharers=2), of_steps=room) == free[0] // 2 - room
    assert kv_bytes(replace(config, draft="ngram"), of_steps=room) == free[0] // 2
    assert step_bytes(replace(config, weights="f32"), config.usual_limits, decoder) > room
    assert step_bytes(replace(config, device="cpu"), config.usual_limits, decoder) == 0
    free[0] = 100 << 30
    assert kv_bytes(config, of_steps=room) == 90 << 30
    free[0] = 1 << 30
    assert kv_bytes(config, of_steps=room) == 0


def test_the_doctor_says_what_the_chosen_backend_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.backend.cuda.probe.read_driver", lambda: None)
    native = list(device_checks(EngineConfig(backend="native")))
    assert all(check.ok for check in native)
    assert native[-1].text == "there is no NVIDIA GPU here; only --backend cuda needs it"
    assert not all(check.ok for check in device_checks(EngineConfig(backend="cuda")))
    assert all(check.ok for check in device_checks(EngineConfig(backend="cuda", device="cpu")))


# An engine on it ---------------------------------------------------------------------------------


def engine_on_host(draft: str, **changes: Any) -> Any:
    config = tiny_config(vocab_size=VOCAB, num_layers=3, eos_ids=(VOCAB - 1,))
    decoder = load_on_host(config, tiny_weights(config, seed=4, embed_scale=SHARP), "f64", "f64", None)
    loaded = build.Loaded("tiny", decoder, tiny_tokenizer(VOCAB), None, "tiny")
    options = EngineConfig(
        draft=draft,
        backend="cuda",
        device="cpu",
        weights="f64",
        kv_tokens=4096,
        limits=Limits(4, MAX_LEN),
        **changes,
    )
    return build.assemble(options, loaded), options, loaded


REQUESTS = [
    Request(
        str(i), (*range(40, 60), *(40 + i, 50, 60) * 4), SamplingParams(temperature=i % 3 / 2, max_tokens=24), i
    )
    for i in range(6)
]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_it_writes_what_the_reference_writes(overlap: str) -> None:
    head = trained_head("eagle3", target().decoder)  # type: ignore[arg-type]
    expected = plain_answers(REQUESTS)
    for draft in ("off", f"eagle3:model={head},k=3"):
        built, _, _ = engine_on_host(draft, overlap=overlap)
        assert_same(expected, run(built.engine, REQUESTS))


def test_banner_and_bench_name_device_and_numerics() -> None:
    built, config, loaded = engine_on_host("off", numerics="fast")
    said = {choice.what: f"{choice.value}: {choice.why}" for choice in built.choices}
    assert said["backend"].startswith("cuda, f64, this machine's cores, exact numerics: Triton kernels")
    assert said["backend"].endswith("as asked")
    assert "threads" in said
    backend = model_and_backend(config, loaded)["backend"]
    assert (backend["name"], backend["device"], backend["numerics"]) == ("cuda", "cpu", "fast")
    assert BACKENDS["cuda"].load("fast") is not BACKENDS["cuda"].load()
