"""MTP layers of checkpoints: found, run as others run them, and lawful."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from paceline import kernels
from paceline.backend.native.load import load_runner, pack_decoder
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.reference.head import ReferenceHead
from paceline.backend.seam import Features, FedBack, PassRequest
from paceline.core.errors import BadModelFile, ConfigError, UnsupportedModel
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.model.heads.mtp import check_numbers, drafters_within, is_mtp_name, load_mtp, usable_mtp
from paceline.model.weights import load_model
from tests.draft.mtp_files import KINDS, names_of, transformers, write_checkpoint
from tests.model.helpers import logits_of, pack
from tests.oracles.mtp import MtpOracle

if TYPE_CHECKING:
    from pathlib import Path

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
    check_numbers(head)
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
    """Of transformers' own MTP model, which reads the same files."""
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
