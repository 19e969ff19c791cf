"""Block heads: formats of heads that guess a whole block of tokens in one pass.

Their layers read the target's hidden states as further keys and values.

DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147), in the format of the `speculators` project and in the
authors' own. The facts of the format, for whoever writes such files:

**The pass.** The last known token of a row, at position p, is the *anchor*: the target has not computed it yet.
The block has `block_size` queries at positions p .. p + block_size - 1: the anchor's embedding, then that of
`mask_token_id`, both from the target's table. Every layer is one of Qwen3 (norms of each head's q and k, RoPE by
position). It has keys and values of the block and, made with the same `k_proj`, `v_proj` and `k_norm`, keys and
values of the *context*: for each position 0 .. p - 1 the feature `hidden_norm(fc(taps))`, the same in all layers,
rotated to its own position, not normed by `input_layernorm`. No mask is causal: each query of the block
sees the whole context and the whole block. `norm`, then `lm_head`, give logits.

**What a query guesses.** `sample_from_anchor` false (DFlash): query k guesses the token at its own position p +
k; the anchor's output is not read, and a block has `block_size - 1` drafts. True (DSpark): query k guesses the
token behind it, p + k + 1; a block has `block_size` drafts.

**The corrector** (`markov_rank` r above 0) adds `markov_w2 @ x` to the logits of each guess, once the guess
before it is chosen. e is the row of `markov_w1` of the token before (for the first draft the anchor), h the
normed state. `vanilla`: x = e. `gated`: x = sigmoid(gate_proj [h; e]) * e. `rnn`: [g; c; o] = joint_proj [s; e;
h], x = tanh(o), and the state s, 0 at first, becomes sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c).

**The confidence** that a draft is kept if all drafts before it are: sigmoid(proj [h; e]), or sigmoid(proj h)
where `confidence_head_with_markov` is false.

config.json of `speculators`: `speculators_model_type` "dflash" or "dspark", `transformer_layer_config` (of a
Qwen3 model of the head's layers, its width the target's), `block_size`, `mask_token_id`, `draft_vocab_size`,
`aux_hidden_state_layer_ids` (taps: after so many layers of the target), `sample_from_anchor`; for a corrector
and confidence `markov_rank`, `markov_head_type`, `enable_confidence_head`, `confidence_head_with_markov`. A
"dspark" file without these has a corrector of rank 256 and a confidence that reads its row. The authors': a
Qwen3 config with `architectures` ["DFlashDraftModel"] or ["Qwen3DSparkModel"], `block_size`, and in
`dflash_config` or beside it `mask_token_id` and `target_layer_ids`, which count layers from 0: id i is the tap
after i + 1 layers. Paceline's own `draft_own_tokens` is as for EAGLE-3.

Tensors of both, V tokens of the target and D of the head, width w, n taps:

| name | shape |
|---|---|
| `fc.weight`, `hidden_norm.weight`, `norm.weight` | [w, n * w], [w], [w] |
| `layers.N.` and `input_layernorm.weight`, `self_attn.q_proj.weight`, ... | as in Qwen3 |
| `lm_head.weight` | [D, w]; absent: the target's output matrix |
| `embed_tokens.weight` | [V, w]; absent: the target's |
| `d2t`, `t2d` | [D] int64: each target id less its index; [V] bool, not read. Absent if D = V |
| `markov_head.markov_w1.weight`, `markov_head.markov_w2.weight` | [V, r], [D, r] |
| `markov_head.gate_proj.weight`, `.bias` | [r, w + r], [r]; `gated` only |
| `markov_head.joint_proj.weight`, `.bias` | [3 r, 2 r + w], [3 r]; `rnn` only |
| `confidence_head.proj.weight`, `.bias` | [1, w + r] or [1, w], [1] |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from paceline.core.errors import BadModelFile, DrafterMismatch, UnsupportedModel
from paceline.core.nouns import PAGE_TOKENS
from paceline.model.families import family
from paceline.model.heads.values import flag, integer, layer_list

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.model.config import ModelConfig

FAMILY = "qwen3"  # family of the layers, whatever the target's family
BLOCK_NAMES = ("dflash", "dspark", "DFlashDraftModel", "DSparkDraftModel", "Qwen3DSparkModel", "block")
MAX_BLOCK = 64
MAX_RANK = 4096
Corrector = Literal["", "vanilla", "gated", "rnn"]
_CORRECTORS = ("vanilla", "gated", "rnn")
_FORMAT = "speculators_model_type"
# Defaults of keys that a "dspark" file of `speculators` lacks. Any other file without them has no corrector.
_DSPARK = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
_WINDOWED = "sliding_attention"
_WINDOW_KEYS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
_NEUTRAL = {"output_multiplier": 1.0, "input_embedding_scale": 1.0, "final_logit_softcapping": 0.0}
# Canonical names of the tensors behind the layers, by their names in a file.
TENSOR_NAMES = {
    "hidden_norm.weight": "hidden_norm",
    "markov_head.markov_w1.weight": "corrector.before",
    "markov_head.markov_w2.weight": "corrector.out",
    "markov_head.gate_proj.weight": "corrector.gate",
    "markov_head.gate_proj.bias": "corrector.gate_bias",
    "markov_head.joint_proj.weight": "corrector.joint",
    "markov_head.joint_proj.bias": "corrector.joint_bias",
    "confidence_head.proj.weight": "confidence",
    "confidence_head.proj.bias": "confidence_bias",
}


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Shape of a head's blocks, of its corrector and of its confidence."""

    size: int  # queries of a block: the anchor and mask tokens
    from_anchor: bool = False  # True: a query guesses the token behind it; False: the token at its own position
    corrector: Corrector = ""  # kind of corrector, which reads the guess before; empty: none
    rank: int = 0  # rank of the corrector's matrices
    confidence: bool = False  # True: the head states how likely each guess is kept
    confidence_reads_token: bool = False  # and reads the corrector's row of the token before

    @property
    def num_drafts(self) -> int:
        """Tokens that one pass guesses."""
        return self.size if self.from_anchor else self.size - 1

    @property
    def state_size(self) -> int:
        """Numbers of the state that the corrector hands from guess to guess."""
        return self.rank if self.corrector == "rnn" else 0

    @property
    def spare_pages(self) -> int:
        """Pages that a block may reach beyond that of its first token."""
        return (PAGE_TOKENS + self.size - 2) // PAGE_TOKENS

    @property
    def first(self) -> int:
        """The query that guesses the first draft."""
        return 0 if self.from_anchor else 1


def all_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with the authors' nested table beside the rest."""
    nested = values.get("dflash_config")
    return {**values, **(nested if isinstance(nested, dict) else {})}


def read_block(values: Mapping[str, Any], target: ModelConfig) -> tuple[tuple[int, ...], BlockShape]:
    """Read taps, empty for the usual ones, and the shape of blocks.

    values: as `all_values` returns them. Raises `BadModelFile`, `DrafterMismatch`, `UnsupportedModel`.
    """
    _refuse_unsupported(values)
    by_project = _FORMAT in values
    if values.get(_FORMAT) == "dspark":
        values = {**_DSPARK, **values}
    taps = layer_list(values, "aux_hidden_state_layer_ids") if by_project else _counted_from_0(values)
    rank, corrects = integer(values, "markov_rank", 0), str(values.get("markov_head_type", "vanilla"))
    if rank and corrects not in _CORRECTORS:
        raise UnsupportedModel(f"markov_head_type = {corrects[:80]} is not supported; known: {_CORRECTORS}")
    confidence = flag(values, "enable_confidence_head")
    others = values.get("num_target_layers")
    if others not in (None, target.num_layers):
        raise DrafterMismatch(
            f"the head was made for a target of {str(others)[:80]} layers, this one has {target.num_layers}; it "
            "belongs to another model"
        )
    block = BlockShape(
        size=integer(values, "block_size", 8 if by_project else 16),
        from_anchor=flag(values, "sample_from_anchor", default=_draws_from_anchor(values)),
        corrector=cast("Corrector", corrects) if rank else "",
        rank=rank,
        confidence=confidence,
        confidence_reads_token=confidence and flag(values, "confidence_head_with_markov"),
    )
    _check(block)
    return taps, block


def whole_text(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of layers without keys about windows that no layer has.

    `layer_types` says which layers see a window. Raises `BadModelFile`, `UnsupportedModel` for a layer that does.
    """
    kinds, of_qwen = values.get("layer_types"), str(values.get("model_type", FAMILY)).startswith("qwen")
    window = values.get("sliding_window")
    if window is not None and flag(values, "use_sliding_window", default=not of_qwen):
        if kinds is None and of_qwen:
            first = integer(values, "max_window_layers", family(FAMILY).defaults["max_window_layers"])
            kinds = [_WINDOWED] * (integer(values, "num_hidden_layers", 0) > first)
        if isinstance(kinds, list) and _WINDOWED in kinds:
            raise UnsupportedModel("block heads whose layers see a window of the text are not supported")
    return {key: value for key, value in values.items() if key not in _WINDOW_KEYS}


def block_shapes(block: BlockShape, layers: ModelConfig, num_tokens: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors behind the layers by canonical name, `head` left out.

    num_tokens: tokens that the head can write.
    """
    width, rank = layers.hidden_size, block.rank
    shapes: dict[str, tuple[int, ...]] = {"hidden_norm": (width,), "norm": (width,)}
    if rank:
        shapes |= {"corrector.before": (layers.vocab_size, rank), "corrector.out": (num_tokens, rank)}
    if block.corrector == "gated":
        shapes |= {"corrector.gate": (rank, width + rank), "corrector.gate_bias": (rank,)}
    if block.corrector == "rnn":
        shapes |= {"corrector.joint": (3 * rank, 2 * rank + width), "corrector.joint_bias": (3 * rank,)}
    if block.confidence:
        shapes |= {"confidence": (1, width + rank * block.confidence_reads_token), "confidence_bias": (1,)}
    return shapes


def _check(block: BlockShape) -> None:
    if not 1 <= block.num_drafts or block.size > MAX_BLOCK:
        raise BadModelFile(
            f"the head's block_size = {block.size} must be at least {1 + block.first} and at most {MAX_BLOCK}"
        )
    if block.rank > MAX_RANK:
        raise BadModelFile(f"the head's markov_rank = {block.rank} must be at most {MAX_RANK}")
    if block.confidence_reads_token and not block.rank:
        raise BadModelFile("the head's confidence_head_with_markov needs a markov_rank above 0")
    if block.state_size and not block.from_anchor:
        raise UnsupportedModel(
            "block heads with markov_head_type = rnn are supported with sample_from_anchor = true only: without "
            "it the corrector's state begins with the anchor's output, which no guess is made of"
        )


def _counted_from_0(values: Mapping[str, Any]) -> tuple[int, ...]:
    taps = tuple(index + 1 for index in layer_list(values, "target_layer_ids"))
    if not taps:
        raise BadModelFile("a block head in its authors' format needs target_layer_ids in its config.json")
    return taps


def _draws_from_anchor(values: Mapping[str, Any]) -> bool:
    """Return True for DSpark, whatever the format."""
    return any("dspark" in str(values.get(key)).lower() for key in (_FORMAT, "architectures"))


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModel` for what would otherwise be ignored silently."""
    if values.get("projector_type", "dflash") != "dflash":
        raise UnsupportedModel(f"block heads of the type {str(values['projector_type'])[:80]} are not supported")
    if values.get("selector_rank") or values.get("conv_kernel_size"):
        raise UnsupportedModel("block heads with convolutions and a selector (DFlash2) are not supported")
    for key, neutral in _NEUTRAL.items():
        if values.get(key) not in (None, neutral):
            raise UnsupportedModel(f"block heads with {key} = {str(values[key])[:80]} are not supported")
