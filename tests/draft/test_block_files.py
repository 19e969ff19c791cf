"""Block heads in both formats: what is read, and what is refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import BadModelFile, DrafterMismatch, UnsupportedModel
from paceline.model.files.hf import LAYER_NAMES
from paceline.model.heads.block_format import TENSOR_NAMES
from paceline.model.heads.checkpoint import head_config, load_head
from paceline.model.heads.config import BLOCK_HEAD, head_shapes, read_config
from tests.draft.test_head_files import DRAFT_VOCAB, LAYER, TARGET, write

LAYERS = {**LAYER, "model_type": "qwen3", "num_hidden_layers": 2, "rope_theta": 5000.0}
PROJECT = {  # as `speculators` writes it; older versions name the target's family
    "speculators_model_type": "dflash",
    "architectures": ["DFlashDraftModel"],
    "transformer_layer_config": {**LAYERS, "model_type": "llama"},
    "draft_vocab_size": DRAFT_VOCAB,
    "aux_hidden_state_layer_ids": [1, 3, 5],
    "block_size": 6,
    "mask_token_id": 7,
    "sample_from_anchor": False,
}
CORRECTED = {
    **PROJECT,
    "speculators_model_type": "dspark",
    "architectures": ["DSparkDraftModel"],
    "sample_from_anchor": True,
    "markov_rank": 10,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
AUTHORS = {
    **LAYERS,
    "architectures": ["DFlashDraftModel"],
    "block_size": 6,
    "num_target_layers": 6,
    "layer_types": ["full_attention"] * 2,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2, 4]},
}
AUTHORS_CORRECTED = {
    **LAYERS,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 6,
    "mask_token_id": 7,
    "target_layer_ids": [0, 2, 4],
    "markov_rank": 10,
    "markov_head_type": "gated",
    "enable_confidence_head": True,
}
FORMATS = {
    "speculators": PROJECT,
    "speculators, corrected": CORRECTED,
    "speculators, gated": {**CORRECTED, "markov_head_type": "gated"},
    "speculators, rnn": {**CORRECTED, "markov_head_type": "rnn", "confidence_head_with_markov": False},
    "authors": AUTHORS,
    "authors, corrected": AUTHORS_CORRECTED,
}
_FILE_NAMES = {canonical: name for name, canonical in TENSOR_NAMES.items()} | {
    "fc": "fc.weight",
    "norm": "norm.weight",
    "head": "lm_head.weight",
    "embed": "embed_tokens.weight",
}


def block_file_name(canonical: str) -> str:
    """A tensor's name in a file."""
    if canonical in _FILE_NAMES:
        return _FILE_NAMES[canonical]
    _, number, short = canonical.split(".")
    return f"layers.{number}.{LAYER_NAMES[short]}"


def block_tensors(values: dict[str, Any]) -> dict[str, Any]:
    """Random tensors by their names in the file."""
    random, shapes = np.random.default_rng(0), head_shapes(read_config(values, TARGET))
    named = {block_file_name(n): random.standard_normal(shape, dtype=np.float32) for n, shape in shapes.items()}
    if "draft_vocab_size" not in values:
        return named
    ids = np.sort(random.permutation(TARGET.vocab_size)[:DRAFT_VOCAB])
    return named | {"d2t": ids - np.arange(DRAFT_VOCAB), "t2d": np.isin(np.arange(TARGET.vocab_size), ids)}


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_arrives(name: str, tmp_path: Path) -> None:
    values = FORMATS[name]
    tensors = block_tensors(values)
    head = load_head(write(tmp_path, values, tensors), TARGET)
    for canonical, shape in head_shapes(head.config).items():
        there = tensors[block_file_name(canonical)]
        assert head.weights[canonical].shape == shape
        assert np.array_equal(head.weights[canonical], there)
    in_draft = tensors.get("t2d", np.ones(TARGET.vocab_size, bool))
    assert np.array_equal(head.token_ids, np.flatnonzero(in_draft))
    assert head.config.own_output == ("draft_vocab_size" in values)
    assert head.config.layers.facts.qk_norm


def test_both_formats_say_the_same_in_their_own_words() -> None:
    project, authors = read_config(PROJECT, TARGET), read_config(AUTHORS, TARGET)
    assert project.algorithm is authors.algorithm is BLOCK_HEAD
    assert project.taps == authors.taps == (1, 3, 5)
    assert project.mask_token_id == authors.mask_token_id == 7
    assert project.block == authors.block
    assert project.block is not None
    assert (project.block.num_drafts, project.block.first) == (5, 1)


def test_queries_of_dspark_guess_the_token_behind_them() -> None:
    for values in (CORRECTED, AUTHORS_CORRECTED):
        block = read_config(values, TARGET).block
        assert block is not None
        assert (block.num_drafts, block.first, block.rank, block.confidence) == (6, 0, 10, True)
    said = read_config({**CORRECTED, "sample_from_anchor": False}, TARGET).block
    assert said is not None
    assert said.num_drafts == 5


def test_a_head_of_the_whole_vocabulary_may_bring_its_own(tmp_path: Path) -> None:
    """The heads of DSpark's authors bring an output matrix and an embedding."""
    own = np.random.default_rng(1).standard_normal((2, 320, TARGET.hidden_size), np.float32)
    tensors = block_tensors(AUTHORS_CORRECTED) | {"lm_head.weight": own[0], "embed_tokens.weight": own[1]}
    head = load_head(write(tmp_path, AUTHORS_CORRECTED, tensors), TARGET)
    assert head.config.own_output
    assert np.array_equal(head.weights["head"], own[0])
    assert np.array_equal(head.weights["embed"], own[1])


def test_a_head_without_output_rows_is_as_wide_as_its_target(tmp_path: Path) -> None:
    values = {**AUTHORS, "target_hidden_size": TARGET.hidden_size, "hidden_size": 2 * TARGET.hidden_size}
    embed = np.zeros((TARGET.vocab_size, 2 * TARGET.hidden_size), np.float32)
    with pytest.raises(DrafterMismatch, match="output matrix"):
        load_head(write(tmp_path, values, block_tensors(values) | {"embed_tokens.weight": embed}), TARGET)


def test_a_window_that_no_layer_has_is_read_past() -> None:
    layers: dict[str, Any] = {**LAYERS, "sliding_window": 6, "max_window_layers": 0}
    kinds = {"layer_types": ["full_attention"] * 2, "use_sliding_window": True}
    for change in (kinds, {"layer_types": ["sliding_attention"] * 2}, {}):  # Qwen's windows are off by default
        config = read_config({**PROJECT, "transformer_layer_config": {**layers, **change}}, TARGET)
        assert config.layers.sliding is None


def test_a_dspark_file_without_its_keys_has_all_parts() -> None:
    short = {key: CORRECTED[key] for key in PROJECT}
    block = read_config(short, TARGET).block
    assert block is not None
    assert (block.corrector, block.rank, block.confidence_reads_token) == ("vanilla", 256, True)


def test_a_list_of_names_that_is_none_is_read_past() -> None:
    assert read_config({**PROJECT, "architectures": 5}, TARGET).block == read_config(PROJECT, TARGET).block


def test_a_shape_is_a_head_without_files() -> None:
    config = head_config(Path("shape:block/64"), TARGET)
    assert config.block is not None
    assert (config.draft_vocab_size, config.block.size) == (64, 8)


CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "no mask": (AUTHORS, {"dflash_config": {"target_layer_ids": [1]}}, BadModelFile, "mask_token_id"),
    "a mask that is no token": (PROJECT, {"mask_token_id": 320}, DrafterMismatch, "mask token"),
    "no layers": (AUTHORS, {"dflash_config": {"mask_token_id": 7}}, BadModelFile, "target_layer_ids"),
    "layers that are not there": (PROJECT, {"aux_hidden_state_layer_ids": [1, 30]}, DrafterMismatch, "30"),
    "another model": (AUTHORS, {"num_target_layers": 28}, DrafterMismatch, "28 layers.*another model"),
    "another width": (PROJECT, {"target_hidden_size": 4096}, DrafterMismatch, "another model"),
    "a corrector of other tokens": (
        CORRECTED,
        {"transformer_layer_config": {**LAYERS, "vocab_size": 330}},
        DrafterMismatch,
        "330 tokens",
    ),
    "no block": (PROJECT, {"block_size": 1}, BadModelFile, "block_size = 1"),
    "a long block": (PROJECT, {"block_size": 65}, BadModelFile, "block_size = 65"),
    "no number": (PROJECT, {"block_size": "8"}, BadModelFile, "whole number"),
    "an unknown corrector": (CORRECTED, {"markov_head_type": "lstm"}, UnsupportedModel, "lstm"),
    "a corrector too wide": (CORRECTED, {"markov_rank": 5000}, BadModelFile, "markov_rank"),
    "no corrector to read": (CORRECTED, {"markov_rank": 0}, BadModelFile, "confidence_head_with_markov"),
    "Domino": (PROJECT, {"projector_type": "domino"}, UnsupportedModel, "domino"),
    "DFlash2": (AUTHORS, {"dflash_config": {"selector_rank": 256}}, UnsupportedModel, "DFlash2"),
    "capped logits": (AUTHORS, {"final_logit_softcapping": 20.0}, UnsupportedModel, "final_logit_softcapping"),
    "a state that begins with the anchor": (
        CORRECTED,
        {"markov_head_type": "rnn", "sample_from_anchor": False},
        UnsupportedModel,
        "sample_from_anchor = true",
    ),
    "windows of the last layers": (
        PROJECT,
        {
            "transformer_layer_config": {
                **LAYERS,
                "sliding_window": 64,
                "use_sliding_window": True,
                "max_window_layers": 1,
            }
        },
        UnsupportedModel,
        "window",
    ),
    "windows of layers as Llama's": (
        PROJECT,
        {
            "transformer_layer_config": {
                **LAYERS,
                "model_type": "llama",
                "sliding_window": 64,
                "layer_types": ["full_attention", "sliding_attention"],
            }
        },
        UnsupportedModel,
        "window",
    ),
    "windows": (
        AUTHORS,
        {
            "layer_types": ["sliding_attention"] * 2,
            "sliding_window": 64,
            "use_sliding_window": True,
            "max_window_layers": 0,
        },
        UnsupportedModel,
        "window",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_does_not_fit_is_refused(name: str) -> None:
    values, change, error, reason = CONFIGS[name]
    with pytest.raises(error, match=reason):
        read_config({**values, **change}, TARGET)


FILES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a missing tensor": ({"markov_head.markov_w2.weight": None}, BadModelFile, "corrector.out"),
    "another shape": ({"hidden_norm.weight": np.ones(7, np.float32)}, DrafterMismatch, "hidden_norm"),
    "no number": ({"confidence_head.proj.bias": np.full(1, np.nan, np.float32)}, BadModelFile, "NaN"),
    "no map": ({"d2t": None}, BadModelFile, "d2t"),
    "a map of two to one": ({"d2t": -np.arange(DRAFT_VOCAB)}, BadModelFile, "two of its tokens"),
    "a map that leads out": ({"d2t": np.full(DRAFT_VOCAB, 300)}, DrafterMismatch, "320"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    change, error, reason = FILES[name]
    tensors = {n: t for n, t in (block_tensors(CORRECTED) | change).items() if t is not None}
    with pytest.raises(error, match=reason):
        dict(load_head(write(tmp_path, CORRECTED, tensors), TARGET).weights)
