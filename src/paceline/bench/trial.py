"""A pair of target and drafter on twenty prompts: what to expect of it, and whether to bother."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from paceline.bench.measure import acceptance_length, kept_per_position
from paceline.bench.prompts import read_prompts
from paceline.bench.report import PLAIN
from paceline.bench.session import Session, run_here
from paceline.core.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.measure import MeasuredAnswer
    from paceline.bench.session import Tell
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig

PROMPTS = Path(__file__).with_name("trial.jsonl")  # short questions of six kinds
MAX_TOKENS = 48  # of an answer
WORTH = 1.05  # a smaller gain is within what a shared machine does by itself


@dataclass(frozen=True, slots=True)
class Expected:
    """What a drafter did on the prompts of one kind, or of all."""

    kind: str
    kept_per_pass: float  # tokens, the target's own included
    kept_per_position: tuple[float, ...]  # share of passes that kept a draft there
    plain_ms: float  # a token after the first, without speculation
    ms: float  # with it
    speedup: float  # the median of the prompts' own ratios


@dataclass(frozen=True, slots=True)
class Trial:
    """The kinds of prompts, and all of them together."""

    kinds: tuple[Expected, ...]
    all: Expected

    @property
    def worth(self) -> bool:
        """Whether to bother."""
        return self.all.speedup >= WORTH

    def verdict(self) -> str:
        """Say in a sentence what to expect and what to do."""
        best, worst = (pick(self.kinds, key=lambda e: e.speedup) for pick in (max, min))
        spread = f"{worst.speedup:.2f}x for {worst.kind} to {best.speedup:.2f}x for {best.kind}"
        figures = f"{self.all.speedup:.2f}x by the time of a token ({spread})"
        if self.worth:
            return f"Verdict: it works and is worth it; expect {figures}."
        if best.speedup >= WORTH:
            return f"Verdict: it works, but not for all prompts: {figures}. --draft auto drafts where it pays."
        return f"Verdict: it works, but is not worth it on this machine: {figures}. Use --draft off."


def try_out(config: EngineConfig, loaded: Loaded, tell: Tell | None = None) -> Trial:
    """Ask the prompts one at a time, plainly and with the config's drafter in turns, greedily."""
    prompts = read_prompts(PROMPTS)
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=MAX_TOKENS)  # one token has no time between
    session = Session(drafts=(PLAIN, config.draft), concurrencies=(1,), params=params)
    plain, drafted = (run.answers for run in run_here(config, loaded, session, prompts, tell or _silent))
    kinds = dict.fromkeys(p.category for p in prompts)
    parts = [
        _expected(kind, *([a for a in answers if a.prompt.category == kind] for answers in (plain, drafted)))
        for kind in kinds
    ]
    return Trial(tuple(parts), _expected("all", plain, drafted))


def num_requests() -> int:
    """Return how many requests `try_out` makes."""
    return 2 * len(read_prompts(PROMPTS))


def _silent(done: int) -> None:
    """Tell nobody."""


def _expected(kind: str, plain: Sequence[MeasuredAnswer], drafted: Sequence[MeasuredAnswer]) -> Expected:
    before, now = _times_ms(plain), _times_ms(drafted)
    return Expected(
        kind=kind,
        kept_per_pass=acceptance_length(drafted) or 1.0,
        kept_per_position=tuple(kept_per_position(drafted) or ()),
        plain_ms=median(before),
        ms=median(now),
        speedup=median(b / n for b, n in zip(before, now, strict=True)),
    )


def _times_ms(answers: Sequence[MeasuredAnswer]) -> list[float]:
    """Return a token's time for each answer; medians over them make a stall of the machine one answer's."""
    return [1e3 * a.tpot_s for a in answers if a.tpot_s is not None]
