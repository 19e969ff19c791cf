"""Measure one long prompt: `python -m tools.measure.long_context --model M --tokens 32768`.

It prints the time to the first token and the time per token behind it, without drafts and with them, beside
llama.cpp where `tools.peers` has installed it; then the time of the same prefix read back from disk by a fresh
engine. The text is this repository's own. Files are dropped from the system's cache before they are read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.params import OFF, SamplingParams, Speculation
from paceline.core.request_nouns import Request
from paceline.core.system import usable_cores
from paceline.engine.assembly.build import Loaded, assemble, load
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from paceline.model.files.pull import resolve
from tools.entry import exit_status
from tools.peers.install import STAMP, preloads, python_of
from tools.peers.protocol import PeerSetting
from tools.peers.remote import PeerFailed, PeerProcess
from tools.peers.rows import LLAMA_CPP

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.engine.engine import Engine

ROOT = Path(__file__).parents[2]
TEXTS = ("docs/**/*.md", "src/**/*.py", "csrc/**/*", "tests/**/*.py")
SLACK_TOKENS = 1024  # of KV, beside one request
WRITE_S = 600.0  # for pages to reach the disk
GIB = 2**30


class Timing(NamedTuple):
    """Times of one answer, and its tokens."""

    first_s: float
    token_ms: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Study:
    """Engine and prompt that are measured."""

    config: EngineConfig
    loaded: Loaded
    prompt: tuple[int, ...]
    answer: int


def prompt_of(loaded: Loaded, count: int) -> tuple[int, ...]:
    """Return the first tokens of this repository's texts. Raises `ConfigError` if there are too few."""
    files = (path for pattern in TEXTS for path in sorted(ROOT.glob(pattern)) if path.is_file())
    ids: list[int] = []
    while len(ids) < count and (path := next(files, None)) is not None:
        ids += loaded.tokenizer.encode(path.read_text(encoding="utf-8"))
    if len(ids) < count:
        raise ConfigError(f"--tokens {count}: the repository has {len(ids)} tokens of text; ask for fewer")
    return tuple(ids[:count])


def answer(engine: Engine, study: Study, speculation: Speculation | None, salt: str = "") -> Timing:
    """Answer the prompt with greedy tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=study.answer, ignore_eos=True)
    start = time.perf_counter()
    engine.add(Request("long", study.prompt, params, seed=0, salt=salt, speculation=speculation))
    ids: list[int] = []
    first_s = last_s = 0.0
    while engine.has_work:
        for outcome in engine.step():
            last_s = time.perf_counter() - start
            first_s = first_s or last_s
            ids += outcome.token_ids
    return Timing(first_s, 1e3 * (last_s - first_s) / max(len(ids) - 1, 1), tuple(ids))


# Prefixes on disk --------------------------------------------------------------------------------


class FromDisk(NamedTuple):
    """A prefix that was read back."""

    timing: Timing
    computed: Timing  # the same, by the engine that wrote it
    pages: int
    num_bytes: int
    read_s: float


def from_disk(study: Study, folder: Path) -> FromDisk:
    """Compute and write a prefix; read it back in a fresh engine. Raises `ConfigError`."""
    config = replace(study.config, draft=OFF, kv_disk=str(folder), kv_disk_bytes=1 << 40)
    writer = assemble(config, study.loaded).engine
    computed = answer(writer, study, None)
    wait_for_pages(writer, len(study.prompt) // PAGE_TOKENS)
    writer.close()
    drop_from_cache(folder)
    reader = assemble(config, study.loaded).engine
    timing, num_bytes = answer(reader, study, None), reader.gauges().num_disk_bytes
    counts = reader.stats().kv_disk
    reader.close()
    if not counts.pages_read:
        raise ConfigError("no page was read back from disk; look at the engine's log")
    if timing.token_ids != computed.token_ids:
        raise ConfigError("the text behind a prefix from disk differs: please report it")
    return FromDisk(timing, computed, counts.pages_read, num_bytes, counts.read_s)


def wait_for_pages(engine: Engine, count: int) -> None:
    """Wait until so many pages were written or lost."""
    end_s = time.monotonic() + WRITE_S
    while (disk := engine.stats().kv_disk).pages_written + disk.pages_lost < count and time.monotonic() < end_s:
        time.sleep(0.05)


def drop_from_cache(folder: Path) -> None:
    """Have the system write files and forget them, as far as it does."""
    os.sync()
    for path in folder.rglob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        with suppress(OSError):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


# Peers -------------------------------------------------------------------------------------------


def llama_cpp(study: Study, model: str, peers: Path, patience_s: float) -> Iterator[tuple[str, Timing | None]]:
    """Yield llama.cpp's times, with flash attention and without, where it is installed.

    patience_s: after this time llama.cpp is ended. Its times are None then, and if it fails.
    """
    if not (peers / LLAMA_CPP.name / STAMP).is_file():
        return
    length, threads = len(study.prompt) + study.answer, study.config.num_threads
    setting = asdict(PeerSetting(str(resolve(model)), threads, 1, length, study.config.limits.prefill_tokens))
    for flash in (True, False):
        options = json.dumps({"flash": flash, "setting": setting})
        command = [python_of(LLAMA_CPP, peers), "-m", "tools.peers.worker", "llama_cpp", options]
        with PeerProcess(command, peers / "long.log", threads, preloads(LLAMA_CPP, peers)) as worker:
            yield f"llama.cpp, flash {'on' if flash else 'off'}", _ask(worker, study, patience_s)


def _ask(worker: PeerProcess, study: Study, patience_s: float) -> Timing | None:
    question = {"do": "decode", "prompts": [list(study.prompt)], "num_tokens": study.answer}
    try:
        (arrivals,) = worker.ask(question, patience_s)["arrivals"]
    except PeerFailed as error:
        sys.stderr.write(f"{error}\n")
        return None
    return Timing(arrivals[0], 1e3 * (arrivals[-1] - arrivals[0]) / max(len(arrivals) - 1, 1), ())


# The tool ----------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    parser = ArgumentParser(
        prog="python -m tools.measure.long_context", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=32768, metavar="N", help="of prompt and answer")
    parser.add_argument("--answer", type=int, default=64, metavar="N", help="tokens of the answer, of these")
    parser.add_argument("--draft", default="auto", metavar="SPEC")
    parser.add_argument("--backend", default="native")
    parser.add_argument("--weights", metavar="TYPE")
    parser.add_argument("--kv", metavar="TYPE")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--folder", metavar="FOLDER", help="for pages on disk (default: a temporary one)")
    parser.add_argument("--peers", default=".peers", metavar="FOLDER", help="where tools.peers installs engines")
    parser.add_argument("--patience", type=float, default=3600, metavar="S", help="for each answer of a peer")
    args = parser.parse_args(argv)
    if not 64 <= args.tokens <= 1 << 20 or not 2 <= args.answer <= args.tokens // 2:
        raise ConfigError("--tokens is 64 to 1048576, --answer 2 to half of it")
    config = EngineConfig(
        model=args.model,
        draft=args.draft,
        backend=args.backend,
        weights=args.weights,
        kv=args.kv,
        threads=args.threads,
        kv_tokens=args.tokens + SLACK_TOKENS,
        limits=Limits(1, args.tokens),
    )
    loaded = load(replace(config, kv_disk=args.folder or "measured"))  # so that the model's files have a key
    count = min(args.tokens, loaded.decoder.config.max_context) - args.answer
    study = Study(config, loaded, prompt_of(loaded, count), args.answer)
    _print(study, args)
    return 0


def _print(study: Study, args: Namespace) -> None:
    console = Console()
    table = Table(
        "engine", "first token, s", "prompt tokens/s", "per token, ms", title=f"{len(study.prompt)} tokens"
    )

    def tell(name: str, timing: Timing | None) -> None:
        """Add a row, and show it now: the whole may take an hour."""
        if timing is None:
            found = ["none", "", ""]
        else:
            speed = len(study.prompt) / timing.first_s
            found = [f"{timing.first_s:.2f}", f"{speed:.0f}", f"{timing.token_ms:.2f}"]
        table.add_row(name, *found)
        console.print(f"{name}: first token after {found[0]} s, {found[2] or 'no'} ms per token")

    with console.status("measuring"):
        for what, timing in _ours(study):
            tell(f"Paceline, {what}", timing)
        with TemporaryDirectory() as temporary:
            read = from_disk(study, Path(args.folder or temporary))
        tell("Paceline, from disk", read.timing)
        for name, found in llama_cpp(study, args.model, Path(args.peers), args.patience):
            tell(name, found)
    console.print(f"{args.model}: {study.loaded.decoder.describe()}, {len(usable_cores())} cores")
    console.print(table)
    console.print(
        f"{read.pages} pages, {read.num_bytes / GIB:.2f} GiB, were read in {read.read_s:.2f} s; the first token "
        f"came after {read.timing.first_s:.2f} s, computed after {read.computed.first_s:.2f} s: "
        f"{read.computed.first_s / read.timing.first_s:.1f} x sooner"
    )


def _ours(study: Study) -> Iterator[tuple[str, Timing]]:
    """Yield our times without drafts and with them; salts keep the prefixes apart."""
    engine = assemble(study.config, study.loaded).engine
    yield "no drafts", answer(engine, study, Speculation(OFF), salt="plain")
    if engine.drafting.drafters:
        yield f"--draft {study.config.draft}", answer(engine, study, None, salt="drafts")


if __name__ == "__main__":
    sys.exit(exit_status(main))
