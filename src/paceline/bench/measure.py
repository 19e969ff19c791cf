"""Figures of a run, computed from the answers and the engine's statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.bench.statistics import num_repeated, repeat_share, spread_of
from paceline.serve.observe.recent import acceptance_by_position

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.bench.prompt_file import Prompt
    from paceline.core.figures import Figures
    from paceline.engine.stats import Stats

    Json = dict[str, Any]

MS_PER_S = 1000.0
LOOPING_SHARE = 0.3  # an answer loops if a larger share of its tokens lies in repeated 16-grams


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredAnswer:
    """One request as its client saw it. Times are seconds of one monotonic clock."""

    prompt: Prompt
    figures: Figures
    start_s: float  # time at which the request was sent
    arrivals: tuple[tuple[float, float], ...]  # (time_s, number of tokens), in order
    token_ids: tuple[int, ...] | None = None  # None: a server does not send token ids

    @property
    def first_s(self) -> float:
        """Time of the first token."""
        return self.arrivals[0][0]

    @property
    def end_s(self) -> float:
        """Time of the last token."""
        return self.arrivals[-1][0]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, seconds; None for an answer of one token."""
        gaps = self.figures.completion_tokens - 1
        return (self.end_s - self.first_s) / gaps if gaps > 0 else None


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The answers to all prompts with one drafter."""

    draft: str
    concurrency: int | None  # None: Poisson arrivals
    repeat: int
    answers: tuple[MeasuredAnswer, ...]
    stats: Stats | None  # of the engine; None for a server, which may have had other clients
    peak_rss_mb: float | None
    warm: bool = False


def acceptance_length(answers: Sequence[MeasuredAnswer]) -> float | None:
    """Return tokens per request and decode pass, with the target's own, without the prefill's token."""
    passes = sum(a.figures.decode_passes for a in answers)
    return sum(a.figures.decoded_tokens for a in answers) / passes if passes else None


def record(run: Run) -> Json:
    """Return a run's record with the keys of the bench contract."""
    answers = run.answers
    wall_s = max(a.end_s for a in answers) - min(a.start_s for a in answers)
    return {
        "draft": run.draft,
        "concurrency": run.concurrency,
        "repeat": run.repeat,
        "overlap": "on" if run.stats and run.stats.overlapped_steps else "off",
        "warm": run.warm,
        "wall_s": wall_s,
        **_figures_of(answers, wall_s),
        **_steps(run.stats),
        "peak_rss_mb": run.peak_rss_mb,
        "by_category": _by_category(answers),
    }


def _figures_of(answers: Sequence[MeasuredAnswer], seconds: float) -> Json:
    """Return the figures of some answers. seconds: the time over which their rate is taken."""
    figures = [a.figures for a in answers]
    tokens = sum(f.completion_tokens for f in figures)
    return {
        "requests": len(answers),
        "prompt_tokens": sum(f.prompt_tokens for f in figures),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds if seconds > 0.0 else None,
        "ttft_ms": spread_of([(a.first_s - a.start_s) * MS_PER_S for a in answers]),
        "tpot_ms": spread_of([a.tpot_s * MS_PER_S for a in answers if a.tpot_s is not None]),
        "e2e_ms": spread_of([(a.end_s - a.start_s) * MS_PER_S for a in answers]),
        "drafted_tokens": sum(f.drafted_tokens for f in figures),
        "verified_tokens": sum(f.verified_tokens for f in figures),
        "accepted_tokens": sum(f.accepted_tokens for f in figures),
        "acceptance_length": acceptance_length(answers),
        "kept_per_position": kept_per_position(answers),
        **_repetition(answers),
    }


def _steps(stats: Stats | None) -> Json:
    """Figures that only the engine knows; null for a server."""
    if stats is None:
        keys = ("steps", "accepted_per_position", "k_histogram", "draft_ms", "target_ms", "host_ms")
        more = ("hidden_ms", "control_ms", "prediction_error", "prediction_error_p50", "estimated_speedup")
        return dict.fromkeys((*keys, *more))
    per_step = MS_PER_S / max(stats.steps, 1)
    return {
        "steps": stats.steps,
        "accepted_per_position": acceptance_by_position(stats),
        "k_histogram": list(stats.k_histogram),
        "draft_ms": stats.draft_s * per_step,
        "target_ms": stats.target_s * per_step,
        "host_ms": stats.host_s * per_step,
        "hidden_ms": stats.overlapped_s * per_step,
        "control_ms": stats.control_s * per_step,
        "prediction_error": stats.predictions.error,
        "prediction_error_p50": stats.predictions.median_error,
        "estimated_speedup": stats.predictions.speedup,
    }


def _by_category(answers: Sequence[MeasuredAnswer]) -> Json:
    """Return the figures of each category; a rate is tokens over summed request times."""
    categories = dict.fromkeys(a.prompt.category for a in answers)
    groups = {c: [a for a in answers if a.prompt.category == c] for c in categories}
    return {c: _figures_of(group, sum(a.end_s - a.start_s for a in group)) for c, group in groups.items()}


def kept_per_position(answers: Sequence[MeasuredAnswer]) -> list[float] | None:
    """Return the share of decode passes that kept a draft at each position.

    One plus the sum of the shares is the mean length. None for a server: its chunks do not tell passes apart.
    """
    if not answers or any(a.token_ids is None for a in answers):
        return None
    kept = [tokens - 1 for a in answers for _, tokens in a.arrivals[1:]]  # the first token comes from the prefill
    return [sum(k > position for k in kept) / len(kept) for position in range(int(max(kept, default=0)))]


def _repetition(answers: Sequence[MeasuredAnswer]) -> Json:
    """Share of repeated text, and acceptance length without looping answers, which are easy to draft."""
    known = [(a, a.token_ids) for a in answers if a.token_ids is not None]
    without_loops = [a for a, ids in known if num_repeated(ids) <= LOOPING_SHARE * len(ids)]
    return {
        "repeat_share": repeat_share([ids for _, ids in known]),
        "without_loops": {"requests": len(without_loops), "acceptance_length": acceptance_length(without_loops)},
    }
