"""The target in training: its embedding and output tables, and its hidden states for texts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from paceline.backend.native import load as native
from paceline.backend.reference.decoder import ReferenceDecoder
from paceline.backend.seam import Packed, PassRequest
from paceline.core.nouns import PAGE_TOKENS, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.model.files.catalogue import published_name
from paceline.model.weights import load_model

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.model.config import ModelConfig
    from paceline.model.weights import LoadedModel
    from paceline.train.corpus import TrainText


@dataclass(frozen=True, slots=True, eq=False)
class TrainTarget:
    """The target's frozen tables, which a head shares."""

    name: str  # published name, known to other tools
    model: LoadedModel
    embed: torch.Tensor  # [vocab, hidden] float32
    head: torch.Tensor  # [vocab, hidden] float32
    final_norm: torch.Tensor  # [hidden] float32

    @property
    def config(self) -> ModelConfig:
        """The target's shape."""
        return self.model.config

    def fingerprint(self) -> str:
        """Return a hash of a few weights that differs between models."""
        digest = hashlib.sha256(self.config.lasting_text.encode())
        digest.update(self.final_norm.cpu().numpy().tobytes())
        digest.update(self.embed[:64].cpu().numpy().tobytes())
        return digest.hexdigest()


def load_target(name: str, device: torch.device) -> TrainTarget:
    """Open a target and read its tables. Raises `ModelError`."""
    model = load_model(name)
    embed = _tensor(model, "embed", device)
    head = embed if model.config.tie_embeddings else _tensor(model, "head", device)
    return TrainTarget(published_name(name), model, embed, head, _tensor(model, "final_norm", device))


def _tensor(model: LoadedModel, name: str, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(model.weights[name]).to(device=device, dtype=torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class TargetOutput:
    """The target's output for texts, packed token after token."""

    states: torch.Tensor  # [num_tokens, num_taps, hidden] float32
    logits: torch.Tensor  # [num_answer_tokens, vocab] float32, predicting the token after each answer token


class TargetReader(Protocol):
    """Runs the target; the only seam between training and a backend."""

    def __call__(self, texts: Sequence[TrainText]) -> TargetOutput:
        """Return the target's output for texts. Tap i is the residual stream after i layers."""


def native_reader(
    target: TrainTarget, taps: Sequence[int], weight_type: str = "int8", threads: int | None = None
) -> TargetReader:
    """Return a reader on the native kernels, of the target as it will be served."""
    decoder = native.load_decoder(target.config, target.model.weights, weight_type, "i16", threads)
    wanted = tuple(dict.fromkeys(taps))
    choose = SamplingSpec("logits", SamplingParams())

    def read(texts: Sequence[TrainText]) -> TargetOutput:
        packed = _packed(texts)
        kv = decoder.new_kv(int(packed.pages.max()) + 1)
        chosen = decoder.launch(PassRequest(packed, kv, [choose] * len(packed.wanted), taps=wanted)).wait()
        logits = np.empty((0, target.config.vocab_size), np.float32) if chosen.logits is None else chosen.logits
        states = np.stack([chosen.taps[tap] for tap in taps], 1)
        return TargetOutput(torch.from_numpy(states), torch.from_numpy(logits))

    return read


def reference_reader(target: TrainTarget, taps: Sequence[int]) -> TargetReader:
    """Return a reader that runs the target in float32 on any device."""
    decoder = ReferenceDecoder(target.config, target.model.weights, torch.float32, target.embed.device)
    wanted = tuple(dict.fromkeys(taps))

    def read(texts: Sequence[TrainText]) -> TargetOutput:
        packed = _packed(texts)
        hidden, tapped = decoder.forward(packed, decoder.new_kv(int(packed.pages.max()) + 1), taps=wanted)
        return TargetOutput(torch.stack([tapped[tap] for tap in taps], 1), decoder.logits(hidden))

    return read


def _packed(texts: Sequence[TrainText]) -> Packed:
    """Pack texts as rows of one pass, each with own pages; answer tokens are wanted."""
    lengths = np.array([len(text) for text in texts])
    num_pages = -(-lengths // PAGE_TOKENS)
    firsts = np.cumsum(num_pages) - num_pages
    pages = np.zeros((len(texts), int(num_pages.max())), np.int64)
    for row, (first, count) in enumerate(zip(firsts, num_pages, strict=True)):
        pages[row, :count] = first + np.arange(count)
    positions = np.concatenate([np.arange(length) for length in lengths])
    prompt_lens = np.repeat([text.prompt_len for text in texts], lengths)
    return Packed(
        token_ids=np.concatenate([text.token_ids for text in texts]),
        positions=positions,
        slots=np.repeat(firsts * PAGE_TOKENS, lengths) + positions,
        cu_len=np.concatenate([[0], np.cumsum(lengths)]),
        pages=pages,
        wanted=np.flatnonzero(positions >= prompt_lens),
    )
