"""Names of builds, free memory, and waits before restarts."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

from paceline.core import system
from paceline.core.system import FIRST_WAIT_S, MAX_WAIT_S, STEADY_S, RestartBackoff, commit_of

if TYPE_CHECKING:
    from pathlib import Path


def git(folder: Path, *arguments: str) -> None:
    someone = ("-c", "user.name=someone", "-c", "user.email=someone@localhost")
    subprocess.run(["git", *someone, *arguments], cwd=folder, check=True, capture_output=True)


def test_changed_builds_of_one_commit_have_names_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "code"
    git(tmp_path, "init")
    file.write_text("as it was")
    git(tmp_path, "add", "code")
    git(tmp_path, "commit", "-m", "first")
    git(tmp_path, "tag", "-a", "v1", "-m", "a tag is no commit")
    clean = commit_of(tmp_path)
    assert clean is not None
    assert re.fullmatch("[0-9a-f]{12}", clean)
    names = []
    for change in ("changed", "changed otherwise"):
        file.write_text(change)
        names.append(commit_of(tmp_path))
    assert len({clean, *names}) == 3
    assert all(name and name.startswith(f"{clean}-dirty-") for name in names)
    file.write_text("as it was")
    assert commit_of(tmp_path) == clean


def test_code_outside_of_a_checkout_has_no_commit_of(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None
    assert commit_of(tmp_path / "nowhere") is None


@pytest.mark.parametrize("path", ["/", "/system.slice/paceline.service", "/hidden/by/the/container"])
def test_free_memory_is_what_control_groups_leave_without_cached_files(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "system.slice" / "paceline.service"
    group.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"4:memory:/old\n0::{path}\n")
    (tmp_path / "meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n")
    for folder, limit in ((tmp_path, "4000000"), (group.parent, "max"), (group, "3000000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("2900000\n")
        (folder / "memory.stat").write_text("anon 500000\nfile 2300000\ninactive_file 1500000\nactive_file 7\n")
    monkeypatch.setattr(system, "_PROC", tmp_path)
    monkeypatch.setattr(system, "_CGROUP", tmp_path)
    limit = 3_000_000 if "paceline" in path else 4_000_000
    assert system.available_bytes() == limit - 2_900_000 + 1_500_007
    (tmp_path / "self" / "cgroup").unlink()
    assert system.available_bytes() == 60_000_000 * 1024


@pytest.mark.parametrize(("path", "cores"), [("/", 4.0), ("/pod/box", 1.5), ("/hidden/by/the/container", 4.0)])
def test_core_time_is_the_least_that_any_control_group_grants(
    path: str, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = tmp_path / "pod" / "box"
    box.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(f"0::{path}\n")
    for folder, line in ((tmp_path, "400000 100000"), (box.parent, "max 100000"), (box, "75000 50000")):
        (folder / "cpu.max").write_text(f"{line}\n")
    monkeypatch.setattr(system, "_PROC", tmp_path)
    monkeypatch.setattr(system, "_CGROUP", tmp_path)
    assert system.core_quota() == cores
    (tmp_path / "self" / "cgroup").unlink()
    assert system.core_quota() == system.MAX_CORE


def test_cores_that_are_there_no_longer_are_no_limit() -> None:
    before = system.usable_cores()
    assert system.on_cores(frozenset({system.MAX_CORE}), system.usable_cores) == before


def test_waits_are_doubled_up_to_the_longest_however_often_it_dies() -> None:
    back_off = RestartBackoff()
    waits = [back_off.wait_s(0.0) for _ in range(3000)]
    assert waits[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert waits == sorted(waits)
    assert set(waits[10:]) == {MAX_WAIT_S}
    assert back_off.wait_s(STEADY_S + 1) == FIRST_WAIT_S


PARENT = """
import os, subprocess, sys, threading, time
child = "from paceline.core.system import *; end_with_parent(); print('up', flush=True); time.sleep(600)"
def start():
    global one
    one = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    one.stdout.readline()
starter = threading.Thread(target=start)
starter.start()
while len(os.listdir("/proc/self/task")) > 1:  # a thread that was joined may not have ended
    time.sleep(0.01)
print(one.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="others have no signal at a parent's end")
def test_a_stopped_child_ends_with_the_process_that_started_it_and_not_with_the_thread() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        stop(child)  # it lives, though the thread is gone
    finally:
        parent.kill()
        parent.communicate()
    until_it_has_ended(child)


def stop(process: psutil.Process) -> None:
    process.suspend()
    until(process, psutil.STATUS_STOPPED)


def until_it_has_ended(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        until(process, psutil.STATUS_ZOMBIE)  # nobody may ask for its end


def until(process: psutil.Process, status: str) -> None:
    end_s = time.monotonic() + 20
    while process.status() != status:
        assert time.monotonic() < end_s, f"it never is {status}"
        time.sleep(0.01)
