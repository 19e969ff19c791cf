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
from paceline.model.files.safetensors_file import open_safetensors
from paceline.train.corpus import packs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy import float16, int32
    from numpy.typing import NDArray

    from paceline.train.corpus import Text
    from paceline.train.target import Reader, TrainTarget

    Progress = Callable[[int, int], None]  # tokens done, tokens in all

SHARD_TOKENS = 1 << 15
PASS_TOKENS = 512  # of one pass of the target; it has a row of logits for each token of an answer
TOP = 64  # most likely tokens that are kept of each distribution
# Hidden states reach tens of thousands; 16 bits end at 65504. A power of two costs no precision.
SCALE = 1 / 16


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """What is known of one text; views of files."""

    states: NDArray[float16]  # [num_tokens, num_taps, hidden], times SCALE
    top_ids: NDArray[int32]  # [num_answer_tokens, TOP] what the target would write next, the most likely first
    top_probs: NDArray[float16]  # [num_answer_tokens, TOP]


class FeatureFile:
    """The features of some texts by number."""

    def __init__(
        self, target: TrainTarget, taps: Sequence[int], texts: Sequence[Text], folder: Path, read_as: str = "int8"
    ) -> None:
        """read_as: which numbers the target reads the texts with; those of others differ a little."""
        self.taps = tuple(taps)
        self._common = f"{target.fingerprint()} {self.taps} {read_as} {SCALE} {TOP}"
        self._texts = texts
        self._folder = folder
        self._shards = list(packs(range(len(texts)), [len(t) for t in texts], SHARD_TOKENS))
        self._place = {
            number: (shard, *offsets)
            for shard, numbers in enumerate(self._shards)
            for number, *offsets in zip(
                numbers,
                _offsets([len(texts[n]) for n in numbers]),
                _offsets([texts[n].answer_len for n in numbers]),
                strict=True,
            )
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
                tensors.append(_features(read, texts))
                done += sum(map(len, texts))
                progress(done, sum(sizes))
            joined = {name: torch.cat([t[name] for t in tensors]) for name in tensors[0]}
            partial = self._paths[shard].with_suffix(".partial")
            save_file(joined, partial)
            partial.replace(self._paths[shard])

    def __getitem__(self, number: int) -> Features:
        shard, offset, answer = self._place[number]
        if shard not in self._open:
            self._open[shard] = _mapped(self._paths[shard])
        whole, text = self._open[shard], self._texts[number]
        rows = slice(answer, answer + text.answer_len)
        return Features(whole.states[offset : offset + len(text)], whole.top_ids[rows], whole.top_probs[rows])

    def _shard_paths(self) -> list[Path]:
        paths = []
        for shard, numbers in enumerate(self._shards):
            digest = hashlib.sha256(self._common.encode())
            for number in numbers:
                digest.update(f"{self._texts[number].prompt_len} ".encode())
                digest.update(self._texts[number].token_ids.tobytes())
            paths.append(self._folder / f"{shard:05}-{digest.hexdigest()[:20]}.safetensors")
        return paths


@torch.inference_mode()
def _features(read: Reader, texts: Sequence[Text]) -> dict[str, torch.Tensor]:
    seen = read(texts)
    stored = (seen.states * SCALE).to(torch.float16)
    if not stored.isfinite().all():
        raise PacelineError(
            f"the target's hidden states reach {float(seen.states.abs().max()):.3g}, too much for 16 bits, or are "
            "not finite; such a target cannot be trained for yet"
        )
    top, ids = seen.logits.topk(min(TOP, seen.logits.shape[1]), dim=-1)
    probs = (top - seen.logits.logsumexp(-1, keepdim=True)).exp_().to(torch.float16)
    return {"states": stored.cpu(), "top_ids": ids.to("cpu", torch.int32), "top_probs": probs.cpu()}


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(sizes)[:-1].tolist()]


def _mapped(path: Path) -> Features:
    """Map a shard into memory."""
    stored = open_safetensors(path)
    types = {"states": "<f2", "top_ids": "<i4", "top_probs": "<f2"}
    arrays = {
        name: np.memmap(path, kind, "r", stored[name].start, stored[name].shape) for name, kind in types.items()
    }
    return Features(**arrays)
