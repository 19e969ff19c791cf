"""Drafters of llama.cpp: the prompt lookup of its Python bindings, or a draft model."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy import float32
    from numpy.typing import NDArray

    ProposeDraft = Callable[[Sequence[int]], list[int]]  # token ids so far -> draft ids

MIN_PROBABILITY = 0.75  # the draft model stops below it; llama.cpp's default


class DraftingModel(Protocol):
    """The calls of a llama.cpp model that a draft model needs; see `llama_cpp.LlamaCpp`."""

    def context(self, num_rows: int, length: int) -> AbstractContextManager[tuple[Any, Any]]:
        """Make a context and a batch for `num_rows` rows of `length` tokens."""
        ...

    def forget(self, context: Any, length: int) -> None:
        """Drop the KV of a one-row context beyond `length` tokens."""
        ...

    def extend(
        self, context: Any, batch: Any, ids: Sequence[int], start: int, num_wanted: int
    ) -> NDArray[float32]:
        """Run a row's tokens from a position; return the last logits [num_wanted, vocab]."""
        ...


class PeerDrafts(Protocol):
    """A drafter for one text at a time."""

    @property
    def max_drafts(self) -> int:
        """Largest number of drafts at once."""
        ...

    def open(self, length: int) -> Any:
        """Return a context manager with a `ProposeDraft` for a text of at most `length` tokens."""
        ...


@dataclass(frozen=True, slots=True)
class PeerLookup:
    """Prompt lookup as the bindings implement it."""

    max_drafts: int

    @contextmanager
    def open(self, length: int) -> Iterator[ProposeDraft]:
        """Return a context manager with a `ProposeDraft`, see `PeerDrafts`."""
        lookup = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(
            num_pred_tokens=self.max_drafts
        )
        yield lambda text: lookup(np.array(text, np.intc)).tolist()


@dataclass(frozen=True, slots=True, eq=False)
class PeerDraftModel:
    """Greedy drafts of a smaller model while their probability stays above `MIN_PROBABILITY`."""

    model: DraftingModel
    max_drafts: int

    @contextmanager
    def open(self, length: int) -> Iterator[ProposeDraft]:
        """Return a context manager with a `ProposeDraft`, see `PeerDrafts`."""
        with self.model.context(1, length) as (context, batch):
            yield _DraftContext(self.model, context, batch, self.max_drafts).draft


@dataclass(slots=True, eq=False)
class _DraftContext:
    model: DraftingModel
    context: Any
    batch: Any
    max_drafts: int
    known: list[int] = field(default_factory=list)  # token ids whose KV it has

    def draft(self, text: Sequence[int]) -> list[int]:
        shared = next(
            (i for i, (a, b) in enumerate(zip(self.known, text, strict=False)) if a != b), len(self.known)
        )
        shared = min(shared, len(text) - 1)
        self.model.forget(self.context, shared)
        del self.known[shared:]
        drafts: list[int] = []
        new = list(text[shared:])
        while len(drafts) < self.max_drafts:
            token_id, probability = self._next(new)
            if probability < MIN_PROBABILITY:
                break
            drafts.append(token_id)
            new = [token_id]
        return drafts

    def _next(self, new: Sequence[int]) -> tuple[int, float]:
        logits = self.model.extend(self.context, self.batch, new, len(self.known), 1)[0]
        self.known += new
        best = int(logits.argmax())
        return best, float(1.0 / np.exp(logits - logits[best]).sum())
