"""The seam every drafter implements, and what it may know of its target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from paceline.core.nouns import WHOLE_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy import int64
    from numpy.typing import NDArray

    from paceline.backend.seam import KV, CutModelDecoder, Decoder, HeadRunner, RowView
    from paceline.core.nouns import Batch, Draft, Plan, RowDraft, Scores, Verdict
    from paceline.core.request_nouns import Request
    from paceline.model.config import ModelConfig
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.cut_model import CutModel
    from paceline.model.tokenizer import Tokenizer

    RunHead = Callable[[Head, str | None], HeadRunner]  # with weights of a type, None for the usual one
    RunCutModel = Callable[[CutModel, str | None], CutModelDecoder]  # likewise
    Narrow = Callable[[NDArray[int64]], CutModelDecoder]  # from tokens, see `BackendSpec.narrow`

MAX_K = 16  # drafts per row and step
MAX_BRANCHES = 8  # and tokens of branches beside them


@dataclass(frozen=True, slots=True)
class Needs:
    """Needs of a drafter. The engine reads them and never asks for its type."""

    pages: Literal["none", "shared", "own"] = "none"  # page table its KV lives in
    stores: tuple[str, ...] = ()  # names of its own stores over the shared page table
    tap_store: str | None = None  # the store among these that taps fill: missing taps cannot be made again
    kv_bytes_per_token: int = 0  # of all its stores
    bytes_per_row: int = 0  # of what it keeps beside stores, however long a text is
    taps: tuple[int, ...] = ()  # after how many of the target's layers it reads hidden states
    reads: int = 0  # tokens of a row's text that it reads before its first draft, at most
    reads_per_step: int = WHOLE_TEXT  # most of these in one step, of all rows
    max_k: int = MAX_K
    branches: int = 0  # tokens of branches that it hands out where a plan asks for them, at most
    stops: bool = False  # it ends a row's draft where the plan's `Stop` says
    late: bool = False  # it drafts on the target's device for rows whose newest tokens the host does not know
    instant: bool = False  # its proposals cost next to nothing: it is a `Lookup`
    grammar_only: bool = False  # it drafts for rows with a grammar only
    trained_to: tuple[float, ...] = ()  # [depth] share of drafts kept there in its training; empty: unknown

    @property
    def has_state(self) -> bool:
        """True if it keeps keys and values."""
        return bool(self.kv_bytes_per_token or self.bytes_per_row)

    def request_bytes(self, num_tokens: int) -> int:
        """Return the memory that its state takes for a request of so many tokens."""
        return self.kv_bytes_per_token * num_tokens + self.bytes_per_row


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """A model's token ids, for telling whether two models mean the same by them."""

    model: str  # name, for messages
    tokenizer: Tokenizer
    size: int  # rows of the embedding, padding included


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Parts of the target that a drafter in its process may share."""

    decoder: Decoder
    kv: KV
    run_head: RunHead  # on the target's backend
    run_cut_model: RunCutModel  # likewise


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The target, as far as drafters know it."""

    config: ModelConfig
    rows: RowView  # a drafter in another process has its own copy
    num_pages: int
    vocabulary: Vocabulary
    law_needs_probs: bool  # drafts must then carry the distribution each token was drawn from
    fingerprint: str  # what it is, see `model/fingerprint.py`
    local: Memory | None  # None to a drafter in another process
    head_within: Head | None = None  # the draft head that the target's own files hold
    apart: bool = False  # drafters have a device of their own, where the target's rows are not

    @property
    def memory(self) -> Memory:
        """Parts of the target, for a drafter that does not stand alone."""
        assert self.local is not None, "a drafter that said it stands alone asks for the target's memory"
        return self.local


@dataclass(frozen=True, slots=True, eq=False)
class DraftWeights:
    """A drafter's own model."""

    decoder: Decoder
    vocabulary: Vocabulary
    narrow: Narrow | None = None  # makes it write some tokens only; None: its backend has no such decoders


class DrafterUnavailable(Exception):  # noqa: N818 (a state, no error of the user's)
    """Raised by `propose` while a drafter restarts and cannot be asked."""


class StoresLost(Exception):  # noqa: N818 (it is news, not an error of the user's)
    """Raised by any call of a drafter whose stores are gone. Rows start anew."""


class Lookup(Protocol):
    """A drafter whose proposals cost next to nothing: previewed before a step is planned."""

    def preview(self, max_drafts: Mapping[int, int]) -> dict[int, RowDraft]:
        """Propose up to `max_drafts[row]` tokens, each with its confidence; rows may be left out."""


class OnDevice(Protocol):
    """A drafter whose needs say `late`: its program runs on the device."""

    def close(self) -> None:
        """End the program, once nothing is asked of it any more."""


class Drafter(Protocol):
    """Proposes tokens. It learns of admissions and releases, and trims its own state at commit.

    It may fail, time out or return nonsense: its rows then draft nothing in that step. This is never fatal.
    It may draft for some rows while other rows' drafts are being scored, so it keeps open drafts by row.
    """

    name: str
    needs: Needs

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Begin a request in a row; each of the drafter's stores holds `valid_lens[store]` first tokens."""

    def propose(self, batch: Batch, plan: Plan) -> Draft:
        """Propose up to `max_drafts` tokens, perhaps none, for each row of the batch."""

    def commit(self, batch: Batch, scores: Scores, verdict: Verdict) -> None:
        """Trim own state to kept tokens; take in taps. The backend has advanced its rows."""

    def valid_lens(self, row: int) -> Mapping[str, int]:
        """Leading committed tokens of a row that each of the drafter's stores holds."""

    def release(self, row: int) -> None:
        """Forget a row whose request has ended or was preempted."""

    def forget(self) -> None:
        """Drop everything learnt across requests."""

    def report(self) -> Mapping[str, Any]:
        """Return facts about this drafter for the start-up banner."""
