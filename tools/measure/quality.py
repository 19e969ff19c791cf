"""Measure the quality loss of weight and KV types: `python -m tools.measure.quality [--prompts FILE.jsonl]`.

Answers are written greedily in float32. Then each type reads the same texts, and its distributions are compared
with those of the float32 reference. Perplexity is measured on the longest prompts, which are natural text.

With `--text FILE` both are measured on a piece of that file, against the native backend in float32, which takes
half the memory: `python -m tools.measure.quality --model NAME --text FILE --types file,int8,int4`.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.backend.registry import BACKENDS
from paceline.backend.seam import Packed, PassRequest
from paceline.bench.interleave import make_questions
from paceline.bench.prompt_file import read_prompts, spread
from paceline.core.nouns import PAGE_TOKENS, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.model.weights import load_model, load_template, load_tokenizer
from paceline.serve.prompts import Prompts
from tools.entry import add_prompts, exit_status

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from numpy import float64
    from numpy.typing import NDArray

    from paceline.backend.seam import Decoder
    from paceline.model.weights import LoadedModel

NUM_TEXTS, TEXT_TOKENS = 8, 512  # number and length of the texts for perplexity
TYPES = (  # (weights, KV)
    ("f32", "f32"),
    ("f32", "f16"),
    ("f32", "i16"),
    ("f32", "i8"),
    ("bf16", "i16"),
    ("int8", "f16"),
    ("int8", "i16"),
    ("int8", "i8"),
    ("int4", "i16"),
)
_READ = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class QualityText:
    """Token ids of a text; its last `num_judged` tokens are compared."""

    token_ids: tuple[int, ...]
    num_judged: int


def log_probs(decoder: Decoder, text: QualityText) -> NDArray[float64]:
    """Return the log-probabilities [num_judged, vocab] float64 that predict the judged tokens."""
    length = len(text.token_ids) - 1
    places = np.arange(length)
    num_pages = -(-length // PAGE_TOKENS)
    packed = Packed(
        token_ids=np.array(text.token_ids[:-1]),
        positions=places,
        slots=places,
        cu_len=np.array([0, length]),
        pages=np.arange(num_pages)[None],
        wanted=places[-text.num_judged :],
    )
    specs = [SamplingSpec("logits", _READ)] * text.num_judged
    chosen = decoder.launch(PassRequest(packed, decoder.new_kv(num_pages), specs)).wait()
    assert chosen.logits is not None
    wide = chosen.logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))  # type: ignore[no-any-return]


def write_greedily(decoder: Decoder, prompt: Sequence[int], num_tokens: int) -> QualityText:
    """Return a prompt with the decoder's greedy answer."""
    ids, num_pages = list(prompt), -(-(len(prompt) + num_tokens) // PAGE_TOKENS)
    kv, done = decoder.new_kv(num_pages), 0
    for _ in range(num_tokens):
        places = np.arange(done, len(ids))
        packed = Packed(
            token_ids=np.array(ids[done:]),
            positions=places,
            slots=places,
            cu_len=np.array([0, len(places)]),
            pages=np.arange(num_pages)[None],
            wanted=np.array([len(places) - 1]),
        )
        done = len(ids)
        request = PassRequest(packed, kv, [SamplingSpec("argmax", _READ)])
        ids.append(int(decoder.launch(request).wait().token_ids[0]))
    return QualityText(tuple(ids), num_tokens)


def load(model: LoadedModel, backend: str, weights: str, kv: str, threads: int | None) -> Decoder:
    """Return a decoder with these types of weights and KV."""
    return BACKENDS[backend].load()(model.config, model.weights, weights, kv, threads)


@dataclass(frozen=True, slots=True)
class QualityFigures:
    """Figures of one type against the float32 reference."""

    kl: float  # mean over judged positions, nats
    top1: float  # share of positions with the same most likely token
    perplexity: float


def measure(
    decoder: Decoder,
    expected: Sequence[NDArray[float64]],
    answers: Sequence[QualityText],
    texts: Sequence[QualityText],
) -> QualityFigures:
    """Compare a decoder with the reference's log-probabilities, and take its perplexity of the texts."""
    divergences, same = [], []
    for answer, wanted in zip(answers, expected, strict=True):
        got = log_probs(decoder, answer)
        divergences.append((np.exp(wanted) * (wanted - got)).sum(axis=1))
        same.append(wanted.argmax(axis=1) == got.argmax(axis=1))
    losses = [
        -log_probs(decoder, text)[np.arange(text.num_judged), list(text.token_ids[-text.num_judged :])]
        for text in texts
    ]
    return QualityFigures(
        float(np.concatenate(divergences).mean()),
        float(np.concatenate(same).mean()),
        float(np.exp(np.concatenate(losses).mean())),
    )


def compare_on_text(model: LoadedModel, args: Namespace) -> Table:
    """Compare types of weights with float32 on a text.

    One model at a time is in memory.
    """
    ids = load_tokenizer(model).encode(Path(args.text).read_text())[: args.text_tokens + 1]
    text = QualityText(tuple(ids), len(ids) - 1)
    expected = [log_probs(load(model, "native", "f32", args.kv, args.threads), text)]
    table = Table("weights", "MB", "mean KL, nats", "same top 1", "perplexity", title=f"{text.num_judged} tokens")
    loss = -expected[0][np.arange(text.num_judged), ids[1:]].mean()
    table.add_row("f32", "", "0", "100%", f"{np.exp(loss):.4f}")
    for weights in args.types.split(","):
        decoder = load(model, "native", weights, args.kv, args.threads)
        f = measure(decoder, expected, [text], [text])
        table.add_row(
            weights, f"{decoder.weight_bytes / 1e6:.0f}", f"{f.kl:.6f}", f"{f.top1:.1%}", f"{f.perplexity:.4f}"
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every type and print a table."""
    parser = ArgumentParser(prog="python -m tools.measure.quality", description=(__doc__ or "").split("\n")[0])
    add_prompts(parser)
    parser.add_argument("--model", default="default")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="prompts answered")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="M", help="tokens of each answer")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--text", metavar="FILE", help="compare on this text instead of on prompts")
    parser.add_argument("--text-tokens", type=int, default=TEXT_TOKENS, metavar="N")
    parser.add_argument("--types", default="file,int8,int4", metavar="TYPES", help="of weights, with --text")
    parser.add_argument("--kv", default="i16", metavar="TYPE", help="with --text, of the reference too")
    args = parser.parse_args(argv)
    model = load_model(args.model)
    if args.text:
        Console().print(compare_on_text(model, args))
        return 0
    tokenizer, prompts = load_tokenizer(model), read_prompts(args.prompts)
    exact = load(model, "native", "f32", "f32", args.threads)
    encode = Prompts(tokenizer, load_template(model), model.config.max_context)
    greedy = SamplingParams(temperature=0.0, max_tokens=args.max_tokens)
    asked = [q.request.prompt_ids for q in make_questions(spread(prompts, args.limit), encode, greedy, 0)]
    bar = Console(stderr=True)
    answers = [write_greedily(exact, ids, args.max_tokens) for ids in track(asked, "writing", console=bar)]
    longest = sorted(prompts, key=lambda p: len(p.text))[-NUM_TEXTS:]
    texts = [QualityText(tuple(tokenizer.encode(p.text)[:TEXT_TOKENS]), TEXT_TOKENS - 1) for p in longest]
    reference = load(model, "reference", "f32", "f32", args.threads)
    expected = [log_probs(reference, answer) for answer in track(answers, "reference", console=bar)]
    table = Table("weights", "kv", "mean KL, nats", "same top 1", "perplexity", title="against float32 reference")
    for backend, weights, kv in track(
        [("reference", "f32", "f32"), *(("native", *t) for t in TYPES)], "types", console=bar
    ):
        f = measure(load(model, backend, weights, kv, args.threads), expected, answers, texts)
        table.add_row(f"{weights} ({backend})", kv, f"{f.kl:.4f}", f"{f.top1:.1%}", f"{f.perplexity:.3f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
