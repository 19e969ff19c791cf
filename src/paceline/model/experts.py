"""Mixture of experts: facts of families, numbers of configs, shapes of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import BadModelFile, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_EXPERTS = 512  # most experts of a layer
MAX_PER_TOKEN = 32
MAX_SHARED_SIZE = 1 << 19
MAX_DENSE = 1 << 10
SWIGLU = (7.0, 1.702)  # limit and factor of the activation `clamped_silu`
DENSE = "dense_"  # begins the tensors' names in layers without experts, where other layers have some
ROUTER_NAMES = frozenset({"router", "shared_gate"})
PARTS = ("gate", "up", "down")
_SCORES = {False: ("softmax",), True: ("sigmoid", "noaux_tc")}  # words of configs, by `MixtureFacts.sigmoid`


@dataclass(frozen=True, slots=True)
class MixtureFacts:
    """Facts of a family with experts, and its names in Hugging Face folders."""

    normed: bool  # the weights of a token's experts sum to 1, unless config.json says otherwise
    shared: bool = False  # one more expert serves every token
    shared_gate: bool = True  # the shared expert is behind a gate of its own
    shared_block: str = "shared_expert"  # module of the shared expert in `block`
    sigmoid: bool = False  # weights of experts are sigmoids; a correction is added where experts are chosen
    correction: str = "gate.e_score_correction_bias"  # tensor of the correction in `block`
    biased: bool = False  # router and experts add biases
    size_key: str = "moe_intermediate_size"
    router: str = "gate"  # module of the router in `block`
    block: str = "mlp"  # the module that holds router and experts
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # its matrices, ordered as `PARTS`

    def check_scores(self, said: object) -> None:
        """Raise `UnsupportedModel` if a file weighs experts in another way.

        said: the file's word for the way; None: the file does not say.
        """
        known = _SCORES[self.sigmoid]
        if said is not None and said not in known:
            raise UnsupportedModel(
                f"the model weighs its experts by {str(said)[:80]}; models of its family do so by {known[0]}"
            )

    def experts(self, num: int, per_token: int, shared_size: int = 0) -> Experts:
        """Return experts of such a family."""
        facts = {"biased": self.biased, "shared_gate": self.shared_gate, "sigmoid": self.sigmoid}
        return Experts(num, per_token, self.normed, shared_size, **facts)


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of every layer, except perhaps the first layers: a token goes to a few."""

    num: int
    per_token: int
    normed: bool = True  # the weights of a token's experts sum to 1; else they are shares among all experts
    shared_size: int = 0  # outputs of the gate of the shared expert; 0: there is none
    biased: bool = False  # router and experts add biases
    shared_gate: bool = True  # the shared expert, if any, has a gate
    sigmoid: bool = False  # weights are sigmoids; a correction is added where experts are chosen
    scale: float = 1.0  # factor of the weights of a token's experts
    num_dense: int = 0  # first layers, which have one feed-forward network for all tokens ...
    dense_size: int = 0  # ... with a gate of so many outputs

    def check(self) -> None:
        """Raise `BadModelFile` for numbers that no model has."""
        if not 1 <= self.num <= MAX_EXPERTS or not 1 <= self.per_token <= min(self.num, MAX_PER_TOKEN):
            raise BadModelFile(
                f"the model says that {self.per_token} of {self.num} experts serve a token; it must be 1 to"
                f" {MAX_PER_TOKEN} of at most {MAX_EXPERTS}"
            )
        if not 0 <= self.shared_size <= MAX_SHARED_SIZE:
            raise BadModelFile(f"the model says that its shared expert has the size {self.shared_size}")
        sensible = 0 <= self.num_dense <= MAX_DENSE and 0.0 < self.scale < 1e6
        if not sensible or not bool(self.num_dense) <= self.dense_size <= MAX_SHARED_SIZE:
            raise BadModelFile(
                f"the model says that {self.num_dense} layers have no experts but a network of {self.dense_size},"
                f" and that weights of experts are multiplied by {self.scale}"
            )

    def shapes(self, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of one layer's feed-forward network. size: width of each expert.

        The shared expert's tensors have the names of a dense network's.
        """
        shapes: dict[str, tuple[int, ...]] = {"router": (self.num, hidden)}
        for index in range(self.num):
            own = feed_forward_shapes(hidden, size)
            shapes |= {expert_name(index, part): shape for part, shape in zip(PARTS, own, strict=True)}
        if self.shared_size:
            shared = feed_forward_shapes(hidden, self.shared_size)
            shapes |= {f"mlp_{part}": shape for part, shape in zip(PARTS, shared, strict=True)}
            if self.shared_gate:
                shapes["shared_gate"] = (1, hidden)
        if self.sigmoid:
            shapes["router_correction"] = (self.num,)
        if self.biased:
            shapes |= {f"{name}_bias": shape[:1] for name, shape in shapes.items()}
        return shapes


def feed_forward_shapes(hidden: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes of a gated feed-forward network, in the order of `PARTS`."""
    return (size, hidden), (size, hidden), (hidden, size)


def expert_name(index: int, part: str) -> str:
    """Return the canonical name of an expert's matrix, without the layer."""
    return f"experts.{index}.{part}"


def expert_names(experts: Experts | None, pattern: str, parts: Mapping[str, str]) -> dict[str, str]:
    """Return the names of all experts' matrices in a file, by canonical name.

    pattern: a name with the fields `index`, `part` and `kind`. parts: the file's word for each of `PARTS`.
    """
    if experts is None:
        return {}
    return {
        expert_name(index, part) + suffix: pattern.format(index=index, part=word, kind=kind)
        for index in range(experts.num)
        for part, word in parts.items()
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    }
