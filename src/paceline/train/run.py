"""One training run in a folder: from captured answers to a drafter's files, resumed where it stopped."""

from __future__ import annotations

import hashlib
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import ConfigError
from paceline.core.system import commit, machine
from paceline.train.batch import Batcher
from paceline.train.checkpoint import (
    append_metrics,
    keep_metrics,
    read_metrics,
    resume,
    save_checkpoint,
    write_json,
)
from paceline.train.export import write_drafter
from paceline.train.plot import plot
from paceline.train.progress import progress
from paceline.train.trainer import Evaluation, Trainer, evaluate

if TYPE_CHECKING:
    from pathlib import Path

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.train.corpus import Corpus
    from paceline.train.features import FeatureFile
    from paceline.train.recipe import Recipe
    from paceline.train.target import TrainTarget
    from paceline.train.trainer import TrainConfig

# Settings that may change on the way.
NOT_RESUMED = ("eval_every", "save_every", "eval_tokens", "eval_steps", "keep_start")


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    """What a run learns from."""

    target: TrainTarget
    corpus: Corpus
    training: list[int]  # numbers of texts
    held_out: list[int]
    store: FeatureFile
    vocabulary: NDArray[int64]  # [draft_vocab] target ids
    coverage: float  # share of the answers' tokens in it


def run(
    recipe: Recipe, config: TrainConfig, material: Material, choices: dict[str, Any], folder: Path, kind: str
) -> Evaluation:
    """Train in a folder and return the last evaluation.

    choices: what the user chose of the drafter. kind: of the numbers in its files, a key of `export.KINDS`.
    """
    batcher = Batcher(
        material.target, material.corpus.texts, material.store, material.vocabulary, config.own_tokens
    )
    trainer = Trainer(recipe, config, batcher, material.training)
    brought = _brought(recipe) if config.keep_start else {}
    settings = _settings(config, material, choices)
    folder.mkdir(parents=True, exist_ok=True)
    watch = _Watch(trainer, config, batcher, material.held_out, folder)
    if not resume(folder, trainer, settings):
        keep_metrics(folder, -1)  # of a run that was stopped before its first checkpoint
        watch.evaluate(0.0)
    with progress("training") as update:
        update(trainer.step, config.steps, watch.note)
        for loss in trainer.run():
            if trainer.step % config.eval_every == 0 or trainer.step == config.steps:
                watch.evaluate(loss)
            if trainer.step % config.save_every == 0 or trainer.step == config.steps:
                save_checkpoint(folder, trainer, settings)
                write_drafter(folder, recipe, kind)  # so that a run that is stopped here leaves one behind
            update(trainer.step, config.steps, f"loss {loss:.3f} {watch.note}")
    if brought:
        _mix(recipe, brought, config.keep_start)
        watch.evaluate(0.0, trainer.step + 1)
    write_drafter(folder, recipe, kind)
    settings["keep_start"] = config.keep_start
    write_json(folder / "provenance.json", _provenance(settings, material, folder))
    _draw(folder)
    return watch.last


def _draw(folder: Path) -> None:
    """Draw the run, or say why not: nobody asked for the picture, and the drafter is there without it."""
    try:
        plot(folder, folder / "acceptance.png")
    except ConfigError as error:
        sys.stderr.write(f"acceptance.png is left out: {error}\n")


def _brought(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Return the weights that a run begins with and did not make."""
    return {name: recipe.weights[name].detach().clone() for name in recipe.taken_over}


@torch.no_grad()
def _mix(recipe: Recipe, brought: dict[str, torch.Tensor], share: float) -> None:
    """Let the weights be means of what they became and what was brought.

    A mean of both often guesses better than either, on texts of other kinds above all (arXiv 2109.01903).
    """
    for name, weight in brought.items():
        recipe.weights[name].lerp_(weight, share)


class _Watch:
    """Evaluates now and then, and logs it."""

    def __init__(
        self, trainer: Trainer, config: TrainConfig, batcher: Batcher, held_out: list[int], folder: Path
    ) -> None:
        self.note = ""
        self._trainer = trainer
        self._config = config
        self._batcher = batcher
        self._held_out = held_out
        self._folder = folder
        self._started = time.monotonic()

    @property
    def last(self) -> Evaluation:
        """The newest evaluation in the log."""
        row = read_metrics(self._folder)[-1]
        return Evaluation(row["divergence"], tuple(row["agreement"]), tuple(row["accepted"]))

    def evaluate(self, loss: float, step: int | None = None) -> None:
        """Evaluate the weights as they are. step: under which it is logged, if not the trainer's."""
        result = evaluate(self._trainer.recipe, self._config, self._batcher, self._held_out)
        step = self._trainer.step if step is None else step
        row = {"step": step, "loss": loss, "acceptance_length": result.acceptance_length}
        append_metrics(self._folder, row | asdict(result) | {"wall_s": time.monotonic() - self._started})
        by_position = " ".join(f"{share:.2f}" for share in result.accepted)
        self.note = f"held out: acceptance length {result.acceptance_length:.2f} ({by_position})"


def _settings(config: TrainConfig, material: Material, choices: dict[str, Any]) -> dict[str, Any]:
    """Return everything that decides what comes out."""
    values = {key: value for key, value in asdict(config).items() if key not in NOT_RESUMED}
    return values | choices | {
        "data": material.corpus.sha256,
        "target": material.target.fingerprint(),
        "vocabulary": hashlib.sha256(material.vocabulary.tobytes()).hexdigest(),
        "texts": [len(material.training), len(material.held_out)],
    }  # fmt: skip


def _provenance(settings: dict[str, Any], material: Material, folder: Path) -> dict[str, Any]:
    rows = read_metrics(folder)
    texts = material.corpus.texts
    return {
        "command": shlex.join(["paceline", *sys.argv[1:]]),
        "git": commit(),
        "version": version("paceline"),
        "machine": machine(),
        "target": material.target.name,
        "settings": settings,
        "data": {
            "prompts_trained": len({texts[n].name for n in material.training}),
            "prompts_held_out": len({texts[n].name for n in material.held_out}),
            "tokens": material.corpus.num_tokens,
            "sha256": material.corpus.sha256,
        },
        "vocabulary": {"size": len(material.vocabulary), "coverage": round(material.coverage, 5)},
        "untrained": rows[0],
        "trained": rows[-1],
    }
