"""Tiny draft heads as folders, random or trained a little, for any tiny target."""

from __future__ import annotations

import json
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch.nn import functional

from paceline.backend.reference.block_head import context_keys, correction, log_odds
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.reference.head import fuse, last_norm, read_out, run_layers
from paceline.model.heads.checkpoint import Head
from paceline.model.heads.config import HeadConfig, head_shapes, read_config
from paceline.model.heads.mtp import mtp_config
from paceline.train.drafts import TextBounds, plan_drafts
from paceline.train.unroll import unroll
from tests.draft.test_block_files import LAYERS, block_file_name
from tests.draft.test_head_files import LAYER, file_name
from tests.model.helpers import pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.model.config import ModelConfig

DRAFT_VOCAB = 290
TEXT_LEN, NUM_TEXTS, NUM_STEPS = 48, 24, 200
AT_ONCE = 4  # texts of one unrolled step
UNROLLED = 3  # steps of a draft that EAGLE-3 is trained for
MASKS = 4  # mask tokens behind a text that P-EAGLE is trained for


CORRECTED = "corrected"  # kind: a block head with a corrector and a confidence
WHOLE = "whole"  # kind: a block head that writes with its target's own head
BLOCKS = ("block", CORRECTED, WHOLE)


def drafter_of(kind: str) -> str:
    """Return the name of the drafter that runs heads of a kind."""
    return "block" if kind in BLOCKS else kind


def head_values(kind: str, target: ModelConfig, **changes: Any) -> dict[str, Any]:
    """Return a config.json in the `speculators` format."""
    if kind in BLOCKS:
        return block_values(kind, target) | changes
    layer = {
        **LAYER,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "intermediate_size": 72,
        "head_dim": 8,
        "num_hidden_layers": 2 if drafter_of(kind) == "peagle" else 1,
        "rope_theta": 10000.0,
    }
    values = {
        "speculators_model_type": drafter_of(kind),
        "transformer_layer_config": layer,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, target.num_layers - 1, target.num_layers],
        "mask_token_id": 300,
        "fusion_bias": kind == "eagle",
        "draft_own_tokens": kind in ("eagle3", "peagle"),
    }
    return values | changes


def block_values(kind: str, target: ModelConfig) -> dict[str, Any]:
    """Return a block head's config.json in the `speculators` format."""
    layer = {
        **LAYERS,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "intermediate_size": 72,
        "head_dim": 8,
        "rope_theta": 10000.0,
    }
    values = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "draft_vocab_size": target.vocab_size if kind == WHOLE else DRAFT_VOCAB,
        "aux_hidden_state_layer_ids": [1, target.num_layers - 1, target.num_layers],
        "block_size": 6,
        "mask_token_id": 300,
        "draft_own_tokens": kind == "block",
    }
    if kind != CORRECTED:
        return values
    return values | {
        "speculators_model_type": "dspark",
        "markov_rank": 12,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def draft_ids(config: HeadConfig, vocab_size: int) -> np.ndarray:
    """Return the target's ids of the draft tokens, not in order: files may do as they like."""
    if config.block and config.draft_vocab_size == vocab_size:
        return np.arange(vocab_size)
    random = np.random.default_rng(3)
    kept = np.r_[np.arange(32, 80), random.permutation(np.r_[np.arange(32), np.arange(80, vocab_size)])]
    ids = kept[: config.draft_vocab_size]
    return np.sort(ids) if config.draft_vocab_size % 2 else random.permutation(ids)


def random_weights(config: HeadConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return float64 tensors by canonical name, norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in head_shapes(config).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[name] = noise / shape[-1] ** 0.5 if len(shape) == 2 else noise * 0.1 + ("norm" in name)
    return weights


def write_head(folder: Path, values: dict[str, Any], target: ModelConfig, weights: Mapping[str, Any]) -> Path:
    """Write a head's two files."""
    config = read_config(values, target)
    tensors: dict[str, Any] = {
        block_file_name(name) if config.block else file_name(name, first_format=False): np.asarray(
            w.detach(), np.float32
        )
        for name, w in weights.items()
    }
    if config.draft_vocab_size != target.vocab_size:
        tensors["d2t"] = draft_ids(config, target.vocab_size) - np.arange(config.draft_vocab_size)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


# Training ----------------------------------------------------------------------------------------


def _texts(target: ReferenceDecoder, taps: tuple[int, ...]) -> tuple[Any, Any, Any, Any]:
    """Return texts that the target wrote: token ids, embeddings, taps and next-token distributions."""
    random = np.random.default_rng(11)
    pages = [list(range(i * 4, i * 4 + 4)) for i in range(NUM_TEXTS)]
    ids = random.integers(32, 75, (NUM_TEXTS, 2)).tolist()
    kv = target.new_kv(4 * NUM_TEXTS)
    while len(ids[0]) < TEXT_LEN:
        start = 0 if len(ids[0]) == 2 else len(ids[0]) - 1
        hidden, _ = target.forward(pack([(t[start:], start, p) for t, p in zip(ids, pages, strict=True)]), kv)
        probs = target.logits(hidden.view(NUM_TEXTS, -1, hidden.shape[-1])[:, -1]).double().softmax(-1).numpy()
        for text, p in zip(ids, probs, strict=True):
            text.append(int(random.choice(len(p), p=p / p.sum())))
    packed = pack([(t, 0, p) for t, p in zip(ids, pages, strict=True)])
    hidden, states = target.forward(packed, target.new_kv(4 * NUM_TEXTS), taps=tuple(set(taps)))
    flat = torch.tensor(ids).flatten()
    tapped = torch.cat([states[tap] for tap in taps], dim=-1)
    found = flat, target.embed[flat], tapped, target.logits(hidden).softmax(-1)
    return tuple(x.clone() if x.dtype == torch.int64 else x.float().clone() for x in found)  # type: ignore[return-value]


def train(values: dict[str, Any], target: ReferenceDecoder) -> dict[str, torch.Tensor]:
    """Teach a head what its target would write: a few seconds, enough to be right now and then."""
    return train_config(read_config(values, target.config), target)


def train_config(config: HeadConfig, target: ReferenceDecoder) -> dict[str, torch.Tensor]:
    """Do the same by the config that was read."""
    torch.manual_seed(0)
    weights = {n: w.float().requires_grad_() for n, w in random_weights(config).items()}
    ids = torch.from_numpy(draft_ids(config, target.config.vocab_size))
    text_ids, embedded, tapped, probs = _texts(target, config.taps)
    soft = probs[:, ids] / probs[:, ids].sum(-1, keepdim=True)
    optimizer = torch.optim.Adam(weights.values(), 4e-3)
    mask = target.embed[config.mask_token_id or 0].float()
    losses = _peagle_loss if config.algorithm.parallel else _serial_loss
    if config.block:
        losses = partial(_block_loss, text_ids)
    given = (
        {} if config.own_output else {"head": target.head[ids].float(), "target_norm": target.final_norm.float()}
    )
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses(config, weights | given, embedded, tapped, soft, mask).backward()
        optimizer.step()
    return weights


def _serial_loss(config: Any, weights: Any, embedded: Any, tapped: Any, soft: Any, mask: Any) -> torch.Tensor:
    """Every text is drafted from everywhere, some tokens deep."""
    del mask
    texts = torch.randperm(NUM_TEXTS)[:AT_ONCE]
    embedded, tapped, soft = (
        x.view(NUM_TEXTS, TEXT_LEN, -1)[texts].flatten(0, 1) for x in (embedded, tapped, soft)
    )
    bounds = [TextBounds(first, first + 1, first + TEXT_LEN) for first in range(0, len(embedded), TEXT_LEN)]
    depths = plan_drafts(bounds, UNROLLED, 1.0, 0, embedded.device)
    loss = torch.zeros(())
    for number, guesses in enumerate(unroll(config, weights, embedded, tapped, bounds, depths)):
        logits = guesses @ weights["head"].T
        loss = loss + functional.cross_entropy(logits, soft[depths[number].anchors + number])
    return loss


def _peagle_loss(config: Any, weights: Any, embedded: Any, tapped: Any, soft: Any, mask: Any) -> torch.Tensor:
    """Every text is cut somewhere and goes on with mask tokens; the cut moves from step to step."""
    cut = int(torch.randint(8, TEXT_LEN - MASKS, ()))
    features = fuse(config, weights, tapped).view(NUM_TEXTS, TEXT_LEN, -1)
    shared = fuse(config, weights, weights["mask_hidden"][None]).expand(NUM_TEXTS, MASKS, -1)
    inputs = torch.cat([features[:, :cut], shared], 1).flatten(0, 1)
    tokens = embedded.view(NUM_TEXTS, TEXT_LEN, -1)[:, 1 : cut + 1]
    tokens = torch.cat([tokens, mask.expand(NUM_TEXTS, MASKS, -1)], 1).flatten(0, 1)
    length = cut + MASKS

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        del layer
        group = query.shape[1] // key.shape[1]
        q, k, v = (x.view(NUM_TEXTS, length, *x.shape[1:]).transpose(1, 2) for x in (query, key, value))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(NUM_TEXTS * length, -1)

    positions = torch.arange(1, length + 1).repeat(NUM_TEXTS)
    hidden = run_layers(config, weights, tokens, inputs, positions, attend)
    logits = read_out(config, weights, hidden)[0].view(NUM_TEXTS, length, -1)
    wanted = soft.view(NUM_TEXTS, TEXT_LEN, -1)[:, 1 : length + 1]
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))


def _block_loss(
    text_ids: torch.Tensor, config: Any, weights: Any, embedded: Any, tapped: Any, soft: Any, mask: Any
) -> torch.Tensor:
    """Every text is cut somewhere and goes on with a block; the cut moves from step to step."""
    block, width = config.block, embedded.shape[-1]
    cut = int(torch.randint(8, TEXT_LEN - block.size - 1, ()))
    features = fuse(config, weights, tapped).view(NUM_TEXTS, TEXT_LEN, -1)[:, :cut].flatten(0, 1)
    context = list(context_keys(config, weights, features, torch.arange(cut).repeat(NUM_TEXTS)))
    tokens = mask.expand(NUM_TEXTS, block.size, width).clone()
    tokens[:, 0] = embedded.view(NUM_TEXTS, TEXT_LEN, -1)[:, cut]

    def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        q, *own = (x.view(NUM_TEXTS, block.size, *x.shape[1:]) for x in (query, key, value))
        before = (x.view(NUM_TEXTS, cut, *x.shape[1:]) for x in context[layer])
        k, v = (torch.cat(pair, 1).repeat_interleave(group, 2) for pair in zip(before, own, strict=True))
        mixed = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return mixed.transpose(1, 2).reshape(NUM_TEXTS * block.size, -1)

    tokens = tokens.flatten(0, 1)
    positions = torch.arange(cut, cut + block.size).repeat(NUM_TEXTS)
    hidden = last_norm(config, weights, run_layers(config, weights, tokens, tokens, positions, attend))
    guesses = hidden.view(NUM_TEXTS, block.size, -1)[:, block.first :]
    ids = text_ids.view(NUM_TEXTS, TEXT_LEN)
    told, loss = torch.zeros(NUM_TEXTS, block.state_size), torch.zeros(())
    for number in range(block.num_drafts):
        before = ids[:, cut + number]
        added, told = correction(block, weights, guesses[:, number], before, told)
        logits = guesses[:, number] @ weights["head"].T + (0 if added is None else added)
        wanted = soft.view(NUM_TEXTS, TEXT_LEN, -1)[:, cut + number]
        loss = loss + functional.cross_entropy(logits, wanted)
        if block.confidence:
            kept = torch.minimum(logits.softmax(-1), wanted).sum(-1).detach()
            odds = log_odds(block, weights, guesses[:, number], before)
            loss = loss + functional.binary_cross_entropy_with_logits(odds, kept)
    return loss / block.num_drafts


@cache
def trained_head(kind: str, target: ReferenceDecoder) -> Path:
    """Return a folder with a head that is sometimes right about the target."""
    folder = Path(tempfile.mkdtemp(prefix="head-"))
    values = head_values(kind, target.config)
    return write_head(folder, values, target.config, train(values, target))


@cache
def trained_mtp(target: ReferenceDecoder) -> Head:
    """Return an MTP layer that is sometimes right about the target."""
    config = mtp_config(target.config)
    ids = draft_ids(config, target.config.vocab_size)
    weights = {name: w.detach().numpy() for name, w in train_config(config, target).items()}
    assert len(ids) == target.config.vocab_size
    return Head(config, weights, np.arange(len(ids)))
