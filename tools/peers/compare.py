"""Measure Paceline beside other engines, interleaved in one run: greedy, the end of text ignored.

`python -m tools.peers.compare [--prompts FILE.jsonl]`, or `scripts/compare-peers` with the same flags. Speculation
is off; with --speculate each engine also decodes with its own kinds of speculation. The other engines are
installed on first use, each in its own environment. An engine that cannot be installed or fails is reported; the
others go on.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.report import write_json
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.system import available_bytes, commit, machine, usable_cores
from paceline.engine.assembly.config import MAX_ROWS, MAX_THREADS
from paceline.model.config import num_weights
from paceline.model.weights import load_model
from paceline.serve.terminal.display import progress, say
from paceline.serve.terminal.output_files import check_file
from tools.entry import add_prompts, exit_status
from tools.peers.install import install, preloads, python_of
from tools.peers.prepare import (
    alone_in,
    chat_prompts,
    file_type,
    judged_texts,
    model_file,
    prompts_of,
    removed_at_end,
    requantized,
    unquantized,
)
from tools.peers.protocol import PeerSetting
from tools.peers.remote import PeerFailed, PeerProcess
from tools.peers.rows import (
    AS_IS,
    DECODING,
    LLAMA_CPP,
    REQUANTIZED,
    UNQUANTIZED,
    PeerWorkload,
    of_file,
    workloads,
)
from tools.peers.shape_gguf import TYPES
from tools.peers.speculation import DRAFT_MODEL, PAIR_STUDY, SPECULATION, draft_gguf, with_pair
from tools.peers.table import MeasuredRow, document, print_tables
from tools.peers.timing import rate

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.model.weights import LoadedModel
    from tools.peers.prepare import JudgedTexts
    from tools.peers.rows import PeerEngine, PeerRow, PeerStudy

    RunPrompts = Mapping[str, Sequence[list[list[int]]]]  # by workload, the prompts of each run

PROBE = "shape:hidden_size=256,intermediate_size=512"
PROBE_TOKENS = 64
SHARE_FOR_FLOATS = 0.8  # of the free memory, for a model in float32
WARM_UP_TOKENS = 32  # of each prompt of a batch during warm-up
_BOUNDS = {
    "repeat": (1, 1000),
    "speculate": (1, 480),
    "prompt_tokens": (2, 4096),
    "new_tokens": (2, 4096),
    "prefill_tokens": (2, 8192),
    "quality_prompts": (0, 480),
    "quality_tokens": (1, 256),
    "threads": (1, MAX_THREADS),
}


@dataclass(frozen=True, slots=True, eq=False)
class PeerComparison:
    """Settings of a comparison."""

    study: PeerStudy
    model: LoadedModel
    work: Path
    engines: Path
    threads: int
    workloads: Sequence[PeerWorkload]
    draft: Path | None = None  # the pair's smaller model

    def setting(self, file: Path) -> PeerSetting:
        """Return the setting that a worker is loaded with."""
        w = self.workloads
        return PeerSetting(
            file=str(file),
            threads=self.threads,
            max_rows=max(x.num_rows for x in w),
            max_len=max(x.prompt_tokens + x.new_tokens for x in w) + PAGE_TOKENS,
            prefill_tokens=max(512, *(x.prompt_tokens for x in w)),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Install, prepare, measure, print."""
    return exit_status(lambda: _compare(_arguments(argv)))


def _arguments(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(prog="compare-peers", description=(__doc__ or "").split("\n")[0])
    add_prompts(parser)
    parser.add_argument("--model", default="default", help="a model's name, a .gguf file, or shape:NAME")
    parser.add_argument("--shape-type", default="Q4_K", choices=TYPES, help="GGUF type that a shape is written in")
    parser.add_argument(
        "--pair", metavar="MODEL", help="with --speculate: a smaller model that drafts, in llama.cpp and in ours"
    )
    parser.add_argument("--rows", default="", metavar="WORDS", help="only rows whose names hold one of these, a,b")
    parser.add_argument(
        "--speculate",
        type=int,
        metavar="N",
        help="with speculation, on N whole prompts of the file, one at a time",
    )
    parser.add_argument("--batches", default="1,16,64", metavar="N,N")
    parser.add_argument("--repeat", type=int, default=3, metavar="R", help="runs; of short workloads 3 R")
    parser.add_argument("--prompt-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--prefill-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--quality-prompts", type=int, default=20, metavar="N", help="0: quality is not measured")
    parser.add_argument("--quality-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--threads", type=int, default=len(usable_cores()), metavar="N")
    parser.add_argument(
        "--engines", default=".peers", metavar="FOLDER", help="where the other engines are installed"
    )
    parser.add_argument("--keep-models", action="store_true", help="keep the forms of the model that rows read")
    parser.add_argument("--install-only", action="store_true", help="install the other engines and stop")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    args.command = " ".join(["python -m tools.peers.compare", *(sys.argv[1:] if argv is None else argv)])
    return args


def _compare(args: Namespace) -> int:
    _check(args)
    engines = Path(args.engines).resolve()
    engines.mkdir(parents=True, exist_ok=True)
    if args.install_only:
        rows = _rows(_study(args), args.rows)
        _install(rows, engines)
        _print_failures(rows)
        return 0
    with alone_in(engines), removed_at_end(engines / "work", keep=args.keep_models):
        return _compare_rows(args, engines)


def _compare_rows(args: Namespace, engines: Path) -> int:
    model = load_model(model_file(args.model, engines / "work", args.shape_type))
    draft = load_model(model_file(args.pair, engines / "work", args.shape_type)).path if args.pair else None
    study = of_file(_study(args), file_type(model))
    rows = _rows(study, args.rows)
    _install(rows, engines)
    work, prompts = _work(args, model)
    c = PeerComparison(study, model, engines / "work" / model.path.stem, engines, args.threads, work, draft)
    c.work.mkdir(parents=True, exist_ok=True)
    start = time.time()
    with removed_at_end(c.work, keep=args.keep_models), ExitStack() as stack:
        texts = _texts(c, args)
        workers = _start(c, rows, stack)
        _warm_up(c, rows, workers, prompts)
        if texts is not None:
            _judge(texts, rows, workers)
        _measure(c, rows, workers, prompts, args.repeat)
    print_tables(study, rows, c.workloads)
    if args.json:
        head = {
            "command": args.command,
            "git": commit(),
            "machine": machine(),
            "setting": asdict(c.setting(model.path)) | {"file": model.path.name},
        }
        times = {"started": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(start)), "took_s": time.time() - start}
        write_json(Path(args.json), document(study, head | times, rows, c.workloads))
    return 0


def _study(args: Namespace) -> PeerStudy:
    if args.speculate is None:
        return DECODING
    return SPECULATION if args.pair is None else PAIR_STUDY


def _rows(study: PeerStudy, words: str) -> list[MeasuredRow]:
    """Return the rows whose names hold one of the words. Raises `ConfigError` if none does."""
    wanted = [w for w in words.lower().split(",") if w]
    rows = [MeasuredRow(r) for r in study.rows if not wanted or any(w in r.name.lower() for w in wanted)]
    if not rows:
        raise ConfigError(f"--rows: no row's name holds one of {words!r}; rows: {[r.name for r in study.rows]}")
    return rows


def _check(args: Namespace) -> None:
    check_file("--json", args.json)
    if args.pair is not None and args.speculate is None:
        raise ConfigError("--pair goes with --speculate N")
    for name, (low, high) in _BOUNDS.items():
        if not low <= (low if getattr(args, name) is None else getattr(args, name)) <= high:
            raise ConfigError(f"--{name.replace('_', '-')} must be between {low} and {high}")


def _work(args: Namespace, model: LoadedModel) -> tuple[list[PeerWorkload], RunPrompts]:
    """Return the workloads, and the prompts of each of their runs."""
    if args.speculate is None:
        found = _workloads(args)
        return found, prompts_of(model, args.prompts, found, args.repeat)
    asked = chat_prompts(model, args.prompts, args.speculate)
    workload = PeerWorkload("one request", 1, max(map(len, asked)), args.new_tokens, len(asked))
    return [workload], {workload.name: [[ids] for ids in asked * args.repeat]}


def _workloads(args: Namespace) -> list[PeerWorkload]:
    with suppress(ValueError):
        batches = tuple(int(n) for n in args.batches.split(","))
        if all(1 <= n <= MAX_ROWS for n in batches):
            return workloads(batches, args.prompt_tokens, args.new_tokens, args.prefill_tokens)
    raise ConfigError(f"--batches must be numbers between 1 and {MAX_ROWS}, such as 1,16,64")


def _install(rows: Sequence[MeasuredRow], folder: Path) -> None:
    needed = [m.row.engine for m in rows] + [LLAMA_CPP for m in rows if m.row.form in REQUANTIZED]
    for engine in dict.fromkeys(needed):
        try:
            if engine.packages:
                say(f"{engine.name}: installing, unless it is there (log: {folder / engine.name}.log)")
            install(engine, folder, partial(_runs, engine, folder))
        except (PacelineError, OSError) as error:
            for m in rows:
                if m.row.engine is engine:
                    m.error = f"not installed: {error}"


def _runs(engine: PeerEngine, folder: Path) -> bool:
    """Return False if llama.cpp dies on a tiny model.

    Its AMX kernels die where the operating system forbids AMX tiles.
    """
    setting = PeerSetting(model_file(PROBE, folder / "work", "Q8_0"), 1, 1, 2 * PROBE_TOKENS, PROBE_TOKENS)
    options = json.dumps({"setting": asdict(setting), "flash": True})
    command = [python_of(engine, folder), "-m", "tools.peers.worker", "llama_cpp", options]
    try:
        with PeerProcess(command, folder / f"{engine.name}-probe.log", 1) as worker:
            worker.ask(_decode([list(range(PROBE_TOKENS))], 2))
    except PeerFailed as error:
        say(f"{engine.name}: {error}; installing it without the newest instructions")
        return False
    return True


def _print_failures(rows: Sequence[MeasuredRow]) -> None:
    for m in rows:
        say(f"{m.row.name}: {m.error or 'installed'}")


# Workers -----------------------------------------------------------------------------------------


def _file(c: PeerComparison, row: PeerRow) -> Path:
    """Return the model in the form that a row reads, made on first use."""
    llama = Path(python_of(LLAMA_CPP, c.engines))
    makers: dict[str, Callable[[], Path]] = {
        AS_IS: lambda: c.model.path,
        UNQUANTIZED: lambda: unquantized(c.model, c.work),
    }
    if row.form in REQUANTIZED:
        return requantized(c.model, c.work, llama, row.form)
    return makers[row.form]()


def _start(c: PeerComparison, rows: Sequence[MeasuredRow], stack: ExitStack) -> dict[str, PeerProcess]:
    """Start all workers one after another; record those that fail."""
    workers = {}
    with progress("loading") as update:
        for done, m in enumerate(rows):
            update(done, len(rows))
            if m.error:
                continue
            try:
                workers[m.row.name] = worker = stack.enter_context(_worker(c, m.row))
                m.description = worker.description
            except (PacelineError, OSError) as error:
                m.error = str(error)
    return workers


def _worker(c: PeerComparison, row: PeerRow) -> PeerProcess:
    options = {"setting": asdict(c.setting(_file(c, row))), **row.options}
    if options.get(DRAFT_MODEL) == "":
        options[DRAFT_MODEL] = str(draft_gguf(c.model, c.work))
    if c.draft is not None:
        options = with_pair(options, c.draft)
    command = [
        python_of(row.engine, c.engines),
        "-m",
        "tools.peers.worker",
        row.module,
        json.dumps(options),
    ]
    name = "".join(ch if ch.isalnum() else "-" for ch in row.name)
    return PeerProcess(command, c.work / f"{name}.log", c.threads, preloads(row.engine, c.engines))


def _ask(m: MeasuredRow, workers: dict[str, PeerProcess], question: dict[str, Any]) -> dict[str, Any] | None:
    """Ask a row's worker; end one that fails and record why."""
    worker = workers.get(m.row.name)
    if worker is None:
        return None
    try:
        return worker.ask(question)
    except PeerFailed as error:
        m.error = str(error)
        workers.pop(m.row.name).close()
        return None


def _decode(prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
    return {"do": "decode", "prompts": prompts, "num_tokens": num_tokens}


def _warm_up(
    c: PeerComparison, rows: Sequence[MeasuredRow], workers: dict[str, PeerProcess], prompts: RunPrompts
) -> None:
    """Run every batch size once in every worker."""
    with progress("warming up") as update:
        for done, m in enumerate(rows):
            update(done, len(rows))
            for w in c.workloads:
                length = w.prompt_tokens if w.num_rows == 1 else WARM_UP_TOKENS
                _ask(m, workers, _decode([ids[:length] for ids in prompts[w.name][0]], min(2, w.new_tokens)))


def _texts(c: PeerComparison, args: Namespace) -> JudgedTexts | None:
    """Return the texts for quality, None if it is not measured.

    They are made before any worker has a model in memory.
    """
    needed = 4 * num_weights(c.model.config)
    if not args.quality_prompts:
        return None
    if needed > SHARE_FOR_FLOATS * available_bytes():
        say(f"quality is not measured: {c.model.path.name} takes {needed >> 30} GiB in float32")
        return None
    with progress("writing texts in float32") as update:
        expected = c.work / "expected.npy"
        return judged_texts(c.model, args.prompts, args.quality_prompts, args.quality_tokens, expected, update)


def _judge(texts: JudgedTexts, rows: Sequence[MeasuredRow], workers: dict[str, PeerProcess]) -> None:
    question = {"do": "quality", "texts": texts.texts, "expected": str(texts.expected)}
    with progress("quality") as update:
        for done, m in enumerate(rows):
            update(done, len(rows))
            if answer := _ask(m, workers, question):
                m.kl, m.top1 = answer["kl"], answer["top1"]


def _measure(
    c: PeerComparison,
    rows: Sequence[MeasuredRow],
    workers: dict[str, PeerProcess],
    prompts: RunPrompts,
    repeat: int,
) -> None:
    """Measure all rows interleaved; each run of a workload begins with another row."""
    total = sum(w.cost * w.num_runs(repeat) for w in c.workloads) * len(rows)
    done = 0.0
    try:
        with progress("measuring") as update:
            for w, run in _in_turns(c.workloads, repeat):
                first = run % len(rows)
                for m in (*rows[first:], *rows[:first]):
                    _measure_one(m, workers, w, prompts[w.name][run])
                    done += w.cost
                    update(int(done), int(total))
    except KeyboardInterrupt:
        _drop_unfinished(rows)
        sys.stderr.write("interrupted: the tables hold the runs that every row has finished\n")


def _in_turns(workloads: Sequence[PeerWorkload], repeat: int) -> Iterator[tuple[PeerWorkload, int]]:
    """Yield workloads in turns, each with the number of its run."""
    for again in range(repeat):
        for w in workloads:
            for run in range(again * w.runs_per_repeat, (again + 1) * w.runs_per_repeat):
                yield w, run


def _drop_unfinished(rows: Sequence[MeasuredRow]) -> None:
    """Cut each workload's rates to the runs that all rows have."""
    for name in {name for m in rows for name in m.rates}:
        finished = min(len(m.rates.get(name, ())) for m in rows)
        for m in rows:
            m.rates[name] = m.rates.get(name, [])[:finished]


def _measure_one(
    m: MeasuredRow, workers: dict[str, PeerProcess], w: PeerWorkload, prompts: list[list[int]]
) -> None:
    answer = _ask(m, workers, _decode(prompts, w.new_tokens))
    found = None
    if answer is not None:
        try:
            found = rate(replace(w, prompt_tokens=len(prompts[0])), answer["arrivals"])
        except ValueError as error:
            m.error = f"{w.name}: {error}"
    m.rates.setdefault(w.name, []).append(found)


if __name__ == "__main__":
    sys.exit(main())
