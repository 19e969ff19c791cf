"""What llama.cpp drafts with: the prompt lookup of its Python bindings, or a second model."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tools.peers.llama_cpp import LlamaCpp

    Draft = Callable[[Sequence[int]], list[int]]  # from the text so far

LEAST_PROBABILITY = 0.75  # below it the second model stops drafting: llama.cpp's own default


class PeerDrafts(Protocol):
    """Something that drafts for one text at a time."""

    @property
    def most(self) -> int:
        """Drafts at once."""
        ...

    def open(self, length: int) -> Any:
        """Return a context manager that gives a `Draft` for a text of so many tokens at most."""
        ...


@dataclass(frozen=True, slots=True)
class PeerLookup:
    """What followed the last tokens before, as the bindings do it."""

    most: int

    @contextmanager
    def open(self, length: int) -> Iterator[Draft]:
        """See `PeerDrafts`."""
        lookup = import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(num_pred_tokens=self.most)
        yield lambda text: lookup(np.array(text, np.intc)).tolist()


@dataclass(frozen=True, slots=True, eq=False)
class SecondModel:
    """The likeliest tokens of a smaller model, as long as it is sure of them."""

    model: LlamaCpp
    most: int

    @contextmanager
    def open(self, length: int) -> Iterator[Draft]:
        """See `PeerDrafts`."""
        with self.model.context(1, length) as (context, batch):
            yield _Continued(self.model, context, batch, self.most).draft


@dataclass(slots=True, eq=False)
class _Continued:
    model: LlamaCpp
    context: Any
    batch: Any
    most: int
    known: list[int] = field(default_factory=list)  # tokens whose keys and values it has

    def draft(self, text: Sequence[int]) -> list[int]:
        shared = next(
            (i for i, (a, b) in enumerate(zip(self.known, text, strict=False)) if a != b), len(self.known)
        )
        shared = min(shared, len(text) - 1)
        self.model.forget(self.context, shared)
        del self.known[shared:]
        drafts: list[int] = []
        new = list(text[shared:])
        while len(drafts) < self.most:
            token_id, probability = self._next(new)
            if probability < LEAST_PROBABILITY:
                break
            drafts.append(token_id)
            new = [token_id]
        return drafts

    def _next(self, new: Sequence[int]) -> tuple[int, float]:
        logits = self.model.extend(self.context, self.batch, new, len(self.known), 1)[0]
        self.known += new
        best = int(logits.argmax())
        return best, float(1.0 / np.exp(logits - logits[best]).sum())
