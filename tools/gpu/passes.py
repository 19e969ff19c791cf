"""Passes of a target over a filled store: layers, logits and the choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from paceline.backend.cuda.choice import ChoiceSpecs, choose
from paceline.backend.cuda.device_pass import DevicePass
from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from paceline.backend.cuda.decoder import CudaDecoder
    from paceline.backend.cuda.kv_store import DeviceKV


@dataclass(frozen=True, slots=True, eq=False)
class StaticPass:
    """Pass of rows with as many tokens behind the same context, and their choices."""

    decoder: CudaDecoder
    kv: DeviceKV
    tokens: DevicePass
    specs: ChoiceSpecs

    def __call__(self) -> torch.Tensor:
        """Run it; return the chosen tokens."""
        hidden, _ = self.decoder.forward(self.tokens, self.kv)
        chosen, _ = choose(self.decoder.logits(hidden), self.specs)
        return chosen

    def row(self, row: int) -> StaticPass:
        """Return the pass of one row alone."""
        d = self.tokens
        new = len(d.positions) // len(d.pages)
        return self._some(slice(row * new, row * new + new), slice(row, row + 1))

    def token(self, index: int) -> StaticPass:
        """Return the pass of one token of the one row."""
        return self._some(slice(index, index + 1), slice(0, 1))

    def _some(self, tokens: slice, rows: slice) -> StaticPass:
        d, count = self.tokens, tokens.stop - tokens.start
        each = torch.arange(count, device=d.positions.device)
        cu_len = torch.tensor([0, count]).to(d.positions.device)
        some = DevicePass(d.token_ids[tokens], d.positions[tokens], d.slots[tokens], cu_len, d.pages[rows], each)
        return replace(self, tokens=some)


def pages_of(context: int, new: int) -> int:
    """Return the pages of a row of `context` tokens and `new` ones."""
    return -(-(context + new) // PAGE_TOKENS)


def filled_kv(decoder: CudaDecoder, num_pages: int) -> DeviceKV:
    """Return a store of random keys and values."""
    kv = decoder.new_kv(num_pages)
    for layer in kv.data:  # one at a time: a copy of all would take as much memory again
        layer.copy_(torch.randn(layer.shape, device=layer.device, dtype=torch.bfloat16))
    if kv.scales is not None:
        kv.scales.fill_(1.0)
    return kv


def static_pass(
    decoder: CudaDecoder, kv: DeviceKV, rows: int, new: int, context: int, *, every: bool = True
) -> StaticPass:
    """Return a pass of `rows` rows with `new` tokens each behind `context`.

    Pages lie at random.

    every: choose after each token; False: after each row's last, as prefill does.
    """
    device, width = decoder.setup.device, pages_of(context, new)
    assert rows * width * PAGE_TOKENS <= kv.num_slots, "the store has too few pages"
    pages = _shuffled(rows * width, device).view(rows, width)
    positions = (context + torch.arange(new, device=device)).repeat(rows)
    owner = torch.arange(rows, device=device).repeat_interleave(new, output_size=rows * new)
    slots = pages[owner, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    cu_len = torch.arange(rows + 1, device=device) * new
    wanted = torch.arange(rows * new, device=device) if every else cu_len[1:] - 1
    tokens = DevicePass(
        token_ids=torch.arange(rows * new, device=device) * 7919 % decoder.config.vocab_size,
        positions=positions,
        slots=slots,
        cu_len=cu_len,
        pages=pages,
        wanted=wanted,
    )
    return StaticPass(decoder, kv, tokens, _specs(len(wanted), device))


def _shuffled(count: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randperm(count, generator=generator).to(device)


def _specs(num_places: int, device: torch.device) -> ChoiceSpecs:
    """Return the rules of choices half of which are under noise."""
    place = torch.arange(num_places, device=device)
    return ChoiceSpecs(
        seed_lo=place,
        seed_hi=torch.zeros_like(place),
        choice=torch.zeros_like(place),
        position=place + 100,
        temperature=(place % 2).to(torch.float64),
    )
