"""Keeper of the sandbox's process: starts it, sends jobs, ends it after its limits."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from paceline.core.errors import BadModelFile, QueueFull, RequestError
from paceline.serve.sandbox.jobs import (
    JobRefused,
    Rendered,
    RenderPrompts,
    SetTemplate,
    decode_result,
    frame,
    read_frame,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.model.template_source import TemplateSource
    from paceline.serve.sandbox.jobs import JobResult, SandboxJob, SetupJob

log = logging.getLogger(__name__)

MEMORY_BYTES = 2 << 30  # of the address space
JOB_LIMIT_S = 10.0
SETUP_LIMIT_S = 60.0  # start of the process, tokenizer or template
MAX_WAITING = 64  # jobs at once
_SECRET = "PACELINE_API_KEY"  # noqa: S105 - a variable's name, which the process needs not see


class SandboxLost(Exception):  # noqa: N818 - handled here, never seen by others
    """The process is gone or was ended."""


class Sandbox:
    """One process for jobs, one at a time. Safe to use from several threads."""

    def __init__(
        self, what: str, *, param: str, limit_s: float = JOB_LIMIT_S, first: SetupJob | None = None
    ) -> None:
        """what: name of the work in error messages, which blame the field `param`.

        first: a small job for a process that starts, so that its imports take no time of a client's job.
        """
        self._what, self._param = what, param
        self._limit_s, self._memory_bytes = limit_s, MEMORY_BYTES
        self._setups: dict[type, SetupJob] = {} if first is None else {type(first): first}
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(MAX_WAITING)
        self._closed = False

    def setup(self, job: SetupJob) -> None:
        """Send a job now and whenever the process is started anew. Raises `BadModelFile`."""
        with self._lock:
            self._closed = False
            if self._setups.get(type(job)) == job:
                return
            self._setups[type(job)] = job
            try:
                if self._process is None:
                    self._start()
                else:
                    self._exchange(job, SETUP_LIMIT_S)
            except BaseException:  # a job that failed must not pass for done when it is set up again
                del self._setups[type(job)]
                raise

    def call(self, job: SandboxJob) -> JobResult:
        """Return a job's result. Raises `RequestError`, also beyond the limits, or `QueueFull`."""
        if not self._places.acquire(blocking=False):
            raise QueueFull(f"{MAX_WAITING} requests wait for the {self._what} already; try again later")
        try:
            with self._lock:
                if self._process is None or self._process.poll() is not None:
                    self._end()
                    self._start()
                return self._exchange(job, self._limit_s)
        finally:
            self._places.release()

    def close(self) -> None:
        """End the process."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()  # ends a job that holds the lock
        with self._lock:
            self._end()

    # With the lock -----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._closed:
            raise RequestError("the server is shutting down")
        ours, theirs = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if k != _SECRET}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        command = [sys.executable, "-P", "-m", "paceline.serve.sandbox.job_process"]
        limits = [str(self._memory_bytes), str(SETUP_LIMIT_S)]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                [*command, *limits], stdin=theirs.fileno(), stdout=subprocess.DEVNULL, env=environment
            )
        self._link = ours
        for job in self._setups.values():
            self._exchange(job, SETUP_LIMIT_S)

    def _exchange(self, job: SandboxJob, limit_s: float) -> JobResult:
        """Send a job and return its result. Ends the process after the limit. Raises `RequestError`."""
        try:
            result = self._answer(job, time.monotonic() + limit_s)
        except TimeoutError:
            self._end()
            raise RequestError(
                f"the {self._what} did not come to an end within {limit_s:g} s", self._param
            ) from None
        except (OSError, SandboxLost):
            self._end()
            raise self._too_much() from None
        if isinstance(result, JobRefused):
            if result.ends:
                self._end()
                raise self._too_much()
            raise BadModelFile(result.message) if result.of_model else RequestError(result.message, result.param)
        return result

    def _too_much(self) -> RequestError:
        limit = f"{self._memory_bytes >> 20} MB"
        return RequestError(f"the {self._what} needs more memory than the {limit} it may have", self._param)

    def _answer(self, job: SandboxJob, deadline_s: float) -> JobResult:
        link = self._link
        assert link is not None

        def receive(count: int) -> bytes:
            link.settimeout(max(deadline_s - time.monotonic(), 1e-3))
            return link.recv(count)

        link.settimeout(max(deadline_s - time.monotonic(), 1e-3))
        link.sendall(frame(job))
        data = read_frame(receive)
        if data is None:
            raise SandboxLost
        result: JobResult = decode_result(data)
        return result

    def _end(self) -> None:
        process, link, self._process, self._link = self._process, self._link, None, None
        if link is not None:
            link.close()
        if process is not None:
            process.kill()
            process.wait()


class SandboxedTemplate:
    """Chat template that is rendered in a sandbox. Like `ChatTemplate`, for the server."""

    def __init__(self, source: TemplateSource, sandbox: Sandbox) -> None:
        """Compile the template there. Raises `BadModelFile`."""
        self.source = source
        self._sandbox = sandbox
        sandbox.setup(SetTemplate(source))

    def render_all(self, asked: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the prompt of each mapping of variables. Raises `RequestError`."""
        result = self._sandbox.call(RenderPrompts(msgspec.json.encode([dict(values) for values in asked])))
        assert isinstance(result, Rendered)
        return list(result.texts)
