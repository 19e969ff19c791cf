"""Engines that start together: one measures what steps cost, the others wait for it."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TYPE_CHECKING

import pytest

from paceline.control.files import Profile, read_profile, write_profile
from paceline.core.system import file_lock
from paceline.engine.assembly import auto
from paceline.engine.assembly.config import EngineConfig
from tests.engine.same_text import PLAIN, STAIRCASE, make_engine
from tests.serve.test_faults import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.engine.engine import Engine

CONFIG = EngineConfig(draft="auto:suffix")
PROFILE = read_profile(Path(STAIRCASE))
NEVER = pytest.fail


class Measurer:
    """Stands in for `auto.measure`: takes until a test says so, and notes how many measure at once."""

    def __init__(self) -> None:
        self.may_end: Callable[[], bool] = lambda: True
        self.num_measured = self.now = self.most = 0

    def __call__(self, engine: Engine, *_: object, **__: object) -> Profile:
        self.now += 1
        self.most = max(self.most, self.now)
        assert eventually(self.may_end)
        self.now -= 1
        self.num_measured += 1
        suffix = PROFILE.drafters.index("suffix")
        cost = type(PROFILE.cost)(PROFILE.cost.target, PROFILE.cost.drafters[suffix : suffix + 1])  # type: ignore[union-attr,call-arg]
        return Profile(cost, tuple(engine.drafting.drafters))


@pytest.fixture
def measurer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurer:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    measurer = Measurer()
    monkeypatch.setattr(auto, "measure", measurer)
    return measurer


def start(number: int, begin: Barrier | None = None) -> str:
    del number
    engine = make_engine("suffix", PLAIN)
    if begin is not None:
        begin.wait()
    return auto.close_loop(engine, CONFIG, "tiny")


def profiles(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "profiles").iterdir())


def test_of_engines_that_start_together_one_measures_and_the_others_read(
    measurer: Measurer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = "another engine is measuring what steps cost"
    measurer.may_end = lambda: caplog.text.count(waiting) == 2  # the others have asked
    begin = Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(start, range(3), [begin] * 3))
    assert measurer.num_measured == 1
    assert sum("measured now" in s for s in said) == 1
    assert sum("by an engine that started before" in s for s in said) == 2
    assert profiles(tmp_path) == [".json", ".lock"]
    assert "measured on this machine before" in start(3)


def test_the_wait_for_another_engine_has_a_bound_and_says_what_is_waited_for(
    measurer: Measurer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(auto, "LOCK_WAIT_S", 0.3)
    engine, shown = make_engine("suffix", PLAIN), []
    file = auto.profile_file(engine, CONFIG, "tiny")
    file.parent.mkdir(parents=True)
    with file_lock(file.with_suffix(".lock"), 1.0, NEVER) as held:
        assert held
        said = auto.close_loop(engine, CONFIG, "tiny", lambda *progress: shown.append(progress))
    assert "measured now" in said
    assert shown[0] == ("waiting for another engine's measurement", 0, 0)
    assert str(file) in caplog.text


def test_a_cache_that_cannot_be_written_keeps_no_engine_from_starting(
    measurer: Measurer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profiles").write_text("a file where a folder should be")
    assert "measured now" in start(0)
    assert re.search("measured costs are not kept.*File exists", caplog.text), "why there is no folder"


def test_profiles_written_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path, begin = tmp_path / "profile.json", Barrier(8)

    def write(number: int) -> None:
        begin.wait()
        for _ in range(20):
            write_profile(path, Profile(PROFILE.cost, PROFILE.drafters, about={"writer": number}))
            read_profile(path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    assert read_profile(path).about["writer"] in range(8)


def test_a_profile_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, _: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        write_profile(tmp_path / "profile.json", PROFILE)
    assert list(tmp_path.iterdir()) == []
