"""Write tiny heads with the `speculators` package itself, and what they answer, for `test_speculators_files.py`.

Run where that package is installed (0.9.0 was used): `python tests/draft/write_with_speculators.py tests/data`.
Names of heads behind the folder: only these are written.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle.data import generate_cod_sample_indices
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB, DRAFT_VOCAB, WIDTH, TAPS, TOKENS = 64, 40, 16, (1, 2, 3), 12
BLOCK, RANK, ANCHORS, BLOCK_TOKENS = 5, 6, (1, 7, 20), 27


def layer_config(num_layers: int) -> LlamaConfig:
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_hidden_layers=num_layers,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope_theta=500.0,
    )
    config._attn_implementation = "eager"
    return config


def block_layers(**changes: Any) -> Qwen3Config:
    """Config of a block head's layers, as the package makes it for any target."""
    config = Qwen3Config(**layer_config(2).to_diff_dict() | {"model_type": "qwen3", "layer_types": None} | changes)
    config._attn_implementation = "eager"
    return config


def about(algorithm: str) -> SpeculatorsConfig:
    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def common(algorithm: str, num_layers: int) -> dict:
    return {
        "transformer_layer_config": layer_config(num_layers),
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": WIDTH,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "speculators_config": about(algorithm),
    }


def block_model(algorithm: str, layers: Any = None, **changes: Any) -> torch.nn.Module:
    """A random DFlash or DSpark head. layers: config of its layers."""
    make, of = {
        "dflash": (DFlashDraftModel, DFlashSpeculatorConfig),
        "dspark": (DSparkDraftModel, DSparkSpeculatorConfig),
    }[algorithm]
    values = {
        "transformer_layer_config": layers or block_layers(),
        "draft_vocab_size": DRAFT_VOCAB,
        "aux_hidden_state_layer_ids": list(TAPS),
        "block_size": BLOCK,
        "mask_token_id": 60,
        "speculators_config": about(algorithm),
    }
    return make(of(**values | changes))


def models() -> dict:
    new = Eagle3SpeculatorConfig(**common("eagle3", 1), norm_before_residual=True, fc_norm=True, norm_output=True)
    parallel = PEagleSpeculatorConfig(**common("peagle", 2), mask_token_id=60)
    return {
        "eagle3": Eagle3DraftModel(Eagle3SpeculatorConfig(**common("eagle3", 1))),
        "eagle3-1": Eagle3DraftModel(new),
        "peagle": PEagleDraftModel(parallel),
    }


def block_models() -> dict:
    return {
        "dflash": block_model("dflash"),
        "dspark": block_model("dspark", markov_rank=RANK),
        "dspark-gated": block_model("dspark", markov_rank=RANK, markov_head_type="gated"),
        "dspark-rnn": block_model(
            "dspark", markov_rank=RANK, markov_head_type="rnn", confidence_head_with_markov=False
        ),
    }


def fill(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        parameter.data = 1 + 0.1 * noise if "norm" in name else noise / parameter.shape[-1] ** 0.5
    if not model.use_draft_vocab:
        return
    known, drafted = model.verifier_vocab_size, model.draft_vocab_size
    kept = torch.randperm(known)[:drafted].sort().values
    t2d = torch.zeros(known, dtype=torch.bool)
    t2d[kept] = True
    model.load_vocab_mappings(t2d, kept - torch.arange(drafted))


def answers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The logits of one text, by the package's own modules: of its training pass if that drafts in order."""
    ids, tapped = torch.randint(VOCAB, (1, TOKENS)), torch.randn(1, TOKENS, len(TAPS) * WIDTH)
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, output: found.append(output))
    one_text = torch.zeros(1, TOKENS, dtype=torch.long)
    Eagle3DraftModel.forward(model, tapped, ids, one_text, ttt_steps=1)
    hook.remove()
    return {"token_ids": ids[0], "tapped": tapped[0], "logits": found[0][0].contiguous()}


@torch.no_grad()
def drafted(model: torch.nn.Module, ids: torch.Tensor, tapped: torch.Tensor, num: int) -> torch.Tensor:
    """Logits [num, entries, draft vocabulary] of an EAGLE-3 head's drafts, each told of the text's own tokens."""
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, output: found.append(output[0]))
    model(tapped[None], ids[None], torch.zeros(1, len(ids), dtype=torch.long), ttt_steps=num)
    hook.remove()
    return torch.stack(found)


@torch.no_grad()
def drafted_at_once(
    model: torch.nn.Module, ids: torch.Tensor, tapped: torch.Tensor, num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a P-EAGLE head's drafts, and the entry and the depth of each."""
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, output: found.append(output[0]))
    every = {"num_depths": num, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    last, one_text = (
        torch.randn(1, len(ids), model.norm.weight.numel()),
        torch.zeros(1, len(ids), dtype=torch.long),
    )
    loss, seed = resolve_loss_config("kl_div", "eager"), torch.initial_seed()
    torch.manual_seed(seed)  # the pass begins with a draw of places, which is repeated below
    model(tapped[None], ids[None], one_text, verifier_last_hidden_states=last, loss_config=loss, **every)
    hook.remove()
    torch.manual_seed(seed)
    places = generate_cod_sample_indices(len(ids), torch.ones(1, len(ids)), num, 1.0, 1.0)
    return found[0], *places


def block_answers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the package's forward pass computes for blocks at `ANCHORS` of one text.

    logits: [anchors, slots, draft vocabulary], corrected by the text's own tokens. log_odds: [anchors, slots].
    """
    ids = torch.randint(VOCAB, (1, BLOCK_TOKENS))
    tapped = (
        torch.randn(1, BLOCK_TOKENS, model.fc.in_features).half().float()
    )  # Paceline keeps taps in half precision
    found: dict[str, list[torch.Tensor]] = {"lm_head": [], "markov_head.markov_w2": [], "confidence_head": []}
    hooks = [
        module.register_forward_hook(lambda _m, _i, output, n=name: found[n].append(output))
        for name, module in model.named_modules()
        if name in found
    ]
    chosen = torch.zeros(1, BLOCK_TOKENS)
    chosen[:, ANCHORS] = 1
    one_text, last = (
        torch.zeros(1, BLOCK_TOKENS, dtype=torch.long),
        torch.randn(1, BLOCK_TOKENS, model.norm.weight.numel()),
    )
    more = (
        {"tv_loss_fn": resolve_loss_config("tv", "eager")["tv"][0]} if isinstance(model, DSparkDraftModel) else {}
    )
    loss = resolve_loss_config("kl_div", "eager")
    model(tapped, ids, chosen, last, one_text, loss_config=loss, max_anchors=len(ANCHORS), **more)
    for hook in hooks:
        hook.remove()
    shape = len(ANCHORS), model.block_size
    logits = found["lm_head"][0].view(*shape, -1)
    if corrected := found["markov_head.markov_w2"]:
        logits = logits + (corrected[0] if corrected[0].ndim == 3 else torch.stack(corrected, 1))
    answered = {
        "token_ids": ids[0],
        "tapped": tapped[0],
        "anchors": torch.tensor(ANCHORS),
        "logits": logits.contiguous(),
        "embed": model.embed_tokens.weight,
        "target_head": (model.verifier_lm_head if model.use_draft_vocab else model.lm_head).weight,
    }
    return (
        answered | {"log_odds": found["confidence_head"][0].view(shape)} if found["confidence_head"] else answered
    )


def write(folder: Path, model: torch.nn.Module) -> None:
    """Write a head with random weights, and what it answers."""
    fill(model)
    model.eval()
    ask = block_answers if isinstance(model, DFlashDraftModel) else answers
    with torch.no_grad():
        save_file(ask(model), _made(folder) / "answers.safetensors")
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # their own source, which nobody here runs


def main(folder: Path, names: Sequence[str]) -> None:
    torch.manual_seed(0)
    for make in (models, block_models):
        for name, model in make().items():
            if not names or name in names:
                write(folder / f"speculators-{name}", model)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
