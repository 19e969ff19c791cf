"""The engine in a process of its own: load, then step while there is work, else wait for messages.

Started by `engine_client` as `python -m paceline.serve.worker.process ADDRESS`. It lives no longer than its
parent: stdin is a pipe the parent holds open, and its end is the parent's end, however that came about.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import zmq

from paceline.core.errors import PacelineError, RequestError
from paceline.core.system import end_with_parent
from paceline.engine.assembly.build import build
from paceline.engine.wire import BAD_MESSAGE, Failed, Submit, encode
from paceline.serve.worker.messages import (
    MAX_TO_ENGINE_BYTES,
    Cancel,
    Load,
    OutcomeBatch,
    Progress,
    Ready,
    Rejected,
    Snapshot,
    StartupChoice,
    StopEngine,
    Template,
    ToEngine,
    ToServer,
    decode_to_engine,
)

if TYPE_CHECKING:
    from paceline.engine.assembly.build import Built
    from paceline.engine.engine import Engine

log = logging.getLogger(__name__)

IDLE_MS = 500  # how long to wait for a message before looking whether to stop
SNAPSHOT_S = 0.25  # between two snapshots of the counters while there is work
PROGRESS_S = 0.1  # between two reports on loading
SEND_MS = 30_000  # a server that takes no message for so long is gone
INTERNAL = "internal error; the server's log has the details"


class Link:
    """The engine's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_TO_ENGINE_BYTES)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_MS)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def send(self, message: ToServer) -> None:
        """Send a message. Raises `zmq.Again` if the server takes none any more."""
        self._socket.send(encode(message))

    def receive(self, timeout_ms: int) -> ToEngine | None:
        """Return the next message, or None if none comes in time. Bytes that are no message are dropped."""
        while self._socket.poll(timeout_ms):
            try:
                message: ToEngine = decode_to_engine(self._socket.recv())
            except BAD_MESSAGE as error:
                log.warning("dropped a broken message: %s", error)
            else:
                return message
        return None

    def close(self) -> None:
        """Send what is left and close."""
        self._socket.close()
        self._context.term()


class EngineWorker:
    """Takes messages in, steps the engine, sends outcomes out."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self.engine = engine
        self.link = link
        self.leaving = False  # take no more requests, finish those that are open
        self.stopped = False
        self._next_snapshot_s = 0.0
        self._handlers: dict[type, Any] = {Submit: self._submit, Cancel: self._cancel, StopEngine: self._stop}

    def run(self) -> None:
        """Serve until told to stop, or until nothing is open when told to leave."""
        while not self.stopped and not (self.leaving and not self.engine.has_work):
            self._take_in()
            if self.engine.has_work and not self.stopped:
                self._step()

    def _take_in(self) -> None:
        while (message := self.link.receive(0 if self.engine.has_work else IDLE_MS)) is not None:
            handler = self._handlers.get(type(message))
            if handler is None:
                log.warning("dropped a message out of place: %s", type(message).__name__)
            else:
                handler(message)
            if self.stopped:
                return

    def _step(self) -> None:
        if self.engine.loop.wait():
            self._take_in()  # who came while the pass ran is to come along in the next
            if self.stopped:
                return
        outcomes = self.engine.step()
        self._tell_counters()
        if outcomes:
            self.link.send(OutcomeBatch(tuple(outcomes)))

    def _tell_counters(self) -> None:
        """Send a snapshot now and then, and before the last outcome, so that it is never older than an answer."""
        now_s = time.monotonic()
        if now_s >= self._next_snapshot_s or not self.engine.has_work:
            self._next_snapshot_s = now_s + SNAPSHOT_S
            self.link.send(Snapshot(self.engine.stats(), self.engine.gauges()))

    def _submit(self, message: Submit) -> None:
        try:
            if self.leaving:
                raise PacelineError("the engine is stopping")
            self.engine.add(message.request())
        except PacelineError as error:
            param = error.param if isinstance(error, RequestError) else None
            self.link.send(Rejected(message.request_id, type(error).__name__, str(error), param))
        except Exception:  # one request's error never ends another's
            log.exception("request %s could not be taken", message.request_id)
            self.link.send(Rejected(message.request_id, "", INTERNAL))

    def _cancel(self, message: Cancel) -> None:
        self.engine.cancel(message.request_id)

    def _stop(self, _: StopEngine) -> None:
        self.stopped = True


def _reporter(link: Link) -> Any:
    """Return a progress callback that reports no more often than a bar can show."""
    last_s = 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done >= total or now_s - last_s >= PROGRESS_S:
            last_s = now_s
            link.send(Progress(what, done, total))

    return report


def _ready(built: Built) -> Ready:
    tokenizer, template = built.engine.tokenizer, built.template
    source = None if template is None else template.source
    return Ready(
        model_name=built.model_name,
        max_len=built.max_len,
        vocab_size=built.engine.target.config.vocab_size,
        tokenizer_json=tokenizer.raw.to_str(),
        eos_ids=tuple(tokenizer.eos_ids),
        bos_id=tokenizer.bos_id,
        template=None if source is None else Template(source.text, dict(source.special)),
        choices=tuple(StartupChoice(c.what, c.value, c.why) for c in built.choices),
    )


def _load(link: Link) -> Built | None:
    """Load what the first message asks for; tell the server why if that fails."""
    message = link.receive(SEND_MS)
    if not isinstance(message, Load):
        log.error("the first message must say what to load")
        return None
    try:
        return build(message.config, _reporter(link))
    except PacelineError as error:
        link.send(Failed(type(error).__name__, str(error)))
    except Exception as error:
        log.exception("loading failed")
        link.send(Failed("", f"loading failed: {type(error).__name__}: {error}"))
    return None


def run(address: str) -> int:
    """Serve one server until it is done with us. Returns the exit status."""
    link = Link(address)
    try:
        built = _load(link)
        if built is None:
            return 2
        worker = EngineWorker(built.engine, link)
        # Who stops a whole process group, as systemd does, stops us too: finish what is open, so that the server
        # can drain.
        signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "leaving", True))
        link.send(Snapshot(built.engine.stats(), built.engine.gauges()))
        link.send(_ready(built))
        worker.run()
    except zmq.Again:
        log.exception("the server takes no messages any more")
        return 1
    finally:
        link.close()
    return 0


def main() -> int:
    """Entry point of the process."""
    logging.basicConfig(
        level=os.environ.get("PACELINE_LOG_LEVEL", "WARNING").upper(), format="engine: %(message)s"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    end_with_parent()
    return run(sys.argv[1])


if __name__ == "__main__":
    sys.exit(main())
