"""Watch over processes: notice from missing beats that they hang.

A beat of an engine is any message: its step loop sends one every second at least, and one comes with every tensor
of newer weights. A beat of ranks is a meeting. A long pass is no hang: the system says that the process computes,
or waits for a disk or a core. A process that hangs does none of these.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError

WATCHDOG_S = 8.0  # usual limit: seconds without a beat of a ready engine
TICK_S = 0.25  # seconds between two looks at the process
PATIENCE = 15  # a process that computes without a beat has this many times as long
LATE_SHARE = 0.4  # share of the limit; an engine that is silent for longer is taken out of service
BUSY_SHARE = 0.02  # share of a core from which on a process counts as computing
CLOCK_S = 1 / os.sysconf("SC_CLK_TCK")  # unit in which the system counts what a process has computed
LOOK_S = 1.0  # seconds of stillness after which a process's threads are looked at
WAITS_FOR_MACHINE = frozenset("RD")  # states of a thread that runs, or waits for a core or a disk
MIN_LIMIT_S, MAX_LIMIT_S = 5.0, 86400.0
SHOW_THREADS = signal.SIGUSR1  # makes the engine's process write where each of its threads is


def check_limit(limit_s: float) -> None:
    """Raise `ConfigError` for a limit that no watchdog can have; 0 switches it off."""
    if limit_s and not MIN_LIMIT_S <= limit_s <= MAX_LIMIT_S:
        raise ConfigError(
            f"--watchdog-seconds must be 0 (off) or from {MIN_LIMIT_S:g} to {MAX_LIMIT_S:g}, not {limit_s:g}"
        )


@dataclass(slots=True, eq=False)
class Watchdog:
    """Silence of one process, or of several that wait for one another.

    Silence is counted in ticks of this process, so that a pause of this process blames nobody.
    """

    pids: tuple[int, ...]
    limit_s: float  # limit of silence; 0: none
    _still_s: float = 0.0  # seconds without a beat and without work
    _silent_s: float = 0.0  # seconds without a beat
    _cpu_s: float | None = None  # computed until stillness began; None: a beat came since the last tick

    def beat(self) -> None:
        """Note a message of the engine."""
        self._still_s = self._silent_s = 0.0
        self._cpu_s = None

    def tick(self, elapsed_s: float) -> None:
        """Note that time has passed.

        A long tick counts as a short one: this process was late itself.
        """
        elapsed_s = min(elapsed_s, 2 * TICK_S)
        self._silent_s += elapsed_s
        self._still_s += elapsed_s
        cpu_s = sum(process_work(pid)[1] for pid in self.pids)
        if self._cpu_s is None:
            self._cpu_s = cpu_s
        if cpu_s - self._cpu_s > CLOCK_S + BUSY_SHARE * self._still_s or self._waits_for_machine():
            self._still_s, self._cpu_s = 0.0, cpu_s

    def _waits_for_machine(self) -> bool:
        return self._still_s > LOOK_S and any(
            not WAITS_FOR_MACHINE.isdisjoint(thread_states(pid)) for pid in self.pids
        )

    @property
    def late(self) -> bool:
        """True if the engine seems to hang; no request should be sent to it."""
        return self._over(LATE_SHARE)

    @property
    def hung(self) -> bool:
        """True if the engine has to be replaced."""
        return self._over(1.0)

    def _over(self, share: float) -> bool:
        if not self.limit_s:
            return False
        return self._still_s > share * self.limit_s or self._silent_s > share * PATIENCE * self.limit_s


def process_work(pid: int) -> tuple[str, float]:
    """Return a process's state, as one letter, and the seconds that it has computed.

    Where the system does not tell, it counts as running, so that only the longer limit holds.
    """
    try:
        fields = _stat(Path(f"/proc/{pid}/stat"))
        return fields[0], (int(fields[11]) + int(fields[12])) * CLOCK_S
    except (OSError, IndexError, ValueError):
        return "R", 0.0


def thread_states(pid: int) -> set[str]:
    """Return the states of a process's threads, but for the one that asks.

    Where the system does not tell, one is taken to run.
    """
    own, found = str(threading.get_native_id()), set()
    try:
        threads = [one for one in Path(f"/proc/{pid}/task").iterdir() if one.name != own]
    except OSError:
        return {"R"}
    for one in threads:
        with suppress(OSError, IndexError):  # it has ended
            found.add(_stat(one / "stat")[0])
    return found


def _stat(path: Path) -> list[str]:
    """Return the fields of a stat file that come after the process's name."""
    return path.read_text(encoding="latin-1").rpartition(")")[2].split()
