"""`paceline train data`: let the target answer prompts, and further prompts made from these."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from paceline.core.errors import ConfigError, PacelineError
from paceline.train.corpus import read_answers
from paceline.train.widen import SOURCES, PromptPair, is_translation, widen

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

_GENERATE = [
    sys.executable,
    "-P",
    "-c",
    "from paceline.cli import main; raise SystemExit(main())",
    "generate",
    "--sampling-defaults",
    "neutral",
]


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--prompts", required=True, metavar="FILE", type=Path, help="JSON lines with id and prompt"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", type=Path, help="where answers are kept; resumes there"
    )
    parser.add_argument("--model", default="default", metavar="default|PATH|ID", help="the model that answers")
    parser.add_argument("--n", type=int, default=3, metavar="N", help="sampled answers to each prompt")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T")
    parser.add_argument("--max-tokens", type=int, default=320, metavar="M", help="of an answer")
    parser.add_argument("--weights", metavar="TYPE", help="of the answering model; int8 answers fastest")
    parser.add_argument("--no-widen", action="store_true", help="only the prompts of the file")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the prompts that are made")


def run(args: Namespace) -> int:
    """Answer the file's prompts, then prompts made from the answers, then translations back."""
    if not args.prompts.is_file():
        raise ConfigError(f"there is no file {args.prompts}")
    texts = {} if args.no_widen else _prompt_texts(args.prompts)  # checked first: answers take hours
    _capture(args, args.prompts)
    if not args.no_widen:
        _capture(args, _write(args.out / "prompts-2.jsonl", _pairs(args, texts), args.seed))
        texts |= _prompt_texts(args.out / "prompts-2.jsonl")
        translations = [p for p in _pairs(args, texts) if is_translation(p.name)]
        _capture(args, _write(args.out / "prompts-3.jsonl", translations, args.seed))
    _print_counts(args.out)
    return 0


def _capture(args: Namespace, prompts: Path) -> None:
    """Run `paceline generate --capture` on one file of prompts."""
    if prompts.stat().st_size == 0:  # no prompt could be made
        return
    options = ["--model", args.model, "--n", args.n]
    options += ["--temperature", args.temperature, "--max-tokens", args.max_tokens]
    options += ["--draft", "off", *(["--weights", args.weights] if args.weights else [])]
    command = [*_GENERATE, "--chat", "--prompts", prompts, "--capture", args.out, *options]
    if subprocess.run([str(word) for word in command], check=False).returncode != 0:  # noqa: S603 - our own
        raise PacelineError("answering stopped early; the same command goes on from there")


def _prompt_texts(path: Path) -> dict[str, str]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        return {str(row["id"]): row["prompt"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} must hold JSON lines with id and prompt: {error!r}") from None


def _pairs(args: Namespace, texts: dict[str, str]) -> list[PromptPair]:
    """Return each answered prompt with its first answer, in the order of the prompts."""
    from paceline.model.weights import load_model, load_tokenizer

    tokenizer = load_tokenizer(load_model(args.model))
    first = {c.name: c.answers[0] for c in read_answers(args.out)}
    return [PromptPair(n, text, tokenizer.decode(first[n])) for n, text in texts.items() if n in first]


def _write(path: Path, pairs: Sequence[PromptPair], seed: int) -> Path:
    lines = (json.dumps({"id": p.name, "source": p.source, "prompt": p.text}) + "\n" for p in widen(pairs, seed))
    try:
        path.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from None
    return path


def _print_counts(out: Path) -> None:
    counts: dict[str, list[int]] = {}
    for captured in read_answers(out):
        word = captured.name.partition(" ")[0]
        row = counts.setdefault(word if word in SOURCES else "as given", [0, 0, 0])
        row[0] += 1
        row[1] += len(captured.answers)
        row[2] += sum(map(len, captured.answers))
    table = Table("prompts", "how many", "answers", "tokens", title=str(out))
    for kind, (prompts, answers, tokens) in sorted(counts.items()):
        table.add_row(kind, f"{prompts:,}", f"{answers:,}", f"{tokens:,}")
    Console().print(table)
