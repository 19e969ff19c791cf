"""The rules of the documentation: short, plain, true to the tree and to the commands."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from paceline import cli
from paceline.backend import registry as backend_registry
from paceline.core.errors import ConfigError
from paceline.draft import registry
from paceline.draft.drafter import Drafter
from tests.decode_path import DRAFTS, decode_path
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
TOUR = ROOT / "docs/tour.md"
PACKAGE = ROOT / "src" / "paceline"
README = ROOT / "README.md"
ALL = [
    README,
    *sorted(ROOT.glob("[A-Z]*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "training/README.md",
]
ALL += sorted(PACKAGE.glob("drafters/*/*/README.md"))
ALL = list(dict.fromkeys(ALL))
NOT_LAB = [path for path in ALL if "docs/lab" not in path.as_posix()]
PLAIN = [path for path in NOT_LAB if "docs/results" not in path.as_posix()]  # whose prose and commands are checked
MAX_README_WORDS, MAX_SENTENCE_WORDS, MAX_PARAGRAPH_WORDS, MAX_LINE = 900, 20, 80, 120

TOP = ("src/", "csrc/", "tests/", "tools/", "scripts/", "docs/", "examples/", "training/", ".ci/")
ROOMS = tuple(f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("_"))
FENCE, ITEM, TABLE = re.compile(r"^\s*```"), re.compile(r"^\s*(?:[-*]|\d+\.)\s+"), re.compile(r"^\s*\|")
LINK, CODE = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)"), re.compile(r"`([^`]+)`")
NEW_FILE = re.compile(r"<!-- new-file: (\S+) -->")  # a path that a tutorial lets the reader make
COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,12}\b")
PLACEHOLDERS = re.compile(r"[A-Z]{3}[A-Z_]*(?![A-Za-z.])|[*<{…]|\.\.\.")


# What a page says ---------------------------------------------------------------------------------


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) outside of fenced code."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            yield number, line


def code_lines(text: str) -> Iterator[str]:
    """Yield the lines of fenced code, continued ones joined."""
    inside, held = False, ""
    for line in text.splitlines():
        if FENCE.match(line):
            inside = not inside
        elif inside:
            held += line
            if held.endswith("\\"):
                held = held[:-1]
                continue
            yield held
            held = ""


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield (first line, text) of every paragraph and list item; no headings, tables or comments."""
    start, held = 0, []
    for number, line in [*prose_lines(text), (0, "")]:
        breaks = not line.strip() or ITEM.match(line) or line.startswith(("#", "<!--")) or TABLE.match(line)
        if breaks and held:
            yield start, " ".join(held)
            held = []
        if line.strip() and not line.startswith(("#", "<!--")) and not TABLE.match(line):
            start = start if held else number
            held.append(ITEM.sub("", line).strip())


def words(paragraph: str) -> int:
    return len(LINK.sub(r"\1", paragraph).split())


def sentences(paragraph: str) -> list[str]:
    return re.split(r"(?<=[.!?])[)\"*]*\s+(?=[A-Z0-9`*\[(\"])", paragraph)


# Rules: page -> what is wrong ---------------------------------------------------------------------


def long_readme(text: str, path: Path = README) -> list[str]:
    count = len(text.split())
    return [f"{count} words"] if count > MAX_README_WORDS else []


def long_sentences(text: str, path: Path = README) -> list[str]:
    """The average is what counts: one long sentence among short ones is no harm."""
    lengths = [words(s) for _, paragraph in paragraphs(text) for s in sentences(paragraph)]
    average = sum(lengths) / max(1, len(lengths))
    return [f"{average:.1f} words a sentence"] if average > MAX_SENTENCE_WORDS else []


def long_paragraphs(text: str, path: Path = README) -> list[str]:
    counts = [(line, words(paragraph)) for line, paragraph in paragraphs(text)]
    return [f"{line}: a paragraph of {count} words" for line, count in counts if count > MAX_PARAGRAPH_WORDS]


def long_lines(text: str, path: Path = README) -> list[str]:
    return [
        f"{number}: {len(line)} characters"
        for number, line in prose_lines(text)
        if len(line) > MAX_LINE and not TABLE.match(line)
    ]


def commit_hashes(text: str, path: Path = README) -> list[str]:
    return [f"{n}: commit {found}" for n, line in prose_lines(text) for found in COMMIT.findall(line)]


def foreign_data(text: str, path: Path = README) -> list[str]:
    return ["names ../shared, which no user has"] if "../shared" in text else []


def broken_links(text: str, path: Path = README) -> list[str]:
    found = []
    for number, line in prose_lines(text):
        for _, target in LINK.findall(CODE.sub("", line)):
            name, _, anchor = target.partition("#")
            if ":" in name:
                continue
            page = (path.parent / name).resolve() if name else path
            if not page.exists():
                found.append(f"{number}: {target} is not there")
            elif anchor and anchor not in _anchors(text if page == path else page.read_text(encoding="utf-8")):
                found.append(f"{number}: no section #{anchor}")
    return found


def _anchors(text: str) -> set[str]:
    headings = [line.lstrip("#").strip() for _, line in prose_lines(text) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", LINK.sub(r"\1", h).lower()).replace(" ", "-") for h in headings}


def missing_paths(text: str, path: Path = README) -> list[str]:
    """Files and folders of the project named in code spans or in fenced code that are not there."""
    new = set(NEW_FILE.findall(text))
    spans = [word for _, line in prose_lines(text) for span in CODE.findall(line) for word in span.split()]
    fenced = [word for line in code_lines(text) for word in line.split()]
    named = {word.strip("`,;:()'\"").partition("#")[0].partition("::")[0] for word in (*spans, *fenced)}
    return [f"{name} is not there" for name in sorted(named - new) if _is_path(name) and not _exists(name)]


def _is_path(name: str) -> bool:
    short = name.startswith(ROOMS) and name.endswith((".py", "/"))
    return (name.startswith(TOP) or short) and not PLACEHOLDERS.search(name)


def _exists(name: str) -> bool:
    name = re.sub(r":\d+$", "", name)
    return (ROOT / name).exists() or (PACKAGE / name).exists()


def wrong_commands(text: str, path: Path = README) -> list[str]:
    """Commands of `paceline` that do not exist, or whose flags their parser does not take."""
    spans = [span for _, line in prose_lines(text) for span in CODE.findall(line)]
    said = [line for line in (*code_lines(text), *spans) if line.startswith("paceline ")]
    return [f"{line}: {problem}" for line in said if (problem := _refused(line))]


def _refused(line: str) -> str | None:
    argv = shlex.split(re.split(r"\s[|&>]\s?", line)[0], comments=True)[1:]
    if argv[0].startswith("-") or PLACEHOLDERS.fullmatch(argv[0]):
        return None
    size = 2 if " ".join(argv[:2]) in cli.COMMANDS else 1
    name, rest = " ".join(argv[:size]), [a for a in argv[size:] if a != "--help"]
    if not rest and any(known == name or known.startswith(f"{name} ") for known in cli.COMMANDS):
        return None  # it is only named
    if name not in cli.COMMANDS:
        return "no such command"
    try:
        cli.parse(_parser(name), rest, {})
    except ConfigError as error:
        return str(error)
    return None


def _parser(name: str) -> argparse.ArgumentParser:
    return cli.parser_of(name)


@functools.cache
def _known_flags() -> frozenset[str]:
    parsers = [_parser(name) for name in cli.COMMANDS]
    own = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    return frozenset(own | {"--help", "--version"})


def unknown_flags(text: str, path: Path = README) -> list[str]:
    """Flags in code spans of a guide that no command has."""
    spans = [span for _, line in prose_lines(text) for span in CODE.findall(line) if span.startswith("--")]
    return [f"{span}: no command has it" for span in spans if re.split(r"[ =]", span)[0] not in _known_flags()]


# The rules hold -----------------------------------------------------------------------------------

GUIDES = [README, *sorted((ROOT / "docs/guide").glob("*.md"))]
RULES: list[tuple[Callable[[str, Path], list[str]], list[Path]]] = [
    (long_readme, [README]),
    (long_sentences, PLAIN),
    (long_paragraphs, PLAIN),
    (long_lines, NOT_LAB),
    (commit_hashes, PLAIN),
    (foreign_data, PLAIN),
    (broken_links, ALL),
    (missing_paths, NOT_LAB),
    (wrong_commands, PLAIN),
    (unknown_flags, GUIDES),
]


@pytest.mark.parametrize(
    ("rule", "path"),
    [pytest.param(r, p, id=f"{r.__name__}-{p.relative_to(ROOT)}") for r, pages in RULES for p in pages],
)
def test_page_keeps_the_rule(rule, path):
    assert rule(path.read_text(encoding="utf-8"), path) == []


def test_every_page_is_reached_from_the_readme():
    """By links, from page to page."""
    reached, todo = set(), [README]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = [t.partition("#")[0] for _, t in LINK.findall(page.read_text(encoding="utf-8"))]
        todo += [(page.parent / t).resolve() for t in targets if t and ":" not in t]
    assert {p for p in (ROOT / "docs").rglob("*.md") if p not in reached} == set()


def test_the_drafter_of_the_tutorial_runs(tmp_path, monkeypatch):
    text = (ROOT / "docs/develop/add-a-drafter.md").read_text(encoding="utf-8")
    code, line = re.search(r"```python\n(.*?)```", text, re.DOTALL), re.search(r'"repeat": "(\S+)",', text)
    (tmp_path / "repeat_drafter.py").write_text(code[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    class_name = line[1].partition(":")[2]
    monkeypatch.setitem(registry.DRAFTERS, "repeat", f"repeat_drafter:{class_name}")
    config = registry.parse_spec("repeat:k=3")
    drafter = config.build(SimpleNamespace(rows=SimpleNamespace(tokens=lambda row: [5, 6, 7 + row])), None)
    batch = SimpleNamespace(rows=[SimpleNamespace(row=row, max_drafts=row) for row in range(3)])
    draft = drafter.propose(batch, SimpleNamespace(k=lambda row: config.k))
    assert [list(row.token_ids) for row in draft.rows] == [[], [8], [9, 9]]
    seam = {name for name in vars(Drafter) if not name.startswith("_")} | set(Drafter.__annotations__)
    assert {name for name in seam if not hasattr(drafter, name)} == set()
    with pytest.raises(ConfigError, match="between 1 and"):
        registry.parse_spec("repeat:k=0")


def test_the_backend_of_the_tutorial_loads(tmp_path, monkeypatch):
    text = (ROOT / "docs/develop/add-a-backend.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"`src/paceline/backend/(mine/\w+\.py)`:\n\n```python\n(.*?)```", text, re.DOTALL))
    (tmp_path / "mine").mkdir()
    for file, code in files.items():
        (tmp_path / file).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    entry = re.search(r"^ +BackendSpec\((.*?)^ +\),", text, re.DOTALL | re.MULTILINE)
    spec = eval(f"BackendSpec({entry[1]})".replace("paceline.backend.mine", "mine"), vars(backend_registry))
    config = tiny_config(num_layers=1)
    decoder = spec.load()(config, tiny_weights(config), spec.weight_type(None), spec.kv_type(None, "f32"), None)
    assert decoder.name == spec.name == "mine"
    assert spec.load_head(1)
    assert spec.load_cut_model(1)


def listed_paths(text: str) -> dict[str, list[str]]:
    """Return the files that the tour lists for each way of drafting."""
    found = re.findall(r"<!-- decode-path:(\w+) -->\n```\n(.*?)```\n<!-- /", text, re.DOTALL)
    return {name: listed.split() for name, listed in found}


def list_paths(text: str) -> str:
    """Return the tour with lists of the files that run now."""
    for name, draft in PATHS.items():
        mark, lines = f"decode-path:{name} -->\n", "".join(f"{file}\n" for file in decode_path(draft))
        text = re.sub(f"(<!-- {mark}```\n).*?(```\n<!-- /{mark})", rf"\g<1>{lines}\g<2>", text, flags=re.DOTALL)
    return text


PATHS = dict(zip(("off", "fixed", "auto"), DRAFTS, strict=True))  # name of a list in the tour -> `--draft`


@pytest.mark.parametrize("name", PATHS)
def test_the_tour_lists_every_file_of_a_decode_step(name):
    """If it fails, see whether the step must touch a new file; then `python -m tests.test_docs`."""
    ran, listed = decode_path(PATHS[name]), listed_paths(TOUR.read_text(encoding="utf-8"))[name]
    assert set(ran) - set(listed) == set()


def test_a_file_that_the_tour_does_not_list_is_found():
    text = list_paths(TOUR.read_text(encoding="utf-8"))
    assert listed_paths(text) == {name: decode_path(draft) for name, draft in PATHS.items()}
    assert "engine/step.py" in listed_paths(text)["off"]


# The rules can fail -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (long_readme, "word " * 901),
        (long_sentences, "word " * 21 + "end."),
        (long_sentences, "- " + "word " * 30 + "end.\n- " + "word " * 14 + "end."),
        (long_paragraphs, "One two three four.\n" * 21),
        (long_paragraphs, "1. " + "One two three four.\n   " * 21),
        (long_lines, "x" * 121),
        (commit_hashes, "as of 7cc5b82 it was"),
        (foreign_data, "```\npaceline bench --prompts ../shared/data/x.jsonl\n```"),
        (broken_links, "[there](docs/nowhere.md)"),
        (broken_links, "[there](#nowhere)\n\n# Somewhere"),
        (broken_links, "![a picture](docs/nowhere.png)"),
        (missing_paths, "see `src/paceline/nowhere.py`"),
        (missing_paths, "see `control/nowhere.py`"),
        (missing_paths, "```\nscripts/nowhere --fast\n```"),
        (wrong_commands, "```\npaceline dance\n```"),
        (wrong_commands, "run `paceline dance` now"),
        (wrong_commands, "```\npaceline bench --prompts builtin \\\n    --loudly\n```"),
        (wrong_commands, "```\npaceline bench --limit many  # a comment\n```"),
        (unknown_flags, "give `--loudly 3` to it"),
    ],
)
def test_rule_finds(rule, text):
    assert rule(text, README)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (long_sentences, "word " * 15 + "end. " + "Word " * 15 + "end. | a table\n\n| " + "word " * 90),
        (long_sentences, "```\n" + "word " * 90 + "\n```"),
        (long_paragraphs, "- One two three.\n" * 40),
        (long_lines, "| " + "x" * 121 + " |\n```\n" + "x" * 121 + "\n```"),
        (commit_hashes, "1234567 tokens, effaced, a `--seed 7`"),
        (broken_links, "[there](#some-where), [out](https://example.org/x)\n\n# Some, where"),
        (missing_paths, "`src/paceline/drafters/TARGET/NAME`, `csrc/`, `core/nouns.py`, `heads/mine`"),
        (missing_paths, "<!-- new-file: src/paceline/draft/mine.py -->\n`src/paceline/draft/mine.py`"),
        (wrong_commands, "```\npaceline bench --prompts builtin --limit 8 > out.txt | cat\n```"),
        (wrong_commands, "`paceline train eagle3`, `paceline COMMAND --help`, `paceline --version`"),
        (unknown_flags, "`--draft eagle3:k=4` and `--seed=3`"),
    ],
)
def test_rule_spares(rule, text):
    assert rule(text, README) == []


if __name__ == "__main__":
    TOUR.write_text(list_paths(TOUR.read_text(encoding="utf-8")), encoding="utf-8")
