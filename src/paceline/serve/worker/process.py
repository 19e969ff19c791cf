"""Process of the engine: load, step while there is work, otherwise wait for messages.

`child` starts it as `python -m paceline.serve.worker.process`, and the first line on its stdin says where to
connect. It ends with its parent: stdin is a pipe that the parent holds open, closed however the parent ends.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import zmq

from paceline.backend.rank_processes import LIMIT
from paceline.control.controller import ClosedLoop
from paceline.control.fixed import FixedK
from paceline.control.policy import Work
from paceline.core import logs
from paceline.core.errors import EngineDied, PacelineError, RequestError
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Outcome, Request
from paceline.core.system import end_with_parent, give_memory_back, leave_to_parent, stay_on, wake_with_parent
from paceline.core.watchdog import SHOW_THREADS
from paceline.engine.assembly.owner import load_engine
from paceline.engine.assembly.promise_key import self_test
from paceline.engine.gauges import Gauges
from paceline.engine.stats import Stats
from paceline.engine.wire import BAD_MESSAGE, Failed, Submit, encode
from paceline.model.config import num_weights
from paceline.serve.worker.commands import Obeyed, ReleaseMemory, UpdateWeights
from paceline.serve.worker.held_outcomes import HeldOutcomes
from paceline.serve.worker.kv_publisher import KvPublisher
from paceline.serve.worker.messages import (
    MAX_TO_ENGINE_BYTES,
    Cancel,
    Draining,
    Language,
    Load,
    OutcomeBatch,
    Progress,
    Ready,
    Rejected,
    Snapshot,
    StepProfile,
    StopEngine,
    ToEngine,
    ToServer,
    Watch,
    decode_to_engine,
    refusal_of,
)
from paceline.serve.worker.obey import BEAT_S, Commands, Preparation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.pass_notes import StepNote
    from paceline.engine.assembly.build import Built
    from paceline.engine.engine import Engine
    from paceline.serve.worker.commands import Command

log = logging.getLogger(__name__)

IDLE_MS = 500  # wait for a message before checking whether to stop
PREPARING_MS = 2  # ... or whether newer weights are ready
SNAPSHOT_S = 0.25  # between two snapshots of the counters while there is work
PROGRESS_S = 0.1  # between two progress messages
SEND_MS = 30_000  # a server that accepts no message for this long is gone
WARM_UP_PROMPT_TOKENS = 16
WARM_UP_TOKENS = 3
WARM_UP_K = 2
INTERNAL = "internal error; the server's log has the details"


class ServerConnection:
    """Engine's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_TO_ENGINE_BYTES)
        self._socket.setsockopt(zmq.SNDTIMEO, SEND_MS)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def send(self, message: ToServer) -> None:
        """Send a message. Raises `zmq.Again` if the server no longer accepts any."""
        self._socket.send(encode(message))

    def receive(self, timeout_ms: int) -> ToEngine | None:
        """Return the next message, None after `timeout_ms`. Bytes that are no message are dropped."""
        while self._socket.poll(timeout_ms):
            data = self._socket.recv()
            try:
                message: ToEngine = decode_to_engine(data)
            except BAD_MESSAGE as error:
                log.warning("dropped a broken message: %s", error)
                if (refusal := refusal_of(data, error)) is not None:
                    self.send(refusal)
            else:
                return message
        return None

    def close(self) -> None:
        """Send what is queued and close."""
        self._socket.close()
        self._context.term()


class EngineWorker:
    """Receives messages, steps the engine, sends outcomes."""

    def __init__(self, commands: Commands, server: ServerConnection, publisher: KvPublisher | None = None) -> None:
        self.commands = commands
        self.server = server
        self.publisher = publisher
        self._held = HeldOutcomes()
        self._watched = False  # somebody looks at the last steps
        self.draining = False  # accept no more requests, finish the open ones
        self._told_draining = False
        self.stopped = False
        self._next_snapshot_s = self._next_beat_s = 0.0

    @property
    def engine(self) -> Engine:
        """The engine. Raises `EngineDied` while its memory is given back."""
        return self.commands.owner.built.engine

    @property
    def _has_work(self) -> bool:
        """True if the next step has anything to do."""
        return self.commands.steps and self.engine.has_work

    def run(self) -> None:
        """Serve until told to stop, or while draining until nothing is open."""
        while not self.stopped and not (self._told_draining and not self._has_work):
            self._receive()
            self._end_update()
            if self.draining and not self._told_draining:
                self._told_draining = True
                self.server.send(Draining())
            if self._has_work and not self.stopped:
                self._step()
            elif time.monotonic() >= self._next_beat_s:
                self._send_snapshot()

    def _receive(self) -> None:
        """Take the messages that are there; the first one is waited for."""
        wait_ms = self._wait_ms
        while (message := self.server.receive(wait_ms)) is not None:
            wait_ms = 0  # else messages that come apart would keep a paused engine from any sign of life
            match message:
                case Submit():
                    self._submit(message)
                case Cancel():
                    self._cancel(message)
                case Watch():
                    self._watched = message.on
                    self._watch()
                case StopEngine():
                    self.stopped = True
                    return
                case Load():
                    log.warning("dropped a message out of place: %s", type(message).__name__)
                case _:
                    self._command(message)

    def _watch(self) -> None:
        """Note steps or not, as was asked last; a command may have made another engine."""
        if not self.commands.owner.asleep:
            self.engine.outputs.book.watch(on=self._watched)

    @property
    def _wait_ms(self) -> int:
        if self._has_work:
            return 0
        return IDLE_MS if self.commands.preparing is None else PREPARING_MS

    def _step(self) -> None:
        if self.engine.loop.wait():
            self._receive()  # requests that came while the pass ran join the next one
            if self.stopped or not self._has_work:
                return
        outcomes = self._held.take_in(self.engine.step())
        self._send_snapshot()
        self._send(outcomes)
        self._publish()

    def _publish(self) -> None:
        """Publish what happened in the prefix cache."""
        if self.publisher is not None:
            self.publisher.send(None if self.commands.owner.asleep else self.engine.scheduler.pool)

    def _send_snapshot(self) -> None:
        """Send a snapshot at intervals and before the last outcome, so it counts every answer."""
        now_s = time.monotonic()
        if now_s >= self._next_snapshot_s or not self._has_work:
            self._next_snapshot_s, self._next_beat_s = now_s + SNAPSHOT_S, now_s + BEAT_S
            self._send(self._held.take_held())
            if self.commands.owner.asleep:
                self.server.send(Snapshot(Stats(), Gauges.none()))
                return
            steps = tuple(self.engine.outputs.book.steps or ())
            self.server.send(snapshot_of(self.engine, steps))

    def _command(self, message: Command) -> None:
        """Obey. An update that comes while there is work is made ready beside it.

        Before memory is given back, rows that were cancelled leave and their last outcomes are sent.
        """
        self._end_update(wait=True)
        if isinstance(message, ReleaseMemory) and not self.commands.owner.asleep:
            self.engine.settle()
            self._send_outcomes()
        if isinstance(message, UpdateWeights) and self._has_work:
            self.commands.preparing = Preparation(self.commands.owner, message)
        else:
            self._reply(self.commands.obey(message))
            self._watch()

    def _end_update(self, *, wait: bool = False) -> None:
        preparing = self.commands.preparing
        if preparing is not None and (wait or preparing.done) and (reply := self.commands.end_preparing()):
            self._reply(reply)

    def _reply(self, reply: Obeyed) -> None:
        """Reply behind the outcomes of all steps before."""
        self._send_outcomes()
        self._publish()
        self.server.send(reply)

    def _send_outcomes(self) -> None:
        """Send the outcomes that came without a step, and those that have waited."""
        if not self.commands.owner.asleep:
            outcomes = self._held.take_in(self.engine.outputs.take_outcomes())
            self._send(self._held.take_held() + outcomes)

    def _send(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes:
            self.server.send(OutcomeBatch(tuple(outcomes)))

    def _submit(self, message: Submit) -> None:
        try:
            if self.draining:
                raise EngineDied("the engine is stopping; try again")
            if self.commands.lost:
                raise EngineDied(self.commands.lost)
            self.engine.outputs.on_start = self._tell_start
            request = message.request()
            self.engine.add(request)
            self._held.expect(request)
        except PacelineError as error:
            param = error.param if isinstance(error, RequestError) else None
            self.server.send(Rejected(message.request_id, type(error).__name__, str(error), param))
        except Exception:  # one request's error never ends another's
            log.exception("request %s could not be taken", message.request_id)
            self.server.send(Rejected(message.request_id, "", INTERNAL))

    def _tell_start(self, outcome: Outcome) -> None:
        self._send((outcome,))

    def _cancel(self, message: Cancel) -> None:
        if not self.commands.owner.asleep:
            self.engine.cancel(message.request_id, "abort" if message.abort else "cancelled")
        if not self.commands.steps:
            self._send_outcomes()


def snapshot_of(engine: Engine, steps: tuple[StepNote, ...] = ()) -> Snapshot:
    """Return an engine's counters and gauges."""
    running = engine.scheduler.running
    prefilled = sum(len(r.token_ids) - r.scheduled_len for r in running if not r.decoding)
    return Snapshot(engine.stats(), engine.gauges(), steps, engine.scheduler.num_queued_tokens + prefilled)


def _progress_sender(server: ServerConnection) -> Any:
    """Return a progress callback that sends no more often than a bar can show."""
    last_s = 0.0

    def report(what: str, done: int, total: int) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if done >= total or now_s - last_s >= PROGRESS_S:
            last_s = now_s
            server.send(Progress(what, done, total))

    return report


def _ready(built: Built, promise: str) -> Ready:
    tokenizer = built.engine.tokenizer
    return Ready(
        model_name=built.model_name,
        max_len=built.max_len,
        vocab_size=built.engine.target.config.vocab_size,
        tokenizer_json=built.tokenizer_json or tokenizer.raw.to_str().encode(),
        eos_ids=tuple(tokenizer.eos_ids),
        bos_id=tokenizer.bos_id,
        template=built.template,
        choices=built.choices,
        drafters=tuple(built.engine.drafting.drafters),
        sampling=dict(built.sampling),
        profile=profile_of(built.engine),
        promise=promise,
        settled=built.settled,
        prefill_tokens=built.engine.scheduler.limits.prefill_tokens,
        num_weights=num_weights(built.engine.target.config),
        keeps_pages=built.engine.scheduler.pool.caching,
    )


def profile_of(engine: Engine) -> StepProfile | None:
    """Return what passes cost, of an engine that has measured it.

    More rows never cost less: corrections of neighbouring sizes may disagree.
    """
    controller, limits = engine.controller, engine.scheduler.limits
    if not isinstance(controller, ClosedLoop) or controller.cost is None:
        return None
    chunk, pass_s = limits.prefill_tokens, controller.cost.pass_s
    prefill_s = pass_s(Work(chunk, chunk - 1, chunk, chunk * (chunk + 1) // 2)) / chunk
    key_s = (pass_s(Work(1, 0, chunk, chunk)) - pass_s(Work(1))) / chunk
    step_s = accumulate((pass_s(Work(n + 1)) for n in range(limits.num_rows)), max)
    return StepProfile(prefill_s, tuple(step_s), key_s)


def warm_up(built: Built) -> None:
    """Answer a short request with each drafter that computes, and forget all of it.

    The first pass of a fresh engine takes 4 to 6 times as long as the next: it touches all weights, work space and
    KV for the first time. Texts do not depend on it, and the prefix cache is emptied again.
    """
    engine = built.engine
    if built.max_len < WARM_UP_PROMPT_TOKENS + WARM_UP_TOKENS:
        return
    vocab_size = engine.target.config.vocab_size
    prompt_ids = tuple(i % vocab_size for i in range(WARM_UP_PROMPT_TOKENS))
    params = SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    computing = [name for name, drafter in engine.drafting.drafters.items() if not drafter.needs.instant]
    drafters: list[str | None] = [*computing]
    for drafter in drafters or [None]:
        engine.controller = FixedK(drafter, WARM_UP_K)  # the engine's own would trace these steps
        engine.add(Request("warm-up", prompt_ids, params, seed=0, salt=drafter or ""))  # no prefix hit
        while engine.has_work:
            engine.step()
    engine.forget()  # and take a fresh controller of the engine's own kind
    engine.reset_stats()


def _load(server: ServerConnection) -> EngineWorker | None:
    """Load what the first message asks for, or send the reason and return None."""
    message = server.receive(SEND_MS)
    if not isinstance(message, Load):
        log.error("the first message must say what to load")
        return None
    publisher = None
    try:
        if message.config.kv_events is not None:  # before the model loads, as the address may be taken
            publisher = KvPublisher(message.config.kv_events)
        progress = _progress_sender(server)
        owner = load_engine(
            message.config,
            progress,
            lambda json, tokenizer, template: server.send(
                Language(json, template, tuple(tokenizer.eos_ids), tokenizer.bos_id)
            ),
        )
        if publisher is not None:
            publisher.send(owner.built.engine.scheduler.pool)
        warm_up(owner.built)
        commands = Commands(owner, progress, owner.built.promise.key(self_test(owner.built.engine)))
        commands.begin(message)
        if commands.lost:
            server.send(Obeyed(owner.version, commands.promise))
        LIMIT.seconds = message.watchdog_s  # from here on
        return EngineWorker(commands, server, publisher)
    except PacelineError as error:
        server.send(Failed(type(error).__name__, str(error)))
    except Exception as error:
        log.exception("loading failed")
        server.send(Failed("", f"loading failed: {type(error).__name__}: {error}"))
    return None


def run(address: str) -> int:
    """Serve one server until it stops us. Returns the exit status."""
    server = ServerConnection(address)
    try:
        worker = _load(server)
        if worker is None:
            return 2
        commands = worker.commands
        owner = commands.owner
        # A signal to the whole process group, as systemd sends it, comes here too. Finish what is open, so that
        # the server can drain.
        signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "draining", True))
        told = snapshot_of(owner.built.engine), _ready(owner.built, commands.promise)
        commands.rest()
        for message in told:
            server.send(message)
        owner.drop_json()
        give_memory_back()
        worker.run()
        commands.end_preparing()  # its thread must not outlive the engine
        if worker.publisher is not None:
            worker.publisher.close()
        owner.close()
    except zmq.Again:
        log.exception("the server accepts no messages any more")
        return 1
    finally:
        server.close()
    return 0


def main() -> int:
    """Entry point of the process."""
    leave_to_parent(signal.SIGINT, signal.SIGHUP)
    wake_with_parent()
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # reads nothing beyond the line
        line = stdin.readline()
    if not line:
        return 0  # the parent needed no engine
    address, os.environ[logs.FORMAT], cores = json.loads(line)
    stay_on(frozenset(cores))
    logs.configure("engine")
    faulthandler.register(SHOW_THREADS)
    end_with_parent()
    return run(address)


if __name__ == "__main__":
    sys.exit(main())
