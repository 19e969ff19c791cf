"""The command line as a user meets it: processes, exit codes, what is written where."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from paceline import __version__, cli, kernels
from paceline.backend.registry import BACKENDS
from paceline.bench import kernel_bench
from paceline.core.errors import ConfigError

COMMAND = [sys.executable, "-c", "from paceline.cli import main; raise SystemExit(main())"]


def paceline(*arguments, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_") or k == "PACELINE_CACHE"}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=clean | {"OMP_NUM_THREADS": "1"} | environment,
    )


def test_help_names_every_command_and_imports_none_of_them():
    code = (
        "import sys; from paceline.cli import main; main(['--help']); print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert all(name in done.stdout for name in cli.COMMANDS)
    assert done.stdout.endswith("set()\n")


OF_FLEETS = ("fleet", "fleet drain", "fleet move")
WITHOUT_MODEL = ("pull", "explain", "simulate", "list", "rm", "completion", "key new", "train plot", *OF_FLEETS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_each_command_explains_its_flags(name):
    done = paceline(name, "--help")
    assert done.returncode == 0, done.stderr
    assert name in WITHOUT_MODEL or "PACELINE_MODEL" in done.stdout


def test_help_does_not_wait_for_torch():
    modules = [cli.COMMANDS[name][0].partition(":")[0] for name in ("serve", "bench", "pull", "doctor")]
    code = f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["srve"], "did you mean 'serve'?"),
        (["bench", "--drfat", "off"], "did you mean '--draft'?"),
        (["bench", "--drfat=off"], "did you mean '--draft'?"),
        (["bench", "--repeat", "x"], "invalid int value"),
        (["bench", "--prompts", "missing.jsonl"], "hemingkx/Spec-Bench"),
        (["doctor", "--draft-device", "cpu:x"], "cpu:2-3"),
        (["bench", "--request-rate", "3"], "--url"),
        (["bench", "--url", "x", "--request-rate", "3", "--concurrency", "4"], "leave out --concurrency"),
        (["bench", "--limit", "0"], "--limit"),
        (["doctor", "--draft", "ngrm"], "did you mean 'ngram'?"),
        (["doctor", "--kv", "float16"], "--kv"),
        (["pull", "no such model"], "no model"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments, said):
    done = paceline(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_debug_shows_where_an_error_came_from():
    assert "Traceback" in paceline("srve", PACELINE_DEBUG="1").stderr


def test_version():
    said = paceline("--version").stdout
    assert said.startswith(f"paceline {__version__}")
    assert said.endswith(f", {kernels.isa()}, backends {', '.join(BACKENDS)}\n")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve"], "interrupted\n"),
        ([], "interrupted\n"),
        (["train", "eagle3"], "interrupted; the same command goes on where it stopped\n"),
        (["compare", "day"], "interrupted; the same command goes on where it stopped\n"),
    ],
)
def test_interrupt(monkeypatch, capsys, argv, said):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_main", interrupted)
    assert cli.main(argv) == 130
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("locale", ["C.UTF-8", "C"])
def test_input_that_is_not_utf_8_is_refused_in_one_line(model, locale):
    options = ["--model", str(model), "--draft", "off", "--threads", "1", "--max-len", "512"]
    for command, given in (("generate", b"caf\xe9"), ("chat", b"caf\xe9\n")):
        done = subprocess.run(
            [*COMMAND, command, *options],
            input=given,
            capture_output=True,
            timeout=240,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1", "LC_ALL": locale},
        )
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == b"error: standard input is not UTF-8"
        assert b"Traceback" not in done.stderr


def test_output_that_cannot_say_everything_escapes_it_as_json_does(model):
    options = ["--model", model, "--draft", "off", "--threads", "1", "--max-len", "512", "--seed", "1"]
    asked = ["generate", "the", *options, "--temperature", "9", "--max-tokens", "60"]
    for flags in ([], ["--json"]):
        plain, escaped = (
            paceline(*asked, *flags, PYTHONIOENCODING=encoding, PYTHONUTF8="0") for encoding in ("utf-8", "ascii")
        )
        assert (plain.returncode, escaped.returncode) == (0, 0), escaped.stderr
        assert not plain.stdout.isascii()
        assert escaped.stdout.isascii()
        if flags:
            assert json.loads(escaped.stdout)["text"] == json.loads(plain.stdout)["text"]


def test_the_overview_keeps_names_and_what_they_do_apart(capsys):
    cli.main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name, (_, about) in cli.COMMANDS.items():
        assert any(line.startswith(f"  {name}  ") and line.endswith(f" {about}") for line in lines)


# Environment -------------------------------------------------------------------------------------


def parsed(argv, **environment):
    from paceline.bench import bench_command

    parser = cli._Parser(prog="paceline bench", allow_abbrev=False)
    bench_command.add_arguments(parser)
    return cli.parse(parser, list(argv), {f"PACELINE_{k}": v for k, v in environment.items()})


def test_flags_come_from_the_environment_and_the_command_line_wins():
    args = parsed(["--repeat", "3"], REPEAT="2", MAX_TOKENS="9", WARM="1", PREFIX_CACHE="0", TOP_P="0.5")
    assert (args.repeat, args.max_tokens, args.warm, args.prefix_cache, args.top_p) == (3, 9, True, False, 0.5)
    assert parsed(["--prefix-cache"], PREFIX_CACHE="off").prefix_cache is True
    assert parsed([], WARM="0").warm is False


def test_a_list_on_the_command_line_replaces_that_of_the_environment():
    assert parsed([], DRAFT="off ngram:k=4").draft == ["off", "ngram:k=4"]
    assert parsed(["--draft", "off"], DRAFT="ngram").draft == ["off"]


@pytest.mark.parametrize("environment", [{"WARM": "maybe"}, {"REPEAT": "x"}, {"OVERLAP": "sometimes"}])
def test_the_environment_is_checked_too(environment):
    with pytest.raises(ConfigError):
        parsed([], **environment)


def test_a_list_in_the_environment_that_does_not_end_is_named():
    with pytest.raises(ConfigError, match='PACELINE_DRAFT: no closing quotation in "it\'s"; write'):
        parsed([], DRAFT="it's")


# Commands on a tiny model ------------------------------------------------------------------------


def test_bench_end_to_end(model, prompts, tmp_path):
    out, tokens = tmp_path / "b.json", tmp_path / "t.jsonl"
    drafts = ["--draft", "ngram:k=3", "--draft", "off", "--draft", "draft-model:layers=1,k=2"]
    arguments = ["--prompts", prompts, "--model", model, "--max-tokens", 40, "--concurrency", "1,4", "--repeat", 2]
    weights = ["--weights", "f32", "--json", out, "--save-tokens", tokens, "--temperature", "0.7"]
    done = paceline("bench", *arguments, *drafts, *weights)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1].startswith("off")
    assert any("rag" in line for line in lines)
    _check_document(json.loads(out.read_text()))
    _check_tokens([json.loads(line) for line in tokens.read_text().splitlines()])
    picture = tmp_path / "b.png"
    assert paceline("bench", "--plot", out, "--out", picture).returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def _check_document(document):
    assert set(document) == {
        "schema",
        "command",
        "git",
        "version",
        "machine",
        "model",
        "backend",
        "runs",
        "summary",
    }
    assert document["schema"] == 1
    order = [(r["concurrency"], r["repeat"], r["draft"]) for r in document["runs"]]
    drafts = ("ngram:k=3", "off", "draft-model:layers=1,k=2")
    assert order == [(c, r, d) for c in (1, 4) for r in (0, 1) for d in drafts]
    for run in document["runs"]:
        assert run["requests"] == 9
        assert set(run["by_category"]) == {"writing", "qa", "rag"}
        assert sum(c["output_tokens"] for c in run["by_category"].values()) == run["output_tokens"]
        assert run["output_tokens_per_s"] > 0
        assert run["accepted_tokens"] <= run["verified_tokens"] <= run["drafted_tokens"]
        passes = sum(run["k_histogram"])
        assert run["acceptance_length"] == pytest.approx((run["output_tokens"] - 9) / passes)
        assert (run["drafted_tokens"] == 0) == (run["draft"] == "off")
    assert len(document["summary"]) == 6
    assert all(s["speedup"]["low"] <= s["speedup"]["median"] <= s["speedup"]["high"] for s in document["summary"])


def _check_tokens(lines):
    """Same seed, same text: drafter, concurrency and repeat change nothing."""
    assert len(lines) == 9 * 12
    texts = {}
    for line in lines:
        texts.setdefault(line["question_id"], set()).add(tuple(line["token_ids"]))
    assert len(texts) == 9
    assert all(len(different) == 1 for different in texts.values())
    assert len({next(iter(t)) for t in texts.values()}) > 1


def test_doctor(model, tmp_path):
    done = paceline("doctor", "--model", model, "--max-len", "512")
    assert done.returncode == 0, done.stderr
    assert "Verdict: it works" in done.stdout
    assert "tokens/s" in done.stdout
    assert "20 prompts, greedy" in done.stdout
    checked = paceline("doctor", "--model", model, "--no-measure", "--max-len", "512", "--draft", "off")
    assert checked.returncode == 0
    assert "tokens/s" not in checked.stdout
    missing = paceline("doctor", "--model", tmp_path, "--no-measure")
    assert missing.returncode == 1
    assert "FAIL" in missing.stdout


def test_doctor_refuses_layers_the_target_does_not_have(model):
    done = paceline(
        "doctor", "--model", model, "--no-measure", "--max-len", "512", "--draft", "draft-model:layers=99"
    )
    assert done.returncode == 1
    assert "layers" in done.stdout


def test_pull_of_a_folder_looks_whether_it_can_be_used(model, tmp_path):
    assert paceline("pull", model).stdout.strip() == str(model)
    assert paceline("pull", tmp_path).returncode == 2


def test_kernels_are_measured_against_the_machine(model, monkeypatch, capsys):
    monkeypatch.setattr(kernel_bench, "COLD_BYTES", 1 << 16)
    assert cli.main(["bench", "kernels", "--model", str(model), "--threads", "1", "--repeat", "1"]) == 0
    shown = capsys.readouterr().out
    for words in ("GB/s", "times its floor", "whole passes", "64 rows"):
        assert words in shown
