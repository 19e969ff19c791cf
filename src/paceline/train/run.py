"""A resumable training run in a folder, from captured answers to a drafter's files."""

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
from paceline.train.progress import progress
from paceline.train.recipe import write_drafter
from paceline.train.run_folder import (
    append_metrics,
    keep_metrics,
    make_folder,
    read_metrics,
    resume,
    save_checkpoint,
    write_json,
)
from paceline.train.summary import PICTURE, plot
from paceline.train.trainer import Trainer, evaluate

if TYPE_CHECKING:
    from pathlib import Path

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.train.corpus import Corpus
    from paceline.train.feature_store import FeatureFiles
    from paceline.train.recipe import Recipe
    from paceline.train.target_model import TrainTarget
    from paceline.train.trainer import TrainConfig

# Settings that may change when a run resumes.
MUTABLE_SETTINGS = ("eval_every", "save_every", "eval_tokens", "eval_steps", "keep_start")


@dataclass(frozen=True, slots=True, eq=False)
class TrainMaterial:
    """Input of a run."""

    target: TrainTarget
    corpus: Corpus
    training: list[int]  # numbers of texts
    held_out: list[int]
    store: FeatureFiles
    vocabulary: NDArray[int64]  # [draft_vocab] target ids
    coverage: float  # share of the answers' tokens in the vocabulary


def train(
    recipe: Recipe, config: TrainConfig, material: TrainMaterial, choices: dict[str, Any], folder: Path, kind: str
) -> None:
    """Train in a folder.

    choices: the user's settings of the drafter. kind: number type of its files, a key of `recipe.KINDS`.
    """
    batcher = Batcher(
        material.target, material.corpus.texts, material.store, material.vocabulary, config.own_tokens
    )
    trainer = Trainer(recipe, config, batcher, material.training)
    inherited = recipe.inherited if config.keep_start else ()  # weights that `--start-from` copied
    initial = {name: recipe.weights[name].detach().clone() for name in inherited}
    settings = _settings(config, material, choices)
    make_folder(folder)
    evaluator = _Evaluator(trainer, config, batcher, material.held_out, folder)
    if not resume(folder, trainer, settings):
        keep_metrics(folder, -1)  # drops rows of a run that stopped before its first checkpoint
        evaluator.evaluate(0.0)
    with progress("training") as update:
        update(trainer.step, config.steps, evaluator.note)
        for loss in trainer.run():
            if trainer.step % config.eval_every == 0 or trainer.step == config.steps:
                evaluator.evaluate(loss)
            if trainer.step % config.save_every == 0 or trainer.step == config.steps:
                save_checkpoint(folder, trainer, settings)
                write_drafter(folder, recipe, kind)  # a run that is stopped here leaves a drafter behind
            update(trainer.step, config.steps, f"loss {loss:.3f} {evaluator.note}")
    if initial:
        _average(recipe, initial, config.keep_start)
        evaluator.evaluate(0.0, trainer.step + 1)
    write_drafter(folder, recipe, kind)
    settings["keep_start"] = config.keep_start
    write_json(folder / "provenance.json", _provenance(settings, material, folder))
    _draw(folder)


def _draw(folder: Path) -> None:
    """Draw the run, or say why not; without matplotlib a finished run must not fail."""
    try:
        plot(folder, folder / PICTURE)
    except ConfigError as error:
        sys.stderr.write(f"{PICTURE} is left out: {error}\n")


@torch.no_grad()
def _average(recipe: Recipe, initial: dict[str, torch.Tensor], share: float) -> None:
    """Average trained and initial weights; `share` is the share of the initial ones.

    The mean often drafts better than either, above all on texts of other kinds (WiSE-FT, arXiv 2109.01903).
    """
    for name, weight in initial.items():
        recipe.weights[name].lerp_(weight, share)


class _Evaluator:
    """Evaluates the weights on held-out texts and logs the figures."""

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

    def evaluate(self, loss: float, step: int | None = None) -> None:
        """Evaluate the current weights and log them as `step`, by default the trainer's."""
        result = evaluate(self._trainer.recipe, self._config, self._batcher, self._held_out)
        step = self._trainer.step if step is None else step
        row = {"step": step, "loss": loss, "acceptance_length": result.acceptance_length}
        append_metrics(self._folder, row | asdict(result) | {"wall_s": time.monotonic() - self._started})
        by_position = " ".join(f"{share:.2f}" for share in result.accepted)
        self.note = f"held out: acceptance length {result.acceptance_length:.2f} ({by_position})"


def _settings(config: TrainConfig, material: TrainMaterial, choices: dict[str, Any]) -> dict[str, Any]:
    """Return all settings that determine the trained weights."""
    values = {key: value for key, value in asdict(config).items() if key not in MUTABLE_SETTINGS}
    return choices | values | {  # `own_tokens` is in both: a switch in `choices`; the number in `values` wins
        "data": material.corpus.sha256,
        "target": material.target.fingerprint(),
        "vocabulary": hashlib.sha256(material.vocabulary.tobytes()).hexdigest(),
        "texts": [len(material.training), len(material.held_out)],
    }  # fmt: skip


def _provenance(settings: dict[str, Any], material: TrainMaterial, folder: Path) -> dict[str, Any]:
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
