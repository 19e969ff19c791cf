"""Choice of tokens at many places, under the noise of `core/noise.py`.

The token ids are those of `core.sampling.choose_token`, the margins those of `choose_ahead`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from paceline.backend.cuda.kernel_launch import (
    ELEMENTS,
    Variant,
    aligned_names,
    cdiv,
    launch,
    lists_variants,
    unaligned_marks,
    uses_kernels,
)
from paceline.core.nouns import BROKEN
from paceline.core.sampling import MIN_TEMPERATURE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.nouns import SamplingSpec

BLOCK = 2048  # logits of a tile, which one program takes
BLOCK_TILES = 128  # tiles that are compared at once
MAX_SCORED = 1 << 21  # logits that PyTorch takes at once
_SPECS = ("seed_lo", "seed_hi", "choice", "position", "temperature", "hint_ids", "hint_add")
_MASK = 0xFFFFFFFF
_MURMUR = (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16)
_LOWBIAS = (16, 0x7FEB352D, 15, 0x846CA68B, 16)


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceSpecs:
    """Rules of the choices at some places: `SamplingSpec` as arrays.

    They do not hold edits and filters.
    """

    seed_lo: torch.Tensor  # [num_places] int64 the seed's lower 32 bits
    seed_hi: torch.Tensor  # [num_places] int64 the seed's upper bits
    choice: torch.Tensor  # [num_places] int64
    position: torch.Tensor  # [num_places] int64
    temperature: torch.Tensor  # [num_places] float32 or float64; 0: the largest logit


def choice_specs(specs: Sequence[SamplingSpec], device: torch.device) -> ChoiceSpecs:
    """Return a host's specs as arrays on a device."""

    def on_device(numbers: list[int] | list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)

    return ChoiceSpecs(
        seed_lo=on_device([s.seed & _MASK for s in specs], torch.int64),
        seed_hi=on_device([s.seed >> 32 for s in specs], torch.int64),
        choice=on_device([s.choice for s in specs], torch.int64),
        position=on_device([s.position for s in specs], torch.int64),
        temperature=on_device([s.params.temperature for s in specs], torch.float64),
    )


def choose(
    logits: torch.Tensor,
    specs: ChoiceSpecs,
    *,
    draft_ids: torch.Tensor | None = None,
    hint_ids: torch.Tensor | None = None,
    hint_add: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose a token at every place; the lowest id on ties.

    logits: [num_places, vocab] float32 or float64. draft_ids: [vocab] target id of each logit of a draft
    vocabulary, none twice, negative where there is no token; noise and results are of target ids. hint_ids,
    hint_add: [num_places] one target id for each place, or -1, and what is added to its logit.

    Returns token ids [num_places] int64, BROKEN where no logit is finite, and margins [num_places] float64: by
    how many logits the best score leads the next.
    """
    assert (hint_ids is None) == (hint_add is None)
    if len(logits) and uses_kernels(logits):
        return _choose_by_kernels(logits, specs, draft_ids, hint_ids, hint_add)
    return _choose_by_torch(logits, specs, draft_ids, hint_ids, hint_add)


# Kernels ------------------------------------------------------------------------------------------


@lru_cache
def _score_variant(
    element: str, temperature: str, add: str | None, has_draft_ids: bool, aligned: frozenset[str]
) -> Variant:
    return Variant(
        name=f"score_tiles {element} {temperature}"
        + (f" hint {add}" if add else "")
        + " draft_ids" * has_draft_ids
        + unaligned_marks(aligned, "stride"),
        kernel="choice_kernels:score_tiles",
        arguments={
            "logits": f"*{element}",
            "seed_lo": "*i64",
            "seed_hi": "*i64",
            "choice": "*i64",
            "position": "*i64",
            "temperature": f"*{temperature}",
            "draft_ids": "*i64" if has_draft_ids else "none",
            "hint_ids": "*i64" if add else "none",
            "hint_add": f"*{add}" if add else "none",
            "best": "*fp64",
            "second": "*fp64",
            "best_ids": "*i32",
            "stride": "i32",
            "vocab_size": "i32",
        },
        constants={"MIN_TEMPERATURE": MIN_TEMPERATURE, "BLOCK": BLOCK},
        unaligned=frozenset(_SPECS),
        aligned=aligned,
    )


@lru_cache
def _best_variant(temperature: str) -> Variant:
    return Variant(
        name=f"best_of_tiles {temperature}",
        kernel="choice_kernels:best_of_tiles",
        arguments={
            "best": "*fp64",
            "second": "*fp64",
            "best_ids": "*i32",
            "temperature": f"*{temperature}",
            "token_ids": "*i64",
            "margins": "*fp64",
            "num_tiles": "i32",
        },
        constants={"MIN_TEMPERATURE": MIN_TEMPERATURE, "BROKEN": BROKEN, "BLOCK": BLOCK_TILES},
        unaligned=frozenset({"temperature"}),
        num_warps=1,
    )


@lists_variants
def variants() -> list[Variant]:
    """Return variants of the target's choices and of drafters'."""
    any_size, aligned = frozenset[str](), aligned_names(stride=0)
    listed = [_score_variant("fp32", "fp64", None, has_draft_ids, aligned) for has_draft_ids in (False, True)]
    listed.append(_score_variant("fp32", "fp32", None, False, any_size))
    listed += [_score_variant("fp32", "fp64", "fp32", has_draft_ids, aligned) for has_draft_ids in (False, True)]
    return [*listed, _best_variant("fp32"), _best_variant("fp64")]


def _choose_by_kernels(
    logits: torch.Tensor,
    specs: ChoiceSpecs,
    draft_ids: torch.Tensor | None,
    hint_ids: torch.Tensor | None,
    hint_add: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_places, vocab_size = logits.shape
    num_tiles = cdiv(vocab_size, BLOCK)
    assert logits.stride(1) == 1
    best = logits.new_empty(num_places, num_tiles, dtype=torch.float64)
    second = torch.empty_like(best)
    best_ids = logits.new_empty(num_places, num_tiles, dtype=torch.int32)
    token_ids = logits.new_empty(num_places, dtype=torch.int64)
    margins = logits.new_empty(num_places, dtype=torch.float64)
    temperature = ELEMENTS[specs.temperature.dtype]
    launch(
        _score_variant(
            ELEMENTS[logits.dtype],
            temperature,
            None if hint_add is None else ELEMENTS[hint_add.dtype],
            draft_ids is not None,
            aligned_names(stride=logits.stride(0)),
        ),
        (num_places, num_tiles),
        logits,
        *(each.contiguous() for each in (specs.seed_lo, specs.seed_hi, specs.choice, specs.position)),
        specs.temperature,
        draft_ids,
        None if hint_ids is None else hint_ids.contiguous(),
        hint_add,
        best,
        second,
        best_ids,
        logits.stride(0),
        vocab_size,
    )
    launch(
        _best_variant(temperature),
        (num_places,),
        best,
        second,
        best_ids,
        specs.temperature,
        token_ids,
        margins,
        num_tiles,
    )
    return token_ids, margins


# PyTorch ------------------------------------------------------------------------------------------


def _choose_by_torch(
    logits: torch.Tensor,
    specs: ChoiceSpecs,
    draft_ids: torch.Tensor | None,
    hint_ids: torch.Tensor | None,
    hint_add: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_places, vocab_size = logits.shape
    ids = torch.arange(vocab_size, device=logits.device) if draft_ids is None else draft_ids
    token_ids = logits.new_empty(num_places, dtype=torch.int64)
    margins = logits.new_empty(num_places, dtype=torch.float64)
    at_once = max(1, MAX_SCORED // vocab_size)
    for first in range(0, num_places, at_once):
        some = slice(first, first + at_once)
        z = logits[some]
        if hint_ids is not None and hint_add is not None:
            raised = z + hint_add[some, None].to(z.dtype)
            z = torch.where(ids == hint_ids[some, None], raised, z)
        scores, unit = _scores(z, ids, specs, some)
        token_ids[some], margins[some] = _two_best(scores, ids, unit)
    return token_ids, margins


def _scores(
    z: torch.Tensor, ids: torch.Tensor, specs: ChoiceSpecs, some: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [n, vocab] float64 and temperatures [n, 1], 0: no noise."""
    temperature = specs.temperature[some, None].to(torch.float64)
    unit = torch.where(temperature > 0, temperature.clamp(min=MIN_TEMPERATURE), 0)
    inverse = torch.where(unit > 0, 1 / unit, 1).to(z.dtype)
    k0, k1 = _keys(specs, some)
    scores = (z * inverse).to(torch.float64) + torch.where(unit > 0, _gumbel(ids, k0, k1), 0)
    return torch.where((ids < 0) | scores.isnan(), -torch.inf, scores), unit


def _two_best(scores: torch.Tensor, ids: torch.Tensor, unit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids of the largest scores, and their margins. [n]"""
    two = functional.pad(scores, (0, 1), value=-torch.inf).topk(2).values
    token_ids = torch.where((scores == two[:, :1]) & (ids >= 0), ids, torch.iinfo(torch.int64).max).amin(1)
    finite = two[:, 0].isfinite()
    unit = unit.squeeze(1)
    lead = torch.where(finite, two[:, 0] - two[:, 1], torch.where(unit > 0, 0, torch.inf))
    return torch.where(finite, token_ids, BROKEN), lead * torch.where(unit > 0, unit, 1)


def _keys(specs: ChoiceSpecs, some: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both words of each place's noise key, see `core.noise.key`. [n, 1] int64"""
    k0 = torch.full_like(specs.seed_lo[some], 0x243F6A88)
    k1 = torch.full_like(k0, 0x85A308D3)
    lane = torch.zeros_like(k0)
    for word in (specs.seed_lo[some], specs.seed_hi[some], specs.choice[some], lane, specs.position[some]):
        k0 = _mix((k0 ^ word) + 0x9E3779B9, _MURMUR)
        k1 = _mix((k1 ^ word) + 0x7F4A7C15, _LOWBIAS)
    return k0[:, None], k1[:, None]


def _gumbel(ids: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor) -> torch.Tensor:
    """Return the Gumbel noise of token ids [vocab] under keys [n, 1]. [n, vocab] float64"""
    h1 = _mix(_mix(ids ^ k0, _LOWBIAS) + k1, _LOWBIAS)
    h2 = _mix(_mix(ids ^ k1, _MURMUR) + k0, _MURMUR)
    low = h1 < 1 << 31
    distance = torch.where(low, h1, h1 ^ _MASK) << 32 | torch.where(low, h2, h2 ^ _MASK)  # to the nearer end
    v = (distance.to(torch.float64) + 0.5) * 2.0**-64
    return -torch.log(torch.where(low, -torch.log1p(-v), -torch.log(v)))


def _mix(x: torch.Tensor, mixer: tuple[int, ...]) -> torch.Tensor:
    """Mix the lower 32 bits of int64 numbers."""
    a, m, b, n, c = mixer
    x = x & _MASK
    x = ((x ^ (x >> a)) * m) & _MASK
    x = ((x ^ (x >> b)) * n) & _MASK
    return x ^ (x >> c)
