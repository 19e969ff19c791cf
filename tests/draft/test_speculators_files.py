"""Heads that the `speculators` package wrote itself load here, and answer as its own modules do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.backend.reference.head import fuse, read_out, run_layers
from paceline.model.heads.checkpoint import load_head
from tests.draft.test_head_forward import causal
from tests.tiny import tiny_config

FOLDERS = sorted((Path(__file__).parents[1] / "data").glob("speculators-*"))
TARGET = tiny_config(hidden_size=16, vocab_size=64, num_layers=4)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_the_packages_own_heads_answer_alike(folder: Path) -> None:
    head = load_head(folder, TARGET)
    weights = {name: torch.from_numpy(np.asarray(w, np.float64)) for name, w in head.weights.items()}
    given = load_file(folder / "answers.safetensors")
    features = fuse(head.config, weights, given["tapped"].double())
    embedded = weights["embed"][given["token_ids"]]
    places = torch.arange(len(embedded))
    hidden = run_layers(head.config, weights, embedded, features, places, causal(head.config))
    logits, _ = read_out(head.config, weights, hidden)
    assert (logits - given["logits"]).abs().max() < 1e-4 * given["logits"].abs().max()
    assert np.array_equal(head.token_ids, np.sort(head.token_ids))
    assert head.config.algorithm.name == folder.name.split("-")[1]


def test_there_is_one_of_each_kind() -> None:
    assert [f.name for f in FOLDERS] == ["speculators-eagle3", "speculators-eagle3-1", "speculators-peagle"]
