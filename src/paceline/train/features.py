"""The target's hidden states for every token of the data, computed once and kept on disk.

Several epochs, and several heads, read them. A shard holds some consecutive texts; its name carries a hash of
those, of the target and of the taps. So a shard is never taken for another, an interrupted run goes on where it
stopped, and data that grew at its end only adds shards.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import save_file

from paceline.core.errors import PacelineError
from paceline.model.decoder import rms_norm
from paceline.model.safetensors_file import open_safetensors
from paceline.train.corpus import packs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy import float16, float32, int32
    from numpy.typing import NDArray

    from paceline.train.corpus import Text
    from paceline.train.target import Reader, Target

    Progress = Callable[[int, int], None]  # tokens done, tokens in all

SHARD_TOKENS = 1 << 15
PASS_TOKENS = 1024
LOGIT_ROWS = 256
# Hidden states reach tens of thousands; 16 bits end at 65504. A power of two costs no precision.
SCALE = 1 / 16


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """What is known of one text; views of files."""

    states: NDArray[float16]  # [num_tokens, num_taps, hidden], times SCALE; the last tap is the final hidden state
    best: NDArray[int32]  # [num_tokens] the target's most likely next token, of answer tokens only
    log_sum: NDArray[float32]  # [num_tokens] log of the sum of all exponentiated logits, of answer tokens only


class FeatureStore:
    """The features of some texts by number."""

    def __init__(self, target: Target, taps: Sequence[int], texts: Sequence[Text], folder: Path) -> None:
        """taps: of the head; the final hidden state comes behind them."""
        self.taps = (*taps, target.config.num_layers)
        self._target = target
        self._texts = texts
        self._folder = folder
        self._shards = list(packs(range(len(texts)), [len(t) for t in texts], SHARD_TOKENS))
        self._place = {
            number: (shard, offset)
            for shard, numbers in enumerate(self._shards)
            for number, offset in zip(numbers, _offsets([len(texts[n]) for n in numbers]), strict=True)
        }
        self._paths = self._shard_paths()
        self._open: dict[int, Features] = {}

    def compute(self, make_reader: Callable[[], Reader], progress: Progress) -> None:
        """Compute every shard that is missing."""
        missing = [i for i, path in enumerate(self._paths) if not path.is_file()]
        if not missing:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        read = make_reader()
        sizes = [sum(len(self._texts[n]) for n in numbers) for numbers in self._shards]
        done = sum(sizes) - sum(sizes[i] for i in missing)
        for shard in missing:
            tensors = []
            for numbers in packs(self._shards[shard], [len(t) for t in self._texts], PASS_TOKENS):
                texts = [self._texts[n] for n in numbers]
                tensors.append(self._features(read, texts))
                done += sum(map(len, texts))
                progress(done, sum(sizes))
            joined = {name: torch.cat([t[name] for t in tensors]) for name in tensors[0]}
            partial = self._paths[shard].with_suffix(".partial")
            save_file(joined, partial)
            partial.replace(self._paths[shard])

    def __getitem__(self, number: int) -> Features:
        shard, offset = self._place[number]
        if shard not in self._open:
            self._open[shard] = _mapped(self._paths[shard])
        whole, rows = self._open[shard], slice(offset, offset + len(self._texts[number]))
        return Features(whole.states[rows], whole.best[rows], whole.log_sum[rows])

    def _shard_paths(self) -> list[Path]:
        common = f"{self._target.fingerprint()} {self.taps} {SCALE}"
        paths = []
        for shard, numbers in enumerate(self._shards):
            digest = hashlib.sha256(common.encode())
            for number in numbers:
                digest.update(f"{self._texts[number].prompt_len} ".encode())
                digest.update(self._texts[number].token_ids.tobytes())
            paths.append(self._folder / f"{shard:05}-{digest.hexdigest()[:20]}.safetensors")
        return paths

    @torch.inference_mode()
    def _features(self, read: Reader, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
        states = read([t.token_ids for t in texts])
        stored = (states * SCALE).to(torch.float16)
        if not stored.isfinite().all():
            raise PacelineError(
                f"the target's hidden states reach {float(states.abs().max()):.3g}, too much for 16 bits, or are "
                "not finite; such a target cannot be trained for yet"
            )
        answered = np.concatenate([np.arange(len(t)) >= t.prompt_len for t in texts])
        best = torch.zeros(len(states), dtype=torch.int32)
        log_sum = torch.zeros(len(states))
        for rows in torch.split(torch.from_numpy(np.flatnonzero(answered)), LOGIT_ROWS):
            final = rms_norm(states[rows, -1], self._target.final_norm, self._target.config.norm_eps)
            logits = final @ self._target.head.T
            best[rows] = logits.argmax(-1).to("cpu", torch.int32)
            log_sum[rows] = logits.logsumexp(-1).cpu()
        return {"states": stored.cpu(), "best": best, "log_sum": log_sum}


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(sizes)[:-1].tolist()]


def _mapped(path: Path) -> Features:
    """Map a shard into memory."""
    stored = open_safetensors(path)
    types = {"states": "<f2", "best": "<i4", "log_sum": "<f4"}
    arrays = {
        name: np.memmap(path, kind, "r", stored[name].start, stored[name].shape) for name, kind in types.items()
    }
    return Features(**arrays)
