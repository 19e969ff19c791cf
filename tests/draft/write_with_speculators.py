"""Write tiny heads with the `speculators` package itself, and what they answer, for `test_speculators_files.py`.

Run where that package is installed (0.9.0 was used): `python tests/draft/write_with_speculators.py tests/data`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig

VOCAB, DRAFT_VOCAB, WIDTH, TAPS, TOKENS = 64, 40, 16, (1, 2, 3), 12


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


def models() -> dict:
    new = Eagle3SpeculatorConfig(**common("eagle3", 1), norm_before_residual=True, fc_norm=True, norm_output=True)
    parallel = PEagleSpeculatorConfig(**common("peagle", 2), mask_token_id=60)
    return {
        "eagle3": Eagle3DraftModel(Eagle3SpeculatorConfig(**common("eagle3", 1))),
        "eagle3-1": Eagle3DraftModel(new),
        "peagle": PEagleDraftModel(parallel),
    }


def fill(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape)
        parameter.data = 1 + 0.1 * noise if "norm" in name else noise / parameter.shape[-1] ** 0.5
    kept = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[kept] = True
    model.load_vocab_mappings(t2d, kept - torch.arange(DRAFT_VOCAB))


def answers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The logits of one text, by the package's own modules: of its training pass if that drafts in order."""
    ids, tapped = torch.randint(VOCAB, (1, TOKENS)), torch.randn(1, TOKENS, len(TAPS) * WIDTH)
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _m, _i, output: found.append(output))
    one_text = torch.zeros(1, TOKENS, dtype=torch.long)
    Eagle3DraftModel.forward(model, tapped, ids, one_text, ttt_steps=1)
    hook.remove()
    return {"token_ids": ids[0], "tapped": tapped[0], "logits": found[0][0].contiguous()}


def main(folder: Path) -> None:
    torch.manual_seed(0)
    for name, model in models().items():
        fill(model)
        model.eval()
        out = folder / f"speculators-{name}"
        with torch.no_grad():
            save_file(answers(model), _made(out) / "answers.safetensors")
        model.save_pretrained(out)
        (out / "config.py").unlink(missing_ok=True)  # their own source, which nobody here runs


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main(Path(sys.argv[1]))
