"""All runs of a benchmark, drafters interleaved, so that a drifting machine drifts for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from paceline.bench.interleave import SlicedRun, interleave, make_questions
from paceline.bench.load import drive
from paceline.bench.measure import Run
from paceline.core.errors import ConfigError
from paceline.core.params import MAX_SEED, MAX_TOKENS
from paceline.core.system import peak_rss_mb, reset_peak_rss
from paceline.model.template import compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.bench.interleave import Question
    from paceline.bench.load import DrivenServer
    from paceline.bench.prompt_file import Prompt
    from paceline.core.params import SamplingParams
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine

    OnProgress = Callable[[int], None]  # called with the number of finished requests, over all runs

SPARE_TOKENS = 32  # room for drafts behind the last token of an answer
_BOUNDS = {"repeat": (1, 10_000), "warmup": (0, MAX_TOKENS), "seed": (0, MAX_SEED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Settings of a benchmark. Checked when made; raises `ConfigError`."""

    drafts: tuple[str, ...]
    concurrencies: tuple[int, ...]
    params: SamplingParams
    seed: int = 0  # question i is asked with seed + i
    repeat: int = 1
    warmup: int = 1  # uncounted requests before the first run of each drafter
    warm: bool = False  # keep caches and history from run to run

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"--{name} must be between {low} and {high}, not {getattr(self, name)}")

    @property
    def num_runs(self) -> int:
        """Number of runs: drafts times concurrencies times repeats."""
        return len(self.drafts) * len(self.concurrencies) * self.repeat


def run_here(
    config: EngineConfig, loaded: Loaded, session: Session, prompts: Sequence[Prompt], on_progress: OnProgress
) -> Iterator[Run]:
    """Yield the runs in this process, one engine per drafter over the same weights.

    Each engine has its own KV, just large enough for the longest question and answer. The runs of a repeat are
    interleaved, so their peak memory is one figure.
    """
    from paceline.engine.assembly.build import assemble
    from paceline.serve.prompts import Prompts

    max_len = min(config.limits.max_len, loaded.decoder.config.max_context)
    encode = Prompts(loaded.tokenizer, compiled(loaded.template), max_len)
    questions = make_questions(prompts, encode, session.params, session.seed)
    longest = max(len(q.request.prompt_ids) for q in questions) + session.params.max_tokens + SPARE_TOKENS
    limits = replace(config.limits, num_rows=max(session.concurrencies), max_len=min(max_len, longest))
    config = replace(config, limits=limits, keep_learnt=False)
    engines = {draft: assemble(replace(config, draft=draft), loaded).engine for draft in session.drafts}
    done = 0
    for concurrency in session.concurrencies:
        for engine in engines.values():
            interleave([SlicedRun(engine, questions[: session.warmup], concurrency)])
        for repeat in range(session.repeat):
            yield from _repeat(engines, questions, concurrency, repeat, session.warm, _offset(done, on_progress))
            done += len(questions) * len(engines)


def _offset(done: int, on_progress: OnProgress) -> OnProgress:
    """Return a callback for one run that adds the requests of the runs before it."""
    return lambda count: on_progress(done + count)


def _repeat(
    engines: Mapping[str, Engine],
    questions: Sequence[Question],
    concurrency: int,
    repeat: int,
    warm: bool,
    on_progress: OnProgress,
) -> Iterator[Run]:
    if not warm:
        for engine in engines.values():
            engine.forget()
    reset_peak_rss()
    runs = {draft: SlicedRun(engine, questions, concurrency) for draft, engine in engines.items()}
    interleave(list(runs.values()), on_progress=on_progress)
    for draft, run in runs.items():
        yield Run(
            draft=draft,
            concurrency=concurrency,
            repeat=repeat,
            answers=tuple(run.in_order()),
            stats=run.stats,
            peak_rss_mb=peak_rss_mb(),
            warm=warm,
        )


def run_there(
    target: DrivenServer,
    session: Session,
    rate_per_s: float | None,
    prompts: Sequence[Prompt],
    on_progress: OnProgress,
) -> Iterator[Run]:
    """Yield the runs against a server, whose drafter is fixed.

    A server's caches cannot be emptied. Unless they should stay warm, each run has a salt of its own, and so finds
    nothing in them that another run has left.
    """
    concurrencies: tuple[int | None, ...] = session.concurrencies if rate_per_s is None else (None,)
    drive(target, prompts[: session.warmup], 1, None, session.seed)
    done = 0
    for concurrency in concurrencies:
        for repeat in range(session.repeat):
            salt = {} if session.warm else {"cache_salt": token_hex(8)}
            asked = replace(target, body={**target.body, **salt})
            answers = drive(asked, prompts, concurrency, rate_per_s, session.seed, _offset(done, on_progress))
            yield Run(session.drafts[0], concurrency, repeat, tuple(answers), None, None, session.warm)
            done += len(prompts)


def model_and_backend(config: EngineConfig, loaded: Loaded) -> dict[str, Any]:
    """Return the fields `model` and `backend` of the JSON file."""
    from paceline.model.config import num_weights

    c = loaded.decoder.config
    return {
        "model": {
            "name": loaded.name,
            "family": c.family,
            "weights": num_weights(c),
            "layers": c.num_layers,
            "vocab_size": c.vocab_size,
        },
        "backend": {
            "name": config.backend_spec.name,
            "device": None if (device := config.placement.target) is None else str(device),
            "description": loaded.decoder.describe(),
            "numerics": config.numerics_mode,
            "weights": config.weight_type,
            "kv": config.kv_type,
            "threads": config.num_threads,
            "law": config.law,
        },
    }
