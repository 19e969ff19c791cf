"""Ask a server the questions of the Berkeley function calling leaderboard: `python -m tools.bfcl`.

Any server with OpenAI's chat route will do. Every question is asked whole and streamed, greedily and with a seed,
`--in-flight` questions at once. The table tells of malformed calls, of streams that differ from the whole answer,
and of answers that are right by the leaderboard's own rule. Answers are kept in `--out`, one line each; a run that
is started again goes on there.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from paceline.core.errors import ConfigError
from tools.entry import exit_status

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import openai

Json = dict[str, Any]
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}  # the file's words -> JSON schema's
PYTHON_TYPES = {"string": str, "integer": int, "float": float, "boolean": bool, "array": list, "tuple": list}
PYTHON_TYPES |= {"dict": dict}
MAX_TOKENS = 1024
REFUSED = "refused"  # in place of a finish reason: the server did not take the question
_IGNORED = re.compile(r"[ ,./\-_*^]")  # characters of texts that do not count


# The question ----------------------------------------------------------------------------------------


def safe_name(name: str) -> str:
    """Return a function's name as OpenAI allows it, without dots."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def json_schema(given: Any) -> Any:
    """Return parameters with the file's type names as a JSON schema."""
    if isinstance(given, list):
        return [json_schema(each) for each in given]
    if not isinstance(given, dict):
        return given
    found = {key: json_schema(value) for key, value in given.items()}
    kind = given.get("type")
    if isinstance(kind, str) and kind in TYPES:
        found["type"] = TYPES[kind]
        if TYPES[kind] is None:
            del found["type"]
    return found


def request_of(question: Json, model: str, choice: str) -> Json:
    """Return the body that asks a question."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": safe_name(function["name"]),
                "description": function.get("description", ""),
                "parameters": json_schema(function["parameters"]),
            },
        }
        for function in question["function"]
    ]
    return {
        "model": model,
        "messages": question["question"][0],
        "tools": tools,
        "tool_choice": choice,
        "temperature": 0.0,
        "seed": 1,
        "max_tokens": MAX_TOKENS,
    }


# The leaderboard's rule ------------------------------------------------------------------------------


def is_right(question: Json, calls: Sequence[Json]) -> bool:
    """Return True if the leaderboard accepts the calls, parallel ones in any order."""
    wanted = question["ground_truth"]
    if len(calls) != len(wanted):
        return False
    functions = {safe_name(f["name"]): f for f in question["function"]}
    free = list(range(len(calls)))
    for answer in wanted:
        found = next((i for i in free if _fits(functions, answer, calls[i])), None)
        if found is None:
            return False
        free.remove(found)
    return True


def _fits(functions: dict[str, Json], answer: Json, call: Json) -> bool:
    """Return True if name, required parameters and values are right."""
    ((name, allowed),) = answer.items()
    arguments = call["arguments"]
    if call["name"] != safe_name(name) or not isinstance(arguments, dict) or call["name"] not in functions:
        return False
    parameters = functions[call["name"]]["parameters"]
    if any(required not in arguments for required in parameters.get("required", ())):
        return False
    if any(key not in parameters["properties"] or key not in allowed for key in arguments):
        return False
    if any("" not in values and key not in arguments for key, values in allowed.items()):
        return False  # left out though it has no default
    return all(_value_fits(parameters["properties"][key], allowed[key], v) for key, v in arguments.items())


def _value_fits(schema: Json, allowed: Sequence[Any], value: Any) -> bool:
    kind = schema.get("type")
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    wanted = PYTHON_TYPES.get(str(kind))
    if wanted is not None and type(value) is not wanted and not _is_variable(allowed, value):
        return False
    return any(_same(value, one) for one in allowed)


def _is_variable(allowed: Sequence[Any], value: Any) -> bool:
    """Return True for a value of a type that an allowed one has too."""
    return any(type(one) is type(value) and one != "" for one in allowed)


def _same(value: Any, allowed: Any) -> bool:
    if isinstance(value, str) and isinstance(allowed, str):
        return _plain(value) == _plain(allowed)
    if isinstance(value, list) and isinstance(allowed, list):
        return len(value) == len(allowed) and all(map(_same, value, allowed))
    if isinstance(value, dict) and isinstance(allowed, dict):
        if any(key not in allowed for key in value):
            return False
        return all(
            any(_same(value[key], one) for one in _as_list(options)) if key in value else "" in _as_list(options)
            for key, options in allowed.items()
        )
    return isinstance(value, bool) == isinstance(allowed, bool) and bool(value == allowed)


def _as_list(options: Any) -> list[Any]:
    return options if isinstance(options, list) else [options]


def _plain(text: str) -> str:
    """Return a text without what the leaderboard ignores: some punctuation, case and kind of quotes."""
    return _IGNORED.sub("", text).lower().replace("'", '"')


# The answers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """Calls of one answer as texts."""

    calls: list[tuple[str, str]]
    content: str
    finish_reason: str

    def parsed(self) -> list[Json] | None:
        """Return the calls with their arguments as values; None if one is no JSON object."""
        found = []
        for name, arguments in self.calls:
            try:
                value = json.loads(arguments)
            except ValueError:
                return None
            if not isinstance(value, dict):
                return None
            found.append({"name": name, "arguments": value})
        return found


def ask_whole(client: openai.OpenAI, body: Json) -> Answered:
    """Return an answer that came at once."""
    choice = client.chat.completions.create(**body).choices[0]
    functions = [call.function for call in choice.message.tool_calls or () if call.type == "function"]
    calls = [(function.name, function.arguments) for function in functions]
    return Answered(calls, choice.message.content or "", choice.finish_reason)


def ask_streamed(client: openai.OpenAI, body: Json) -> Answered:
    """Return an answer that came in pieces."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    content, reason = [], ""
    for chunk in client.chat.completions.create(**body, stream=True):
        if not chunk.choices:
            continue
        choice = chunk.choices[0]
        reason = choice.finish_reason or reason
        content.append(choice.delta.content or "")
        for call in choice.delta.tool_calls or ():
            if call.function is None:
                continue
            if call.function.name:
                names[call.index] = call.function.name
            arguments.setdefault(call.index, []).append(call.function.arguments or "")
    calls = [(names.get(index, ""), "".join(pieces)) for index, pieces in sorted(arguments.items())]
    return Answered(calls, "".join(content), reason)


def record_of(question: Json, whole: Answered, streamed: Answered) -> Json:
    """Return what is kept of a question's answers."""
    parsed = whole.parsed()
    names = {safe_name(f["name"]) for f in question["function"]}
    known = all(name in names for name, _ in whole.calls)
    ended = whole.finish_reason != "length"  # only a call that is cut short is no JSON object
    return {
        "id": question["id"],
        "category": question["category"],
        "calls": whole.calls,
        "content": whole.content,
        "finish_reason": whole.finish_reason,
        "malformed": ended and (parsed is None or not known or streamed.parsed() is None),
        "same": whole.calls == streamed.calls and whole.content == streamed.content,
        "right": parsed is not None and is_right(question, parsed),
    }


# The run ---------------------------------------------------------------------------------------------


def read_questions(path: Path, categories: Sequence[str], limit: int | None) -> list[Json]:
    """Return the questions; `limit` is for each category. Raises `ConfigError`."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        questions = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    seen: Counter[str] = Counter()
    found = []
    for question in questions:
        seen[question["category"]] += 1
        wanted = not categories or question["category"] in categories
        if wanted and (limit is None or seen[question["category"]] <= limit):
            found.append(question)
    return found


def answered(client: openai.OpenAI, questions: Sequence[Json], args: argparse.Namespace) -> Iterator[Json]:
    """Yield each question's record, kept in the file or made now, some at once."""
    import openai

    kept = _kept(args.out)

    def ask(question: Json) -> tuple[Json, bool]:
        if question["id"] in kept:
            return kept[question["id"]], False
        body = request_of(question, args.model, args.tool_choice)
        try:
            return record_of(question, ask_whole(client, body), ask_streamed(client, body)), True
        except openai.BadRequestError as error:
            return record_of(question, refused := Answered([], str(error), REFUSED), refused), True

    with args.out.open("a", encoding="utf-8") as file, ThreadPoolExecutor(args.in_flight) as pool:
        asked = pool.map(ask, questions)
        for record, new in track(asked, "questions", len(questions), console=Console(stderr=True)):
            if new:
                file.write(json.dumps(record) + "\n")
                file.flush()
            yield record


def _kept(path: Path) -> dict[str, Json]:
    if not path.exists():
        return {}
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {record["id"]: record for record in records}


def table_of(records: Sequence[Json]) -> Table:
    """Return the figures by category."""
    table = Table("category", "questions", "calls", "malformed", "stream differs", "cut short", "refused", "right")
    groups = {name: [r for r in records if r["category"] == name] for name in {r["category"]: 0 for r in records}}
    for name, group in [*groups.items(), ("all", list(records))]:
        right = sum(r["right"] for r in group)
        cells = [
            len(group),
            sum(len(r["calls"]) for r in group),
            sum(r["malformed"] for r in group),
            sum(not r["same"] for r in group),
            sum(r["finish_reason"] == "length" for r in group),
            sum(r["finish_reason"] == REFUSED for r in group),
        ]
        table.add_row(name, *map(str, cells), f"{right} ({right / max(len(group), 1):.1%})")
    return table


def main() -> int:
    """Ask, print the table, and fail if a call was malformed or a stream differed."""
    import openai

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL of the server")
    parser.add_argument("--model", default="default", help="name of the model there")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--data", type=Path, required=True, help="file of questions, JSON lines, may be gzipped")
    parser.add_argument("--out", type=Path, default=Path("bfcl.jsonl"), help="file that keeps the answers")
    parser.add_argument("--limit", type=int, help="questions of each category")
    parser.add_argument("--category", action="append", default=[], help="only this category; may be repeated")
    parser.add_argument("--in-flight", type=int, default=1, help="questions asked at once")
    parser.add_argument("--tool-choice", choices=("auto", "required"), default="auto")
    args = parser.parse_args()
    questions = read_questions(args.data, args.category, args.limit)
    try:
        with openai.OpenAI(base_url=args.url, api_key=args.api_key, timeout=600) as client:
            records = list(answered(client, questions, args))
    except openai.OpenAIError as error:
        raise ConfigError(f"{args.url} did not answer: {error}") from None
    Console().print(table_of(records))
    return int(any(r["malformed"] or not r["same"] for r in records))


if __name__ == "__main__":
    sys.exit(exit_status(main))
