"""The training loop, the same for all drafters.

Everything that is random is a function of the seed and the number of the step, so that a checkpoint is weights,
moments and a number, and a run that resumes ends with the same bits as one that was never interrupted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import PacelineError
from paceline.train.compute import COMPUTES, products
from paceline.train.corpus import packs, shuffled
from paceline.train.drafts import plan_drafts
from paceline.train.loss import divergence, judge

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.train.batch import Batcher, TrainBatch
    from paceline.train.recipe import Recipe

BETAS = (0.9, 0.95)
LAST_LR = 0.05  # of the peak, at the end of the cosine


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How to train. Where a run resumes all is the same, but for how it is watched and what is kept at the end."""

    steps: int
    lr: float = 1e-3
    start_lr: float = 1.0  # share of `lr` at which weights learn that another drafter brought
    keep_start: float = 0.0  # share of these, as they were brought, in what is written at the end
    warmup: float = 0.04  # share of the steps
    weight_decay: float = 0.01  # of matrices
    clip: float = 1.0  # of the gradient's norm
    batch_tokens: int = 2048
    decay: float = 0.8  # weight of each depth against the one before
    keep: float = 0.8  # share of the drafts that go on to the next depth
    own_tokens: int = 0  # that a batch adds to the vocabulary
    seed: int = 0
    compute: str = "float32"  # of products, a key of `COMPUTES`
    eval_tokens: int = 16384
    eval_steps: int = 5  # depths that are evaluated
    eval_every: int = 200
    save_every: int = 100

    def lr_at(self, step: int) -> float:
        """Return the learning rate of a step: a linear rise, then a cosine."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.lr * (step + 1) / rise
        share = (step - rise) / max(1, self.steps - rise)
        return self.lr * (LAST_LR + (1 - LAST_LR) * 0.5 * (1 + math.cos(math.pi * share)))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well drafts do on held-out texts, against the target's most likely token."""

    divergence: float  # KL per guess of depth 0, in nats
    agreement: tuple[float, ...]  # by depth, after the true tokens
    accepted: tuple[float, ...]  # by depth: all guesses up to there agree

    @property
    def acceptance_length(self) -> float:
        """Tokens of a pass with as many drafts, the target's own included."""
        return 1.0 + sum(self.accepted)


class Trainer:
    """Weights, moments and the number of the next step."""

    def __init__(self, recipe: Recipe, config: TrainConfig, batcher: Batcher, numbers: Sequence[int]) -> None:
        """numbers: the texts to train on."""
        self.recipe = recipe
        self.config = config
        self.step = 0
        self._batcher = batcher
        self._numbers = numbers
        for weight in recipe.weights.values():
            weight.requires_grad_()
        self._optimizer = torch.optim.AdamW(self._groups(), lr=config.lr, betas=BETAS, fused=True)

    def _groups(self) -> list[dict[str, Any]]:
        """Return what the optimizer treats alike: matrices and vectors, taken over and new."""
        groups: dict[tuple[bool, bool], list[torch.Tensor]] = {}
        for name, weight in self.recipe.weights.items():
            groups.setdefault((weight.ndim > 1, name in self.recipe.taken_over), []).append(weight)
        return [
            {
                "params": weights,
                "weight_decay": self.config.weight_decay if is_matrix else 0.0,
                "share": self.config.start_lr if taken_over else 1.0,
            }
            for (is_matrix, taken_over), weights in groups.items()
        ]

    def run(self) -> Iterator[float]:
        """Take the steps that are left; yield the loss of each. Raises `PacelineError` if it is not finite."""
        for numbers in self._batches():
            yield self._take_step(self._batcher.make(numbers))

    def state(self) -> dict[str, torch.Tensor]:
        """Return everything but the number of the step."""
        tensors = {f"weight.{n}": w.detach() for n, w in self.recipe.weights.items()}
        for name, weight in self.recipe.weights.items():
            for key, value in self._optimizer.state.get(weight, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def restore(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Go on from a state."""
        self.step = step
        for name, weight in self.recipe.weights.items():
            with torch.no_grad():
                weight.copy_(tensors[f"weight.{name}"])
            if f"step.{name}" in tensors:  # one that nothing has pulled at yet has no moments
                moments = {key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
                # The step too: AdamW in one kernel wants it where the weight is.
                self._optimizer.state[weight] = {key: v.to(weight.device) for key, v in moments.items()}

    def _batches(self) -> Iterator[list[int]]:
        """Yield the texts of the steps that are left, epoch after epoch."""
        lengths, epoch, passed = self._batcher.lengths(), 0, 0
        while True:
            for numbers in packs(
                shuffled(self._numbers, self.config.seed, epoch), lengths, self.config.batch_tokens
            ):
                if self.step >= self.config.steps:
                    return
                passed += 1
                if passed > self.step:
                    yield numbers
            epoch += 1

    def _take_step(self, batch: TrainBatch) -> float:
        config, recipe = self.config, self.recipe
        seed = (config.seed << 32) + self.step
        depths = plan_drafts(batch.bounds, recipe.num_steps, config.keep, seed, batch.token_ids.device)
        with products(config.compute):
            guesses = recipe.guess(batch, depths)
        rows = torch.cat([batch.rows[depth.anchors + number] for number, depth in enumerate(depths)])
        loss = divergence(
            torch.cat(guesses),
            recipe.written(batch.own_ids),
            batch.wanted,
            rows,
            self._shares(guesses),
            COMPUTES[config.compute],
        )
        if not loss.isfinite():
            raise PacelineError(
                f"the loss of step {self.step} is not a number; lower --lr, and start again in another --out: the "
                "last checkpoint may be on its way there too"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(recipe.weights.values(), config.clip)
        for group in self._optimizer.param_groups:
            group["lr"] = config.lr_at(self.step) * group["share"]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def _shares(self, guesses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return how much each guess counts: all of a depth together `decay` times those of the one before."""
        weights = [self.config.decay**number for number in range(len(guesses))]
        parts = (g.new_full((len(g),), w / max(1, len(g))) for g, w in zip(guesses, weights, strict=True))
        return torch.cat(list(parts)) / sum(weights)


@torch.inference_mode()
def evaluate(recipe: Recipe, config: TrainConfig, batcher: Batcher, numbers: Sequence[int]) -> Evaluation:
    """Draft at every place of some held-out texts, of `config.eval_tokens` tokens in all."""
    agreed, accepted, counts = (torch.zeros(config.eval_steps, dtype=torch.float64) for _ in range(3))
    diverged = 0.0
    for pack in _first(packs(numbers, batcher.lengths(), config.batch_tokens), batcher, config.eval_tokens):
        batch = batcher.make(pack)
        depths = plan_drafts(batch.bounds, config.eval_steps, 1.0, 0, batch.token_ids.device)
        alive = torch.ones(len(depths[0].anchors), dtype=torch.bool, device=batch.token_ids.device)
        with products(config.compute):
            drafted = recipe.guess(batch, depths)
        head = recipe.written(batch.own_ids)
        # Logits in float32: in 16 bits many are equal, and which of them is the best is chance.
        for number, (depth, guesses) in enumerate(zip(depths, drafted, strict=True)):
            rows = batch.rows[depth.anchors + number]
            total, best = judge(guesses, head, batch.wanted, rows)
            agrees = best == batch.wanted.best[rows]
            alive = alive[depth.kept] & agrees
            diverged += float(total) if number == 0 else 0.0
            for sums, value in ((agreed, agrees), (accepted, alive)):
                sums[number] += int(value.sum())
            counts[number] += len(guesses)
    counts = counts.clamp(min=1)
    return Evaluation(
        diverged / float(counts[0]), tuple((agreed / counts).tolist()), tuple((accepted / counts).tolist())
    )


def _first(batches: Iterator[list[int]], batcher: Batcher, num_tokens: int) -> Iterator[list[int]]:
    """Yield batches until they hold so many tokens."""
    lengths, seen = batcher.lengths(), 0
    for pack in batches:
        if seen >= num_tokens:
            return
        seen += sum(lengths[n] for n in pack)
        yield pack
