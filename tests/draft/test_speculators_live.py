"""The installed `speculators` package and Paceline: each reads what the other writes, and answers alike.

docs/develop/testing.md says how to run it. `test_speculators_files.py` is the part that needs no package.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.backend.reference.head import fuse, read_out, run_layers
from paceline.cli import main
from paceline.model.heads.checkpoint import load_head
from tests.draft.speculators_answers import TARGET, farthest
from tests.draft.test_block_files import AUTHORS, block_tensors
from tests.draft.test_head_drafter import requests
from tests.draft.test_head_files import write
from tests.draft.test_head_forward import causal
from tests.engine.same_text import PLAIN, VOCAB, assert_same, make_engine, plain_answers, run, target
from tests.train.test_run import command
from tests.train.toy import toy_config, write_answers, write_target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.model.config import ModelConfig

speculators = pytest.importorskip("speculators", reason="the speculators package is not installed")
theirs = pytest.importorskip("tests.draft.write_with_speculators")
pytestmark = pytest.mark.filterwarnings("default")  # those of the package are its own business
CLOSE = 1e-4  # of the largest logit
RNN = {"markov_rank": theirs.RANK, "markov_head_type": "rnn"}
ROPE = {"rope_theta": 500.0, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Changes to a head's config, and to that of its layers.
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dflash": ("dflash", {}, {}),
    "from the anchor": ("dflash", {"sample_from_anchor": True}, {}),
    "dspark as it is by default": ("dspark", {}, {}),
    "gated": ("dspark", {"markov_rank": theirs.RANK, "markov_head_type": "gated"}, {}),
    "rnn": ("dspark", RNN, {}),
    "confidence of the state": ("dspark", RNN | {"confidence_head_with_markov": False}, {}),
    "no confidence": ("dspark", RNN | {"enable_confidence_head": False}, {}),
    "behind the anchor": ("dspark", {"markov_rank": theirs.RANK, "sample_from_anchor": False}, {}),
    "no corrector": ("dspark", {"markov_rank": 0, "confidence_head_with_markov": False}, {}),
    "the whole vocabulary": ("dspark", RNN | {"draft_vocab_size": theirs.VOCAB}, {}),
    "taps in any order": ("dflash", {"aux_hidden_state_layer_ids": [3, 0, 1, 2, 4]}, {}),
    "one draft": ("dspark", RNN | {"block_size": 1}, {}),
    "biases": ("dflash", {}, {"attention_bias": True}),
    "llama3": ("dflash", {}, {"rope_parameters": ROPE | LLAMA3 | {"original_max_position_embeddings": 64}}),
    "linear": ("dflash", {}, {"rope_parameters": ROPE | {"rope_type": "linear"}}),
    "yarn": (
        "dflash",
        {},
        {"rope_parameters": ROPE | {"rope_type": "yarn", "original_max_position_embeddings": 32}},
    ),
    "windows of no layer": (
        "dflash",
        {},
        {"sliding_window": 6, "use_sliding_window": True, "layer_types": ["full_attention"] * 2},
    ),
}
NORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "one norm of all taps": {"norm_before_fc": True},
    "a norm of each tap": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("toy")
    write_target(folder / "target")
    write_answers(folder / "data", 40)
    yield folder


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("name", BLOCKS)
def test_their_block_heads_answer_alike(name: str, tmp_path: Path) -> None:
    algorithm, head, layers = BLOCKS[name]
    theirs.write(tmp_path, theirs.block_model(algorithm, theirs.block_layers(**layers), **head))
    given = load_file(tmp_path / "answers.safetensors")
    for backend in ("reference", "native"):
        assert farthest(backend, tmp_path, given) < CLOSE


def entry_by_entry(
    folder: Path,
    ids: torch.Tensor,
    tapped: torch.Tensor,
    num: int,
    mask: int | None,
    config: ModelConfig = TARGET,
    embed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Our logits of `num` drafts behind the last of the given taps.

    ids: [n] int64 the text's tokens, those of later entries too. mask: P-EAGLE's token of entries not known yet.
    embed: [vocab, width] the target's, where the head has none of its own.
    """
    head = load_head(folder, config)
    weights = {name: torch.from_numpy(np.asarray(w, np.float64)) for name, w in head.weights.items()}
    table = weights["embed"] if embed is None else embed.double()
    features, known = fuse(head.config, weights, tapped.double()), len(tapped)
    made = []
    for depth in range(num):
        tokens = ids[: known + depth].clone()
        if mask is not None:
            tokens[known:] = mask
        places = torch.arange(len(tokens))
        embedded = table[tokens]
        hidden = run_layers(head.config, weights, embedded, features, places, causal(head.config))
        logits, back = read_out(head.config, weights, hidden)
        made.append(logits[-1])
        following = fuse(head.config, weights, weights["mask_hidden"][None]) if mask is not None else back[-1:]
        features = torch.cat([features, following])
    return torch.stack(made)


def near(ours: torch.Tensor, others: torch.Tensor) -> bool:
    """Return True if logits are the same but for rounding."""
    return float((ours - others).abs().max()) < CLOSE * float(others.abs().max())


@pytest.mark.parametrize("name", NORMS)
def test_their_eagle3_heads_draft_alike(name: str, tmp_path: Path) -> None:
    """Three drafts from each entry, in turn: each reads the state of the one before."""
    config = theirs.Eagle3SpeculatorConfig(**theirs.common("eagle3", 1), **NORMS[name])
    model = theirs.Eagle3DraftModel(config)
    theirs.write(tmp_path, model)
    given = load_file(tmp_path / "answers.safetensors")
    ids, tapped = given["token_ids"], given["tapped"]
    found = theirs.drafted(model, ids, tapped, 3)
    for entry in (0, 4, theirs.TOKENS - 3):
        ours = entry_by_entry(tmp_path, ids, tapped[: entry + 1], 3, None)
        assert near(ours, found[:, entry])


@pytest.mark.parametrize("name", NORMS)
def test_their_peagle_heads_draft_alike(name: str, tmp_path: Path) -> None:
    """Drafts of one pass, from mask tokens in place of those that are not known."""
    more = NORMS[name]
    config = theirs.PEagleSpeculatorConfig(**theirs.common("peagle", 2), mask_token_id=60, **more)
    model = theirs.PEagleDraftModel(config)
    theirs.write(tmp_path, model)
    given = load_file(tmp_path / "answers.safetensors")
    ids, tapped = given["token_ids"], given["tapped"]
    logits, anchors, depths = theirs.drafted_at_once(model, ids, tapped, 3)
    last = anchors[depths == 2]  # the package leaves some entries out, by chance
    for entry in last[last >= 0].tolist():
        ours = entry_by_entry(tmp_path, ids, tapped[: entry + 1], 3, 60)
        for depth in range(3):
            (at,) = ((anchors == entry) & (depths == depth)).nonzero()[0]
            assert near(ours[depth], logits[at])


def block_folder(folder: Path, config: ModelConfig, **changes: Any) -> Path:
    """A random DSpark head for a tiny target, by the package."""
    shape = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
    }
    layers = theirs.block_layers(**shape)
    values = {"aux_hidden_state_layer_ids": [1, 2], "draft_vocab_size": 200, "mask_token_id": 9} | changes
    theirs.write(folder, theirs.block_model("dspark", layers, **values))
    return folder


def test_an_engine_drafts_with_their_block_head(tmp_path: Path) -> None:
    """The text is that of plain decoding."""
    folder = block_folder(tmp_path, target().decoder.config, **RNN)
    engine = make_engine(f"block:model={folder},k=4", PLAIN)
    assert_same(plain_answers(requests(3)), run(engine, requests(3)))
    assert engine.stats().drafters["block"].drafted > 50
    assert engine.stats().drafter_failures == 0


def test_their_converter_and_paceline_read_the_authors_format_alike(toy: Path, tmp_path: Path) -> None:
    convert = pytest.importorskip("speculators.convert").convert_model
    authors = tmp_path / "authors"
    authors.mkdir()
    write(authors, AUTHORS, block_tensors(AUTHORS))
    convert(str(authors), str(toy / "target"), "dflash", output_path=str(tmp_path / "theirs"))
    first, second = (load_head(tmp_path / name, toy_config()) for name in ("authors", "theirs"))
    assert (first.config.taps, first.config.block) == (second.config.taps, second.config.block)
    assert first.config.layers == second.config.layers
    assert first.config.mask_token_id == second.config.mask_token_id
    for name, weight in first.weights.items():
        np.testing.assert_array_equal(weight, second.weights[name])


# The other way: what Paceline trains ---------------------------------------------------------------


def trained(kind: str, toy: Path, out: Path, *options: str, **loading: Any) -> Any:
    """Our head of a few steps, as the package loads it: in float32, with its target's weights.

    Given a dtype, the package (0.9.0) leaves the embedding of EAGLE-3 and P-EAGLE heads to chance.
    """
    words = ["--steps", "3", "--eval-every", "3", "--eval-tokens", "200", "--own-tokens", "0", *options]
    assert main(command(kind, toy, out, *words)) == 0
    config = speculators.SpeculatorModelConfig.from_pretrained(str(out))
    config.transformer_layer_config._attn_implementation = "eager"  # its own wants a compiler
    model = speculators.SpeculatorModel.from_pretrained(str(out), config=config, **loading).float().eval()
    assert json.loads((out / "config.json").read_text())["speculators_model_type"] in type(model).__name__.lower()
    return model


@pytest.mark.parametrize("kind", ["--corrector=rnn", "--corrector=gated", "--corrector=vanilla", "--dflash"])
def test_the_package_reads_our_block_heads(kind: str, toy: Path, tmp_path: Path) -> None:
    options = [kind, "--rank", "8", "--layers", "2", "--taps", "1,3,5"]
    model = trained("block", toy, tmp_path, *options)
    with torch.no_grad():
        given = theirs.block_answers(model)
    assert farthest("reference", tmp_path, given, toy_config()) < CLOSE
    embed = load_file(toy / "target" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(given["embed"], embed.half().float())


def test_the_package_reads_our_block_heads_of_8_bits(toy: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    options = ["--rank", "8", "--layers", "1", "--taps", "1,3,5", "--type", "int8"]
    model = trained("block", toy, tmp_path, *options, dtype=torch.float32)
    with torch.no_grad():
        given = theirs.block_answers(model)
    assert farthest("reference", tmp_path, given, toy_config()) < CLOSE


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_package_reads_our_other_heads(kind: str, toy: Path, tmp_path: Path) -> None:
    parallel = kind == "peagle"
    options = ["--taps", "1,3,5"]
    model = trained(kind, toy, tmp_path, *options, *(["--layers", "2"] if parallel else []))
    ids = torch.randint(VOCAB, (theirs.TOKENS,))
    tapped = torch.randn(theirs.TOKENS, model.fc.in_features)
    mask = load_head(tmp_path, toy_config()).config.mask_token_id
    if parallel:
        logits, anchors, depths = theirs.drafted_at_once(model, ids, tapped, 3)
        found = torch.stack([logits[(anchors == 1) & (depths == depth)][0] for depth in range(3)])
    else:
        found = theirs.drafted(model, ids, tapped, 3)[:, 1]
    embed = model.embed_tokens.weight
    assert near(entry_by_entry(tmp_path, ids, tapped[:2], 3, mask, toy_config(), embed), found)
