"""A step of reinforcement learning on this machine's cores, through verl's interface.

`python examples/rollouts/step.py` writes roll-outs of the default model with `paceline serve --rl`, by the adapter
of `verl_adapter.py`. The trainer is PyTorch with verl's own advantages (`verl.trainer.ppo.core_algos`), on a copy
of the model that transformers reads. The newer weights go back while an answer is open; the next roll-outs tell
their version. verl's trainer itself wants GPUs, so its loop is written out here. Needs verl, PyTorch and
transformers, and accelerate for a .gguf file.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl_adapter import RollOutServer

from paceline.model.files.pull import resolve

PROMPTS = ("The sea is", "Once upon a time", "The king said", "In the morning")
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Sample:
    """A roll-out, and what it earned."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]  # of the policy that wrote
    reward: float


def reward(text: str) -> float:
    """Return the share of words that are short: a rule that a machine can check."""
    words = text.split()
    return sum(len(word) <= 4 for word in words) / max(len(words), 1)


async def roll_out(server: Any, tokenizer: Any, samples: int, tokens: int, step: int) -> list[Sample]:
    """Write some answers to each prompt."""

    async def one(index: int, prompt: str) -> Sample:
        ids = tokenizer.encode(prompt)
        sampling = SAMPLING | {"max_tokens": tokens, "seed": 1000 * step + index}
        found = await server.generate(ids, sampling, f"step-{step}-{index}")
        return Sample(ids, found.token_ids, found.log_probs, reward(tokenizer.decode(found.token_ids)))

    asked = [prompt for prompt in PROMPTS for _ in range(samples)]
    return list(await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(asked))))


def scores_of(model: Any, sample: Sample) -> torch.Tensor:
    """Return the trainer's log-probabilities of an answer's tokens: [num_tokens]."""
    ids = torch.tensor([sample.prompt_ids + sample.token_ids])
    logits = model(ids[:, :-1]).logits[0, len(sample.prompt_ids) - 1 :].float()
    wanted = torch.tensor(sample.token_ids)
    return torch.log_softmax(logits, -1).gather(1, wanted[:, None])[:, 0]


def learn(model: Any, optimizer: Any, found: list[Sample], samples: int) -> dict[str, float]:
    """Take one step of GRPO, by verl's advantages and loss."""
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    width = len(found[0].token_ids)
    mask = torch.ones(len(found), width)
    rewards = torch.zeros(len(found), width)
    rewards[:, -1] = torch.tensor([sample.reward for sample in found])
    groups = np.array([index // samples for index in range(len(found))])
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, groups)
    old = torch.tensor([sample.log_probs for sample in found])
    optimizer.zero_grad()
    gaps = []
    for index, sample in enumerate(found):  # one at a time: memory for one graph
        new = scores_of(model, sample)
        ratio = torch.exp(new - old[index])  # corrects for the server's types of weights, too
        clipped = ratio.clamp(0.8, 1.2)
        loss = -torch.minimum(ratio * advantages[index], clipped * advantages[index]).mean() / len(found)
        loss.backward()
        gaps.append(float((new.detach() - old[index]).abs().mean()))
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    return {"reward": float(rewards.sum() / len(found)), "gap": sum(gaps) / len(gaps), "gradient": norm}


async def main(model_name: str, samples: int, tokens: int, steps: int) -> None:
    """Take steps and print what came of them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = Path(model_name) if Path(model_name).exists() else resolve(model_name)
    where: dict[str, Any] = {"gguf_file": place.name} if place.is_file() else {}
    folder = place.parent if place.is_file() else place
    tokenizer = AutoTokenizer.from_pretrained(folder, **where)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    server = RollOutServer(model_name, ["--draft", "eagle3:k=3", "--weights", "bf16", "--no-access-log"])
    await server.launch_server()
    try:
        await server.set_global_steps(0)
        for step in range(1, steps + 1):
            begun_s = time.monotonic()
            found = await roll_out(server, tokenizer, samples, tokens, step)
            rolled_s = time.monotonic()
            told = learn(model, optimizer, found, samples)
            learnt_s = time.monotonic()
            ids = found[0].prompt_ids
            crossing = asyncio.create_task(server.generate(ids, SAMPLING | {"max_tokens": 2000}, "crossing"))
            await asyncio.sleep(0.5)
            sent_s = time.monotonic()
            await server.update_weights(named(model), step)
            updated_s = time.monotonic() - sent_s
            await server.abort_all_requests()
            crossed = await crossing
            await server.resume_generation()
            again = await roll_out(server, tokenizer, samples, tokens, step)
            change = sum(new.token_ids != old.token_ids for new, old in zip(again, found, strict=True))
            print(
                f"step {step}: roll-outs {rolled_s - begun_s:.1f} s, learning {learnt_s - rolled_s:.1f} s, "
                f"weights sent and taken {updated_s:.2f} s; reward {told['reward']:.3f}, gradient "
                f"{told['gradient']:.2f}, log-probabilities of server and trainer differ by {told['gap']:.4f}"
            )
            print(
                f"  an answer across the update: {len(crossed.token_ids)} tokens by "
                f"{' and '.join(crossed.extra_fields['versions'])}; "
                f"{change} of {len(found)} answers of the same seeds are others now"
            )
    finally:
        await server.shutdown()


def named(model: Any) -> Any:
    """Yield tensors by the names in a model's folder."""
    for name, tensor in model.named_parameters():
        yield name, tensor.detach().to(torch.bfloat16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--samples", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--steps", type=int, default=1)
    args = parser.parse_args()
    asyncio.run(main(args.model, args.samples, args.tokens, args.steps))
