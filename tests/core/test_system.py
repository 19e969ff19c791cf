"""Names of builds, and waits before restarts."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

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


def test_waits_are_doubled_up_to_the_longest_however_often_it_dies() -> None:
    back_off = RestartBackoff()
    waits = [back_off.wait_s(0.0) for _ in range(3000)]
    assert waits[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert waits == sorted(waits)
    assert set(waits[10:]) == {MAX_WAIT_S}
    assert back_off.wait_s(STEADY_S + 1) == FIRST_WAIT_S
