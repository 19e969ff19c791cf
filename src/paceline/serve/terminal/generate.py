"""`paceline generate`: answers to prompts as text, JSON lines or training data, without a server."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.core.errors import ConfigError, PacelineError
from paceline.core.params import SamplingParams
from paceline.core.sampling_defaults import FIELDS
from paceline.engine.assembly.cli_options import add_engine_arguments, add_sampling_defaults, engine_config
from paceline.serve.api.openai_format import to_json
from paceline.serve.llm import LLM
from paceline.serve.prompts import Item, read_items
from paceline.serve.terminal.banner import LoadingBar, printable
from paceline.serve.terminal.capture import capture
from paceline.serve.terminal.display import progress

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from collections.abc import Sequence

    from paceline.serve.results import Answer

# The command -----------------------------------------------------------------------------------------


def add_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `paceline generate`."""
    parser.add_argument("prompt", nargs="?", help="what to continue; standard input if it is missing or -")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        type=Path,
        help="JSON lines with prompt, messages or turns, in place of a prompt",
    )
    parser.add_argument("--chat", action="store_true", help="send a prompt as a user's message")
    parser.add_argument("--json", action="store_true", help="write JSON lines with token ids and figures")
    parser.add_argument(
        "--capture",
        metavar="DIR",
        type=Path,
        help="append answers to DIR/answers.jsonl as token ids, to train on; resumes where it stopped",
    )
    parser.add_argument("--n", type=int, default=1, metavar="N", help="answers to each prompt")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    add_sampling_arguments(parser)
    add_engine_arguments(parser)


def run(args: Namespace) -> int:
    """Answer everything asked and return the exit status."""
    given = sampling_values(args) | {"n": args.n, "ignore_eos": args.ignore_eos}
    SamplingParams(**given)  # a bad value should not wait for the model
    items = _items(args)
    config = engine_config(args)
    with LoadingBar() as bar:
        llm = LLM.of(config, progress=bar)
    with llm:
        params = replace(llm.default_params, **given)
        if args.capture is not None:
            return capture(llm, items, params, args.capture, chat=args.chat)
        return generate(llm, items, params, chat=args.chat, as_json=args.json, sink=sys.stdout)


def _items(args: Namespace) -> list[Item]:
    if args.prompts is not None:
        if args.prompt is not None:
            raise ConfigError("give a prompt or --prompts, not both")
        return read_items(args.prompts)
    text = sys.stdin.read() if args.prompt in (None, "-") else args.prompt
    if not text:
        raise ConfigError("there is no prompt; give one, or --prompts FILE")
    return [Item(1, text)]


# Sampling flags, shared with `paceline chat` ---------------------------------------------------------

_DEFAULTS = SamplingParams()
_LEFT_OUT = frozenset(FIELDS)  # flags without a default: --sampling-defaults decides
_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "largest number of tokens of an answer"),
    ("temperature", float, "0 takes the likeliest token"),
    ("top_p", float, "keep the likeliest tokens up to this share"),
    ("top_k", int, "keep this many of the likeliest tokens; 0 keeps all"),
    ("min_p", float, "drop tokens less likely than this times the likeliest"),
    ("repetition_penalty", float, "above 1, tokens that occurred become less likely"),
    ("presence_penalty", float, "above 0, tokens that were written become less likely"),
    ("frequency_penalty", float, "above 0, the same by how often they were written"),
    ("seed", int, "the same seed gives the same text; drawn if missing or negative"),
)


def add_sampling_arguments(parser: ArgumentParser) -> None:
    """Add the flags of `SamplingParams`."""
    group = parser.add_argument_group("sampling")
    for name, kind, about in _NUMBERS:
        flag = "--" + name.replace("_", "-")
        default = None if name in _LEFT_OUT else getattr(_DEFAULTS, name)
        group.add_argument(flag, type=kind, metavar="N", default=default, help=about)
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the answer before this text; repeatable"
    )
    add_sampling_defaults(group)


def sampling_values(args: Namespace) -> dict[str, Any]:
    """Return the fields of `SamplingParams` that parsed flags set, checked. Raises `RequestError`."""
    values = {name: getattr(args, name) for name, _, _ in _NUMBERS}
    if args.seed is not None and args.seed < 0:  # as clients of other servers say "random"
        values["seed"] = None
    given = {name: value for name, value in values.items() if value is not None}
    given["stop"] = tuple(args.stop or ())
    SamplingParams(**given)
    return given


# Answers ---------------------------------------------------------------------------------------------


def generate(
    llm: LLM, items: Sequence[Item], params: SamplingParams, *, chat: bool, as_json: bool, sink: TextIO
) -> int:
    """Answer all items and write the answers in their order. Returns 1 if one failed."""
    if len(items) == 1 and not as_json and params.n == 1:
        return _stream_one(llm, items[0], params, chat, sink)
    ended = count(1)
    with progress("answers", quiet=True) as update:
        prompts = [item.asked(llm.prompts, params, chat=chat) for item in items]
        completions = llm.generate(prompts, params, lambda *_: update(next(ended), len(items)))
    for item, completion in zip(items, completions, strict=True):
        for index, answer in enumerate(completion.choices):
            line = to_json(_json_row(item, index, answer)).decode() if as_json else answer.text
            sink.write(printable(f"{line}\n", sink))
    return int(any(answer.error is not None for c in completions for answer in c.choices))


def _stream_one(llm: LLM, item: Item, params: SamplingParams, chat: bool, sink: TextIO) -> int:
    error = None
    for delta in llm.stream(item.asked(llm.prompts, params, chat=chat), params):
        sink.write(printable(delta.text, sink))
        sink.flush()
        error = delta.outcome.error
    sink.write("\n")
    if error is not None:
        raise PacelineError(error)
    return 0


def _json_row(item: Item, index: int, answer: Answer) -> dict[str, Any]:
    figures = asdict(answer.figures) | {"acceptance_length": answer.figures.acceptance_length}
    return {
        "id": item.name,
        "choice": index,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "token_ids": answer.token_ids,
        "figures": figures,
    } | ({} if answer.error is None else {"error": answer.error})
