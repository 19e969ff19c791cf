"""Placement of drafters on devices, and the drafter that runs in a thread.

A drafter that needs no memory of the target gets a process (`remote/`). A drafter that needs some gets a thread
with cores of its own, as passes release Python's lock. If a call does not return in time, the drafter is given up.
It is asked again later if the call has returned by then.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from paceline.backend.device import CPU, SAME, Device
from paceline.backend.pass_thread import PassThread
from paceline.core.errors import ConfigError
from paceline.core.system import usable_cores
from paceline.draft.drafter import StoresLost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from paceline.core.nouns import Batch, Draft, Plan, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.draft.drafter import Drafter

T = TypeVar("T")

log = logging.getLogger(__name__)

DEADLINE_S = 10.0  # for one call of a drafter
AGAIN_S, LONGEST_AGAIN_S = 10.0, 600.0  # first and longest wait before a drafter that was given up is asked again


@dataclass(frozen=True, slots=True)
class Placement:
    """Devices of target and drafters; None is the default device, shared by both."""

    target: Device | None = None
    draft: Device | None = None

    @classmethod
    def parse(cls, text: str, target: Device | None = None) -> Placement:
        """Parse a `--draft-device`; the target's thread gets the other cores. Raises `ConfigError`.

        Where the target is on a device, `cpu` means all cores; for the rest see `Device.parse`.
        """
        draft = Device(torch_name=CPU) if text == CPU and target is not None else Device.parse(text)
        if draft is None or not draft.cores:
            return cls(target, draft)
        left = usable_cores() - draft.cores
        if not left:
            raise ConfigError(f"--draft-device {text} leaves no core to the target; give it fewer, or {SAME}")
        return cls(Device(left, None if target is None else target.torch_name), draft)

    @property
    def apart(self) -> bool:
        """True if target and drafters can work at once."""
        return self.draft is not None

    def worker(self) -> PassThread:
        """Return a thread for passes of the target, on its cores."""
        return PassThread("target", self.target.cores if self.target else frozenset())


class DrafterGivenUp(Exception):  # noqa: N818 (a state, no error of the user's)
    """A drafter hangs in a call; it is left alone for a while."""


class PlacedDrafter:
    """A drafter whose passes run in a thread on its own device; see `Drafter`.

    Each call has a deadline. A drafter that misses it is given up: it refuses to draft and is not called. It is
    asked again, with empty stores, after a wait, once the call has come back; each time it is given up the wait
    doubles.
    """

    def __init__(
        self, drafter: Drafter, worker: PassThread, deadline_s: float = DEADLINE_S, again_s: float = AGAIN_S
    ) -> None:
        self.name, self.needs = drafter.name, drafter.needs
        self._drafter, self._worker, self._deadline_s = drafter, worker, deadline_s
        self._wait_s = again_s  # wait after the next time that it is given up
        self._until_s: float | None = None  # time before which it is not asked again; None: it is not given up
        self._requests: dict[int, Request] = {}  # by row
        self._known: set[int] = set()  # rows that the drafter was told of

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Note a new request in a row."""
        self._requests[row] = request
        if self._until_s is None:
            self._known.add(row)
            self._drafter.admit(row, request, valid_lens)

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Draft on the device."""
        if self._until_s is not None:
            self._begin_again(self._until_s)
        return self._call(partial(self._drafter.propose, batch, plan))

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Take in on the device what was kept."""
        if self._until_s is None:
            self._call(partial(self._drafter.commit, batch, scores, verdict))

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Leading tokens of a row in each store; empty while it is given up."""
        return {} if self._until_s is not None else self._drafter.valid_lens(row)

    def release(self, row: int) -> None:
        """Note that a row's request has ended or was preempted."""
        self._requests.pop(row, None)
        if self._until_s is None:
            self._known.discard(row)
            self._drafter.release(row)

    def forget(self) -> None:
        """Drop what was learnt across requests."""
        if self._until_s is None:
            self._drafter.forget()

    def report(self) -> Mapping[str, Any]:
        """Return what was chosen, for the start-up banner."""
        on = {"on": f"cores {sorted(self._worker.cores)}"} if self._worker.cores else {}
        return {**self._drafter.report(), **on}

    def _call(self, call: Callable[[], T]) -> T:
        try:
            return self._worker.call(call, self._deadline_s)
        except TimeoutError:
            self._until_s = time.monotonic() + self._wait_s
            self._wait_s = min(2 * self._wait_s, LONGEST_AGAIN_S)
            raise DrafterGivenUp(f"it did not come back within {self._deadline_s:g} s, and is given up") from None

    def _begin_again(self, until_s: float) -> None:
        """Tell the drafter anew of all rows, and raise `StoresLost`.

        Raises `DrafterGivenUp` if it is too soon.
        """
        if time.monotonic() < until_s or not self._worker.idle:
            raise DrafterGivenUp("it did not come back from an earlier call, and is not asked now")
        while self._known:
            self._drafter.release(self._known.pop())
        for row, request in self._requests.items():
            self._known.add(row)
            self._drafter.admit(row, request, dict.fromkeys(self.needs.stores, 0))
        self._until_s = None
        log.warning("drafter %s came back, and is asked again", self.name)
        raise StoresLost


def place(drafter: Drafter, placement: Placement) -> Drafter:
    """Return a drafter that runs on the drafters' device, if any. Raises `ConfigError`."""
    if placement.draft is None or drafter.needs.pages == "none":
        return drafter
    if drafter.needs.pages == "shared" and not drafter.needs.stores:
        raise ConfigError(
            f"{drafter.name} drafts with the target's own layers, which stay where the target is; "
            f"leave out --draft-device, or take a drafter with weights of its own"
        )
    return PlacedDrafter(drafter, PassThread(f"draft {drafter.name}", placement.draft.cores))
