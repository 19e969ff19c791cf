"""The driver's side of a worker process, which computes only while it is asked."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import paceline
from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    Json = dict[str, Any]

LOAD_TIMEOUT_S = 1800.0  # includes compiling
ANSWER_TIMEOUT_S = 1800.0
END_TIMEOUT_S = 10.0


def variables(threads: int | None = None) -> dict[str, str]:
    """Return a worker's environment variables: path of these sources, number of threads."""
    sources = (Path(paceline.__file__).parents[1], Path(__file__).parents[2])  # of the package, and of these tools
    ours = {"PYTHONPATH": os.pathsep.join(map(str, sources))}
    return ours | ({"OMP_NUM_THREADS": str(threads)} if threads else {})


class PeerFailed(PacelineError):  # noqa: N818
    """A worker reported an error, or did not answer."""


class PeerProcess:
    """A worker process in its own process group, stopped (SIGSTOP) whenever it is not asked.

    An idle engine thus takes no processor time, however its threads wait. Raises `PeerFailed` if it cannot load.
    """

    def __init__(
        self, command: Sequence[str], log: Path, threads: int, more: dict[str, str] | None = None
    ) -> None:
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | variables(threads) | (more or {}),
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        self._log = log
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        Thread(target=self._read, daemon=True).start()
        try:
            self.description: str = self._answer(LOAD_TIMEOUT_S)["ready"]
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, question: Json, timeout_s: float = ANSWER_TIMEOUT_S) -> Json:
        """Continue the worker, ask, wait for the answer, stop it again. Raises `PeerFailed`."""
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return self._answer(timeout_s)
        except (OSError, ValueError) as error:  # a broken pipe, a closed one, no JSON
            raise PeerFailed(f"the worker has ended (see {self._log})") from error
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Kill the worker."""
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _answer(self, timeout_s: float) -> Json:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerFailed(f"no answer within {timeout_s:.0f} s (see {self._log})") from None
        if not line:
            raise PeerFailed(f"the worker has ended (see {self._log})")
        answer: Json = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"{answer['error']} (see {self._log})")
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        with suppress(ValueError, OSError):  # closed
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process group if the worker is running."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
