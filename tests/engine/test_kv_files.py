"""Pages on disk against a plain dict: bounds, restarts, broken and foreign files, crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from paceline import kernels
from paceline.core.errors import ConfigError
from paceline.engine import kv_files
from paceline.engine.kv_files import HEADER, PageFiles
from tests.oracles.checksum import checksum

PAGE_BYTES = 100
FILE_BYTES = HEADER.size + PAGE_BYTES
NAMES = st.integers(0, 6)


def name(number: int) -> bytes:
    return bytes([number]) * 32


def page(number: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(number).bytes(PAGE_BYTES), np.uint8)


def path_of(folder: Path, number: int) -> Path:
    text = name(number).hex()
    return folder / text[:2] / f"{text[2:]}.kv"


def read(files: PageFiles, number: int) -> np.ndarray | None:
    found = np.empty(PAGE_BYTES, np.uint8)
    return found if files.read(name(number), found) else None


class PageFilesMachine(RuleBasedStateMachine):
    """Files against a list of numbers, least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = TemporaryDirectory()
        self.folder = Path(self.temporary.name) / "pages"
        self.most = 4
        self.files = PageFiles(self.folder, self.most * FILE_BYTES)
        self.known: list[int] = []
        self.broken: set[int] = set()
        self.clock = 1_000_000_000

    def use(self, number: int) -> None:
        """Note a use, and give the file a time that no other has."""
        self.known = [*(n for n in self.known if n != number), number][-self.most :]
        self.clock += 10
        os.utime(path_of(self.folder, number), (self.clock, self.clock))

    @rule(number=NAMES)
    def write(self, number: int) -> None:
        self.files.write(name(number), page(number))
        self.broken.discard(number)
        self.use(number)

    @rule(number=NAMES)
    def read(self, number: int) -> None:
        found = read(self.files, number)
        if number in self.known and number not in self.broken:
            assert found is not None
            assert (found == page(number)).all()
            self.use(number)
        else:
            assert found is None
            self.known = [n for n in self.known if n != number]
            self.broken.discard(number)

    @rule(number=NAMES, at=st.integers(0, FILE_BYTES - 1), cut=st.booleans())
    def damage(self, number: int, at: int, cut: bool) -> None:
        path = path_of(self.folder, number)
        if number in self.known and number not in self.broken and not cut:
            data = bytearray(path.read_bytes())
            data[at] ^= 64
            stat = path.stat()
            path.write_bytes(data)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            self.broken.add(number)

    @rule()
    def restart(self) -> None:
        self.files.close()
        (self.folder / "00").mkdir(exist_ok=True)
        (self.folder / "00" / f"{62 * 'a'}.part").write_bytes(b"cut short")
        (self.folder / "00" / "film.part").write_bytes(b"of another program")
        (self.folder / "00" / "notes.txt").write_bytes(b"foreign")
        self.files = PageFiles(self.folder, self.most * FILE_BYTES)
        assert [path.name for path in self.folder.rglob("*.part")] == ["film.part"]
        assert (self.folder / "00" / "notes.txt").exists()

    @rule(most=st.integers(1, 5))
    def change_bound(self, most: int) -> None:
        self.files.close()
        self.most = most
        self.files = PageFiles(self.folder, most * FILE_BYTES)
        self.known = self.known[-most:]

    def teardown(self) -> None:
        on_disk = {int(p.parent.name, 16) for p in self.folder.rglob("*.kv")}
        assert on_disk == set(self.known)
        assert len(self.files) == len(self.known)
        assert self.files.num_bytes == FILE_BYTES * len(self.known)
        self.files.close()
        self.temporary.cleanup()


TestPageFiles = PageFilesMachine.TestCase
TestPageFiles.settings = settings(
    max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck), deadline=None
)


@given(data=st.binary(max_size=300))
def test_the_checksum_is_its_slow_twin(data: bytes) -> None:
    assert kernels.checksum(np.frombuffer(data, np.uint8)) == checksum(data)


def test_a_file_of_another_size_or_name_is_not_read(tmp_path: Path) -> None:
    files = PageFiles(tmp_path / "pages", 1 << 20)
    for number in range(3):
        files.write(name(number), page(number))
    path_of(files.folder, 0).write_bytes(path_of(files.folder, 1).read_bytes())  # whole, of another page
    with path_of(files.folder, 1).open("ab") as file:
        file.write(b"more")
    os.truncate(path_of(files.folder, 2), 90)
    assert [read(files, n) for n in range(3)] == [None] * 3
    assert len(files) == 0
    assert not list(files.folder.rglob("*.kv"))


def test_one_engine_has_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_files, "LOCK_WAIT_S", 0.1)
    first = PageFiles(tmp_path, 1 << 20)
    with pytest.raises(ConfigError, match="a folder of its own"):
        PageFiles(tmp_path, 1 << 20)
    first.close()
    PageFiles(tmp_path, 1 << 20).close()


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="other users may write there"):
        PageFiles(tmp_path, 1 << 20)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name a folder on a local disk"):
        PageFiles(tmp_path / "file", 1 << 20)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = PageFiles(tmp_path / "pages", 1 << 20)
    monkeypatch.setattr(os, "writev", lambda *_: 10)  # a full disk writes less than it was given
    with pytest.raises(OSError, match="No space left"):
        files.write(name(1), page(1))
    assert not list(tmp_path.rglob("*.part"))
    assert name(1) not in files


WRITER = """
import sys, itertools
from pathlib import Path
from paceline.engine.kv_files import PageFiles
from tests.engine.test_kv_files import name, page
files = PageFiles(Path(sys.argv[1]), 1 << 20)
print("ready", flush=True)
for number in itertools.count():
    files.write(name(number % 250), page(number % 250))
"""


def test_a_killed_writer_leaves_whole_pages(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        writer.stdout.readline()
        while len(list(folder.rglob("*.kv"))) < 20:
            pass
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    files = PageFiles(folder, 1 << 20)
    assert len(files) >= 20
    for number in range(250):
        if name(number) in files:
            found = read(files, number)
            assert found is not None
            assert (found == page(number)).all()
