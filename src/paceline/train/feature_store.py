"""The target's hidden states for all tokens of the data, computed once, kept on disk.

Several epochs and several heads read them. A shard holds consecutive texts. Its name has a hash of these texts, of
the target and of the taps, so an interrupted run resumes where it stopped, and new data at the end only adds
shards.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.core.errors import PacelineError
from paceline.model.files.safetensors_file import open_safetensors
from paceline.train.corpus import packs
from paceline.train.run_folder import make_folder, save_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy import float16, int32
    from numpy.typing import NDArray

    from paceline.train.corpus import TrainText
    from paceline.train.target_model import TargetReader, TrainTarget

    OnProgress = Callable[[int, int], None]  # (tokens done, tokens in all)

SHARD_TOKENS = 1 << 15  # tokens of a file; a longer text has a file of its own
PASS_TOKENS = 512  # tokens of one pass of the target: few, as each answer token needs a row of logits
DEVICE_PASS_TOKENS = 4096  # the same on a GPU, where small passes take as long as their kernel launches
TOP = 64  # number of most likely tokens kept of each distribution
# Hidden states reach tens of thousands, and float16 ends at 65504. A power of two costs no precision.
SCALE = 1 / 16


@dataclass(frozen=True, slots=True, eq=False)
class TextFeatures:
    """Features of one text, as views of mapped files."""

    states: NDArray[float16]  # [num_tokens, num_taps, hidden], times SCALE
    top_ids: NDArray[int32]  # [num_answer_tokens, TOP] likeliest next tokens of the target, best first
    top_probs: NDArray[float16]  # [num_answer_tokens, TOP]


class FeatureFiles:
    """The features of texts, by number of the text."""

    def __init__(
        self,
        target: TrainTarget,
        taps: Sequence[int],
        texts: Sequence[TrainText],
        folder: Path,
        read_as: str = "int8",
    ) -> None:
        """read_as: weight type of the target while it reads; it changes features a little."""
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
        self._open: dict[int, TextFeatures] = {}

    def compute(
        self, make_reader: Callable[[], TargetReader], on_progress: OnProgress, pass_tokens: int = PASS_TOKENS
    ) -> None:
        """Compute the missing shards in random order, so that commands side by side share them."""
        missing = [i for i, path in enumerate(self._paths) if not path.is_file()]
        if not missing:
            return
        make_folder(self._folder)
        read = make_reader()
        sizes = [sum(len(self._texts[n]) for n in numbers) for numbers in self._shards]
        done = sum(sizes) - sum(sizes[i] for i in missing)
        for shard in np.random.default_rng().permutation(missing).tolist():
            if self._paths[shard].is_file():  # another command wrote it in the meantime
                done += sizes[shard]
                continue
            tensors = []
            for numbers in packs(self._shards[shard], [len(t) for t in self._texts], pass_tokens):
                texts = [self._texts[n] for n in numbers]
                tensors.append(_features(read, texts))
                done += sum(map(len, texts))
                on_progress(done, sum(sizes))
            joined = {name: torch.cat([t[name] for t in tensors]) for name in tensors[0]}
            save_whole(self._paths[shard], joined)

    def __getitem__(self, number: int) -> TextFeatures:
        shard, offset, answer = self._place[number]
        if shard not in self._open:
            self._open[shard] = _mapped(self._paths[shard])
        whole, text = self._open[shard], self._texts[number]
        rows = slice(answer, answer + text.answer_len)
        return TextFeatures(whole.states[offset : offset + len(text)], whole.top_ids[rows], whole.top_probs[rows])

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
def _features(read: TargetReader, texts: Sequence[TrainText]) -> dict[str, torch.Tensor]:
    output = read(texts)
    stored = (output.states * SCALE).to(torch.float16)
    if not stored.isfinite().all():
        raise PacelineError(
            f"the target's hidden states reach {float(output.states.abs().max()):.3g}, too much for 16 bits, "
            "or are not finite; such a target cannot be trained for yet"
        )
    top, ids = output.logits.topk(min(TOP, output.logits.shape[1]), dim=-1)
    probs = (top - output.logits.logsumexp(-1, keepdim=True)).exp_().to(torch.float16)
    return {"states": stored.cpu(), "top_ids": ids.to("cpu", torch.int32), "top_probs": probs.cpu()}


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [0, *np.cumsum(sizes)[:-1].tolist()]


def _mapped(path: Path) -> TextFeatures:
    stored = open_safetensors(path)
    types = {"states": "<f2", "top_ids": "<i4", "top_probs": "<f2"}
    mapped = np.memmap(path, np.uint8, "r")  # one map for all tensors, as each map keeps a file open
    arrays = {
        name: mapped[(t := stored[name]).start : t.start + t.num_bytes].view(kind).reshape(t.shape)
        for name, kind in types.items()
    }
    return TextFeatures(**arrays)
