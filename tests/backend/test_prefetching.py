"""Prefetching: it changes no bit; the fastest choice is measured once, kept, and used."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from paceline import kernels
from paceline.backend.native import prefetching
from paceline.backend.native.load import pack_decoder
from paceline.backend.native.prefetching import (
    CHOICES,
    LEAST_BYTES,
    MOST_AHEAD,
    MOST_ROWS,
    ROWS,
    measured,
    tune,
    use,
)
from tests.oracles.blocks import file_block, random_blocks
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.backend.native.prefetching import Prefetching
    from paceline.backend.seam import PassRequest

USUAL = CHOICES[1]
FASTEST = tuple(CHOICES[i] for i in (0, 6, 4, 5, 3, 1, 2))  # for ROWS
TYPES = ("int8", "int4_row", "int4", "bf16", "f32", *kernels.kept_names())


@pytest.fixture(autouse=True)
def in_force(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[dict[int, Prefetching]]:
    """Yield what was set last, by tokens; afterwards all is as usual."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    found: dict[int, Prefetching] = {}
    real = kernels.set_prefetching

    def note(rows: int, num_bytes: int, past: bool) -> None:
        real(rows, num_bytes, past)
        found[rows] = prefetching.Prefetching(num_bytes, past)

    monkeypatch.setattr(kernels, "set_prefetching", note)
    yield found
    use((USUAL,) * len(ROWS))


@dataclass(frozen=True)
class Table:
    """The embedding, or the output matrix."""

    num_bytes: int


class TimedDecoder:
    """A decoder whose passes take a time by a clock of its own, the least with `FASTEST`."""

    num_ranks = 1

    def __init__(self, in_force: dict[int, Prefetching], weight_bytes: int = LEAST_BYTES) -> None:
        self.weight_bytes = weight_bytes
        self.config = SimpleNamespace(num_layers=40, experts=None)
        table = Table(LEAST_BYTES // 8)
        self.tables = SimpleNamespace(embed=table, head=table)
        self.team = SimpleNamespace(num_threads=1)
        self.num_passes = 0
        self.now_s = 0.0
        self.depths: set[int | None] = set()
        self._in_force = in_force

    def describe(self) -> str:
        return "timed"

    def new_kv(self, num_pages: int, num_layers: int) -> None:
        return None

    def launch(self, request: PassRequest) -> TimedDecoder:
        rows = len(request.packed.token_ids)
        self.depths.add(request.num_layers)
        self.num_passes += 1
        right = self._in_force.get(rows, USUAL) == FASTEST[ROWS.index(rows)]
        self.now_s += (0.9 if right else 1.0) * (1.0 + self.num_passes / 200)  # the machine slows down
        return self

    def wait(self) -> None:
        return None


@pytest.fixture
def decoder(in_force: dict[int, Prefetching], monkeypatch: pytest.MonkeyPatch) -> TimedDecoder:
    """Return a decoder whose clock is the one that is read."""
    found = TimedDecoder(in_force)
    monkeypatch.setattr(prefetching, "perf_counter", lambda: found.now_s)
    monkeypatch.setattr(prefetching, "monotonic", lambda: 0.0)
    return found


def packed(kind: str, width: int) -> kernels.Matrix:
    rng = np.random.default_rng(3)
    if kind not in kernels.kept_names():
        return kernels.pack(rng.standard_normal((70, width), dtype=np.float32), kind)
    rows = random_blocks(rng, kind, 70, width).reshape(-1)
    return kernels.pack_blocks(kernels.ThreadPool(1), rows, kind, 70, width, kind)


@pytest.mark.parametrize("kind", TYPES)
def test_no_bit_of_a_product_depends_on_it(kind: str) -> None:
    width = 768 if kind not in kernels.kept_names() or file_block(kind) == 256 else 896
    matrix, team = packed(kind, width), kernels.ThreadPool(1)
    x = np.random.default_rng(4).standard_normal((14, width), dtype=np.float32)
    for count in range(1, 15):
        found = set()
        for choice in (*CHOICES, (MOST_AHEAD, True)):
            for rows in range(1, MOST_ROWS + 1):
                kernels.set_prefetching(rows, *choice)
            out = np.empty((count, 70), np.float32)
            kernels.multiply(team, matrix, x[:count], out)
            found.add(out.tobytes())
        assert len(found) == 1, count


@pytest.mark.parametrize("wrong", [(0, 0), (MOST_ROWS + 1, 0), (1, MOST_AHEAD + 1)])
def test_what_kernels_cannot_do_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not one piece"):
        kernels.set_prefetching(*wrong, past=False)


def test_the_fastest_is_found_for_each_number_of_tokens(decoder: TimedDecoder) -> None:
    assert measured(decoder) == FASTEST  # type: ignore[arg-type]


def test_numbers_between_take_the_next_larger_ones_choice(in_force: dict[int, Prefetching]) -> None:
    use(FASTEST)
    found = [in_force[n] for n in range(1, MOST_ROWS + 1)]
    assert found == [*FASTEST[:6], *(FASTEST[6],) * 6]


def test_the_choice_is_measured_once_and_kept(decoder: TimedDecoder, in_force: dict[int, Prefetching]) -> None:
    told, passes = tune(decoder), decoder.num_passes  # type: ignore[arg-type]
    assert passes
    use((USUAL,) * len(ROWS))
    assert tune(decoder) == told  # type: ignore[arg-type]
    assert decoder.num_passes == passes
    assert in_force[4] == FASTEST[3]
    assert "4: 6144 past L2, 5: 24576" in told


@pytest.mark.parametrize(
    "kept", [b"{", b"[]", b"[[0,false]]", b"[" + b",".join([b"[-1,false]"] * len(ROWS)) + b"]"]
)
def test_what_is_kept_and_broken_is_measured_anew(
    decoder: TimedDecoder, kept: bytes, monkeypatch: pytest.MonkeyPatch, in_force: dict[int, Prefetching]
) -> None:
    monkeypatch.setattr(type(prefetching.KEPT), "read", lambda *_: kept)
    tune(decoder)  # type: ignore[arg-type]
    assert decoder.num_passes
    assert in_force[4] == FASTEST[3]


def test_of_a_large_model_some_layers_are_timed(decoder: TimedDecoder) -> None:
    decoder.weight_bytes = 40 * prefetching.PASS_BYTES // 3 + LEAST_BYTES // 8
    tune(decoder)  # type: ignore[arg-type]
    assert decoder.depths == {4}


@pytest.mark.parametrize("change", [{"weight_bytes": LEAST_BYTES - 1}, {"num_ranks": 2}])
def test_what_lies_in_a_cache_or_in_several_processes_stays_as_usual(
    decoder: TimedDecoder, change: dict[str, int], in_force: dict[int, Prefetching]
) -> None:
    for name, value in change.items():
        setattr(decoder, name, value)
    assert tune(decoder) == "as usual"  # type: ignore[arg-type]
    assert not decoder.num_passes
    assert not in_force


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "ministral", "gemma4_text", "exaone4"])
def test_real_layers_can_be_timed(family: str) -> None:
    config = tiny_config(family, num_layers=3)
    decoder = pack_decoder(config, tiny_weights(config, dtype=torch.float32), kernels.ThreadPool(2))
    found = measured(decoder)
    assert len(found) == len(ROWS)
    assert set(found) <= set(CHOICES)


def test_experts_stay_as_usual() -> None:
    config = tiny_config("qwen3_moe")
    decoder = pack_decoder(config, tiny_weights(config, dtype=torch.float32), kernels.ThreadPool(1))
    assert tune(decoder) == "as usual"
