"""Config of a draft head, read from config.json in both formats in use.

The EAGLE authors' config (arXiv 2401.15077, 2503.01840) is that of a Llama of one layer, with some fields more.
The `speculators` project keeps the Llama config in `transformer_layer_config`. P-EAGLE heads (arXiv 2602.01469)
add a mask token. Block heads are in `block_format.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.core.errors import BadModelFile, DrafterMismatch, UnsupportedModel
from paceline.model.config import layer_shapes
from paceline.model.files.hf import config_from_json
from paceline.model.heads.block_format import (
    BLOCK_NAMES,
    FAMILY,
    BlockShape,
    all_values,
    block_shapes,
    read_block,
    whole_text,
)
from paceline.model.heads.values import flag, integer, layer_list

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.model.config import ModelConfig

_MAX_PADDING = 1024  # most tokens by which padded vocabularies of one model may differ


@dataclass(frozen=True, slots=True)
class Algorithm:
    """Facts that all heads of one kind share."""

    name: str  # name of the drafter that runs these heads
    parallel: bool  # guesses all tokens in one pass, mask tokens in place of those that are not known yet
    last_tap: int  # the paper's highest tap, counted back from the target's last layer
    guesses_features: bool = False  # features are what the target's output matrix reads; it writes with that
    blocks: bool = (
        False  # True: it makes keys and values of features in all layers, and guesses a block of tokens at once
    )

    def default_taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the paper's taps, after a low, a middle and a high layer."""
        if self.guesses_features:
            return (num_layers,)
        return (2, num_layers // 2, num_layers - self.last_tap)


EAGLE = Algorithm("eagle", parallel=False, last_tap=0, guesses_features=True)
MTP = Algorithm("mtp", parallel=False, last_tap=0, guesses_features=True)
EAGLE3 = Algorithm("eagle3", parallel=False, last_tap=3)
PEAGLE = Algorithm("peagle", parallel=True, last_tap=1)
BLOCK_HEAD = Algorithm("block", parallel=False, last_tap=3, blocks=True)
_ALGORITHMS = {
    "eagle": EAGLE,
    "EagleLlamaForCausalLM": EAGLE,
    "LlamaForCausalLMEagle": EAGLE,
    "eagle3": EAGLE3,
    "peagle": PEAGLE,
    "p-eagle": PEAGLE,
    "LlamaForCausalLMEagle3": EAGLE3,
    "PEagleDraftModel": PEAGLE,
} | dict.fromkeys(BLOCK_NAMES, BLOCK_HEAD)
OWN_TOKENS = "draft_own_tokens"  # key that Paceline adds to config.json; other readers ignore it
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Shape of one head. Hidden states are the target's residual stream after some layer."""

    algorithm: Algorithm
    layers: ModelConfig  # the head's own layers; EAGLE's first layer reads twice the width
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool = False  # the residual is the normed hidden state
    norm_before_fc: bool = False  # one norm over all taps together
    fc_norm: bool = False  # a norm of its own for each tap (EAGLE-3.1, arXiv 2605.09992)
    norm_output: bool = False  # what is fed back is the normed output
    mask_token_id: int | None = None  # P-EAGLE and block heads: stands for a token that is not known yet
    fusion_bias: bool = False  # EAGLE-1: `fc` adds a bias
    layernorms: bool = False  # EAGLE-1: norms of the embedding, before the layer and before the target's head
    feature_norm: bool = False  # MTP: a norm of the feature, too
    request_tokens: bool = False  # True: it can also write request tokens, with rows of the target's output matrix
    target_norm_eps: float = 1e-6  # EAGLE-1: epsilon of the target's last norm, which makes the features
    own_output: bool = True  # False: it writes with its target's output matrix
    block: BlockShape | None = None  # shape of a block head's blocks; None: it is no block head

    def spare_pages(self, num_rows: int) -> int:
        """Return the pages of its store behind those of the page table.

        The first page takes what nobody reads, such as padding. Then come the spare pages of rows and of padding.
        """
        return 1 + self.block.spare_pages * (num_rows + 1) if self.block else 0

    @property
    def tapped_size(self) -> int:
        """Numbers of all taps of one token."""
        return len(self.taps) * self.target_hidden_size


def read_config(values: Mapping[str, Any], target: ModelConfig) -> HeadConfig:
    """Read a head's config.json. Raises `BadModelFile`, `UnsupportedModel`, `DrafterMismatch`.

    What it leaves out is the target's: RoPE, the norm's epsilon, the vocabulary.
    """
    algorithm = _algorithm(values)
    inner = values.get("transformer_layer_config")
    layer_values = dict(inner if isinstance(inner, dict) else values)
    if algorithm.blocks:
        layer_values = {**whole_text(layer_values), "model_type": FAMILY}  # the file names the target's family
    layer_values.setdefault("model_type", "llama")
    layers = config_from_json(_without_tokens(layer_values, target))
    if "rope_theta" not in layer_values and "rope_parameters" not in layer_values:
        layers = replace(layers, rope=target.rope.of_head())
    nested = values.get("eagle_config")
    everywhere = {**(nested if isinstance(nested, dict) else {}), **values}
    if algorithm.guesses_features:
        config = _feature_head(algorithm, layers, everywhere, target)
    elif algorithm.blocks:
        config = _block_head(layers, everywhere, target)
    else:
        if algorithm.parallel:
            _refuse_relay(everywhere)
        config = HeadConfig(
            algorithm=algorithm,
            layers=layers,
            draft_vocab_size=integer(everywhere, "draft_vocab_size", target.vocab_size),
            target_hidden_size=integer(everywhere, "target_hidden_size", target.hidden_size),
            taps=_taps(everywhere, algorithm, target),
            mask_token_id=_mask_token(everywhere) if algorithm.parallel else None,
            request_tokens=flag(everywhere, OWN_TOKENS),
            norm_before_residual=flag(everywhere, "norm_before_residual"),
            norm_before_fc=flag(everywhere, "norm_before_fc"),
            fc_norm=flag(everywhere, "fc_norm"),
            norm_output=flag(everywhere, "norm_output"),
        )
    _check(config, target, _made_for(values))
    return config


def _feature_head(
    algorithm: Algorithm, layers: ModelConfig, values: Mapping[str, Any], target: ModelConfig
) -> HeadConfig:
    """EAGLE-1: as wide as its target; layer outputs are features once `layernorms` normed them."""
    layernorms = flag(values, "layernorms")
    return HeadConfig(
        algorithm=algorithm,
        layers=layers,
        draft_vocab_size=integer(values, "draft_vocab_size", target.vocab_size),
        target_hidden_size=layers.hidden_size,
        taps=algorithm.default_taps(target.num_layers),
        norm_output=layernorms,
        request_tokens=True,
        own_output=False,
        layernorms=layernorms,
        fusion_bias=flag(values, "fusion_bias"),
        target_norm_eps=target.norm_eps,
    )


def _block_head(layers: ModelConfig, values: Mapping[str, Any], target: ModelConfig) -> HeadConfig:
    """Return the config of a block head, see `block_format.py`."""
    values = all_values(values)
    taps, block = read_block(values, target)
    size = integer(values, "draft_vocab_size", target.vocab_size)
    return HeadConfig(
        algorithm=BLOCK_HEAD,
        layers=layers,
        draft_vocab_size=size,
        target_hidden_size=integer(values, "target_hidden_size", layers.hidden_size),
        taps=taps or BLOCK_HEAD.default_taps(target.num_layers),
        mask_token_id=_mask_token(values),
        request_tokens=flag(values, OWN_TOKENS),
        own_output=size != target.vocab_size,  # usual; `load_head` looks whether the file has an output matrix
        block=block,
    )


def head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return every tensor a head asks for, by canonical name, matrices as [out, in]."""
    c, width = config, config.layers.hidden_size
    if c.algorithm.guesses_features:
        return _feature_head_shapes(c)
    shapes: dict[str, tuple[int, ...]] = {"fc": (width, c.tapped_size)}
    if c.fc_norm:
        shapes |= {f"fc_norm.{i}": (c.target_hidden_size,) for i in range(len(c.taps))}
    if c.norm_before_fc:
        shapes["input_norm"] = (c.tapped_size,)
    shapes |= _all_layer_shapes(c.layers)
    if c.block:
        head = {"head": (c.draft_vocab_size, width)} if c.own_output else {}
        return shapes | head | block_shapes(c.block, c.layers, c.draft_vocab_size)
    for name in ("attn_q", "attn_k", "attn_v"):
        shapes[f"layers.0.{name}"] = (shapes[f"layers.0.{name}"][0], 2 * width)
    shapes |= {"layers.0.hidden_norm": (width,), "norm": (width,), "head": (c.draft_vocab_size, width)}
    if c.algorithm.parallel:
        shapes["mask_hidden"] = (c.tapped_size,)
    return shapes


def _feature_head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    width = config.layers.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc": (width, 2 * width), **_all_layer_shapes(config.layers)}
    if config.fusion_bias:
        shapes["fc_bias"] = (width,)
    if config.feature_norm:
        shapes["feature_norm"] = (width,)
    if config.layernorms:
        return shapes | {"embed_norm": (width,), "norm": (width,)}
    del shapes["layers.0.attn_norm"]
    return shapes


def _all_layer_shapes(layers: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {
        f"layers.{i}.{name}": shape
        for i in range(layers.num_layers)
        for name, shape in layer_shapes(layers, i).items()
    }


def _algorithm(values: Mapping[str, Any]) -> Algorithm:
    kind, architectures = values.get("speculators_model_type"), values.get("architectures")
    names = [] if kind is None else [kind]
    names += architectures if isinstance(architectures, list) else []
    for name in names:
        if isinstance(name, str) and name in _ALGORITHMS:
            return _ALGORITHMS[name]
    if names == ["LlamaForCausalLM"]:  # the first published heads; EAGLE-3's have a vocabulary
        return EAGLE3 if "draft_vocab_size" in values else EAGLE
    raise UnsupportedModel(
        f"the head says it is {names}; EAGLE-1, EAGLE-3, P-EAGLE and block heads (DFlash, DSpark) are known"
    )


def _without_tokens(values: dict[str, Any], target: ModelConfig) -> dict[str, Any]:
    """Drop special tokens: a head has none, and its file repeats those of some model."""
    kept = {key: value for key, value in values.items() if not key.endswith("_token_id")}
    kept.setdefault("vocab_size", target.vocab_size)
    kept.setdefault("rms_norm_eps", target.norm_eps)
    return kept


def _taps(values: Mapping[str, Any], algorithm: Algorithm, target: ModelConfig) -> tuple[int, ...]:
    return layer_list(values, "eagle_aux_hidden_state_layer_ids") or algorithm.default_taps(target.num_layers)


def _mask_token(values: Mapping[str, Any]) -> int:
    for key in _MASK_KEYS:
        if values.get(key) is not None:
            return integer(values, key, 0)
    raise BadModelFile("a head that guesses several tokens at once needs mask_token_id in its config.json")


def _refuse_relay(values: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModel` for a head of an earlier version with a relay between guesses."""
    if integer(values, "relay_size", 0):
        raise UnsupportedModel(
            "the head has a relay (relay_size in its config.json), which this version does not read; train one "
            "anew with `paceline train peagle`, or with `paceline train block`, whose guesses know one another"
        )


def _made_for(values: Mapping[str, Any]) -> str:
    """Return the target that a head of the `speculators` project names, in words."""
    found: Any = values
    for key in ("speculators_config", "verifier", "name_or_path"):
        found = found.get(key) if isinstance(found, dict) else None
    return f", {found[:80]}" if isinstance(found, str) and found else ""


def _check_vocabulary(config: HeadConfig, target: ModelConfig, made_for: str) -> None:
    """Raise `DrafterMismatch` unless the head knows the target's tokens."""
    if abs(config.layers.vocab_size - target.vocab_size) > _MAX_PADDING:
        raise DrafterMismatch(
            f"the head was made for a target of {config.layers.vocab_size} tokens, this one has "
            f"{target.vocab_size}; it belongs to another model{made_for}"
        )
    if config.block is not None and config.block.rank and config.layers.vocab_size != target.vocab_size:
        raise DrafterMismatch(
            f"the head's corrector has rows for {config.layers.vocab_size} tokens, this target has "
            f"{target.vocab_size}; it belongs to another model{made_for}"
        )


def _check(config: HeadConfig, target: ModelConfig, made_for: str) -> None:
    """Raise `DrafterMismatch` unless the head can sit on this target."""
    if config.target_hidden_size != target.hidden_size:
        raise DrafterMismatch(
            f"the head was made for a target {config.target_hidden_size} numbers wide, this one has "
            f"{target.hidden_size}; it belongs to another model{made_for}"
        )
    _check_vocabulary(config, target, made_for)
    if not all(0 <= tap <= target.num_layers for tap in config.taps):
        raise DrafterMismatch(
            f"the head looks after layers {list(config.taps)}, the target has {target.num_layers}"
        )
    if not 1 <= config.draft_vocab_size <= target.vocab_size:
        raise DrafterMismatch(
            f"the head chooses among {config.draft_vocab_size} tokens, the target has {target.vocab_size}"
        )
    if config.mask_token_id is not None and config.mask_token_id >= target.vocab_size:
        raise DrafterMismatch(
            f"the head's mask token {config.mask_token_id} lies outside the target's {target.vocab_size} tokens"
        )
    if config.layers.rope.scaling == "factors":
        raise UnsupportedModel(
            "the head's config.json has no RoPE settings, and the target keeps its own as a tensor; write the "
            "rope_theta and rope_scaling that the head was trained with into its config.json"
        )
    if config.layers.rope.share != 1.0:
        raise UnsupportedModel("draft heads whose RoPE rotates a part of each head are not supported")
    if config.norm_before_fc and config.fc_norm:
        raise BadModelFile("the head asks for norm_before_fc and fc_norm, which exclude each other")
