"""What a block head's runner answers where the `speculators` package answered: at anchors of one text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline import kernels
from paceline.backend.native import load as native
from paceline.backend.reference.block_head import load_runner
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.seam import CorrectRequest, Features, FedBack, PassRequest
from paceline.core.nouns import SamplingSpec, Taps
from paceline.core.params import SamplingParams
from paceline.model.heads.checkpoint import load_head
from tests.model.helpers import pack
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy import floating
    from numpy.typing import NDArray

    from paceline.backend.seam import HeadRunner
    from paceline.model.config import ModelConfig
    from paceline.model.heads.checkpoint import Head

    Answer = tuple[NDArray[floating], NDArray[floating] | None]

LOGITS = SamplingSpec("logits", SamplingParams())
PAGES, FIRST = [2, 0, 1], [0]
TARGET = tiny_config(hidden_size=16, vocab_size=64, num_layers=4, head_dim=4, tie_embeddings=False)


def farthest(backend: str, folder: Path, given: Mapping[str, torch.Tensor], target: ModelConfig = TARGET) -> float:
    """Return the largest difference of logits, as a share of the largest logit, and of log-odds.

    folder: a head's. given: as `write_with_speculators.block_answers` returns it.
    """
    head = load_head(folder, target)
    runner = _runner(backend, head, given, target)
    logits, odds = answered(runner, given)
    first = runner.config.block.first  # type: ignore[union-attr]
    theirs = given["logits"][:, first:].numpy()
    distances = [np.abs(logits[..., head.token_ids] - theirs).max() / np.abs(theirs).max()]
    assert (odds is not None) == ("log_odds" in given)
    if odds is not None:
        distances.append(np.abs(odds - given["log_odds"][:, first:].numpy()).max())
    return float(max(distances))


def _runner(backend: str, head: Head, given: Mapping[str, torch.Tensor], config: ModelConfig) -> HeadRunner:
    weights = {**tiny_weights(config, dtype=torch.float32), "embed": given["embed"]}
    if len(given["target_head"]) == config.vocab_size:
        weights["head"] = given["target_head"]
    if backend == "reference":
        return load_runner(head, ReferenceDecoder(config, weights), None, None)
    target = native.pack_decoder(config, weights, kernels.ThreadPool(1), "f32", "f32")
    return native.load_runner(head, target, None, None)


def answered(runner: HeadRunner, given: Mapping[str, Any]) -> Answer:
    """Return logits [anchors, drafts, vocabulary] and log-odds [anchors, drafts], None where there are none.

    given: as `write_with_speculators.block_answers` returns it. The token before each draft is the text's.
    """
    ids, tapped = np.asarray(given["token_ids"]), np.asarray(given["tapped"])
    rows = [_at_anchor(runner, ids, tapped, int(anchor)) for anchor in given["anchors"]]
    odds = None if rows[0][1] is None else np.array([row[1] for row in rows])
    return np.array([row[0] for row in rows]), odds


def _at_anchor(runner: HeadRunner, ids: np.ndarray, tapped: np.ndarray, anchor: int) -> Answer:
    block, mask, kv = runner.config.block, runner.config.mask_token_id, runner.new_kv(3)
    assert block is not None
    assert mask is not None
    if anchor:
        _store_context(runner, kv, ids[:anchor], tapped[:anchor])
    packed = pack([(np.array([ids[anchor], *[mask] * (block.size - 1)]), anchor, PAGES)])
    packed.wanted = np.arange(block.first, block.size)
    hidden = runner.launch(PassRequest(packed, kv, ())).wait().hidden
    told: object = np.zeros((1, block.state_size), np.float32)
    logits, odds = [], []
    for number in range(block.num_drafts):
        before = [int(ids[anchor + number])]
        result = runner.correct(CorrectRequest(hidden, [number], [LOGITS], before, FedBack(told, FIRST)))
        assert result.logits is not None
        told = result.hidden
        logits.append(result.logits[0])
        odds += [] if result.margins is None else [result.margins[0]]
    return np.array(logits), np.array(odds) if block.confidence else None


def _store_context(runner: HeadRunner, kv: Any, ids: np.ndarray, tapped: np.ndarray) -> None:
    count, layers = len(ids), runner.config.taps
    packed = pack([(ids, 0, PAGES)])
    packed.wanted = np.empty(0, np.int64)
    store = runner.new_tap_store(len(PAGES))
    parts = np.split(tapped, len(layers), axis=1)
    states = {layer: part.astype(np.float32) for layer, part in zip(layers, parts, strict=True)}
    store.write(Taps(states, packed.cu_len, packed.slots, FIRST), [count])
    runner.launch(PassRequest(packed, kv, (), features=Features(store, [(0, 0, count)]))).wait()
