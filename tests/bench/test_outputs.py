"""Files that could not be written in the end are refused before anything is loaded; others are of use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tools.entry import exit_status
from tools.measure import overlap_roofline

from paceline import cli
from paceline.core.errors import ConfigError
from paceline.serve.terminal.output_files import check_file, check_picture

PROMPTS = ["--prompts", "prompts.jsonl"]
COMMANDS = {
    "bench": PROMPTS,
    "profile": [],
    "timeline": [*PROMPTS, "--draft", "draft-model"],
    "compare batches": PROMPTS,
}


def test_what_can_be_written_passes(tmp_path: Path) -> None:
    there = tmp_path / "there.png"
    there.touch()
    for name in (None, "", str(there), str(tmp_path / "new.png"), "/dev/null"):
        check_file("--json", name)
    for name in (None, str(there), str(tmp_path / "new.SVG")):
        check_picture("--plot", name)


@pytest.mark.parametrize("name", ["x.foo", "x", "x.json"])
def test_a_picture_needs_a_name_that_says_its_format(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--plot.*png"):
        check_picture("--plot", str(tmp_path / name))


@pytest.mark.parametrize(
    ("command", "flag", "name"),
    [
        *(("bench", flag, name) for flag in ("--json", "--save-tokens") for name in (".", "/nonexistent/x.json")),
        ("compare batches", "--json", "."),
        ("profile", "--out", "."),
        ("profile", "--out", "/nonexistent/x.json"),
        *(
            (command, "--plot", name)
            for command in ("profile", "timeline", "compare batches")
            for name in (".", "/nonexistent/x.png", "x.foo")
        ),
    ],
)
def test_commands_refuse_them_first(
    command: str, flag: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.engine.assembly.build.load", lambda *_: pytest.fail("it is loading"))
    assert cli.main([*command.split(), *COMMANDS[command], flag, name]) == 2
    assert f"error: {flag}: " in capsys.readouterr().err


def test_bench_refuses_where_it_could_not_draw(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--plot", "b.json", "--out", "b.foo"]) == 2
    assert "error: --out: " in capsys.readouterr().err


def test_modules_tell_in_a_line_what_can_be_mended_before_they_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(lambda: overlap_roofline.main(["--plot", str(tmp_path / "nowhere" / "gains.png")])) == 1
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("error: --plot: cannot write into the folder")
    assert exit_status(lambda: overlap_roofline.main(["--plot", str(tmp_path / "gains.png")])) == 0
    assert (tmp_path / "gains.png").stat().st_size


def test_tokens_that_bench_saved_are_what_the_oracle_drafts(model: Path, prompts: Path, tmp_path: Path) -> None:
    usual = [
        "--model",
        str(model),
        "--prompts",
        str(prompts),
        "--ignore-eos",
        "--max-tokens",
        "24",
        "--threads",
        "1",
    ]
    usual += ["--temperature", "0.8", "--concurrency", "3"]
    plain, again, figures = (tmp_path / name for name in ("plain.jsonl", "again.jsonl", "figures.json"))
    assert cli.main(["bench", *usual, "--draft", "off", "--draft", "ngram", "--save-tokens", str(plain)]) == 0
    oracle = f"oracle:file={plain},k=3"
    asked = ["--draft", oracle, "--json", str(figures), "--save-tokens", str(again)]
    assert cli.main(["bench", *usual, *asked]) == 0
    (run,) = json.loads(figures.read_text())["runs"]
    assert run["accepted_per_position"] == [1.0, 1.0, 1.0]
    texts = [[json.loads(line)["token_ids"] for line in file.read_text().splitlines()] for file in (plain, again)]
    assert texts[0][: len(texts[1])] == texts[1]
