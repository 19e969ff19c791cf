"""Simulation of serving without a model: requests, prices and chances of acceptance in; times out.

Discrete events with numbers in place of texts: rows, prefill chunks, drafts of a policy, steps that take as long
as their price. The policies are those of the engine, on the same seam.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.control.policy import NO_WORK, Outcomes, StepView, Work

if TYPE_CHECKING:
    from numpy import bool_, float64, int64
    from numpy.typing import NDArray

    from paceline.control.policy import Decision
    from paceline.control.protocols import Policy, StepCost


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in order of arrival, with their chances of acceptance."""

    arrival_s: NDArray[float64]  # [n] ascending
    prompt_lens: NDArray[int64]  # [n]
    output_lens: NDArray[int64]  # [n]
    chances: NDArray[float64]  # [n, num_drafters, max_depth] that a draft is kept if the one before was

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True, slots=True)
class SimulatedReplica:
    """Limits of one engine."""

    num_rows: int = 64
    prefill_tokens: int = 512  # most prefill tokens of a step


@dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """Result of a workload."""

    first_token_s: NDArray[float64]  # [n] time of each request's first token
    end_s: NDArray[float64]  # [n] time of its last token
    workload: Workload
    num_steps: int
    drafted: int  # tokens
    accepted: int  # tokens
    passes: int  # decode passes: one for each row in each step

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return int(self.workload.output_lens.sum())

    @property
    def throughput(self) -> float:
        """Tokens per second, from the first arrival to the last end."""
        return float(self.num_tokens / (self.end_s.max() - self.workload.arrival_s[0]))

    @property
    def tpot_s(self) -> NDArray[float64]:
        """Seconds per token after the first; NaN for answers of one token. [n]"""
        after = np.where(self.workload.output_lens > 1, self.workload.output_lens - 1, np.nan)
        found: NDArray[float64] = (self.end_s - self.first_token_s) / after
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """A planned step and its price."""

    policy: Policy  # that planned the step
    view: StepView
    decision: Decision
    work: Work  # drafts left out
    chunks: NDArray[int64]  # [num_rows] tokens of prefill
    verify_s: float
    draft_s: float


class Simulator:
    """One engine with the serial loop. A step is a few numpy calls."""

    def __init__(
        self, workload: Workload, replica: SimulatedReplica, cost: StepCost, policy: Policy, seed: int = 0
    ) -> None:
        self.workload = workload
        self.replica = replica
        self.cost = cost
        self.policy = policy
        self._seed = seed
        self._request = np.full(replica.num_rows, -1)  # request in each row, -1: none
        self._to_prefill = np.zeros(replica.num_rows, np.int64)
        self._length = np.zeros(replica.num_rows, np.int64)
        self._left = np.zeros(replica.num_rows, np.int64)  # tokens still to write
        self._queue = deque(range(len(workload)))  # requests that have no row yet
        self._now = 0.0
        self._first = np.full(len(workload), np.nan)
        self._end = np.full(len(workload), np.nan)
        self._counts = [0, 0, 0, 0]  # steps, drafted, accepted, passes

    def run(self) -> Simulated:
        """Run until every request has ended, and return the result."""
        while self._queue or (self._request >= 0).any():
            self._admit()
            if (self._request < 0).all():
                self._now = float(self.workload.arrival_s[self._queue[0]])
            else:
                self._step()
        return Simulated(self._first, self._end, self.workload, *self._counts)

    def _admit(self) -> None:
        for row in np.flatnonzero(self._request < 0):
            if not self._queue or self.workload.arrival_s[self._queue[0]] > self._now:
                return
            self._begin_row(int(row), self._queue.popleft())

    def _begin_row(self, row: int, request: int) -> None:
        self._request[row] = request
        self._to_prefill[row] = self.workload.prompt_lens[request]
        self._length[row] = 0
        self._left[row] = self.workload.output_lens[request]
        self.policy.admit(row)

    def _step(self) -> None:
        planned = self._plan(self._request >= 0)
        self._now += planned.verify_s + planned.draft_s
        self._end_step(planned)

    def _plan(self, members: NDArray[bool_], policy: Policy | None = None) -> PlannedStep:
        """Plan a step of some rows. members: [num_rows] True for these. policy: of their group."""
        policy = policy or self.policy
        (rows,) = np.nonzero(members & (self._to_prefill == 0))
        prefill, chunks = self._prefill(self.replica.prefill_tokens, members)
        view = StepView(rows, self._length[rows], self._left[rows] - 1, prefill)
        decision = policy.decide(view)
        if decision.prefill_tokens is not None:
            budget = min(decision.prefill_tokens, self.replica.prefill_tokens)
            prefill, chunks = self._prefill(budget, members)
        keys = int(view.lengths.sum())
        base = Work(len(rows), 0, keys, keys) + prefill
        draft_s = self.cost.drafting_s(decision.ks, decision.drafters)
        verify_s = self.cost.price(base, view.lengths, decision.ks, decision.drafters) - draft_s
        return PlannedStep(policy, view, decision, base, chunks, verify_s, draft_s)

    def _end_step(self, planned: PlannedStep) -> None:
        """Draw the accepted drafts, let the policy learn, and commit."""
        rows, d = planned.view.rows, planned.decision
        kept = self._kept(rows, d.ks, d.drafters)
        seconds = planned.verify_s + planned.draft_s
        planned.policy.learn(planned.view, Outcomes(rows, d.drafters, d.ks, kept, 0.0, seconds))
        self._commit(rows, kept + 1)
        self._end_prefill(planned.chunks)
        for index, count in enumerate((1, int(d.ks.sum()), int(kept.sum()), len(rows))):
            self._counts[index] += count

    def _prefill(self, budget: int, members: NDArray[bool_]) -> tuple[Work, NDArray[int64]]:
        """Return the work of the next prefill chunks, and each row's tokens. [num_rows]"""
        waiting = np.where(members, self._to_prefill, 0)
        chunks = self._share_out(budget, waiting)
        tokens = int(chunks.sum())
        if not tokens:
            return NO_WORK, chunks
        done = int((self._to_prefill[chunks > 0] == chunks[chunks > 0]).sum())
        pairs = int((chunks * self._length + chunks * (chunks + 1) // 2).sum())
        return Work(tokens, tokens - done, int((self._length + chunks)[chunks > 0].sum()), pairs), chunks

    def _share_out(self, budget: int, waiting: NDArray[int64]) -> NDArray[int64]:
        """Return the tokens of each row's chunk, in the order of rows. [num_rows]"""
        before = np.cumsum(waiting) - waiting
        chunks: NDArray[int64] = np.clip(budget - before, 0, waiting)
        return chunks

    def _kept(self, rows: NDArray[int64], ks: NDArray[int64], drafters: NDArray[int64]) -> NDArray[int64]:
        """Draw the number of accepted drafts of each row. [n]"""
        depth = min(int(ks.max(initial=0)), self.workload.chances.shape[2])
        if not depth:
            return np.zeros(len(rows), np.int64)
        requests, places = self._request[rows], np.arange(depth)
        chances = self.workload.chances[requests, np.maximum(drafters, 0), :depth]
        draws = _draws(self._seed, requests[:, None], self._length[rows][:, None] + places)
        kept = (draws < chances) & (places < ks[:, None])
        found: NDArray[int64] = np.logical_and.accumulate(kept, axis=1).sum(axis=1)
        return found

    def _commit(self, rows: NDArray[int64], counts: NDArray[int64]) -> None:
        counts = np.minimum(counts, self._left[rows])
        self._left[rows] -= counts
        self._length[rows] += counts
        self._finish(rows[self._left[rows] == 0])

    def _end_prefill(self, chunks: NDArray[int64]) -> None:
        """Commit prefill chunks; the last chunk of a prompt yields the first token."""
        (rows,) = np.nonzero(chunks)
        self._length[rows] += chunks[rows]
        self._to_prefill[rows] -= chunks[rows]
        begun = rows[self._to_prefill[rows] == 0]
        requests = self._request[begun]  # a resumed request has had its first token
        self._first[requests] = np.fmin(self._first[requests], self._now)
        self._length[begun] += 1
        self._left[begun] -= 1
        self._finish(begun[self._left[begun] == 0])

    def _finish(self, rows: NDArray[int64]) -> None:
        self._end[self._request[rows]] = self._now
        self._request[rows] = -1


class OverlapSimulator(Simulator):
    """One engine with the loop of `engine/overlapped_loop.py`; groups are evened out by rows, not work."""

    def __init__(
        self,
        workload: Workload,
        replica: SimulatedReplica,
        cost: StepCost,
        policy: Policy,
        seed: int = 0,
        *,
        apart: bool = True,
    ) -> None:
        """Take `apart`: drafters have a device of their own."""
        super().__init__(workload, replica, cost, policy, seed)
        self._apart = apart
        self._policies = policy, policy.for_second_group()  # by group
        self._group = np.zeros(replica.num_rows, np.int64)
        self._ready: PlannedStep | None = None  # step whose drafts were made in the last step
        self._next_group = 0  # group that is ready, or that is drafted for next

    def _step(self) -> None:
        now = self._ready or self._begin()
        self._ready = None
        if now is None:
            super()._step()
            return
        self._next_group = 1 - self._next_group
        self._even_out(self._next_group)
        members = (self._request >= 0) & (self._group == self._next_group)
        self._ready = self._plan(members, self._policies[self._next_group]) if members.any() else None
        draft_s = self._ready.draft_s if self._ready else 0.0
        self._now += max(now.verify_s, draft_s) if self._apart else now.verify_s + draft_s
        self._end_step(now)

    def _begin(self) -> PlannedStep | None:
        """Draft for one group while the target waits, if there are two rows or more."""
        (rows,) = np.nonzero(self._request >= 0)
        if len(rows) < 2:
            return None
        self._group[rows] = np.arange(len(rows)) % 2
        members = (self._request >= 0) & (self._group == self._next_group)
        planned = self._plan(members, self._policies[self._next_group])
        self._now += planned.draft_s
        return planned

    def _even_out(self, group: int) -> None:
        """Move rows out of a group while it has two more than the other."""
        (own,), (other,) = (np.nonzero((self._request >= 0) & (self._group == g)) for g in (group, 1 - group))
        surplus = max(len(own) - len(other), 0) // 2
        self._group[own[len(own) - surplus :]] = 1 - group

    def _admit(self) -> None:
        """Admit requests; they join the group that is drafted for next."""
        free = self._request < 0
        super()._admit()
        self._group[free & (self._request >= 0)] = 1 - self._next_group if self._ready else self._next_group


def _draws(seed: int, requests: NDArray[int64], positions: NDArray[int64]) -> NDArray[float64]:
    """Return uniform numbers by text and position, independent of the policy (splitmix64)."""
    with np.errstate(over="ignore"):
        x = (requests.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64)
        x += np.uint64(0x9E3779B97F4A7C15) * np.uint64(2 * seed + 1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    found: NDArray[float64] = (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return found


def mixed_ease(chances: NDArray[float64], ease: NDArray[float64]) -> NDArray[float64]:
    """Return chances for each of n requests: `chances` shifted by `ease` logits. [n, 1, depth]"""
    z = np.log(chances) - np.log1p(-chances)
    found: NDArray[float64] = 1 / (1 + np.exp(-(z + ease[:, None])))
    return found[:, None, :]
