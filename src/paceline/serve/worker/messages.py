"""Messages between server and engine process: typed msgpack over a private socket, never pickle."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from paceline.core.errors import RequestError
from paceline.core.pass_notes import StepNote
from paceline.core.request_nouns import Outcome
from paceline.core.watchdog import WATCHDOG_S
from paceline.engine.assembly.config import Choice, EngineConfig, Settled
from paceline.engine.gauges import Gauges
from paceline.engine.stats import Stats
from paceline.engine.wire import BAD_MESSAGE, Failed, Message, RequestId, Submit
from paceline.model.template_source import TemplateSource
from paceline.serve.worker.commands import Command, EngineState, Obeyed

MAX_TO_ENGINE_BYTES = 64 << 20  # a prompt of a million tokens has 5 MB
MAX_TO_SERVER_BYTES = 512 << 20  # the tokenizer travels in `Ready`


# To the engine ---------------------------------------------------------------------------------------


class Load(Message, frozen=True):
    """First message: the model and engine to load."""

    config: EngineConfig
    state: EngineState = EngineState()  # of the engine before this one
    watchdog_s: float = WATCHDOG_S  # longest silence of its ranks, if any; 0: they are waited for


class Cancel(Message, frozen=True):
    """End a request now."""

    request_id: RequestId
    abort: bool = False  # somebody waits for what it has written


class Watch(Message, frozen=True):
    """Begin or end noting steps for those who watch."""

    on: bool


class StopEngine(Message, frozen=True):
    """End the process, also if requests are open."""


# To the server ---------------------------------------------------------------------------------------


class Progress(Message, frozen=True):
    """Progress of pulling, loading or measuring."""

    what: str
    done: int
    total: int


class Language(Message, frozen=True):
    """Tokenizer and template, told long before `Ready`, so that the server makes its own meanwhile."""

    tokenizer_json: bytes
    template: TemplateSource | None
    eos_ids: tuple[int, ...]
    bos_id: int | None

    @classmethod
    def of(cls, ready: Ready) -> Language:
        """Return what a ready engine has."""
        return cls(ready.tokenizer_json, ready.template, ready.eos_ids, ready.bos_id)


class StepProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of the target's passes, as measured at the start."""

    prefill_s_per_token: float
    step_s_by_rows: tuple[float, ...]  # [max_rows] of a step without drafts, with 1, 2, ... rows, keys apart
    key_s: float = 0.0  # seconds that each key of a row adds to a step


class Ready(Message, frozen=True):
    """The engine is ready. Carries what the server needs to make token ids."""

    model_name: str
    max_len: int  # tokens of prompt and answer of one request
    vocab_size: int
    tokenizer_json: bytes
    eos_ids: tuple[int, ...]
    bos_id: int | None
    template: TemplateSource | None  # None: the model has none, so chat is refused
    choices: tuple[Choice, ...]
    drafters: tuple[str, ...] = ()  # names that a request may ask for
    sampling: dict[str, int | float] = msgspec.field(default_factory=dict)  # of requests that set none
    profile: StepProfile | None = None  # None: nobody has measured it
    promise: str = ""  # key: engines of equal ones write the same text, see `core/promise.py`
    settled: Settled | None = None
    prefill_tokens: int = 512  # of prompts in one pass, at most
    num_weights: int = 0  # of the model
    keeps_pages: bool = True  # a prompt's KV is kept for later prompts that begin alike

    @property
    def law(self) -> str:
        """The engine's law, with its budget if it has one."""
        return next((choice.value for choice in self.choices if choice.what == "law"), "")


class Draining(Message, frozen=True):
    """The engine was told by a signal to take no more requests."""


class Rejected(Message, frozen=True):
    """A request was refused. `kind` as in `Failed`."""

    request_id: str
    kind: str
    message: str
    param: str | None = None


class OutcomeBatch(Message, frozen=True):
    """Outcomes, in their order."""

    outcomes: tuple[Outcome, ...]


class Snapshot(Message, frozen=True):
    """Counters and gauges of the engine."""

    stats: Stats
    gauges: Gauges
    steps: tuple[StepNote, ...] = ()  # the last ones, while somebody watches
    backlog_tokens: int = 0  # of prompts, told answers included, that are not computed yet


ToEngine = Load | Submit | Cancel | Watch | StopEngine | Command
ToServer = Progress | Language | Ready | Failed | Draining | Rejected | OutcomeBatch | Snapshot | Obeyed

decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode


class _SubmitId(Struct, tag="Submit", frozen=True):
    """The id of a `Submit` whose other fields may be out of bounds."""

    request_id: RequestId


def refusal_of(data: bytes, why: Exception) -> Rejected | None:
    """Return the answer to a `Submit` that is no message.

    Without an answer its caller would wait for ever. Returns None if the message has no id.
    """
    try:
        found = msgspec.msgpack.decode(data, type=_SubmitId)
    except BAD_MESSAGE:
        return None
    return Rejected(found.request_id, RequestError.__name__, f"the engine cannot read this request: {why}")
