"""Traces of services: arrivals, lengths, and the pages that prompts share.

- `jsonl`: our own, JSON lines with `arrival_s`, `prompt_tokens`, `output_tokens` and perhaps `hash_ids`.
- `mooncake`: JSON lines of Mooncake (Qin et al., FAST 2025), with `hash_ids`.
- `azure`: CSV of the Azure LLM inference traces (Patel et al., ISCA 2024), without hashes.

A hash stands for 512 tokens of a prompt and all before them.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy import float64, int64
    from numpy.typing import NDArray

    Line = tuple[float, int, int, tuple[int, ...]]  # arrival, prompt and answer tokens, pages

MAX_REQUESTS = 10_000_000
MAX_REQUEST_TOKENS = 1 << 24
HASHED_TOKENS = 512  # tokens of a page in traces with hashes
MAX_LINE = 1 << 20  # characters
Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_REQUEST_TOKENS)]
PageHash = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


@dataclass(frozen=True, slots=True, eq=False)
class FleetTrace:
    """Requests in order of arrival, with the pages of their prompts."""

    arrival_s: NDArray[float64]  # [n] ascending, from 0
    prompt_lens: NDArray[int64]  # [n]
    output_lens: NDArray[int64]  # [n]
    pages: Sequence[tuple[int, ...]]  # [n] hash of each page of a prompt, the last perhaps not full; none: unknown
    page_tokens: int = PAGE_TOKENS

    def __len__(self) -> int:
        return len(self.arrival_s)

    def first(self, count: int) -> FleetTrace:
        """Return the first requests."""
        return self.only(np.arange(min(count, len(self))))

    def only(self, chosen: NDArray[int64]) -> FleetTrace:
        """Return some requests, by index."""
        arrival_s, prompts, outputs = (
            self.arrival_s[chosen],
            self.prompt_lens[chosen],
            self.output_lens[chosen],
        )
        return FleetTrace(arrival_s, prompts, outputs, [self.pages[i] for i in chosen.tolist()], self.page_tokens)

    def repeated(self, copies: int) -> FleetTrace:
        """Return the requests of several services like this one.

        Each copy is shifted in time and has pages of its own.
        Arrivals that would come after the end come at the beginning.
        """
        length = float(self.arrival_s[-1]) + 1e-3
        times = np.concatenate([(self.arrival_s + length * c / copies) % length for c in range(copies)])
        order = np.argsort(times, kind="stable")
        prompts, outputs = (np.tile(a, copies)[order] for a in (self.prompt_lens, self.output_lens))
        stride = 1 + max((max(p) for p in self.pages if p), default=0)
        pages = _CopiedPages(self.pages, order, stride)
        return FleetTrace(times[order] - times[order[0]], prompts, outputs, pages, self.page_tokens)


class _CopiedPages(Sequence[tuple[int, ...]]):
    """The pages of a trace's copies, made when they are asked for."""

    def __init__(self, pages: Sequence[tuple[int, ...]], order: NDArray[int64], stride: int) -> None:
        """Take the order of the copies' requests, and the distance between copies' pages."""
        self._pages = pages
        self._order = order
        self._stride = stride

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        copy, request = divmod(int(self._order[index]), len(self._pages))
        return tuple(page + copy * self._stride for page in self._pages[request])


class _Plain(msgspec.Struct, frozen=True):
    arrival_s: Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
    prompt_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    output_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    hash_ids: tuple[PageHash, ...] = ()


class _Mooncake(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e12)]  # milliseconds
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[PageHash, ...] = ()


def read_fleet_trace(path: Path, form: str) -> FleetTrace:
    """Read a trace, compressed if its name ends in `.gz`. Raises `ConfigError`."""
    lines: list[Line] = []
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for line in FORMS[form](_bounded(file)):
                lines.append(line)
                if len(lines) > MAX_REQUESTS:
                    raise ValueError(f"it has more than {MAX_REQUESTS} requests")
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, csv.Error) as error:
        raise ConfigError(f"{path} is no trace in the form {form}: {error}") from None
    if not lines:
        raise ConfigError(f"{path} has no requests")
    lines.sort(key=lambda line: line[0])
    times, prompts, outputs, pages = zip(*lines, strict=True)
    arrival_s = np.array(times) - times[0]
    page_tokens = HASHED_TOKENS if any(pages) else PAGE_TOKENS
    return FleetTrace(arrival_s, np.maximum(prompts, 1), np.maximum(outputs, 1), pages, page_tokens)


def _bounded(file: Iterator[str]) -> Iterator[str]:
    for line in file:
        if len(line) > MAX_LINE:
            raise ValueError(f"a line has more than {MAX_LINE} characters")
        if line.strip():
            yield line


def _plain(lines: Iterator[str]) -> Iterator[Line]:
    decode = msgspec.json.Decoder(_Plain).decode
    for line in lines:
        read = decode(line)
        yield read.arrival_s, read.prompt_tokens, read.output_tokens, read.hash_ids


def _mooncake(lines: Iterator[str]) -> Iterator[Line]:
    decode = msgspec.json.Decoder(_Mooncake).decode
    for line in lines:
        read = decode(line)
        yield read.timestamp / 1e3, read.input_length, read.output_length, read.hash_ids


def _azure(lines: Iterator[str]) -> Iterator[Line]:
    for row in csv.DictReader(lines):
        time = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()  # six digits of a second
        prompt, output = (int(row[name]) for name in ("ContextTokens", "GeneratedTokens"))
        if not (0 <= prompt <= MAX_REQUEST_TOKENS and 0 <= output <= MAX_REQUEST_TOKENS):
            raise ValueError(f"a request has {prompt} and {output} tokens")
        yield time, prompt, output, ()


FORMS: dict[str, Callable[[Iterator[str]], Iterator[Line]]] = {
    "jsonl": _plain,
    "mooncake": _mooncake,
    "azure": _azure,
}
