"""What was seen of a few steps: figures from spans, an engine watched, the command and its picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from paceline import cli
from paceline.backend.device import usable_cores
from paceline.backend.pending import PassThread
from paceline.bench.prompts import Prompt
from paceline.bench.run import Question
from paceline.bench.timeline import DRAFT, STEP, TARGET, Span, Timeline, record, summary
from paceline.core.errors import ConfigError
from paceline.core.nouns import Request
from paceline.core.params import SamplingParams
from paceline.engine.overlap import OverlappedLoop
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
TURNS = timeline(  # a step waits for the pass before it, begins one, drafts beside it
    *((STEP, 0.0, 3.0, HOST), (TARGET, 0.5, 4.0, OTHER), (DRAFT, 1.0, 3.0, HOST)),
    *((STEP, 3.0, 6.5, HOST), (TARGET, 4.0, 8.0, OTHER), (DRAFT, 4.5, 6.5, HOST)),
)


def test_a_turn_lasts_from_pass_to_pass() -> None:
    (serial,), (turn,) = SERIAL.turns(), TURNS.turns()
    assert (serial.length_s, serial.verify_s, serial.draft_s) == (6.0, 3.0, 1.5)
    assert (serial.serial, serial.overlapped) == (6.0 / 4.5, 2.0)
    assert (turn.length_s, turn.verify_s, turn.draft_s) == (3.5, 3.5, 2.0)
    assert turn.overlapped == 1.0
    assert summary([turn])["serial"] == 3.5 / 5.5
    with pytest.raises(ConfigError, match="--steps"):
        summary([])


def test_the_host_works_where_it_waits_for_nobody() -> None:
    def pieces(found: Timeline) -> list[tuple[float, float]]:
        return [(span.start_s, span.end_s) for span in found.host()]

    assert pieces(SERIAL) == [(0.0, 1.0), (5.5, 6.0), (6.0, 7.0), (11.0, 12.0)]
    assert pieces(TURNS) == [(0.0, 1.0), (4.0, 4.5)]


@pytest.mark.parametrize("turns", [False, True])
def test_an_engine_is_watched_once_all_decode(turns: bool) -> None:
    engine = make_engine("draft-model:model=noisy,k=2", PLAIN)
    if turns:
        engine.loop = OverlappedLoop(PassThread("target"), lambda _: True)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    asked = [Question(Prompt(i, "any", ""), Request(str(i), (1, 2, 3 + i), params, i)) for i in range(4)]
    seen = record(engine, asked, 6)
    assert not engine.has_work
    assert len(seen.of(STEP)) == 6
    assert 6 <= len(seen.of(TARGET)) <= 7
    assert len(seen.of(DRAFT)) >= 11, "proposals and commits"
    (host,) = {span.thread for span in seen.of(STEP)}
    assert {span.thread == host for span in seen.of(TARGET)} == {not turns}
    assert all(turn.verify_s > 0 and turn.draft_s > 0 for turn in seen.turns())
    with pytest.raises(ConfigError, match="ended before"):
        record(engine, asked, 70)


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
    assert "in turns" in out
    assert picture.stat().st_size > 0
    assert cli.main([*command, "--size", "1"]) == 2
    assert cli.main([*command, "--steps", "2000"]) == 2
    assert "--steps 2000: with --max-len 2048 it is 117 at most" in capsys.readouterr().err
    assert cli.main([*command, "--steps", "2000", "--max-len", "40000"]) == 2
    assert "answers of 34017 tokens leave no room for prompts in 16384" in capsys.readouterr().err
