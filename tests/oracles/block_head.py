"""Block heads from their files, a token and a number at a time: nothing of `paceline` is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Drafted:
    """A block's greedy guesses, their logits [guesses, draft vocabulary] and the log-odds that they are kept.

    states: [width] of each, before the output matrix.
    """

    token_ids: list[int]
    states: list[np.ndarray]
    logits: np.ndarray
    log_odds: list[float]


def draft_block(
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    embed: np.ndarray,
    target_head: np.ndarray,
    text: Sequence[int],
    taps: Mapping[int, np.ndarray],
) -> Drafted:
    """Guess behind a text whose tokens but the last the target has read.

    values, tensors: config.json and the safetensors file. taps: by number of layers, [len(text) - 1, width].
    """
    by_project = "speculators_model_type" in values
    layer = dict(values["transformer_layer_config"] if by_project else values)
    flat = {**values, **values.get("dflash_config", {})}
    t = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    ids = flat["aux_hidden_state_layer_ids"] if by_project else [i + 1 for i in flat["target_layer_ids"]]
    eps, size = layer["rms_norm_eps"], flat["block_size"]
    spark = "dspark" in str((values.get("speculators_model_type"), values.get("architectures"))).lower()
    from_anchor = flat.get("sample_from_anchor", spark)

    anchor = len(text) - 1
    context = [
        norm(t["fc.weight"] @ np.concatenate([taps[i][at] for i in ids]), t["hidden_norm.weight"], eps)
        for at in range(anchor)
    ]
    block = [embed[text[-1]], *(embed[flat["mask_token_id"]] for _ in range(size - 1))]
    for number in range(layer["num_hidden_layers"]):
        own = {n.removeprefix(f"layers.{number}."): w for n, w in t.items() if n.startswith(f"layers.{number}.")}
        block = run_layer(layer, own, context, block, anchor)
    states = [norm(row, t["norm.weight"], eps) for row in block]
    guessing = states if from_anchor else states[1:]
    head = t.get("lm_head.weight", target_head)
    to_target = tensors["d2t"] + np.arange(len(head)) if "d2t" in tensors else np.arange(len(head))
    return choose(flat, t, guessing, head, to_target, text[-1])


def run_layer(layer: Mapping[str, Any], w: Mapping[str, Any], context: Any, block: Any, anchor: int) -> list[Any]:
    """Return the block's rows behind a layer of Qwen3 whose every query sees everything."""
    eps, heads, dim = layer["rms_norm_eps"], layer["num_attention_heads"], layer["head_dim"]
    shared = heads // layer["num_key_value_heads"]
    read = [norm(row, w["input_layernorm.weight"], eps) for row in block]

    def parts(name: str, row: Any) -> list[Any]:
        return np.split(w[f"self_attn.{name}_proj.weight"] @ row, len(w[f"self_attn.{name}_proj.weight"]) // dim)

    def placed(name: str, row: Any, position: int) -> list[Any]:
        weight = w[f"self_attn.{name}_norm.weight"]
        return [turned(norm(part, weight, eps), position, layer["rope_theta"]) for part in parts(name, row)]

    everything = [*context, *read]
    keys = [placed("k", row, at) for at, row in enumerate(everything)]
    content = [parts("v", row) for row in everything]
    out = []
    for index, row in enumerate(read):
        mixed = []
        for head, query in enumerate(placed("q", row, anchor + index)):
            scores = np.array([query @ key[head // shared] / math.sqrt(dim) for key in keys])
            shares = np.exp(scores - scores.max())
            shares /= shares.sum()
            mixed.append(sum(share * v[head // shared] for share, v in zip(shares, content, strict=True)))
        hidden = block[index] + w["self_attn.o_proj.weight"] @ np.concatenate(mixed)
        normed = norm(hidden, w["post_attention_layernorm.weight"], eps)
        gate = w["mlp.gate_proj.weight"] @ normed
        out.append(
            hidden + w["mlp.down_proj.weight"] @ (gate * sigmoid(gate) * (w["mlp.up_proj.weight"] @ normed))
        )
    return out


def choose(
    values: Mapping[str, Any], t: Mapping[str, Any], guessing: Any, head: Any, to_target: Any, newest: int
) -> Drafted:
    """Choose greedily from the first guess to the last, each corrected by the one before."""
    rank, kind = values.get("markov_rank", 0), values.get("markov_head_type", "vanilla")
    before, memory = newest, np.zeros(rank)
    token_ids, rows, odds = [], [], []
    for state in guessing:
        logits = head @ state
        token = t["markov_head.markov_w1.weight"][before] if rank else np.zeros(0)
        if values.get("enable_confidence_head"):
            read = np.concatenate([state, token]) if values.get("confidence_head_with_markov") else state
            weight, bias = t["confidence_head.proj.weight"], t["confidence_head.proj.bias"]
            odds.append(float(weight[0] @ read + bias[0]))
        if rank and kind == "gated":
            weight, bias = t["markov_head.gate_proj.weight"], t["markov_head.gate_proj.bias"]
            token = token * sigmoid(weight @ np.concatenate([state, token]) + bias)
        elif rank and kind == "rnn":
            weight, bias = t["markov_head.joint_proj.weight"], t["markov_head.joint_proj.bias"]
            joint = weight @ np.concatenate([memory, token, state]) + bias
            keep = sigmoid(joint[:rank])
            memory = keep * memory + (1 - keep) * np.tanh(joint[rank : 2 * rank])
            token = np.tanh(joint[2 * rank :])
        if rank:
            logits = logits + t["markov_head.markov_w2.weight"] @ token
        before = int(to_target[np.argmax(logits)])
        token_ids.append(before)
        rows.append(logits)
    return Drafted(token_ids, list(guessing), np.array(rows), odds)


def norm(x: Any, weight: Any, eps: float) -> Any:
    """Root-mean-square norm."""
    return weight * x / math.sqrt(float(x @ x) / len(x) + eps)


def turned(x: Any, position: int, theta: float) -> Any:
    """RoPE: numbers i and i + half are turned together, by position / theta ** (2 i / dim)."""
    half, out = len(x) // 2, np.empty_like(x)
    for i in range(half):
        angle = np.float32(position) * np.float32(1 / np.float32(theta ** (2 * i / len(x))))
        c, s = math.cos(angle), math.sin(angle)
        out[i], out[i + half] = x[i] * c - x[i + half] * s, x[i + half] * c + x[i] * s
    return out


def sigmoid(x: Any) -> Any:
    """The logistic function."""
    return 1 / (1 + np.exp(-x))
