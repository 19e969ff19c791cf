"""Protocol of the workers: JSON lines, one answer to each question.

Every engine's own environment imports this module: it needs the standard library only, and numpy where it is used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy import float32
    from numpy.typing import NDArray

    Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PeerAnswers:
    """New tokens of rows that were decoded as one batch."""

    token_ids: list[list[int]]  # [num_rows][num_tokens]
    arrivals: list[list[float]]  # [num_rows][num_tokens], seconds after the call


@dataclass(frozen=True, slots=True)
class PeerSetting:
    """Setting that every engine is loaded with."""

    file: str  # a model file or folder
    threads: int
    max_rows: int
    max_len: int  # prompt and answer tokens of one row
    prefill_tokens: int  # prompt tokens in one step


class Peer(Protocol):
    """An engine with a model loaded: greedy, speculation and prefix caching off, all cores."""

    def describe(self) -> str:
        """Return the version and other facts for readers of the table."""
        ...

    def decode(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> PeerAnswers:
        """Continue all prompts as one batch by `num_tokens` each; ignore the end of text."""
        ...

    def logits(self, token_ids: Sequence[int], num_judged: int) -> NDArray[float32] | None:
        """Return the logits [num_judged, vocab] that predict a text's last tokens; None if unavailable."""
        ...


@dataclass(slots=True, eq=False)
class Recorder:
    """Records the arrival of each row's tokens. Its clock starts when it is made."""

    num_rows: int
    now_s: Callable[[], float] = time.perf_counter
    token_ids: list[list[int]] = field(init=False)
    arrivals: list[list[float]] = field(init=False)
    start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = [[] for _ in range(self.num_rows)]
        self.arrivals = [[] for _ in range(self.num_rows)]
        self.start_s = self.now_s()

    def add(self, row: int, token_ids: Sequence[int]) -> None:
        """Record tokens that have arrived now."""
        self.token_ids[row] += token_ids
        self.arrivals[row] += [self.now_s() - self.start_s] * len(token_ids)

    def answers(self) -> PeerAnswers:
        """Return the recorded answers."""
        return PeerAnswers(self.token_ids, self.arrivals)


def reply(peer: Peer, question: Json) -> Json:
    """Answer one question: `decode` or `quality`."""
    return _REPLIES[question["do"]](peer, question)


def _decode(peer: Peer, question: Json) -> Json:
    answers = peer.decode(question["prompts"], question["num_tokens"])
    return {"token_ids": answers.token_ids, "arrivals": answers.arrivals}


def _quality(peer: Peer, question: Json) -> Json:
    """Compare with log-probabilities [num_texts, num_judged, vocab] float32 in a .npy file."""
    import numpy as np

    expected = np.load(question["expected"], mmap_mode="r", allow_pickle=False)
    divergences: list[float] = []
    same: list[bool] = []
    for token_ids, wanted in zip(question["texts"], expected, strict=True):
        logits = peer.logits(token_ids, len(wanted))
        if logits is None:
            return {"kl": None, "top1": None}
        divergences += divergence(np.asarray(wanted), logits)
        same += (wanted.argmax(axis=1) == logits.argmax(axis=1)).tolist()
    return {"kl": float(np.mean(divergences)), "top1": float(np.mean(same))}


_REPLIES: dict[str, Callable[[Peer, Json], Json]] = {"decode": _decode, "quality": _quality}


def divergence(wanted: NDArray[float32], logits: NDArray[float32]) -> list[float]:
    """Return KL(wanted || softmax(logits)) in nats for each position; wanted are log-probabilities."""
    import numpy as np

    p, wide = wanted.astype(np.float64), logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    got = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return (np.exp(p) * (p - got)).sum(axis=1).tolist()  # type: ignore[no-any-return]
