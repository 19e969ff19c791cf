"""MTP layers of checkpoints: found, run as others run them, and lawful."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from paceline import LLM, kernels
from paceline.backend.native.load import load_runner, pack_decoder
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.reference.head import ReferenceHead
from paceline.backend.seam import Features, FedBack, PassRequest
from paceline.core.errors import BadModelFile, ConfigError, UnsupportedModel
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.core.weight_source import WeightSource
from paceline.draft.registry import parse_drafters
from paceline.engine.assembly.build import Built, assemble, build
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from paceline.model.config import Sliding
from paceline.model.files import hf
from paceline.model.heads.mtp import drafters_within, is_mtp_name, load_mtp, usable_mtp
from paceline.model.renewed import renewed, with_arrays
from paceline.model.weights import load_model
from tests.draft.heads import trained_mtp
from tests.draft.mtp_files import KINDS, names_of, transformers, write_checkpoint
from tests.engine.same_text import KV_TYPES, STAIRCASE, run, target
from tests.model.helpers import logits_of, pack, write_gguf
from tests.oracles.mtp import MtpOracle

LOGITS = SamplingSpec("logits", SamplingParams())
IDS = [(11 * i * i + 5 * i) % 320 for i in range(40)]
DEEP = 3  # guesses after the text


def states_of(folder: Path) -> np.ndarray:
    """Return the target's normed last states by transformers, [len(IDS), hidden]."""
    values = json.loads((folder / "config.json").read_text())
    if values["model_type"] == "mimo":  # transformers has it as Qwen2, without the MTP layer
        config = transformers.Qwen2Config(**(values | {"model_type": "qwen2"}))
        model = transformers.Qwen2ForCausalLM.from_pretrained(folder, config=config)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        return model.model(torch.tensor([IDS])).last_hidden_state[0].numpy()


def guessed(runner: Any, states: np.ndarray, ids: list[int]) -> tuple[list[np.ndarray], list[int]]:
    """Return logits of every entry of a text and of `DEEP` guesses behind it, and those."""
    kv, pages, found, guesses = runner.new_kv(4), [2, 0, 3, 1], [], []

    def run(token_ids: list[int], features: np.ndarray, start: int) -> Any:
        packed = replace(pack([(token_ids, start, pages)]), first_keys=np.ones(1, np.int64))
        given = Features(runner.new_tap_store(1), (), FedBack(features, range(len(features))))
        return runner.launch(PassRequest(packed, kv, [LOGITS] * len(token_ids), features=given)).wait()

    result = run(ids[1:], states[: len(ids) - 1], 1)
    found += list(result.logits)
    for depth in range(DEEP):
        guesses.append(int(found[-1].argmax()))
        result = run(guesses[-1:], result.hidden[-1:], len(ids) + depth)
        found += list(result.logits)
    return found, guesses


def expected_of(kind: str, folder: Path, own: dict[str, np.ndarray], states: np.ndarray) -> list[np.ndarray]:
    """Return the same of the restatement, which follows the same guesses."""
    values = json.loads((folder / "config.json").read_text())
    target = {n: t.astype(np.float64) for n, t in load_file(folder / "model.safetensors").items()}
    oracle = MtpOracle(names_of(kind), {n: t.astype(np.float64) for n, t in own.items()}, target, values)
    found, state, text = [], states[0], list(IDS)
    for position in range(1, len(IDS) + DEEP):
        before = states[position - 1] if position <= len(IDS) - 1 else state
        logits, state = oracle.entry(text[position], before, position)
        found.append(logits)
        if position >= len(IDS) - 1:
            text.append(int(logits.argmax()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_guess_is_the_restatements(kind: str, tmp_path: Path) -> None:
    own = write_checkpoint(tmp_path, kind)
    states = states_of(tmp_path)
    expected = expected_of(kind, tmp_path, own, states)
    model = load_model(tmp_path)
    head = load_mtp(model)
    assert head is not None
    reference = ReferenceHead(head, ReferenceDecoder(model.config, model.weights, torch.float64))
    team = kernels.ThreadPool(2)
    native = load_runner(head, pack_decoder(model.config, model.weights, team, "f32", "f32"), None, "f32")
    for runner, bound in ((reference, 1e-5), (native, 2e-4)):
        logits, _ = guessed(runner, states.astype(np.float32), IDS)
        assert len(logits) == len(expected)
        for one, other in zip(logits, expected, strict=True):
            assert np.abs(one - other).max() < bound * np.abs(other).max()


def test_mimo_is_qwen2_with_more_tensors(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mimo")
    model = load_model(tmp_path)
    decoder = ReferenceDecoder(model.config, model.weights, torch.float32)
    head = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    expected = states_of(tmp_path) @ head.T
    assert np.abs(logits_of(decoder, IDS).numpy() - expected).max() < 1e-4


def test_glm_drafts_as_transformers_does(tmp_path: Path) -> None:
    """The reference is transformers' own MTP model, which reads the same files."""
    from transformers.modeling_layers import MtpModel  # from 5.20 on

    write_checkpoint(tmp_path, "glm")
    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4.*"]  # where it looks for them
    theirs = MtpModel.from_pretrained(main).eval()
    states = states_of(tmp_path)
    with torch.inference_mode():
        given = torch.from_numpy(states[None, :-1])
        positions = torch.arange(1, len(IDS))[None]
        hidden = theirs.forward_layer(0, given, positions, None, input_ids=torch.tensor([IDS[1:]]))
        expected = theirs._project_to_logits(hidden)[0].numpy()
    model = load_model(tmp_path)
    head = load_mtp(model)
    assert head is not None
    runner = ReferenceHead(head, ReferenceDecoder(model.config, model.weights, torch.float32))
    logits, _ = guessed(runner, states, IDS)
    assert np.abs(np.array(logits[: len(IDS) - 1]) - expected).max() < 1e-4


# Files -------------------------------------------------------------------------------------------


def changed(folder: Path, changes: dict[str, Any]) -> None:
    """Change tensors of a folder by name; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def test_what_is_wrong_with_an_mtp_layer_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path, "mimo")
    model, name = load_model(tmp_path), "model.mtp_layers.0.self_attn.k_proj.weight"
    whole = load_file(tmp_path / "model.safetensors")[name]
    for wrong, told in ((None, "lacks the tensor"), (whole[:3], "has shape")):
        changed(tmp_path, {name: wrong})
        with pytest.raises(BadModelFile, match=told):
            load_mtp(model)
        assert usable_mtp(model) is None
        assert "is left out" in caplog.text


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_an_expert_that_holds_no_number_is_told_while_it_is_loaded(tmp_path: Path, number: float) -> None:
    write_checkpoint(tmp_path, "glm")
    name = "model.layers.4.mlp.experts.1.down_proj.weight"
    broken = load_file(tmp_path / "model.safetensors")[name]
    broken[0, 0] = number
    changed(tmp_path, {name: broken})
    model = load_model(tmp_path)
    head, team = load_mtp(model), kernels.ThreadPool(1)
    assert head is not None
    told = r"NaN or infinity in 'layers\.0\.experts\.1\.down' of the MTP layer"
    with pytest.raises(BadModelFile, match=told):
        ReferenceHead(head, ReferenceDecoder(model.config, model.weights, torch.float32))
    for weights in ("f32", "int4_row"):
        target = pack_decoder(model.config, model.weights, team, "f32", "f32")
        with pytest.raises(BadModelFile, match=told):
            load_runner(head, target, None, weights)


def test_files_without_mtp_have_none(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "glm", with_mtp=False)
    assert usable_mtp(load_model(tmp_path)) is None
    assert drafters_within(None) == ()


@pytest.mark.parametrize("kind", ["glm", "glm, normed heads"])
def test_gguf_files_of_llama_cpp_keep_the_layer(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, kind)
    model = load_model(tmp_path)
    head = load_mtp(model)
    assert head is not None
    keys = {"rope.dimension_count": 8, "leading_dense_block_count": 1, "expert_weights_scale": 1.7}
    extra = {f"glm4moe.{key}": value for key, value in keys.items()}
    again = load_model(write_gguf(tmp_path / "model.gguf", model.config, model.weights, extra=extra, mtp=head))
    assert again.config.num_layers == model.config.num_layers
    found = load_mtp(again)
    assert found is not None
    assert found.config.taps == head.config.taps
    for name, tensor in head.weights.items():
        np.testing.assert_array_equal(found.weights[name], tensor)


def test_a_window_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen")
    model = load_model(tmp_path)
    sliding = Sliding(16, frozenset({0}), model.config.rope)
    with pytest.raises(UnsupportedModel, match="layers with a window"):
        load_mtp(replace(model, config=replace(model.config, sliding=sliding)))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("mtp.fc.weight", True),
        ("model.mtp_layers.0.input_proj.weight", True),
        ("model.layers.4.enorm.weight", True),
        ("model.layers.3.input_layernorm.weight", False),
        ("model.norm.weight", False),
    ],
)
def test_names_of_mtp_layers_are_known(name: str, known: bool) -> None:
    assert is_mtp_name(name, 4) == known


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "deepseek_v3"])
def test_targets_that_do_not_run_are_refused_in_words(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match="MTP"):
        hf.config_from_json({"model_type": kind})


# In the engine -----------------------------------------------------------------------------------


def built(folder: Path, draft: str, **changes: Any) -> Built:
    limits = Limits(num_rows=4, max_len=128, prefill_tokens=32)
    config = EngineConfig(model=str(folder), draft=draft, limits=limits, threads=1, kv_tokens=1024)
    return build(replace(config, **changes))


def requests() -> list[Request]:
    """Greedy and drawn texts, two that share a stem."""
    params = [SamplingParams(temperature=t, max_tokens=24, ignore_eos=True) for t in (0.0, 0.8)]
    return [Request(str(i), (*range(40, 70), 50 + i), params[i % 2], seed=i) for i in range(5)]


@pytest.mark.parametrize(
    ("kind", "backend", "weights"),
    [
        ("glm", "native", "int4"),
        ("mimo", "native", "int8"),
        ("qwen", "native", "bf16"),
        ("glm, normed heads", "reference", "f64"),
    ],
)
@pytest.mark.parametrize("branches", [0, 3])
def test_drafts_do_not_change_the_text(
    kind: str, backend: str, weights: str, branches: int, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, kind)
    asked = {"backend": backend, "weights": weights}
    expected = run(built(tmp_path, "off", **asked).engine, requests())
    engine = built(tmp_path, f"mtp:k=3,branches={branches}", **asked).engine
    assert run(engine, requests()) == expected
    assert engine.stats().drafter_failures == 0
    assert sum(c.drafted for c in engine.stats().drafters.values()) > 100


def test_auto_finds_the_mtp_layer_without_being_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mimo")
    costs = json.loads(Path(STAIRCASE).read_text())
    of_model = costs["drafters"]["draft-model"]
    costs["drafters"] = {"suffix": [], "grammar": [], "mtp": of_model}
    profile = tmp_path / "costs.json"
    profile.write_text(json.dumps(costs))
    found = built(tmp_path, "auto", weights="int8", backend="native", profile=str(profile))
    assert [*found.engine.drafting.drafters] == ["suffix", "grammar", "mtp"]
    assert any("within the target's files" in choice.value for choice in found.choices)
    assert run(found.engine, requests()) == run(built(tmp_path, "off", weights="int8").engine, requests())


def test_without_such_a_layer_mtp_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mimo", with_mtp=False)
    with pytest.raises(ConfigError, match="no MTP layer"):
        built(tmp_path, "mtp", backend="native")


def test_doctor_counts_the_layer(tmp_path: Path) -> None:
    own = write_checkpoint(tmp_path, "glm")
    model = load_model(tmp_path)
    (config,) = parse_drafters("auto", model.fingerprint, drafters_within(usable_mtp(model))).configs[-1:]
    assert config.num_weights(model) == sum(tensor.size for tensor in own.values())


def test_newer_weights_bring_their_layer(tmp_path: Path) -> None:
    """From a folder, from some tensors and from arrays; without any the layer stays."""
    write_checkpoint(tmp_path, "mimo")
    model, name = load_model(tmp_path), "model.mtp_layers.0.input_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    newer = {name: tensors[name] * 2}
    (tmp_path / "tensors").mkdir()
    save_file(newer, tmp_path / "tensors" / "model.safetensors")
    by_tensors = renewed(lambda: model, WeightSource(tensors=str(tmp_path / "tensors")))
    by_arrays = with_arrays(model, tensors | newer)
    first = load_mtp(model)
    assert first is not None
    for other in (by_tensors, by_arrays):
        head = load_mtp(other)
        assert head is not None
        assert head.weights.sources == ()  # no cache may take it for the first one
        np.testing.assert_array_equal(head.weights["fc"], first.weights["fc"] * 2)
        np.testing.assert_array_equal(head.weights["norm"], first.weights["norm"])


def test_an_engine_drafts_with_the_newer_layer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mimo")
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.mtp_layers.0.input_proj.weight"
    with LLM(str(tmp_path), draft="mtp:k=2", backend="native", weights="int8", max_len=128, threads=1) as llm:
        (drafter,) = llm.built.engine.drafting.drafters.values()
        report = llm.update_weights({**tensors, name: tensors[name] * 2}, "newer")
        assert report.rebuilt == ("mtp",)
        (newer,) = llm.built.engine.drafting.drafters.values()
        assert newer is not drafter
        (found,) = llm.generate([tuple(range(40, 70))], SamplingParams(temperature=0.0, max_tokens=12))
        assert found.figures.drafted_tokens


def test_an_engine_that_woke_drafts_with_the_newer_layer(tmp_path: Path) -> None:
    first, latest, name = tmp_path / "first", tmp_path / "latest", "model.mtp_layers.0.input_proj.weight"
    write_checkpoint(first, "mimo")
    tensors = load_file(shutil.copytree(first, latest) / "model.safetensors")
    save_file({**tensors, name: tensors[name] * 2}, latest / "model.safetensors", {"format": "pt"})
    with LLM(str(first), draft="mtp:k=2", backend="native", weights="int8", max_len=128, threads=1) as llm:
        llm.update_weights(latest, "newer")
        llm.release_memory()
        llm.resume_memory()
        loaded, head = llm._owned._loaded, load_mtp(load_model(latest))
        assert loaded is not None and loaded.head_within is not None and head is not None
        np.testing.assert_array_equal(loaded.head_within.weights["fc"], head.weights["fc"])
        (found,) = llm.generate([tuple(range(40, 70))], SamplingParams(temperature=0.0, max_tokens=12))
        assert found.figures.drafted_tokens


@pytest.mark.parametrize("types", ["f64", "int4"])
def test_drafts_of_a_trained_layer_are_kept_now_and_then(types: str) -> None:
    """Some guesses at three depths are right: states and tokens are where the layer was trained to find them."""
    loaded = replace(target(types), head_within=trained_mtp(target().decoder))  # type: ignore[arg-type]
    backend, limits = "reference" if types == "f64" else "native", Limits(4, 128, 48)
    config = EngineConfig(
        draft="mtp:k=3", backend=backend, weights=types, kv=KV_TYPES[types], kv_tokens=2048, limits=limits
    )
    engine = assemble(config, loaded).engine
    params = SamplingParams(temperature=0.7, max_tokens=60)
    run(engine, [Request(str(i), (40 + i, 50), params, seed=i) for i in range(6)])
    (counts,) = engine.stats().drafters.values()
    assert counts.accepted > 0.25 * counts.drafted > 0


def test_a_quantised_layer_is_read_with_its_scales(tmp_path: Path) -> None:
    """As published in FP8: blocks of 128 x 128 for the layer's matrices, beside plain ones."""
    write_checkpoint(tmp_path, "mimo")
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    name, tensors = "model.mtp_layers.0.self_attn.q_proj", load_torch(tmp_path / "model.safetensors")
    plain = tensors[f"{name}.weight"]
    tensors[f"{name}.weight"] = (plain * 2).to(torch.float8_e4m3fn)
    tensors[f"{name}.weight_scale_inv"] = torch.full((1, 1), 0.5)
    save_torch(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    head = load_mtp(load_model(tmp_path))
    assert head is not None
    expected = (plain * 2).to(torch.float8_e4m3fn).float() / 2
    np.testing.assert_array_equal(head.weights["layers.0.attn_q"], expected.numpy())
