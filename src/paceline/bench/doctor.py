"""Does a drafter fit its target, and what does a pass cost? Checks first, then a few real passes."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from paceline.backend.registry import NUM_BYTES
from paceline.bench.run import empty
from paceline.control.controller import FixedK
from paceline.core.errors import ConfigError, ModelError
from paceline.core.interrupts import uninterrupted
from paceline.core.nouns import Request
from paceline.core.params import SamplingParams
from paceline.draft.registry import parse_drafters
from paceline.engine.assembly.calibration_stubs import Always
from paceline.engine.assembly.memory import available_bytes
from paceline.engine.drafters import DrafterPool
from paceline.model.cost import num_weights
from paceline.model.files.pull import resolve
from paceline.model.weights import load_model, load_template, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.errors import PacelineError
    from paceline.engine.assembly.build import Built
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine
    from paceline.model.weights import LoadedModel

STEPS = 16  # steps timed
SAMPLE = "Explain in a few sentences how a bicycle stays upright, then say it again in other words."


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis."""

    what: str
    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class Speed:
    """What steps of one row cost, in seconds: medians of real ones."""

    plain_s: float  # one token
    verify_s: float  # the newest token and k drafts, without drafting
    draft_s: float  # proposing
    k: int

    @property
    def break_even(self) -> float:
        """Tokens per pass at which speculation is as fast as plain decoding; at most k + 1 can be had."""
        return (self.verify_s + self.draft_s) / self.plain_s


# Before anything is loaded -----------------------------------------------------------------------


def check_files(config: EngineConfig) -> Iterator[Check]:
    """Look at what the files say: architecture, vocabulary, template, context, memory.

    Yields a line for each; raises `ModelError`, `ConfigError` where there is no use in going on.
    """
    model = load_model(resolve(config.model))
    c = model.config
    shape = f"{c.num_layers} layers of {c.hidden_size}, {c.num_heads} heads, {c.num_kv_heads} for KV"
    yield Check("files", True, f"{model.path}: every tensor lies within its file")
    yield Check("architecture", True, f"{c.family}, {num_weights(c) / 1e6:.0f} million weights, {shape}")
    tokenizer = load_tokenizer(model)
    yield Check("vocabulary", True, f"{tokenizer.vocab_size} tokens for {c.vocab_size} rows of the embedding")
    yield Check("end of text", bool(tokenizer.eos_ids), f"token ids {list(tokenizer.eos_ids)}")
    template = load_template(model)
    chat = "there is one" if template else "none, as in base models: `chat` is refused, `generate` works"
    yield Check("chat template", True, chat)
    asked = config.limits.max_len
    yield Check("context", True, f"{c.max_context} tokens; requests may have {min(asked, c.max_context)}")
    yield _check_memory(config, model)


def _check_memory(config: EngineConfig, model: LoadedModel) -> Check:
    """Weights of target and drafter against free memory; the KV cache takes a share of what is left."""
    per_weight, free = NUM_BYTES[config.weight_type], available_bytes()
    weights = num_weights(model.config) * per_weight
    asked = parse_drafters(config.draft, model.fingerprint)
    drafter = sum(spec.num_weights(model) for spec in asked.configs) * per_weight
    text = (
        f"weights {_mib(weights)}, drafter at most {_mib(drafter)}, free {_mib(free)}; the KV cache comes on top"
    )
    return Check("memory", weights + drafter < free, text)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def check_built(built: Built) -> Iterator[Check]:
    """Say what was chosen for the engine and why."""
    for choice in built.choices:
        yield Check(choice.what, True, f"{choice.value}: {choice.why}")


def diagnose(config: EngineConfig) -> tuple[list[Check], PacelineError | None]:
    """Return the checks of the files, up to the error that ended them."""
    checks: list[Check] = []
    try:
        checks.extend(check_files(config))  # keeps what was found before an error
    except (ModelError, ConfigError) as error:
        return checks, error
    return checks, None


# Real passes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    step_s: float
    draft_s: float


def measure(built: Built, draft: str) -> Speed:
    """Time plain steps, steps that verify k drafts, and the drafter's own. The engine must be idle."""
    engine = built.engine
    k = max((spec.k for spec in parse_drafters(draft).configs), default=0)
    own = _steps(engine, k)
    kept = engine.drafting, engine.controller
    try:
        engine.drafting, engine.controller = DrafterPool([], engine.target.config.vocab_size), FixedK()
        plain = _steps(engine, 0)
        engine.drafting = DrafterPool([Always()], engine.target.config.vocab_size)
        engine.controller = FixedK(Always.name, k)
        full = _steps(engine, k) if k else plain
    finally:
        engine.drafting, engine.controller = kept
    return Speed(
        plain_s=median(s.step_s for s in plain),
        verify_s=median(s.step_s - s.draft_s for s in full),
        draft_s=median(s.draft_s for s in own) if k else 0.0,
        k=k,
    )


def _steps(engine: Engine, k: int) -> list[_Step]:
    """Ask the sample prompt and return its decode steps."""
    ids = tuple(engine.tokenizer.encode(SAMPLE))
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=(STEPS + 2) * (k + 1))
    engine.add(Request("doctor", ids, params, seed=0))
    steps: list[_Step] = []
    before = engine.stats()
    while engine.has_work and len(steps) < STEPS:
        with uninterrupted():
            engine.step()
        after = engine.stats()
        gained = after.since(before)
        if gained.decode_passes:
            steps.append(_Step(gained.step_s, gained.draft_s))
        before = after
    empty(engine, ["doctor"])
    return steps
