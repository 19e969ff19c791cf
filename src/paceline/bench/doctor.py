"""`paceline doctor`: check a target and its drafter, and estimate the speed-up on twenty prompts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from paceline.backend.registry import BACKENDS, NUM_BYTES
from paceline.bench.interleave import cancel_all
from paceline.bench.measure import acceptance_length, kept_per_position
from paceline.bench.prompt_file import BUILTIN, read_prompts
from paceline.bench.report import PLAIN
from paceline.bench.session import Session, run_here
from paceline.control.fixed import FixedK
from paceline.core.errors import ConfigError, ModelError
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.core.system import uninterrupted
from paceline.draft.registry import parse_drafters
from paceline.engine.assembly.build import assemble, load
from paceline.engine.assembly.calibration import AlwaysDrafter
from paceline.engine.assembly.cli_options import add_engine_arguments, engine_config
from paceline.engine.drafter_pool import DrafterPool
from paceline.engine.pages import pages_for
from paceline.engine.sliding_pages import most_pages
from paceline.model.config import num_weights
from paceline.model.files.pull import resolve
from paceline.model.heads.mtp import drafters_within, usable_mtp
from paceline.model.weights import load_model, load_template, load_tokenizer
from paceline.serve.terminal.display import progress, say, table

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from paceline.bench.measure import MeasuredAnswer
    from paceline.bench.prompt_file import Prompt
    from paceline.core.errors import PacelineError
    from paceline.engine.assembly.build import Built, Loaded
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine
    from paceline.engine.stats import Stats
    from paceline.model.weights import LoadedModel

TIMED_STEPS = 16  # at most, of which the median counts
SAMPLE = "Explain in a few sentences how a bicycle stays upright, then say it again in other words."
CATEGORIES = (  # of the built-in prompts
    *("writing", "reasoning", "math", "coding", "code_edit"),
    *("extraction", "translation", "summarization", "qa", "rag"),
)
# Categories, how many of the shortest prompts of each are asked, and the most tokens of an answer.
WHOLE = (CATEGORIES, 2, 48)
QUICK = (("writing", "coding", "summarization", "qa"), 1, 24)
MIN_SPEEDUP = 1.05  # smaller gains are within the noise of a shared machine


# The command -------------------------------------------------------------------------------------


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--quick", action="store_true", help="ask four short questions rather than twenty")
    parser.add_argument("--no-measure", action="store_true", help="check only, time nothing")
    add_engine_arguments(parser)


def run(args: Namespace) -> int:
    """Print the checks and a verdict; return 1 if something will not work."""
    config = replace(engine_config(args), keep_learnt=False)
    drafters = parse_drafters(config.draft)  # a misspelt option is an error, not a failed check
    checks, error = check_files(config)
    if error is None and all(c.ok for c in checks):
        try:
            with progress(f"loading {config.model}") as update:
                loaded = load(config, lambda _, done, total: update(done, total))
            built = assemble(config, loaded)
            checks += [Check(choice.what, True, f"{choice.value}: {choice.why}") for choice in built.choices]
            checks += _state_checks(built)
        except (ConfigError, ModelError) as load_error:
            error = load_error
    if error is not None:
        checks.append(Check("error", False, str(error)))
    rows = [["ok" if check.ok else "FAIL", check.subject, check.text] for check in checks]
    table("checks", ["", "what", "found"], rows, num_left=3)
    if not all(c.ok for c in checks):
        say("Verdict: this will not work; see the lines marked FAIL.")
        return 1
    if args.no_measure:
        say("Verdict: target and drafter fit.")
        return 0
    _print_cost(measure_steps(built, config.draft))
    if not drafters.configs:
        say("Verdict: it works; plain decoding, so there is no speculation to judge.")
        return 0
    del built  # frees its KV: the evaluation makes engines of its own
    categories, per_category, _ = QUICK if args.quick else WHOLE
    num_prompts = len(categories) * per_category
    with progress(f"asking {num_prompts} prompts, with speculation and without") as update:
        evaluation = evaluate_drafter(config, loaded, lambda done: update(done, 2 * num_prompts), args.quick)
    _print_evaluation(evaluation, num_prompts)
    return 0


def _print_cost(cost: PassTimes) -> None:
    plain = 1.0 / cost.plain_s
    say(f"One request, greedy, medians of real steps: {1e3 * cost.plain_s:.1f} ms a token, {plain:.1f} tokens/s.")
    if cost.k:
        say(
            f"A pass that verifies {cost.k} drafts takes {1e3 * cost.verify_s:.1f} ms, drafting "
            f"{1e3 * cost.draft_s:.1f} ms: it pays from {cost.break_even:.2f} tokens kept per pass on, "
            f"of at most {cost.k + 1}.\n"
        )


def _print_evaluation(evaluation: DrafterEvaluation, num_prompts: int) -> None:
    columns = ["prompts", "kept per pass", "% kept at 1, 2, ...", "ms a token, plain", "with drafts", "speed-up"]
    rows = []
    for part in (*evaluation.categories, evaluation.all):
        kept = " ".join(f"{100 * share:.0f}" for share in part.kept_per_position)
        times = [f"{part.plain_ms:.1f}", f"{part.ms:.1f}", f"{part.speedup:.2f}x"]
        rows.append([part.category, f"{part.kept_per_pass:.2f}", kept or "-", *times])
    table(f"{num_prompts} prompts, greedy", columns, rows)
    say(evaluation.verdict())


# Checks of the files, before anything is loaded --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the diagnosis."""

    subject: str
    ok: bool
    text: str


def check_files(config: EngineConfig) -> tuple[list[Check], PacelineError | None]:
    """Return the checks of the model's files, and the error that ended them, if any."""
    checks: list[Check] = []
    try:
        checks.extend(_file_checks(config))  # one by one, so the checks before an error are kept
    except (ModelError, ConfigError) as error:
        return checks, error
    return checks, None


def _file_checks(config: EngineConfig) -> Iterator[Check]:
    """Yield checks of devices, shape, vocabulary, template, context and memory.

    Raises `ModelError`, `ConfigError`.
    """
    yield from device_checks(config)
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
    max_len = min(config.limits.max_len, c.max_context)
    yield Check("context", True, f"{c.max_context} tokens; requests may have {max_len}")
    yield _check_memory(config, model)


def device_checks(config: EngineConfig) -> Iterator[Check]:
    """Yield what backends need of this machine; what the chosen one lacks is a failure."""
    chosen = config.backend_spec
    yield Check("backend", True, f"{chosen.name}, {config.why_backend}")
    for spec in BACKENDS.values():
        is_chosen = spec.name == chosen.name
        for found in spec.findings(config.placement.target if is_chosen else None):
            text = found.text if found.ok or is_chosen else f"{found.text}; only --backend {spec.name} needs it"
            yield Check(found.subject, found.ok or not is_chosen, text)


def _check_memory(config: EngineConfig, model: LoadedModel) -> Check:
    """Compare the weights of target and drafter with free memory; the KV shares the remainder."""
    kind, _ = config.backend_spec.settled_weights(config.weights, model.config, model.weights)
    per_weight, free = NUM_BYTES[kind], config.free_bytes()
    weights = num_weights(model.config) * per_weight
    drafters = parse_drafters(config.draft, model.fingerprint, drafters_within(usable_mtp(model)))
    drafter = sum(spec.num_weights(model) for spec in drafters.configs) * per_weight
    text = (
        f"weights {_mib(weights)}, drafter at most {_mib(drafter)}, free {_mib(free)}; the KV cache comes on top"
    )
    return Check("memory", weights + drafter < free, text)


def _state_checks(built: Built) -> Iterator[Check]:
    """Yield the memory that the longest request takes in each drafter's state."""
    engine, max_len = built.engine, built.max_len
    pool, own = engine.scheduler.pool, engine.target.kv_bytes_per_token * max_len
    own = own if pool.budget is None else pool.budget.of_row(pages_for(max_len), most_pages(pool.window, 0))
    for name, drafter in engine.drafting.drafters.items():
        if drafter.needs.has_state:
            state = drafter.needs.request_bytes(max_len)
            text = f"{_mib(state)} for a request of {max_len} tokens, beside {_mib(own)} of the target's"
            yield Check(f"state of {name}", True, text)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


# Cost of real steps ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Median times of steps of one row, seconds."""

    plain_s: float  # one token
    verify_s: float  # a pass over the newest token and k drafts; drafting is not in it
    draft_s: float  # proposing
    k: int

    @property
    def break_even(self) -> float:
        """Tokens per pass, of k + 1 possible, at which speculation matches plain decoding."""
        return (self.verify_s + self.draft_s) / self.plain_s


def measure_steps(built: Built, draft: str) -> PassTimes:
    """Time plain steps, steps that verify k drafts, and drafting. The engine must be idle.

    Under `auto` only plain steps are timed: its drafts have many depths, so a median would fit none.
    """
    engine, asked = built.engine, parse_drafters(draft)
    k = 0 if asked.auto else max((spec.k for spec in asked.configs), default=0)
    drafting = _time_steps(engine, k)
    own_drafters, own_controller = engine.drafting, engine.controller
    try:
        engine.drafting = DrafterPool([], engine.target.config.vocab_size)
        engine.controller = FixedK()
        plain = _time_steps(engine, 0)
        engine.drafting = DrafterPool([AlwaysDrafter()], engine.target.config.vocab_size)
        engine.controller = FixedK(AlwaysDrafter.name, k)
        verifying = _time_steps(engine, k) if k else plain
    finally:
        engine.drafting = own_drafters
        engine.controller = own_controller
    return PassTimes(
        plain_s=median(s.step_s for s in plain),
        verify_s=median(s.step_s - s.draft_s for s in verifying),
        draft_s=median(s.draft_s for s in drafting) if k else 0.0,
        k=k,
    )


def _time_steps(engine: Engine, k: int) -> list[Stats]:
    """Ask the sample prompt; return what each of its decode steps counted."""
    ids = tuple(engine.tokenizer.encode(SAMPLE))
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=(TIMED_STEPS + 2) * (k + 1))
    engine.add(Request("doctor", ids, params, seed=0))
    steps: list[Stats] = []
    before = engine.stats()
    while engine.has_work and len(steps) < TIMED_STEPS:
        with uninterrupted():
            engine.step()
        after = engine.stats()
        gained = after.since(before)
        if gained.decode_passes:
            steps.append(gained)
        before = after
    cancel_all(engine, ["doctor"])
    return steps


# Speed-up on twenty prompts ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CategorySpeedup:
    """Drafter figures on the prompts of one category, or of all."""

    category: str
    kept_per_pass: float  # tokens, the target's own included
    kept_per_position: tuple[float, ...]  # share of passes that kept a draft there
    plain_ms: float  # per token after the first, without speculation
    ms: float  # the same with the drafter
    speedup: float  # median of the prompts' own ratios


@dataclass(frozen=True, slots=True)
class DrafterEvaluation:
    """Figures by category, and of all prompts together."""

    categories: tuple[CategorySpeedup, ...]
    all: CategorySpeedup

    def verdict(self) -> str:
        """Return a sentence that says what speed-up to expect and which `--draft` to use."""
        best, worst = (pick(self.categories, key=lambda c: c.speedup) for pick in (max, min))
        spread = f"{worst.speedup:.2f}x for {worst.category} to {best.speedup:.2f}x for {best.category}"
        figures = f"{self.all.speedup:.2f}x by the time of a token ({spread})"
        if self.all.speedup >= MIN_SPEEDUP:
            return f"Verdict: it works and is worth it; expect {figures}."
        if best.speedup >= MIN_SPEEDUP:
            return f"Verdict: it works, but not for all prompts: {figures}. --draft auto drafts where it pays."
        return f"Verdict: it works, but is not worth it on this machine: {figures}. Use --draft off."


def evaluation_prompts(quick: bool = False) -> list[Prompt]:
    """Return the shortest built-in prompts: two from each of ten categories, or one from four."""
    categories, per_category, _ = QUICK if quick else WHOLE
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in sorted(read_prompts(BUILTIN), key=lambda prompt: len(prompt.text)):
        by_category[prompt.category].append(prompt)
    return [prompt for category in categories for prompt in by_category[category][:per_category]]


def evaluate_drafter(
    config: EngineConfig, loaded: Loaded, on_progress: Callable[[int], None], quick: bool = False
) -> DrafterEvaluation:
    """Ask the prompts one at a time, greedily: plain decoding interleaved with the config's drafter."""
    categories, _, max_tokens = QUICK if quick else WHOLE
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=max_tokens)  # TPOT needs two tokens
    session = Session(drafts=(PLAIN, config.draft), concurrencies=(1,), params=params)
    runs = run_here(config, loaded, session, evaluation_prompts(quick), on_progress)
    both = [run.answers for run in runs]
    parts = [
        _speedup(category, *([a for a in answers if a.prompt.category == category] for answers in both))
        for category in categories
    ]
    return DrafterEvaluation(tuple(parts), _speedup("all", *both))


def _speedup(category: str, plain: Sequence[MeasuredAnswer], drafted: Sequence[MeasuredAnswer]) -> CategorySpeedup:
    plain_ms, drafted_ms = _token_times_ms(plain), _token_times_ms(drafted)
    return CategorySpeedup(
        category=category,
        kept_per_pass=acceptance_length(drafted) or 1.0,
        kept_per_position=tuple(kept_per_position(drafted) or ()),
        plain_ms=median(plain_ms),
        ms=median(drafted_ms),
        speedup=median(p / d for p, d in zip(plain_ms, drafted_ms, strict=True)),
    )


def _token_times_ms(answers: Iterable[MeasuredAnswer]) -> list[float]:
    """Return the TPOT of each answer in ms; their median withstands a stall."""
    return [1e3 * a.tpot_s for a in answers if a.tpot_s is not None]
