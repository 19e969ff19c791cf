"""Check promise 1 on a real model: `python -m tools.same_text [--prompts FILE.jsonl]`.

Every prompt is answered by plain decoding, one request at a time. Then all prompts are answered again under many
settings: other drafters, batch sizes, threads, prefill chunks, prefix hits and preemptions, such that every pair
of values occurs at least once. Token ids, texts, finish and stop reasons must never differ. Prompts have
temperatures of 0, 0.7, 1 and 1.5, which share batches. A full run takes about an hour.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import astuple, dataclass, fields, replace
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track

from paceline.bench.interleave import make_questions
from paceline.bench.prompt_file import read_prompts, spread
from paceline.core.params import SamplingParams
from paceline.engine.assembly.build import assemble, load
from paceline.engine.assembly.config import EngineConfig
from paceline.engine.request_table import Limits
from paceline.model.template import compiled
from paceline.serve.prompts import Prompts
from tools.entry import add_prompts, exit_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.core.request_nouns import Request
    from paceline.engine.assembly.build import Loaded

SPARE_PAGES = 4  # pages beyond those of the longest request, in settings in which pages run out
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
_WIDTHS = (7, 26, 4, 7, 5, 12, 7, 11, 7, 9)  # characters of the columns
Ending = tuple[tuple[int, ...], str, object, object]  # token ids, text, finish reason, stop reason


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """Values that must not change the text, except for the weights."""

    weights: str
    draft: str
    rows: int
    threads: int
    chunk: int
    prefix_cache: bool
    preempt: bool


PEAGLE = "eagle3:k=8"  # replaced by the head that `--peagle` names: none ships with the default model
CHOICES: dict[str, tuple[Any, ...]] = {
    "weights": ("int8", "int4", "f32"),
    "draft": (
        "off",
        "ngram:k=2",
        "ngram:k=8",
        "suffix:shared=50000",
        "draft-model:layers=28,k=2",
        "draft-model",
        "eagle3",
        PEAGLE,
        "auto",
    ),
    "rows": (1, 3, 16, 64),
    "threads": (1, 2),
    "chunk": (64, 4096),
    "prefix_cache": (False, True),
    "preempt": (False, True),
}


def plain(weights: str) -> EngineSetting:
    """Return the setting that the others are compared with."""
    return EngineSetting(weights, "off", 1, 2, 4096, prefix_cache=False, preempt=False)


def covering(choices: dict[str, tuple[Any, ...]]) -> Iterator[EngineSetting]:
    """Yield settings until every pair of values has occurred, greedily the most new pairs."""
    names = [f.name for f in fields(EngineSetting)]
    everything = [dict(zip(names, values, strict=True)) for values in product(*(choices[n] for n in names))]
    usable = [s for s in everything if not (s["preempt"] and s["rows"] == 1)]  # one row never runs out of pages
    pairs = {i: {(a, s[a], b, s[b]) for a, b in combinations(names, 2)} for i, s in enumerate(usable)}
    missing = set().union(*pairs.values())
    while missing:
        best = max(pairs, key=lambda i: len(pairs[i] & missing))
        missing -= pairs.pop(best)
        yield EngineSetting(**usable[best])


def answer_all(
    setting: EngineSetting, loaded: Loaded, requests: Sequence[Request], max_tokens: int
) -> tuple[dict[str, Ending], int]:
    """Return how each request ended under a setting, and the number of preemptions."""
    longest = max(len(r.prompt_ids) for r in requests) + max_tokens + 32
    pages = -(-longest // 16)
    pages = pages + SPARE_PAGES if setting.preempt else setting.rows * pages
    config = EngineConfig(
        draft=setting.draft,
        weights=setting.weights,
        threads=setting.threads,
        kv_tokens=pages * 16,
        prefix_cache=setting.prefix_cache,
        limits=Limits(
            num_rows=setting.rows, max_len=longest, prefill_tokens=setting.chunk, max_queued_tokens=1 << 30
        ),
    )
    engine = assemble(config, loaded).engine
    for request in requests:
        engine.add(request)
    ids: dict[str, tuple[int, ...]] = {r.request_id: () for r in requests}
    texts = dict.fromkeys(ids, "")
    endings: dict[str, Ending] = {}
    while engine.has_work:
        for o in engine.step():
            ids[o.request_id] += o.token_ids
            texts[o.request_id] += o.text
            if o.finish_reason is not None:
                endings[o.request_id] = ids[o.request_id], texts[o.request_id], o.finish_reason, o.stop_reason
    return endings, engine.stats().preemptions


class AnswerCache:
    """Answers by setting, kept between runs of the command in the folder of `--keep`."""

    def __init__(self, args: Namespace) -> None:
        self._args = args
        self._loaded: dict[tuple[str, int], Loaded] = {}

    def __call__(self, setting: EngineSetting) -> tuple[dict[str, Ending], int]:
        """Answer all prompts under a setting, or read the kept answers."""
        if self._args.keep is None:
            return self._run(setting)
        words = "_".join(str(value) for value in (*astuple(setting), self._args.limit, self._args.max_tokens))
        file = Path(self._args.keep) / f"{words}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(".part")
            part.write_text(json.dumps(self._run(setting)))
            part.replace(file)
        endings, preemptions = json.loads(file.read_text())
        return {name: (tuple(ids), *others) for name, (ids, *others) in endings.items()}, preemptions

    def _run(self, setting: EngineSetting) -> tuple[dict[str, Ending], int]:
        key = setting.weights, setting.threads
        if key not in self._loaded:
            config = EngineConfig(model=self._args.model, weights=setting.weights, threads=setting.threads)
            self._loaded[key] = load(config)
        return answer_all(
            setting, self._loaded[key], _requests(self._args, self._loaded[key]), self._args.max_tokens
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print a table; the exit status is 1 if any answer differed."""
    parser = ArgumentParser(prog="python -m tools.same_text", description=(__doc__ or "").split("\n")[0])
    add_prompts(parser)
    parser.add_argument("--model", default="default")
    parser.add_argument("--limit", type=int, default=120, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="M")
    parser.add_argument("--weights", default=",".join(CHOICES["weights"]), metavar="TYPE[,TYPE...]")
    parser.add_argument(
        "--drafts", nargs="+", metavar="SPEC", help="in place of the default model's; off is always among them"
    )
    parser.add_argument(
        "--peagle", metavar="FOLDER", help="a P-EAGLE head for the model, to be among the drafters"
    )
    parser.add_argument("--keep", metavar="FOLDER", help="keep answers there, to go on after an interruption")
    args = parser.parse_args(argv)
    asked = CHOICES["draft"] if args.drafts is None else ("off", *(d for d in args.drafts if d != "off"))
    drafts = tuple(f"peagle:model={args.peagle}" if args.peagle and draft == PEAGLE else draft for draft in asked)
    choices = CHOICES | {"weights": tuple(args.weights.split(",")), "draft": drafts}
    settings = sorted(covering(choices), key=lambda s: (s.weights, s.threads))
    different, shown = 0, Console(width=140)
    shown.print(_line([*(f.name for f in fields(EngineSetting)), "preemptions", "answers", "different"]))
    answers = AnswerCache(args)
    expected: dict[str, dict[str, Ending]] = {}
    for setting in track(
        [*(plain(w) for w in choices["weights"]), *settings], "answering", console=Console(stderr=True)
    ):
        endings, preemptions = answers(setting)
        wanted = expected.setdefault(setting.weights, endings)
        wrong = sum(endings[name] != wanted[name] for name in wanted)
        different += wrong
        values = [getattr(setting, f.name) for f in fields(setting)]
        shown.print(_line([*values, preemptions, len(endings), wrong]))
    shown.print(f"{different} answers differed")
    return 1 if different else 0


def _line(values: Sequence[Any]) -> str:
    """Return a row of the table, padded; rows are printed as they are measured."""
    return "  ".join(f"{value!s:{width}}" for value, width in zip(values, _WIDTHS, strict=True)).rstrip()


def _requests(args: Namespace, loaded: Loaded) -> list[Request]:
    encode = Prompts(loaded.tokenizer, compiled(loaded.template), loaded.decoder.config.max_context)
    prompts = spread(read_prompts(args.prompts), args.limit)
    questions = make_questions(prompts, encode, SamplingParams(temperature=0.0, max_tokens=args.max_tokens), 0)
    return [
        replace(q.request, params=replace(q.request.params, temperature=TEMPERATURES[i % len(TEMPERATURES)]))
        for i, q in enumerate(questions)
    ]


if __name__ == "__main__":
    sys.exit(exit_status(main))
