"""The machine and its processes: processor, cores, memory, commit, restarts, Ctrl-C."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import platform
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

T = TypeVar("T")

FIRST_WAIT_S = 0.25  # seconds before the first restart; doubled while the process keeps ending
MAX_WAIT_S = 30.0
MAX_DOUBLINGS = 16  # by then the wait is at its longest, and 2 to the power of thousands would be no float
STEADY_S = 60.0  # a process that ran this long ended for a new reason
POLL_S = 0.05  # seconds between two tries to take a lock

MAX_CORE = 1 << 16

_GROUP = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_NODES = Path("/sys/devices/system/node")
_CPUS = Path("/sys/devices/system/cpu")
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_CACHED = {"active_file", "inactive_file", "slab_reclaimable"}  # of memory.stat: what the system may drop
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)
_PR_SET_PDEATHSIG = 1  # see prctl(2)


# What figures depend on --------------------------------------------------------------------------


def processor() -> dict[str, Any]:
    """Return what the speed of a model depends on: processor and cores."""
    return {"cpu": _cpu_name(), "cores": os.cpu_count(), "usable_cores": len(usable_cores())}


def machine() -> dict[str, Any]:
    """Return what figures depend on: processor, cores, memory, system, versions of what we run on."""
    return {
        **processor(),
        "memory_gb": round(memory_bytes() / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "triton": version_of("triton"),
        "numpy": version_of("numpy"),
    }


def version_of(package: str) -> str | None:
    """Return a package's version without importing it; None if it cannot be imported."""
    try:
        return version(package) if find_spec(package) else None
    except ModuleNotFoundError:  # `PackageNotFoundError`, too
        return None


@cache
def commit() -> str | None:
    """Return the commit of the running code; None if it is no checkout."""
    return commit_of(Path(__file__).parents[3])


def commit_of(folder: Path) -> str | None:
    """Return the commit of a folder; None if it is no checkout.

    A changed checkout gets `-dirty` and a hash of its changes, as two changes of one commit are two builds.
    """
    if not (folder / ".git").exists():
        return None
    try:
        found = _git(folder, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").decode().strip()
        changes = _git(folder, "diff", "HEAD") if found.endswith("-dirty") else b""
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{found}-{hashlib.sha256(changes).hexdigest()[:8]}" if changes else found or None


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=10, check=True)  # noqa: S603 (our own)
    return done.stdout


def _cpu_name() -> str:
    names = (line.partition(":")[2].strip() for line in _lines(_PROC / "cpuinfo") if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


# Memory ------------------------------------------------------------------------------------------


def memory_bytes() -> int:
    """Return the machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Return the memory available without swapping, within the limits of control groups."""
    free = memory_bytes()
    for line in _lines(_PROC / "meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return max(min([free, *_group_rooms()]), 0)


def _group_rooms() -> Iterator[int]:
    """Yield the room in each limited control group around this process.

    Cached files count as room: the system may drop them.
    """
    for folder in _groups():
        limit, used, stat = (_lines(folder / f"memory.{name}") for name in ("max", "current", "stat"))
        if limit and used and limit[0].isdigit():
            cached = (int(size) for name, size in map(str.split, stat) if name in _CACHED)
            yield int(limit[0]) - int(used[0]) + sum(cached)


def _groups() -> Iterator[Path]:
    """Yield the folders of the control groups around this process."""
    for line in _lines(_PROC / "self" / "cgroup"):
        hierarchy, _, path = line.split(":", 2)
        own = _CGROUP / path.lstrip("/")
        yield from (own, *own.parents) if hierarchy == "0" else ()  # in a container its own may be the root


def reset_peak_rss() -> None:
    """Start a new peak of this process's memory, where the system can."""
    try:
        (_PROC / "self" / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        return


def peak_rss_mb() -> float:
    """Return the peak of this process's memory since the reset, engines of other drafters included."""
    for line in _lines(_PROC / "self" / "status"):
        if line.startswith("VmHWM:"):
            return round(int(line.split()[1]) / 1e3, 1)
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def give_memory_back() -> None:
    """Return freed memory to the system, if its C library can.

    A start frees much that is never needed again.
    """
    import ctypes

    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


# Cores -------------------------------------------------------------------------------------------


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def core_quota() -> float:
    """Return how many cores' time control groups grant this process; without limit, very many."""
    limits = (lines[0].split() for folder in _groups() if (lines := _lines(folder / "cpu.max")))
    return min((int(most) / int(period) for most, period in limits if most.isdigit()), default=float(MAX_CORE))


def stay_on(cores: frozenset[int]) -> None:
    """Keep this thread and its new threads on cores, if possible. No cores: no limit."""
    if cores and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):  # others may have taken all of them from this process since they were dealt out
            os.sched_setaffinity(0, cores)


def on_cores(cores: frozenset[int], call: Callable[[], T]) -> T:
    """Make a call, which must not fail, in a thread on some cores; see `stay_on`."""
    found: list[T] = []

    def run() -> None:
        stay_on(cores)
        found.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def core_groups(text: str) -> list[frozenset[int]]:
    """Parse groups of cores, such as 0-3,4-7. Raises `ConfigError`."""
    groups = []
    for part in text.split(","):
        found = _GROUP.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last <= MAX_CORE:
            raise ConfigError(f"--cores is auto, or a group for each replica such as 0-3,4-7, not {text[:64]!r}")
        groups.append(frozenset(range(first, last + 1)))
    return groups


def deal(count: int, cores: frozenset[int], place: Mapping[int, tuple[int, ...]]) -> list[frozenset[int]]:
    """Deal cores out to processes, evenly; neighbours stay together, and few processes span nodes.

    place: of each core, its node first. With fewer cores than processes some share one.
    """
    ordered = sorted(cores, key=lambda core: (place.get(core, ()), core))
    if count >= len(ordered):
        return [frozenset({ordered[index % len(ordered)]}) for index in range(count)]
    nodes: dict[tuple[int, ...], list[int]] = {}
    for core in ordered:
        nodes.setdefault(place.get(core, ())[:1], []).append(core)
    if count % len(nodes) == 0:  # no process needs to span nodes
        each = count // len(nodes)
        if all(len(of_node) >= each for of_node in nodes.values()):
            return [group for of_node in nodes.values() for group in _cut(of_node, each)]
    return _cut(ordered, count)


def _cut(cores: Sequence[int], count: int) -> list[frozenset[int]]:
    edges = [len(cores) * index // count for index in range(count + 1)]
    return [frozenset(cores[a:b]) for a, b in pairwise(edges)]


def places(cores: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """Return node, socket and physical core of each core, so far as the system tells."""
    nodes: dict[int, int] = {}
    for path in _NODES.glob("node[0-9]*/cpulist"):
        text = _read(path)
        for group in core_groups(text) if text else ():
            nodes |= dict.fromkeys(group, int(path.parent.name.removeprefix("node")))
    return {
        core: (nodes.get(core, 0), *(_number(core, name) for name in ("physical_package_id", "core_id")))
        for core in cores
    }


def _number(core: int, name: str) -> int:
    text = _read(_CPUS / f"cpu{core}" / "topology" / name)
    return int(text) if text.isdigit() else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


# Processes, locks and Ctrl-C ---------------------------------------------------------------------


class RestartBackoff:
    """Waits before a process that ended is started again, longer while it keeps ending."""

    def __init__(self) -> None:
        self._deaths = 0  # in a row

    def wait_s(self, lived_s: float) -> float:
        """Return the seconds to wait after a process that ran for `lived_s`."""
        self._deaths = 0 if lived_s > STEADY_S else self._deaths + 1
        doublings = min(max(self._deaths - 1, 0), MAX_DOUBLINGS)
        return float(min(FIRST_WAIT_S * 2**doublings, MAX_WAIT_S))


@contextmanager
def file_lock(path: Path, wait_s: float, on_wait: Callable[[float], None]) -> Iterator[bool]:
    """Hold a lock among this machine's processes during the block; yield False if unavailable.

    The system frees the lock when its holder ends, in whatever way; the file stays. wait_s: bound of the wait for
    the holder. on_wait: called while waiting, every `POLL_S`, with the seconds waited so far.
    """
    with ExitStack() as stack:
        held = False
        with suppress(OSError):  # a folder that cannot be made, or a file system without locks
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.open("a"))
            start = time.monotonic()
            while not (held := try_lock(file)) and (waited_s := time.monotonic() - start) < wait_s:
                on_wait(waited_s)
                time.sleep(POLL_S)
        yield held


def try_lock(file: IO[Any]) -> bool:
    """Lock a file for this process if no other has it; return whether it did."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def anonymous_memory(num_bytes: int) -> int:
    """Return the descriptor of a file of zeros without a name, in memory if possible."""
    if hasattr(os, "memfd_create"):
        found = os.memfd_create("paceline")
    else:
        with tempfile.TemporaryFile() as file:
            found = os.dup(file.fileno())
    os.ftruncate(found, num_bytes)
    return found


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole, or leave what is there. Raises `OSError`."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        part = Path(file.name)
        try:
            file.write(data)
            file.flush()
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def file_size(path: Path) -> int:
    """Return the size of a file. Raises `OSError` for a folder, pipe or device."""
    if not stat.S_ISREG((found := path.stat()).st_mode):
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device, and no file", str(path))
    if not os.access(path, os.R_OK):
        raise PermissionError(errno.EACCES, "this user may not read it", str(path))
    return found.st_size


def leave_to_parent(*signals: signal.Signals) -> None:
    """Ignore signals that come to the whole process group: the parent answers them."""
    for number in signals:
        signal.signal(number, signal.SIG_IGN)


def wake_with_parent() -> None:
    """Ask to be woken, if stopped, when the parent ends: Linux does so.

    SIGKILL could come too early: Linux sends the signal when the thread ends that started this process.
    """
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGCONT))


def end_with_parent() -> None:
    """Exit at once when stdin ends: the parent held it open, so it is gone."""
    wake_with_parent()

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent-watch").start()


@contextmanager
def uninterrupted() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the block ends: half a step would disorder an engine.

    Raises `KeyboardInterrupt` at the end of the block, or where the block calls the function it is given: a block
    of many steps calls it between two of them, as to begin and end a block takes 30 us. Other threads are never
    interrupted. A handler other than Python's own is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed: list[int] = []

    def raise_if_pressed() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        yield raise_if_pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    raise_if_pressed()
