"""Routing: the replica that a request goes to.

A policy prices every replica, and the router takes the cheapest replica that may have the request. Equally cheap
replicas take turns. There is no clock and no network here: the fleet and the simulator pass in what they know.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS, noun

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from numpy import bool_, float64, int64
    from numpy.typing import NDArray

COUNTED_REQUESTS = 256  # requests in one generation of page counts; the last two generations are read
COUNTED_PAGES = 512  # first pages of a prompt that are counted; later ones are as common as the last of these
FEW = 2  # a page that no more requests than this share is never common
MEAN_RATE = 0.02  # share of the mean prompt that one more prompt replaces
RECENT_REQUESTS = 16  # later requests for each replica, on average, after which a request counts 1/e
MAX_WEIGHT = 1e9  # weight of the newest request at which all weights are scaled down

Why = Literal["pages", "load", "turn", "only"]


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as routing sees it."""

    prompt_tokens: int  # to prefill: the prompt, and the told tokens of an answer that goes on
    page_hashes: Sequence[Hashable] = ()  # of the prompt's full pages, each of all tokens up to there
    banned: frozenset[str] = frozenset()  # names of replicas that must not have it
    promise: str = ""  # promise key that the answer began under; empty: any
    page_tokens: int = PAGE_TOKENS


class ReplicaView(NamedTuple):
    """A replica as routing sees it, made anew for each request that finds pages there."""

    name: str
    alive: bool  # it takes requests: neither dead nor draining
    promise: str  # promise key
    open_rows: int  # requests sent there that have not ended
    backlog_tokens: int  # prompt tokens sent there that are not computed
    prefill_s_per_token: float
    step_s_by_rows: tuple[float, ...]  # seconds per token of each row with 1, 2, ... rows, with the K chosen there
    hit_pages: int = 0  # first pages of this request's prompt that are kept there


class RouteChoice(NamedTuple):
    """The replica of a request, and the reason."""

    replica: str
    why: Why


@noun
class Columns:
    """The n replicas as policies read them. [n] each"""

    names: Sequence[str]
    may: NDArray[bool_]  # it may have the request
    open_rows: NDArray[int64]
    wait_s: NDArray[float64]  # until all prompts sent there are computed
    prefill_s: NDArray[float64]  # seconds of a prompt token
    token_s: NDArray[float64]  # seconds per token of a row, with one more row
    slower_s: NDArray[float64]  # by how much one more row delays a token of each row
    hit_pages: NDArray[int64]


class RoutingPolicy(Protocol):
    """Prices replicas for a request."""

    @property
    def why(self) -> Why:
        """Strongest reason that this policy has for a choice.

        A policy with "pages" gives this reason if the chosen replica keeps the most pages, else "load".
        """

    def prices(self, request: RequestView, replicas: Columns, recent: NDArray[float64]) -> NDArray[float64]:
        """Return a price for each replica; the lowest wins. [n]

        recent: requests that each one got lately.
        """


# Views to columns --------------------------------------------------------------------------------


def decoding_s(open_rows: int, step_s_by_rows: Sequence[float]) -> tuple[float, float]:
    """Return the seconds per token with one more row, and the row's part in them.

    A row beyond the last one of the table waits for another to end, which counts like a slower step.
    """
    rows = len(step_s_by_rows)
    if not rows:
        return 0.0, 0.0
    if open_rows < rows:
        now = step_s_by_rows[open_rows]
        return now, max(now - step_s_by_rows[open_rows - 1], 0.0) if open_rows else 0.0
    slower_s = step_s_by_rows[-1] / rows
    return slower_s * (open_rows + 1), slower_s


def columns(request: RequestView, views: Sequence[ReplicaView]) -> Columns:
    """Return the columns of some replicas for a request."""
    names, alive, promises, rows, backlogs, prefill, steps, hits = zip(*views, strict=True)
    may = np.array(alive, np.bool_)
    if request.banned:
        may &= np.array([name not in request.banned for name in names])
    if request.promise:
        may &= np.array([promise == request.promise for promise in promises])
    decoding = np.array([decoding_s(n, table) for n, table in zip(rows, steps, strict=True)])
    prefill_s = np.array(prefill, np.float64)
    wait_s = np.array(backlogs) * prefill_s
    return Columns(
        names, may, np.array(rows), wait_s, prefill_s, decoding[:, 0], decoding[:, 1], np.array(hits, np.int64)
    )


# Policies ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seconds:
    """Predicted seconds: queue, own prefill, own answer, and the delay of others.

    Three corrections of the bare sum keep a few replicas from having all requests. A token computed anew counts
    `anew` times, as it will be computed once more when it is evicted. An open row costs at least `open_share` of
    the prefill of a mean prompt, as it takes so much of the cache. A request that the replica got lately costs
    `recent_share` of it, as it left pages there: else an idle replica's cache stays empty while others evict.
    """

    anew: float = 1.5
    open_share: float = 0.125
    recent_share: float = 0.05
    answer_tokens: int = 256  # tokens that an answer is taken to have
    why: Why = "pages"
    _mean_prompt: float = field(default=0.0, init=False)

    def prices(self, request: RequestView, replicas: Columns, recent: NDArray[float64]) -> NDArray[float64]:
        """Return seconds. [n]"""
        self._mean_prompt = _moved(self._mean_prompt, request.prompt_tokens)
        hits = replicas.hit_pages * request.page_tokens
        fresh_s = np.maximum(request.prompt_tokens - hits, 1) * replicas.prefill_s
        mean_s = self._mean_prompt * replicas.prefill_s
        open_s = np.maximum(self.open_share * mean_s, self.answer_tokens * replicas.slower_s) * replicas.open_rows
        answer_s = self.answer_tokens * replicas.token_s
        found: NDArray[float64] = (
            replicas.wait_s + self.anew * fresh_s + answer_s + open_s + self.recent_share * mean_s * recent
        )
        return found


def _moved(mean: float, value: float) -> float:
    return mean + MEAN_RATE * (value - mean) if mean else float(value)


class CommonPages:
    """Pages that more of the last requests have than one replica's share of them.

    Prompts of one system prompt begin with the same pages. A rule that follows pages would send them all to one
    replica, so these pages must not count.
    """

    def __init__(self) -> None:
        self._counts: list[Counter[Hashable]] = [Counter(), Counter()]  # counts of this generation and of the last
        self._requests = [0, 0]

    def count(self, page_hashes: Sequence[Hashable], num_replicas: int) -> int:
        """Count a request's pages, and return how many of its first pages are common."""
        if self._requests[0] == COUNTED_REQUESTS:
            self._counts = [Counter(), self._counts[0]]
            self._requests = [0, self._requests[0]]
        counted = page_hashes[:COUNTED_PAGES]
        self._counts[0].update(counted)
        self._requests[0] += 1
        share = max(FEW, sum(self._requests) / num_replicas)
        new, old = self._counts
        common = next((i for i, page in enumerate(counted) if new[page] + old[page] <= share), len(counted))
        return len(page_hashes) if common == COUNTED_PAGES else common


@dataclass(slots=True)
class Prefix:
    """The longest kept prefix, else the fewest open requests: Ray Serve's rule.

    A prefix counts from a tenth of the prompt on, and common pages do not count.
    """

    least_share: float = 0.1
    why: Why = "pages"
    _common: CommonPages = field(default_factory=CommonPages, init=False)

    def prices(self, request: RequestView, replicas: Columns, recent: NDArray[float64]) -> NDArray[float64]:
        """Return kept pages, negative, or open requests. [n]"""
        common = self._common.count(request.page_hashes, int(np.count_nonzero(replicas.may)))
        rare = np.maximum(replicas.hit_pages - common, 0)
        rare[rare * request.page_tokens < self.least_share * request.prompt_tokens] = 0
        if not (rare * replicas.may).any():
            return replicas.open_rows.astype(np.float64)
        found: NDArray[float64] = replicas.open_rows / (1.0 + replicas.open_rows.max()) - rare
        return found


@dataclass(frozen=True, slots=True)
class Least:
    """The fewest open requests."""

    why: Why = "load"

    def prices(self, request: RequestView, replicas: Columns, recent: NDArray[float64]) -> NDArray[float64]:
        """Return open requests. [n]"""
        return replicas.open_rows.astype(np.float64)


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """One after another."""

    why: Why = "turn"

    def prices(self, request: RequestView, replicas: Columns, recent: NDArray[float64]) -> NDArray[float64]:
        """Return zeros. [n]"""
        return np.zeros(len(replicas.may))


ROUTES: dict[str, Callable[[], RoutingPolicy]] = {
    "seconds": Seconds,
    "prefix": Prefix,
    "least": Least,
    "round-robin": RoundRobin,
}


def policy_named(name: str, known: Mapping[str, Callable[[], RoutingPolicy]] = ROUTES) -> RoutingPolicy:
    """Return a routing policy. Raises `ConfigError`."""
    if name not in known:
        raise ConfigError(f"--route {name}: known are {', '.join(known)}")
    return known[name]()


# The router --------------------------------------------------------------------------------------


class RecentRequests:
    """Counts of the last requests of each replica; older ones count less."""

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._newest = 1.0  # weight of a request now: it grows, instead of all others shrinking

    def of(self, names: Sequence[str]) -> NDArray[float64]:
        """Return the count of each replica. [n]"""
        weights = map(self._weights.get, names, repeat(0.0))
        return np.fromiter(weights, np.float64, len(names)) / self._newest

    def add(self, name: str, num_replicas: int) -> None:
        """Count a request that this replica got, in a fleet of so many."""
        self._newest *= 1 + 1 / (RECENT_REQUESTS * num_replicas)
        self._weights[name] = self._weights.get(name, 0.0) + self._newest
        if self._newest > MAX_WEIGHT:
            scaled = ((name, weight / self._newest) for name, weight in self._weights.items())
            self._weights = {name: weight for name, weight in scaled if weight > 1 / MAX_WEIGHT}
            self._newest = 1.0


class Router:
    """Chooses replicas by a policy; equally cheap ones take turns."""

    def __init__(self, policy: RoutingPolicy) -> None:
        self._policy = policy
        self._recent = RecentRequests()
        self._turn = 0  # index that comes first among equals

    def choose(self, request: RequestView, views: Sequence[ReplicaView]) -> RouteChoice | None:
        """Return the replica for a request; None if none may have it."""
        if not views:
            return None
        read = columns(request, views)
        index = self.index(request, read)
        return None if index is None else RouteChoice(views[index].name, self._why(read, index))

    def index(self, request: RequestView, replicas: Columns) -> int | None:
        """Return the place of the replica for a request; None if none may have it."""
        (allowed,) = np.nonzero(replicas.may)
        if not len(allowed):
            return None
        prices = self._policy.prices(request, replicas, self._recent.of(replicas.names))[allowed]
        prices[np.isnan(prices)] = np.inf
        cheapest = allowed[prices == prices.min()]
        place = int(np.searchsorted(cheapest, self._turn))
        chosen = int(cheapest[place % len(cheapest)])
        self._turn = chosen + 1
        self._recent.add(replicas.names[chosen], len(allowed))
        return chosen

    def _why(self, replicas: Columns, index: int) -> Why:
        if np.count_nonzero(replicas.may) == 1:
            return "only"
        if self._policy.why != "pages":
            return self._policy.why
        hits = replicas.hit_pages * replicas.may
        return "pages" if 0 < hits[index] == hits.max() else "load"
