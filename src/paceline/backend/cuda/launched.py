"""Passes that were launched on a device, and their results."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.backend.cuda.device_memory import on_device
from paceline.backend.seam import PassResult
from paceline.backend.target import Deferred
from paceline.core.nouns import UNCHOSEN, noun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.seam import Pending


@noun
class Choices:
    """Tokens that a pass chose, still on its device, and their places among its specs."""

    num_specs: int
    places: NDArray[int64]  # [num_chosen] specs whose tokens the device chose
    token_ids: torch.Tensor  # [num_chosen] int64
    margins: torch.Tensor | None  # [num_chosen] float64; None: no spec asks for them
    logits: torch.Tensor | None  # [num_logit_rows, vocab] of the specs that want them
    logit_idx: NDArray[int64] | None  # as in `PassResult`


@noun
class DeviceResult:
    """Result of a pass, still on its device."""

    choices: Choices
    taps: Mapping[int, torch.Tensor] | None = None  # as in `PassResult`; they stay on the device
    hidden: torch.Tensor | None = None  # as in `PassResult`; it stays on the device


def launched(device: torch.device, run: Callable[[], DeviceResult]) -> Pending:
    """Launch a pass: enqueued now on a GPU, run in `wait` on a host."""
    if device.type == "cpu":
        return Deferred(lambda: to_host(run()))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with on_device(device), torch.inference_mode():
        start.record()
        result = run()
        end.record()
    return Deferred(partial(_fetch, result, start, end))


def _fetch(result: DeviceResult, start: torch.cuda.Event, end: torch.cuda.Event) -> PassResult:
    """Wait for a pass, and copy to the host what the host reads."""
    end.synchronize()
    return to_host(result, start.elapsed_time(end) / 1e3)


def to_host(result: DeviceResult, pass_s: float | None = None) -> PassResult:
    """Return chosen tokens as host arrays; taps and features stay where they are."""
    c = result.choices
    token_ids = np.full(c.num_specs, UNCHOSEN, np.int64)
    token_ids[c.places] = c.token_ids.cpu().numpy()
    margins = None
    if c.margins is not None:
        margins = np.full(c.num_specs, np.nan)
        margins[c.places] = c.margins.cpu().numpy()
    logits = None if c.logits is None else c.logits.cpu().numpy()
    taps = result.taps or {}
    return PassResult(token_ids, logits, c.logit_idx, taps, margins, hidden=result.hidden, pass_s=pass_s)  # type: ignore[arg-type]
