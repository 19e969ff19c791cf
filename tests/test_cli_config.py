"""Options from a file: what wins, what is refused, what is printed; completions; models that are here."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paceline import cli
from paceline.core.config_file import as_toml, config_path
from paceline.core.errors import ConfigError
from paceline.serve.terminal.model_commands import _agreed

COMMAND = [sys.executable, "-m", "paceline.cli"]


def parsed(
    path: Path | None, name: str, argv: list[str], environ: dict[str, str] | None = None
) -> dict[str, object]:
    given = [*argv, *(["--config", str(path)] if path else [])]
    section = cli._section(name, given, environ or {})
    return vars(cli.parse(cli.parser_of(name), given, environ or {}, section))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.toml"
    path.write_text(
        "[serve]\nport = 1234\nmax-rows = 8\nmax_len = 512\nprefix-cache = false\ninsecure = true\n"
        'served-model-name = ["a", "b"]\n[generate]\nstop = ["x y", "z"]\ntemperature = 0.5\n'
        "[bench]\nrepeat = 3\n[bench.kernels]\n[train.eagle3]\n"
    )
    return path


def test_a_file_is_below_the_environment_and_that_below_the_command_line(file: Path) -> None:
    found = parsed(file, "serve", [])
    assert (found["port"], found["num_rows" if "num_rows" in found else "max_rows"], found["max_len"]) == (
        1234,
        8,
        512,
    )
    assert found["prefix_cache"] is False
    assert found["insecure"] is True
    assert found["served_model_name"] == ["a", "b"]
    environ = {"PACELINE_PORT": "9", "PACELINE_MAX_ROWS": "9", "PACELINE_PREFIX_CACHE": "1"}
    found = parsed(file, "serve", ["--port", "7"], environ)
    assert (found["port"], found["max_rows"], found["max_len"], found["prefix_cache"]) == (7, 9, 512, True)


def test_the_environment_turns_off_what_the_file_turns_on(file: Path) -> None:
    assert parsed(file, "serve", [], {"PACELINE_INSECURE": "0"})["insecure"] is False
    assert parsed(file, "serve", ["--insecure"], {"PACELINE_INSECURE": "0"})["insecure"] is True


def test_a_list_further_up_replaces_that_of_the_file(file: Path) -> None:
    assert parsed(file, "generate", [])["stop"] == ["x y", "z"]
    assert parsed(file, "generate", ["--stop", "q"])["stop"] == ["q"]
    assert parsed(file, "generate", [], {"PACELINE_STOP": "e f"})["stop"] == ["e", "f"]
    assert parsed(file, "bench", [])["repeat"] == 3
    assert parsed(file, "bench kernels", [])


def test_the_file_is_the_one_asked_for_or_the_usual_one(file: Path, tmp_path: Path) -> None:
    usual = tmp_path / "paceline" / "config.toml"
    assert config_path([], {"XDG_CONFIG_HOME": str(tmp_path)}) is None
    usual.parent.mkdir()
    usual.write_text("")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert config_path([], environ) == usual
    assert config_path([f"--config={file}"], environ | {"PACELINE_CONFIG": "no"}) == file
    assert config_path([], environ | {"PACELINE_CONFIG": str(file)}) == file
    with pytest.raises(ConfigError, match="PACELINE_CONFIG: there is no file 'no'"):
        config_path([], environ | {"PACELINE_CONFIG": "no"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[serve]\nprot = 1", "has no option 'prot'; did you mean 'port'"),
        ("[srve]\nport = 1", "no command 'srve'; did you mean 'serve'"),
        ("port = 1", "no command 'port'"),
        ("serve = 1", r"must be a section, \[serve\]"),
        ("[serve]\nport = true", "port must be a text or a number"),
        ('[serve]\nport = "many"', "port must be int, not 'many'"),
        ("[serve]\nport = [1]", "port takes one value"),
        ("[serve]\ninsecure = 1", "insecure must be true or false"),
        ('[serve]\nunknown-fields = "eat"', "unknown-fields is one of refuse, warn"),
        ('[serve]\nconfig = "x"', "has no option 'config'"),
        ("[serve.fast]\nport = 1", "no command 'serve fast'"),
        ("[train.eagl3]\n", "no command 'train eagl3'; did you mean 'train "),
        ("[train]\nfoo = 1", "no command 'train foo'"),
        ("[fleet]\ndrain = 1", r"fleet drain must be a section, \[fleet.drain\]"),
        ("[serve]\n" + "x" * 99 + " = 1", "is no option"),
        ("[serve", "is no TOML file"),
        ("\0", "is no TOML file"),
    ],
)
def test_a_file_that_says_what_is_not_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        parsed(path, "serve", [])


def test_what_is_printed_can_be_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["serve", "--config", str(file), "--api-key", "secret", "--model", 'a "b" \\ é']
    assert cli.main([*argv, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "secret" not in printed
    assert f"port = 1234  # {file}" in printed
    assert "max-open = 1024  # default" in printed
    assert "# api-key =  # command line" in printed
    values = tomllib.loads(printed)["serve"]
    assert values["model"] == 'a "b" \\ é'
    file.write_text(printed)
    found = parsed(file, "serve", [])
    assert found["served_model_name"] == ["a", "b"]
    assert found["api_key"] is None  # no stand-in, which would be a key that anyone can guess


def test_what_is_printed_without_options_can_be_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, printed = tmp_path / "empty.toml", tmp_path / "printed.toml"
    empty.write_text("")
    assert cli.main(["serve", "--config", str(empty), "--print-config"]) == 0
    printed.write_text(capsys.readouterr().out)
    assert parsed(printed, "serve", []) | {"config": None} == parsed(empty, "serve", []) | {"config": None}


@pytest.mark.parametrize("value", ["", "a\x7fb\n\"'\\", "é\u2028", 0.5, 7, True, ["a", 1], ("x",)])
def test_values_survive_toml(value: object) -> None:
    wanted = list(value) if isinstance(value, tuple) else value
    assert tomllib.loads(f"x = {as_toml(value)}")["x"] == wanted


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completions_know_commands_and_flags(shell: str, tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, "completion", shell], capture_output=True, text=True, check=True, timeout=120)
    assert "eagle3" in done.stdout
    assert "watchdog-seconds" in done.stdout
    if shell == "bash":
        path = tmp_path / "paceline"
        path.write_text(done.stdout)
        code = (
            f"source {path}; COMP_WORDS=(paceline serve --watch); COMP_CWORD=2; "
            '$(complete -p paceline | sed "s/.*-F \\([^ ]*\\).*/\\1/") paceline; echo "${COMPREPLY[@]}"'
        )
        said = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=240)
        assert "--watchdog-seconds" in said.stdout


def test_models_that_are_here_are_listed_and_removed(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"x" * 2_000_000)
    (models / "mine.gguf").write_bytes(b"y" * 1_000_000)
    (models / ".qwen2.5-coder-0.5b-instruct-q4_k_m.gguf.partial").write_bytes(b"z" * 49_140_006)
    environ = os.environ | {"PACELINE_CACHE": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}

    def paceline(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *argv], capture_output=True, text=True, check=False, env=environ, stdin=subprocess.DEVNULL
        )

    with (models / "mine.gguf").open("rb"):
        rows = {row["name"]: row for row in map(json.loads, paceline("list", "--json").stdout.splitlines())}
        assert rows["mine"]["used_by"] == [os.getpid()]
    assert rows["default"]["bytes"] == 2_000_000
    assert rows["qwen2.5-coder-0.5b"]["note"] == "10% fetched"
    shown = paceline("list").stdout
    assert "2 MB" in shown
    assert "paceline pull qwen2.5-coder-1.5b: 1" in shown
    refused = paceline("rm", "mine")
    assert (refused.returncode, "say --yes" in refused.stderr) == (2, True)
    assert "did you mean 'mine'" in paceline("rm", "mien").stderr
    assert paceline("rm", "mine", "--yes").stdout.startswith("removed mine, 1 MB")
    assert paceline("rm", "qwen2.5-coder-0.5b", "--yes").returncode == 0
    assert [path.name for path in models.iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_the_end_of_the_input_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert not _agreed("mine")


class Terminal(io.StringIO):
    """A terminal at which Ctrl-D is pressed."""

    def isatty(self) -> bool:
        return True
