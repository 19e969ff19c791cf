"""Timelines of a few steps: figures from spans, an engine watched, the command and its picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline import cli
from paceline.backend.pass_thread import PassThread
from paceline.bench.interleave import Question
from paceline.bench.prompt_file import Prompt
from paceline.bench.timeline import DRAFT, STEP, TARGET, Span, Timeline, record, summary
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.core.system import usable_cores
from paceline.engine.overlapped_loop import OverlappedLoop
from tests.engine.same_text import PLAIN, make_engine

if TYPE_CHECKING:
    from pathlib import Path

HOST, OTHER = 1, 2  # threads


def timeline(*spans: tuple[str, float, float, int]) -> Timeline:
    found = Timeline()
    found.spans = [Span(*span) for span in spans]
    return found


SERIAL = timeline(
    *((STEP, 0.0, 6.0, HOST), (DRAFT, 1.0, 2.0, HOST), (TARGET, 2.0, 5.0, HOST), (DRAFT, 5.0, 5.5, HOST)),
    *((STEP, 6.0, 12.0, HOST), (DRAFT, 7.0, 8.0, HOST), (TARGET, 8.0, 11.0, HOST)),
)
OVERLAPPED = timeline(  # a step waits for the pass before it, begins one, drafts beside it
    *((STEP, 0.0, 3.0, HOST), (TARGET, 0.5, 4.0, OTHER), (DRAFT, 1.0, 3.0, HOST)),
    *((STEP, 3.0, 6.5, HOST), (TARGET, 4.0, 8.0, OTHER), (DRAFT, 4.5, 6.5, HOST)),
)


def test_a_cycle_lasts_from_pass_to_pass() -> None:
    (serial,), (cycle,) = SERIAL.cycles(), OVERLAPPED.cycles()
    assert (serial.length_s, serial.verify_s, serial.draft_s) == (6.0, 3.0, 1.5)
    assert (serial.serial, serial.overlapped) == (6.0 / 4.5, 2.0)
    assert (cycle.length_s, cycle.verify_s, cycle.draft_s) == (3.5, 3.5, 2.0)
    assert cycle.overlapped == 1.0
    assert summary([cycle])["serial"] == 3.5 / 5.5
    with pytest.raises(ConfigError, match="--steps"):
        summary([])


def test_host_time_is_a_step_without_its_waits() -> None:
    def pieces(found: Timeline) -> list[tuple[float, float]]:
        return [(span.start_s, span.end_s) for span in found.host()]

    assert pieces(SERIAL) == [(0.0, 1.0), (5.5, 6.0), (6.0, 7.0), (11.0, 12.0)]
    assert pieces(OVERLAPPED) == [(0.0, 1.0), (4.0, 4.5)]


@pytest.mark.parametrize("overlapped", [False, True])
def test_an_engine_is_watched_once_all_decode(overlapped: bool) -> None:
    engine = make_engine("draft-model:model=noisy,k=2", PLAIN)
    if overlapped:
        engine.loop = OverlappedLoop(PassThread("target"), lambda _: True)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    questions = [Question(Prompt(i, "any", ""), Request(str(i), (1, 2, 3 + i), params, i)) for i in range(4)]
    seen = record(engine, questions, 6)
    assert not engine.has_work
    assert len(seen.of(STEP)) == 6
    assert 6 <= len(seen.of(TARGET)) <= 7
    assert len(seen.of(DRAFT)) >= 11, "proposals and commits"
    (host,) = {span.thread for span in seen.of(STEP)}
    assert {span.thread == host for span in seen.of(TARGET)} == {not overlapped}
    assert all(cycle.verify_s > 0 and cycle.draft_s > 0 for cycle in seen.cycles())
    with pytest.raises(ConfigError, match="ended before"):
        record(engine, questions, 70)


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core cannot be shared out")
def test_the_command_prints_both_loops_and_draws_them(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "t.png"
    command = [
        "timeline",
        "--prompts",
        str(prompts),
        "--model",
        str(model),
        "--draft",
        f"draft-model:model={model}",
    ]
    assert cli.main([*command, "--size", "4", "--steps", "8", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "serial, apart" in out
    assert "overlapped" in out
    assert picture.stat().st_size > 0
    assert cli.main([*command, "--size", "1"]) == 2
    assert cli.main([*command, "--steps", "2000"]) == 2
    assert "--steps 2000: with --max-len 2048 it is 117 at most" in capsys.readouterr().err
    assert cli.main([*command, "--steps", "2000", "--max-len", "40000"]) == 2
    assert "answers of 34017 tokens leave no room for prompts in 16384" in capsys.readouterr().err
