"""A thread for passes and other calls, on cores of its own if asked."""

from __future__ import annotations

from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import finalize

from paceline.core.system import stay_on

if TYPE_CHECKING:
    from collections.abc import Callable

    Call = tuple[Future[Any], Lock, Callable[[], Any]]

T = TypeVar("T")

LEAVE_S = 2.0  # seconds that the end of a process waits for a call


class PassThread:
    """Daemon thread from its first call to its owner's end; hanging calls block no exit."""

    def __init__(self, name: str, cores: frozenset[int] = frozenset()) -> None:
        """cores: of the thread, and of every thread it starts; empty: all."""
        self.cores = cores
        self._name = name
        self._calls: SimpleQueue[Call | None] | None = None
        self._last: Future[Any] | None = None

    @property
    def idle(self) -> bool:
        """True if every call has returned."""
        return self._last is None or self._last.done()

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Begin a call; return when it first releases Python's lock."""
        future: Future[T] = Future()
        self._last = future
        begun = Lock()
        begun.acquire()
        self._queue().put((future, begun, call))
        begun.acquire()  # otherwise the caller keeps Python's lock for milliseconds before the thread gets it
        return future

    def call(self, call: Callable[[], T], timeout_s: float | None = None) -> T:
        """Make a call and wait. Raises its error, or `TimeoutError` after `timeout_s`."""
        future: Future[T] = Future()
        self._last = future
        self._queue().put((future, Lock(), call))
        return future.result(timeout_s)

    def _queue(self) -> SimpleQueue[Call | None]:
        if self._calls is None:
            self._calls = SimpleQueue()
            thread = Thread(target=_serve, args=(self._calls, self.cores), name=self._name, daemon=True)
            thread.start()
            finalize(self, _end, self._calls, thread)
        return self._calls


def _end(calls: SimpleQueue[Call | None], thread: Thread) -> None:
    """Wait for a thread's call, as a process must not end in native code."""
    calls.put(None)
    if thread is not current_thread():
        thread.join(LEAVE_S)


def _serve(calls: SimpleQueue[Call | None], cores: frozenset[int]) -> None:
    stay_on(cores)
    while (task := calls.get()) is not None:
        future, begun, call = task
        if begun.locked():
            begun.release()
        try:
            future.set_result(call())
        except BaseException as error:  # the caller gets the error, whatever it is
            future.set_exception(error)
        del task, future, call  # a reference would keep what the call holds until the next call
