"""All runs of a benchmark: drafters in turns of a second, so that a drifting machine drifts for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.bench.load import drive
from paceline.bench.measure import Run
from paceline.bench.run import TURN_S, Asking, ask_in_turns, questions
from paceline.core.errors import ConfigError
from paceline.core.params import MAX_SEED, MAX_TOKENS
from paceline.core.system import peak_rss_mb, reset_peak_rss
from paceline.engine.assembly.config import MAX_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.bench.load import Server
    from paceline.bench.prompts import Prompt
    from paceline.bench.run import Question
    from paceline.core.params import SamplingParams
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine

    Tell = Callable[[int], None]  # requests done so far, over all runs

SPARE_TOKENS = 32  # drafts behind the last token of an answer
_BOUNDS = {"repeat": (1, 10_000), "warmup": (0, MAX_TOKENS), "seed": (0, MAX_SEED)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What to run. Checked when made; raises `ConfigError`."""

    drafts: tuple[str, ...]
    concurrencies: tuple[int, ...]
    params: SamplingParams
    seed: int = 0  # question i is asked with seed + i
    repeat: int = 1
    warmup: int = 1  # requests before the first run of each drafter that do not count
    warm: bool = False  # keep caches and history from run to run

    def __post_init__(self) -> None:
        for name, (low, high) in _BOUNDS.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"--{name} must be between {low} and {high}, not {getattr(self, name)}")
        if not self.concurrencies or not all(1 <= c <= MAX_ROWS for c in self.concurrencies):
            raise ConfigError(f"--concurrency must be numbers between 1 and {MAX_ROWS}, such as 1,8,32")

    @property
    def num_runs(self) -> int:
        """Runs in all."""
        return len(self.drafts) * len(self.concurrencies) * self.repeat


def run_here(
    config: EngineConfig, loaded: Loaded, session: Session, prompts: Sequence[Prompt], tell: Tell
) -> Iterator[Run]:
    """Yield the runs in this process: one engine per drafter, all over the same loaded weights, in turns.

    Each engine has KV of its own, just large enough for the longest question and answer. Runs of one repeat take
    turns, so they share the peak of the process's memory.
    """
    from paceline.engine.assembly.build import assemble
    from paceline.serve.prompts import Prompts

    max_len = min(config.limits.max_len, loaded.decoder.config.max_context)
    asked = questions(prompts, Prompts(loaded.tokenizer, loaded.template, max_len), session.params, session.seed)
    longest = max(len(q.request.prompt_ids) for q in asked) + session.params.max_tokens + SPARE_TOKENS
    limits = replace(config.limits, num_rows=max(session.concurrencies), max_len=min(max_len, longest))
    engines = {
        draft: assemble(replace(config, draft=draft, limits=limits), loaded).engine for draft in session.drafts
    }
    done = 0
    for concurrency in session.concurrencies:
        for engine in engines.values():
            ask_in_turns([Asking(engine, asked[: session.warmup], concurrency)], TURN_S)
        for repeat in range(session.repeat):
            yield from _runs(engines, asked, concurrency, repeat, session.warm, _after(done, tell))
            done += len(asked) * len(engines)


def _after(done: int, tell: Tell) -> Tell:
    """Return what tells of a run's requests, behind those of the runs before it."""
    return lambda count: tell(done + count)


def _runs(
    engines: Mapping[str, Engine],
    asked: Sequence[Question],
    concurrency: int,
    repeat: int,
    warm: bool,
    tell: Tell,
) -> Iterator[Run]:
    if not warm:
        for engine in engines.values():
            engine.forget()
    reset_peak_rss()
    before = {draft: engine.stats() for draft, engine in engines.items()}
    askings = {draft: Asking(engine, asked, concurrency) for draft, engine in engines.items()}
    ask_in_turns(list(askings.values()), TURN_S, tell)
    for draft, engine in engines.items():
        yield Run(
            draft=draft,
            concurrency=concurrency,
            repeat=repeat,
            answers=tuple(askings[draft].in_order()),
            stats=engine.stats().since(before[draft]),
            peak_rss_mb=peak_rss_mb(),
            warm=warm,
        )


def run_there(
    target: Server, session: Session, rate_per_s: float | None, prompts: Sequence[Prompt], tell: Tell
) -> Iterator[Run]:
    """Yield the runs against a server: its drafter is its own, and its caches cannot be emptied from here."""
    concurrencies: tuple[int | None, ...] = session.concurrencies if rate_per_s is None else (None,)
    drive(target, prompts[: session.warmup], 1, None, session.seed)
    done = 0
    for concurrency in concurrencies:
        for repeat in range(session.repeat):
            answers = drive(target, prompts, concurrency, rate_per_s, session.seed, _after(done, tell))
            yield Run(session.drafts[0], concurrency, repeat, tuple(answers), None, None, warm=True)
            done += len(prompts)


def about(config: EngineConfig, loaded: Loaded) -> dict[str, Any]:
    """Return the JSON file's `model` and `backend`."""
    import torch

    from paceline.model.cost import num_weights

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
            "name": config.backend,
            "weights": config.weight_type,
            "kv": config.kv_type,
            "threads": torch.get_num_threads(),
            "law": config.law,
        },
    }
