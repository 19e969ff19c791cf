"""Structured output over many schemas: `python -m tools.structured SCHEMAS.jsonl.gz --out FILE.jsonl`.

Each drafter answers every schema at each temperature, several at once, with the grammar and without it. Every
answer is a line of FILE; a run that was cut short goes on where it stopped. At the end: how many answers ended by
themselves, fitted their schema, were equal to those without drafts, or had no end, and what was accepted.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from argparse import ArgumentParser
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema

from paceline.core.errors import RequestError
from paceline.core.params import Grammar, SamplingParams
from paceline.model.grammar import check
from paceline.serve.llm import LLM

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from io import TextIOWrapper

    from paceline.serve.results import Completion

SHOWN_CHARS = 1500  # of a schema, in its prompt
AT_ONCE = 8
PROMPT = "Write one JSON value that fits this JSON schema. Answer with the JSON value only.\n\n{}"

Row = dict[str, Any]


def read_schemas(path: Path, limit: int) -> list[Row]:
    """Return the first schemas of a file, spread over all of it."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    return rows[:: max(1, len(rows) // limit)][:limit]


def fits(text: str, schema: Any) -> bool:
    """Return True if a text is JSON that a schema allows.

    Numbers are decimal: as floats, 19.99 is no multiple of 0.01.
    """
    try:
        exact = json.loads(json.dumps(schema), parse_float=Decimal)
        jsonschema.validators.validator_for(exact)(exact).validate(json.loads(text, parse_float=Decimal))
    except (ValueError, RecursionError, jsonschema.ValidationError):
        return False
    return True


class Run:
    """Answers of one drafter, appended to a file."""

    def __init__(self, out: Path, draft: str, model: str, max_tokens: int) -> None:
        self.out, self.draft, self.model, self.max_tokens = out, draft, model, max_tokens
        self.done = {key_of(row) for row in read_rows(out)}

    def run(self, schemas: Sequence[Row], temperatures: Sequence[float], *, beside: bool) -> None:
        """Answer what the file lacks."""
        wanted = [
            (row, temperature, with_grammar)
            for temperature in temperatures
            for with_grammar in ([True, False] if beside else [True])
            for row in schemas
            if (row["id"], self.draft, temperature, with_grammar) not in self.done
        ]
        if not wanted:
            return
        with LLM(self.model, draft=self.draft, num_rows=AT_ONCE) as llm, self.out.open("a") as file:
            for start in range(0, len(wanted), 4 * AT_ONCE):
                self._answer(llm, wanted[start : start + 4 * AT_ONCE], file)

    def _answer(self, llm: LLM, wanted: Sequence[tuple[Row, float, bool]], file: TextIOWrapper) -> None:
        prompts, params, asked = [], [], []
        for row, temperature, with_grammar in wanted:
            grammar = Grammar.json_schema(row["schema"])
            try:
                check(grammar)
            except RequestError as error:
                self._write(file, row, temperature, with_grammar, {"refused": str(error)[:200]})
                continue
            text = PROMPT.format(json.dumps(row["schema"])[:SHOWN_CHARS])
            prompts.append(list(llm.prompts.of_messages([{"role": "user", "content": text}])))
            params.append(
                SamplingParams(
                    temperature=temperature,
                    seed=1,
                    max_tokens=self.max_tokens,
                    grammar=grammar if with_grammar else None,
                )
            )
            asked.append((row, temperature, with_grammar))

        def done(index: int, completion: Completion) -> None:
            row, temperature, with_grammar = asked[index]
            self._write(file, row, temperature, with_grammar, _result(completion, row["schema"]))

        if prompts:
            llm.generate(prompts, params, done)

    def _write(self, file: TextIOWrapper, row: Row, temperature: float, with_grammar: bool, result: Row) -> None:
        line = {
            "id": row["id"],
            "draft": self.draft,
            "temperature": temperature,
            "grammar": with_grammar,
            **result,
        }
        file.write(json.dumps(line) + "\n")
        file.flush()


def _result(completion: Completion, schema: Any) -> Row:
    figures = completion.figures
    return {
        "text": completion.text,
        "finish": completion.finish_reason,
        "valid": fits(completion.text, schema),
        "tokens": figures.completion_tokens,
        "passes": figures.decode_passes,
        "decoded": figures.decoded_tokens,
        "verified": figures.verified_tokens,
        "accepted": figures.accepted_tokens,
        "error": completion.choices[0].error,
    }


def key_of(row: Row) -> tuple[str, str, float, bool]:
    """Return what a line answers."""
    return row["id"], row["draft"], row["temperature"], row["grammar"]


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the lines of an earlier run."""
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line for each drafter and temperature, with the grammar and without."""
    plain = {(r["id"], r["temperature"], r["grammar"]): r.get("text") for r in rows if r["draft"] == "off"}
    groups: dict[tuple[str, float, bool], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["draft"], row["temperature"], row["grammar"]].append(row)
    for (draft, temperature, with_grammar), group in sorted(groups.items(), key=str):
        answered = [r for r in group if "refused" not in r]
        ends = Counter(r["finish"] for r in answered)
        ended = [r for r in answered if r["finish"] == "stop"]
        valid = sum(r["valid"] for r in ended)
        other = sum(plain.get((r["id"], temperature, with_grammar), r["text"]) != r["text"] for r in answered)
        passes, decoded = sum(r["passes"] for r in answered), sum(r["decoded"] for r in answered)
        verified, accepted = sum(r["verified"] for r in answered), sum(r["accepted"] for r in answered)
        yield (
            f"{draft:14} t={temperature:g} {'grammar' if with_grammar else 'free   '}: "
            f"{len(group)} schemas, {len(group) - len(answered)} refused by name, {dict(ends)}, "
            f"{valid}/{len(ended)} of those ended are valid, {other} differ from off, "
            f"{decoded / max(passes, 1):.2f} tokens a pass, {accepted / max(verified, 1):.0%} of drafts kept"
        )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run and print."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("schemas", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", nargs="+", default=["off", "eagle3:k=4", "auto"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--limit", type=int, default=350)
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--beside", action="store_true", help="the same prompts without the grammar, too")
    options = parser.parse_args()
    schemas = read_schemas(options.schemas, options.limit)
    for draft in options.draft:
        start = time.monotonic()
        Run(options.out, draft, options.model, options.max_tokens).run(
            schemas, options.temperatures, beside=options.beside
        )
        _say(f"{draft}: {time.monotonic() - start:.0f} s")
    for line in summary(list(read_rows(options.out))):
        _say(line)


if __name__ == "__main__":
    main()
