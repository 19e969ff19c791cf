"""Multi-token prediction layers, a token at a time, from a checkpoint's own tensors (arXiv 2412.19437)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy import float64
    from numpy.typing import NDArray

    Tensors = Mapping[str, NDArray[float64]]

# Kind of checkpoint -> names of fc, of the norms of embedding and state, of the last norm; prefix of the layer.
KINDS = {
    "glm": ("eh_proj", "enorm", "hnorm", "shared_head.norm", ""),
    "mimo": ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", ""),
    "qwen": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "layers.0."),
}


def norm(x: Any, weight: Any, eps: float) -> Any:
    return weight * x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


class MtpOracle:
    """One MTP layer with what it has seen of a text."""

    def __init__(self, kind: str, tensors: Tensors, target: Tensors, values: Mapping[str, Any]) -> None:
        """tensors: by their names behind MTP's prefix. target: embedding and head. values: of config.json."""
        *self.names, prefix = KINDS[kind]
        self.t, self.prefix, self.target, self.values = tensors, prefix, target, values
        self.hidden_first = kind == "mimo"
        self.keys: list[Any] = []
        self.seen: list[Any] = []

    def entry(self, token_id: int, hidden: Any, position: int) -> tuple[Any, Any]:
        """Read a token and the state before it; return logits of the token behind, and the next state."""
        fc, of_embed, of_hidden, last = (self.t[f"{name}.weight"] for name in self.names)
        eps = self.values["rms_norm_eps"]
        embedded = norm(self.target["model.embed_tokens.weight"][token_id], of_embed, eps)
        parts = [embedded, norm(hidden, of_hidden, eps)]
        x = fc @ np.concatenate(parts[::-1] if self.hidden_first else parts)
        x = x + self.attention(norm(x, self.own("input_layernorm.weight"), eps), position, eps)
        x = x + self.feed_forward(norm(x, self.own("post_attention_layernorm.weight"), eps))
        state = norm(x, last, eps)
        return self.target["lm_head.weight"] @ state, state

    def own(self, name: str) -> Any:
        return self.t[self.prefix + name]

    def attention(self, x: Any, position: int, eps: float) -> Any:
        heads = {}
        for name in "qkv":
            made = self.own(f"self_attn.{name}_proj.weight") @ x
            made = made + self.t.get(f"{self.prefix}self_attn.{name}_proj.bias", 0.0)
            heads[name] = made.reshape(-1, self.values["head_dim"])
        for name in "qk":
            weight = self.t.get(f"{self.prefix}self_attn.{name}_norm.weight")
            normed = heads[name] if weight is None else norm(heads[name], weight, eps)
            heads[name] = self.turned(normed, position)
        self.keys.append(heads["k"])
        self.seen.append(heads["v"])
        group, mixed = len(heads["q"]) // len(heads["k"]), []
        for number, query in enumerate(heads["q"]):
            scores = np.array([query @ keys[number // group] for keys in self.keys])
            shares = np.exp((scores - scores.max()) / len(query) ** 0.5)
            mixed.append(shares / shares.sum() @ np.array([values[number // group] for values in self.seen]))
        return self.own("self_attn.o_proj.weight") @ np.concatenate(mixed)

    def turned(self, heads: Any, position: int) -> Any:
        """Rotate the first part of each head."""
        rope = self.values["rope_parameters"]
        size = int(heads.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        angles = position / rope["rope_theta"] ** (np.arange(0, size, 2) / size)
        a, b, rest = heads[:, : size // 2], heads[:, size // 2 : size], heads[:, size:]
        c, s = np.cos(angles), np.sin(angles)
        return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)

    def network(self, prefix: str, x: Any) -> Any:
        gate, up, down = (self.own(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down"))
        return down @ (silu(gate @ x) * (up @ x))

    def feed_forward(self, x: Any) -> Any:
        if self.prefix + "mlp.gate.weight" not in self.t:
            return self.network("mlp.", x)
        shares = 1 / (1 + np.exp(-(self.own("mlp.gate.weight") @ x)))
        best = np.argsort(-(shares + self.own("mlp.gate.e_score_correction_bias")), kind="stable")
        best = best[: self.values["num_experts_per_tok"]]
        factor = self.values["routed_scaling_factor"] / shares[best].sum()
        routed = sum(shares[e] * factor * self.network(f"mlp.experts.{e}.", x) for e in best)
        return routed + self.network("mlp.shared_experts.", x)
