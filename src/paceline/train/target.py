"""What training reads of the target: its tables, and its hidden states for any text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from paceline.core.nouns import PAGE_TOKENS
from paceline.model.decoder import ReferenceDecoder
from paceline.model.packed import Packed
from paceline.model.weights import load_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.model.config import ModelConfig
    from paceline.model.weights import LoadedModel


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The frozen tables that a head shares with its target."""

    name: str
    model: LoadedModel
    embed: torch.Tensor  # [vocab, hidden] float32
    head: torch.Tensor  # [vocab, hidden] float32
    final_norm: torch.Tensor  # [hidden] float32

    @property
    def config(self) -> ModelConfig:
        """The target's shape."""
        return self.model.config

    def fingerprint(self) -> str:
        """Return a hash that differs between models, from a few of its weights."""
        digest = hashlib.sha256(repr(self.config).encode())
        digest.update(self.final_norm.cpu().numpy().tobytes())
        digest.update(self.embed[:64].cpu().numpy().tobytes())
        return digest.hexdigest()


def load_target(name: str, device: torch.device) -> Target:
    """Open a target and read its tables. Raises `ModelError`."""
    model = load_model(name)
    embed = _tensor(model, "embed", device)
    head = embed if model.config.tie_embeddings else _tensor(model, "head", device)
    return Target(name, model, embed, head, _tensor(model, "final_norm", device))


def _tensor(model: LoadedModel, name: str, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(model.weights[name]).to(device=device, dtype=torch.float32)


class Reader(Protocol):
    """Computes hidden states; the one place where training meets whatever executes the target."""

    def __call__(self, texts: Sequence[NDArray[int64]]) -> torch.Tensor:
        """Return the states of all tokens of all texts, one after another: [num_tokens, num_taps, hidden]."""
        ...


def reference_reader(target: Target, taps: Sequence[int]) -> Reader:
    """Return a reader that runs the target in float32; tap i is the residual stream after i layers."""
    decoder = ReferenceDecoder(target.config, target.model.weights, torch.float32, target.embed.device)
    wanted = tuple(dict.fromkeys(taps))

    def read(texts: Sequence[NDArray[int64]]) -> torch.Tensor:
        packed = _packed(texts)
        _, tapped = decoder.forward(packed, decoder.new_kv(int(packed.pages.max()) + 1), taps=wanted)
        return torch.stack([tapped[tap] for tap in taps], 1)

    return read


def _packed(texts: Sequence[NDArray[int64]]) -> Packed:
    """Lay texts out as the rows of one pass, each with pages of its own."""
    lengths = np.array([len(ids) for ids in texts])
    num_pages = -(-lengths // PAGE_TOKENS)
    firsts = np.cumsum(num_pages) - num_pages
    pages = np.zeros((len(texts), int(num_pages.max())), np.int64)
    for row, (first, count) in enumerate(zip(firsts, num_pages, strict=True)):
        pages[row, :count] = first + np.arange(count)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return Packed(
        token_ids=np.concatenate(texts),
        positions=positions,
        slots=np.repeat(firsts * PAGE_TOKENS, lengths) + positions,
        cu_len=np.concatenate([[0], np.cumsum(lengths)]),
        pages=pages,
        wanted=np.empty(0, np.int64),
    )
