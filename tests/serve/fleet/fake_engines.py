"""Engines without a process: a replica whose every word, death and silence a test decides."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace as with_fields

from paceline.core.errors import EngineDied, LineBroke, RequestError
from paceline.core.figures import Figures, Spent
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Outcome, Request
from paceline.engine.gauges import Gauges
from paceline.engine.stats import Stats
from paceline.serve.engines import Answers
from paceline.serve.fleet.fleet_commands import FleetCommands
from paceline.serve.fleet.journal import answer_id
from paceline.serve.worker.messages import Ready, Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.serve.engines import Commanded, Event, OnEvent


def token_of(request: Request, index: int) -> int:
    """Token of an answer: a function of the request and its place, as an engine's is."""
    return (31 * request.seed + 7 * index + 11 * len(request.prompt_ids) + request.choice) % 997


def text_of(token_ids: Sequence[int]) -> str:
    """Text of an answer's tokens. Even ones keep their text back until the next odd one, as stops do."""
    shown = len(token_ids)
    while shown and token_ids[shown - 1] % 2 == 0:
        shown -= 1
    return "".join(f"{token} " for token in token_ids[:shown])


def whole_answer(request: Request) -> list[int]:
    return [token_of(request, index) for index in range(request.params.max_tokens)]


@dataclass
class Row:
    """A request as a replica writes it."""

    request: Request
    told: list[int]
    spent: Spent = field(default_factory=Spent)

    def more(self, count: int) -> Outcome:
        """Write up to so many tokens more; behind the last comes the rest of the text, whatever was kept back."""
        whole = whole_answer(self.request)
        start, before = len(self.told), text_of(self.told)
        self.told = whole[: start + count]
        done = len(self.told) == len(whole)
        text = "".join(f"{token} " for token in self.told) if done else text_of(self.told)
        ids = tuple(self.told[start:])
        first = self.spent == Spent()
        passes, decoded = self.spent.decode_passes + 1, self.spent.decoded_tokens + len(ids) - first
        self.spent = self.spent._replace(decode_passes=passes, decoded_tokens=decoded)
        figures = Figures(
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=len(self.told),
            drafted_tokens=0,
            verified_tokens=0,
            accepted_tokens=0,
            seed=self.request.seed,
            cached_tokens=0,
            decode_passes=passes,
            decoded_tokens=decoded,
        )
        return Outcome(
            self.request.request_id,
            ids,
            text[len(before) :],
            finish_reason="length" if done else None,
            figures=figures if done else None,
            start=start,
            spent=self.spent,
        )


READY: dict[str, Any] = {
    "model_name": "fake",
    "max_len": 1000,
    "vocab_size": 1000,
    "tokenizer_json": "",
    "eos_ids": (),
    "bos_id": None,
    "template": None,
    "choices": (),
}


class FakeEngines:
    """A replica; see `Engines`."""

    def __init__(self, promise: str = "one") -> None:
        self.promise = promise
        self.restarts = 0
        self.snapshot: Snapshot | None = None
        self.first_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.on_snapshot: Callable[[Snapshot], None] | None = None
        self.on_language: Callable[[Any], None] | None = None
        self.on_ready: Callable[[], None] | None = None
        self.on_draining: Callable[[], None] | None = None
        self.on_renewed: Callable[[str], None] | None = None
        self.ready: Ready | None = None
        self.rows: dict[str, Row] = {}
        self.submitted: list[Request] = []
        self.slow = False  # requests that are cancelled are there until a pass ends
        self.leaving: set[str] = set()  # these
        self._answers: dict[str, Answers] = {}
        self.commands: Commanded = FleetCommands({}, {}, asyncio.create_task)
        self.load()

    def load(self) -> None:
        self.ready = Ready(**READY, promise=self.promise)
        if not self.first_ready.done():
            self.first_ready.set_result(self.ready)
        self.beat()

    pid = None

    @property
    def num_open(self) -> int:
        return len(self._answers)

    async def submit(self, requests: Sequence[Request], on_event: OnEvent | None = None) -> Answers:
        if self.ready is None:
            raise EngineDied("not ready")
        answers = Answers(self, {r.request_id: i for i, r in enumerate(requests)}, on_event)
        for request in requests:
            self.submitted.append(request)
            if request.request_id in self.leaving:
                answers.index.clear()
                asyncio.get_running_loop().call_soon(answers.put, RequestError("request id is in use"))
                continue
            self.rows[answer_id(request.request_id)] = Row(replace(request, told=()), list(request.told))
            self._answers[answer_id(request.request_id)] = answers
        return answers

    async def cancel(self, answers: Answers) -> None:
        for request_id in tuple(answers.index):
            if self._answers.get(answer_id(request_id)) is answers:
                del self.rows[answer_id(request_id)], self._answers[answer_id(request_id)]
            if self.slow:
                self.leaving.add(request_id)
        answers.index.clear()

    async def watch(self, *, on: bool) -> None:
        pass

    def finish(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    # What a test does --------------------------------------------------------------------------------

    def beat(self, steps: int = 0) -> None:
        gauges = Gauges(len(self.rows), 0, 0, 64, len(self.rows), 0, 0)
        stats = Stats(steps=steps, step_s=1e-4 * steps, decode_passes=steps, decoded_tokens=steps)
        self.snapshot = Snapshot(stats, gauges)
        if self.on_snapshot is not None:
            self.on_snapshot(self.snapshot)

    def say(self, request_id: str, count: int = 1) -> Outcome:
        """Write on, and tell it."""
        outcome = self.rows[request_id].more(count)
        self.tell(outcome)
        return outcome

    def start(self, request_id: str) -> None:
        """Tell that a first step of it begins."""
        self.tell(Outcome(request_id, (), "", start=len(self.rows[request_id].told)))

    def tell(self, outcome: Outcome) -> None:
        name = answer_id(outcome.request_id)
        answers = self._answers.get(name)
        if answers is not None:
            (request_id,) = answers.index
            answers.put((answers.index[request_id], with_fields(outcome, request_id=request_id)))
            if outcome.finish_reason is not None:
                self._answers.pop(name, None)
                self.rows.pop(name, None)
                answers.index.clear()

    def refuse(self, request_id: str, error: Any) -> None:
        answers = self._answers.pop(request_id)
        self.rows.pop(request_id)
        answers.index.clear()
        answers.put(error)

    def die(self, why: EngineDied | None = None) -> None:
        """End with all that is open; `revive` brings it back. why: told to open answers."""
        self.ready = None
        lost = {id(a): a for a in self._answers.values()}
        self._answers.clear()
        self.rows.clear()
        for answers in lost.values():
            answers.index.clear()
            answers.put(why or EngineDied("died"))

    def lose_line(self) -> None:
        """Lose the line to an engine that lives; `load` attaches it again."""
        self.die(LineBroke("broke"))

    def renew(self, promise: str) -> None:
        """Write with newer weights from here on."""
        before, self.promise = self.promise, promise
        self.load()
        if self.on_renewed is not None:
            self.on_renewed(before)

    def revive(self) -> None:
        self.restarts += 1
        self.load()
        if self.on_ready is not None:
            self.on_ready()


def request_of(name: str, max_tokens: int = 12, prompt: int = 5, seed: int = 3, **more: Any) -> Request:
    return Request(name, tuple(range(1, prompt + 1)), SamplingParams(max_tokens=max_tokens), seed, **more)


class Heard:
    """What a client was told."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.last: Outcome | None = None
        self.error: Any = None

    def take(self, event: Event) -> None:
        if isinstance(event, Exception):
            self.error = event
            return
        assert isinstance(event, tuple)
        outcome = event[1]
        assert self.last is None, "words after the end"
        assert outcome.start == len(self.token_ids)
        self.token_ids += outcome.token_ids
        self.text += outcome.text
        if outcome.finish_reason is not None:
            self.last = outcome

    def check_whole(self, request: Request) -> None:
        whole = whole_answer(request)
        assert self.token_ids == whole
        assert self.text == "".join(f"{token} " for token in whole)
        assert self.last is not None
        assert self.last.figures is not None
        assert self.last.figures.completion_tokens == len(whole)
