"""Roofline prices of passes on stated hardware, from bytes, operations and launches.

A pass takes as long as the slowest of reading weights and keys, computing, and launching kernels. On several
devices the two sums of each layer are exchanged besides. Rates are the peaks that makers state, so these are lower
bounds. What data sheets do not state is a constant, and its source is for the user to state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from paceline.control.cost import Curve, DraftCost, MeasuredCost, TargetCost

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_BYTES = 2  # bytes of a weight, a key, a value or an activation
LAUNCHES_PER_LAYER = 15  # kernels: norms, products, rotary embedding, KV store, attention, activation, sums
TOKENS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices that run a model together."""

    bytes_per_s: float  # memory bandwidth of one device
    operations_per_s: float  # of one device
    num_devices: int = 1
    link_bytes_per_s: float = 32e9
    link_latency_s: float = 20e-6  # of one exchange
    launch_s: float = 0.0  # host time of one launch; 0: a captured graph is replayed


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes of a Llama-like model."""

    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    vocab: int = 151_936

    @property
    def body(self) -> int:
        """Weights of all layers."""
        attention = self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head(self) -> int:
        """Weights of the LM head."""
        return self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values of one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * NUM_BYTES


def pass_s(sizes: ModelSizes, on: Hardware, tokens: float, kv_tokens: float = 0.0) -> float:
    """Return the seconds of a pass over cached tokens, with all rows scored."""
    read = (sizes.body + sizes.head) * NUM_BYTES + kv_tokens * sizes.kv_bytes
    operations = 2.0 * (sizes.body + sizes.head) * tokens
    device_s = max(read / on.bytes_per_s, operations / on.operations_per_s) / on.num_devices
    launches = sizes.num_layers * LAUNCHES_PER_LAYER
    return max(device_s + _exchange_s(sizes, on, tokens), launches * on.launch_s)


def _exchange_s(sizes: ModelSizes, on: Hardware, tokens: float) -> float:
    """Return the seconds of the all-reduces, two in each layer, in a ring."""
    if on.num_devices == 1:
        return 0.0
    sent = 2 * (on.num_devices - 1) / on.num_devices * tokens * sizes.hidden * NUM_BYTES
    return 2 * sizes.num_layers * (on.link_latency_s + sent / on.link_bytes_per_s)


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target and its drafter, each on its hardware, and the host's time."""

    target: ModelSizes
    target_on: Hardware
    drafter: ModelSizes
    drafter_on: Hardware
    host_s: float = 0.0  # of a step
    context: int = 400  # tokens of a row

    def verify_s(self, rows: int, k: int) -> float:
        """Return the seconds of a pass over k drafts of each row, the host's included."""
        return pass_s(self.target, self.target_on, rows * (1 + k), rows * self.context) + self.host_s

    def draft_s(self, rows: int, k: int) -> float:
        """Return the seconds of drafting k tokens for each row, one pass after another."""
        return k * pass_s(self.drafter, self.drafter_on, rows, rows * self.context)

    def cost(self, max_k: int) -> MeasuredCost:
        """Return prices for the simulator; rows have `context` keys."""
        rate = self.target_on.bytes_per_s * self.target_on.num_devices
        passes = [pass_s(self.target, self.target_on, n) + self.host_s for n in TOKENS]
        target = TargetCost(Curve.of(TOKENS, passes), kv_token_s=self.target.kv_bytes / rate)
        curves = (_curve(partial(self.draft_s, k=k)) for k in range(1, max_k + 1))
        return MeasuredCost(target, (DraftCost(tuple(curves)),))


def _curve(seconds: Callable[[int], float]) -> Curve:
    return Curve.of(ROWS, [seconds(rows) for rows in ROWS])


def fit(residual: Callable[[float], float], high: float, num_steps: int = 100) -> float:
    """Return the smallest x where a function rises through zero, or `high`."""
    low = 0.0
    for above in (high * (i + 1) / num_steps for i in range(num_steps)):
        if residual(above) >= 0:
            high = above
            break
        low = above
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if residual(middle) < 0 else (low, middle)
    return high
