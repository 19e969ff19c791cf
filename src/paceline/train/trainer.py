"""Training loop of all drafters.

All randomness is a function of the seed and the number of the step. A checkpoint is therefore weights, moments and
a number, and a resumed run ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import PacelineError
from paceline.train.compute import COMPUTES, product_precision
from paceline.train.corpus import packs, shuffled
from paceline.train.drafts import plan_drafts
from paceline.train.loss import divergence, evaluate_drafts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.train.batch import Batcher, TrainBatch
    from paceline.train.recipe import Recipe

BETAS = (0.9, 0.95)
LAST_LR = 0.05  # learning rate at the end of the cosine, as a share of its peak
_MOMENTS = (("step", "exp_avg", "exp_avg_sq"), ("momentum_buffer",))  # of AdamW and of Muon
# Matrices with a row for each token. Muon leaves them out, as only a few of their rows have a gradient in a step.
TOKEN_ROWS = ("head", "corrector.before", "corrector.out")
CORRECTOR = "corrector."  # a block head's corrector, whose tables learn slowly: `start_lr` is not for its weights


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Settings of the loop; resuming may change only those of evaluation, saving and `keep_start`."""

    steps: int
    lr: float = 1e-3
    start_lr: float = 1.0  # learning rate of weights from another drafter but its corrector, as a share of `lr`
    keep_start: float = 0.0  # share of their initial values in the weights written at the end
    warmup: float = 0.04  # share of the steps with a rising learning rate
    weight_decay: float = 0.01  # for matrices only
    clip: float = 1.0  # largest norm of the gradient
    batch_tokens: int = 2048
    decay: float = 0.8  # weight of a depth relative to the depth before it
    keep: float = 0.8  # share of the drafts that go on to the next depth
    anchors: float = 1.0  # share of the answers' tokens at which a draft begins
    own_tokens: int = 0  # request tokens that a batch adds to the vocabulary
    seed: int = 0
    compute: str = "float32"  # number type of matrix products, a key of `COMPUTES`
    muon: bool = False  # orthogonalised momentum for matrices between states (Muon, arXiv 2502.16982)
    eval_tokens: int = 16384
    eval_steps: int = 5  # number of depths that are evaluated
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
    """Figures of drafts on held-out texts, against the target's most likely token."""

    divergence: float  # KL per draft of depth 0, in nats
    agreement: tuple[float, ...]  # by depth: share of drafts equal to the target's token
    accepted: tuple[float, ...]  # by depth: share of drafts equal to the target's tokens down to this depth

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a pass, the target's own included."""
        return 1.0 + sum(self.accepted)


class Trainer:
    """Weights, moments and the number of the next step."""

    def __init__(self, recipe: Recipe, config: TrainConfig, batcher: Batcher, numbers: Sequence[int]) -> None:
        """numbers: numbers of the training texts."""
        self.recipe = recipe
        self.config = config
        self.step = 0
        self._batcher = batcher
        self._numbers = numbers
        for weight in recipe.weights.values():
            weight.requires_grad_()
        names = recipe.weights.keys()
        turned = [n for n in names if config.muon and recipe.weights[n].ndim == 2 and n not in TOKEN_ROWS]
        others = [n for n in names if n not in turned]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(self._groups(others), lr=config.lr, betas=BETAS, fused=True)
        ]
        if turned:
            self._optimizers.append(
                torch.optim.Muon(self._groups(turned), lr=config.lr, adjust_lr_fn="match_rms_adamw")
            )

    def _groups(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return an optimizer's parameter groups: matrices and vectors, inherited and new."""
        groups: dict[tuple[bool, bool], list[torch.Tensor]] = {}
        for name in names:
            weight = self.recipe.weights[name]
            inherited = name in self.recipe.inherited and not name.startswith(CORRECTOR)
            groups.setdefault((weight.ndim > 1, inherited), []).append(weight)
        return [
            {
                "params": weights,
                "weight_decay": self.config.weight_decay if is_matrix else 0.0,
                "share": self.config.start_lr if inherited else 1.0,
            }
            for (is_matrix, inherited), weights in groups.items()
        ]

    def run(self) -> Iterator[float]:
        """Take the remaining steps; yield each loss. Raises `PacelineError` if it is not finite."""
        for numbers in self._batches():
            yield self._take_step(self._batcher.make(numbers))

    def state(self) -> dict[str, torch.Tensor]:
        """Return weights and moments, without the number of the step."""
        tensors = {f"weight.{n}": w.detach() for n, w in self.recipe.weights.items()}
        for name, weight in self.recipe.weights.items():
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(weight, {}).items():
                    tensors[f"{key}.{name}"] = value
        return tensors

    def restore(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        """Continue from a state."""
        self.step = step
        for name, weight in self.recipe.weights.items():
            with torch.no_grad():
                weight.copy_(tensors[f"weight.{name}"])
            for optimizer, keys in zip(self._optimizers, _MOMENTS, strict=False):
                if f"{keys[0]}.{name}" in tensors:  # else it is a weight of the other optimizer
                    # Fused AdamW wants its step counter on the device of the weight.
                    moments = {key: tensors[f"{key}.{name}"].to(weight.device) for key in keys}
                    optimizer.state[weight] = moments

    def _batches(self) -> Iterator[list[int]]:
        """Yield the texts of the remaining steps, epoch after epoch."""
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
        depths = plan_drafts(
            batch.bounds, recipe.num_steps, config.keep, seed, batch.token_ids.device, config.anchors
        )
        with product_precision(config.compute):
            hidden = recipe.predict(batch, depths)
        rows = torch.cat([batch.rows[depth.anchors + number] for number, depth in enumerate(depths)])
        loss = divergence(
            torch.cat(hidden),
            recipe.output_rows(batch.own_ids),
            batch.expected,
            rows,
            self._shares(hidden),
            COMPUTES[config.compute],
            recipe.num_frozen,
        )
        if not loss.isfinite():
            raise PacelineError(
                f"the loss of step {self.step} is not a number; lower --lr, and start again in another --out: the "
                "last checkpoint may be on its way there too"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(recipe.weights.values(), config.clip)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.lr_at(self.step) * group["share"]
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def _shares(self, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weights of all drafts, whose sum is 1.

        A depth weighs `decay` times the one before.
        """
        weights = [self.config.decay**number for number in range(len(hidden))]
        parts = [h.new_full((len(h),), w / max(1, len(h))) for h, w in zip(hidden, weights, strict=True)]
        return torch.cat(parts) / sum(weights)


@torch.inference_mode()
def evaluate(recipe: Recipe, config: TrainConfig, batcher: Batcher, numbers: Sequence[int]) -> Evaluation:
    """Draft at every position of evenly spaced held-out texts of about `config.eval_tokens` tokens."""
    agreed, accepted, counts = ([0] * config.eval_steps for _ in range(3))
    diverged, lengths = 0.0, batcher.lengths()
    for pack in packs(_spread(numbers, lengths, config.eval_tokens), lengths, config.batch_tokens):
        batch = batcher.make(pack)
        depths = plan_drafts(batch.bounds, config.eval_steps, 1.0, 0, batch.token_ids.device)
        alive = torch.ones(len(depths[0].anchors), dtype=torch.bool, device=batch.token_ids.device)
        with product_precision(config.compute):
            predicted = recipe.predict(batch, depths)
        output_rows = recipe.output_rows(batch.own_ids)
        # Logits are float32: in 16 bits many would be equal, and the best of them chance.
        for number, (depth, hidden) in enumerate(zip(depths, predicted, strict=True)):
            rows = batch.rows[depth.anchors + number]
            total, best = evaluate_drafts(hidden, output_rows, batch.expected, rows)
            agrees = best == batch.expected.best[rows]
            alive = alive[depth.kept] & agrees
            diverged += float(total) if number == 0 else 0.0
            for sums, value in ((agreed, agrees), (accepted, alive)):
                sums[number] += int(value.sum())
            counts[number] += len(hidden)
    each = [max(count, 1) for count in counts]
    shares = (tuple(num / count for num, count in zip(sums, each, strict=True)) for sums in (agreed, accepted))
    return Evaluation(diverged / each[0], *shares)


def _spread(numbers: Sequence[int], lengths: Sequence[int], num_tokens: int) -> list[int]:
    """Return evenly spaced texts of about `num_tokens` tokens, as files sort prompts by kind."""
    share = num_tokens / sum(lengths[n] for n in numbers)
    count = min(len(numbers), math.ceil(share * len(numbers)))
    return [numbers[i * len(numbers) // count] for i in range(count)]
