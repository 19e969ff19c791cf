"""A recorded text as the draft, with wrong tokens to reach the asked acceptance.

For benchmarks. Under the coupled law a text does not depend on its drafts. So what plain decoding wrote is the
perfect draft, and the target refuses any other token in its place. A position is tested at most once: afterwards
the row is past it, whether its draft was kept or not. So one uniform number for each position (lane `draft`)
decides: the draft at depth i is the recorded token if the number is below rate i.

Where the target's decoder drafts on its device, so does the oracle. There a real drafter may run beside it, just
to take its time: so heads and verification run at any acceptance, with weights that were never trained.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, cast

import numpy as np

from paceline.core import noise
from paceline.core.errors import ConfigError
from paceline.core.nouns import RowDraft
from paceline.core.params import OFF
from paceline.core.system import file_size
from paceline.draft.drafter import MAX_K, Needs
from paceline.draft.late import LateDrafter, late_decoder
from paceline.draft.lookup.lookup import LookupDrafter, LookupOptions
from paceline.draft.registry import bounded, parse_spec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy import float64, int64
    from numpy.typing import NDArray

    from paceline.backend.seam import LateDecoder, LateOracle, RowView
    from paceline.core.request_nouns import Request
    from paceline.draft.drafter import Drafter, Target
    from paceline.draft.registry import DrafterConfig, Loader
    from paceline.model.weights import LoadedModel

MAX_FILE_BYTES = 1 << 30
MAX_ID_DIGITS = 9  # most digits of a request's number
BESIDE = re.compile(r"([\w-]+)(?:\[(.*)\])?")  # NAME or NAME[key=value;...]


@dataclass(frozen=True, slots=True)
class OracleConfig(LookupOptions):
    """`oracle:file=plain.jsonl,rates=0.68+0.57+0.52,k=3`.

    file: of `paceline bench --draft off --save-tokens`, with the same questions, seed and parameters. rates:
    chance that a draft is kept if those before it are, at depth 1, 2, ...; the last one holds for deeper drafts.
    head: a drafter that runs beside it on the target's device, such as `eagle3[model=FOLDER;weights=bf16]`.
    """

    name: ClassVar[str] = "oracle"
    file: str = ""
    rates: str = "1"
    head: str = ""

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)
        if not self.file:
            raise ConfigError(f"{self.name} wants file=FILE: `paceline bench --draft off --save-tokens FILE`")
        _ = self.chances, self.beside

    @property
    def chances(self) -> NDArray[float64]:
        """Chance at each depth that a draft is kept, if those before it are. [k]"""
        try:
            rates = [float(rate) for rate in self.rates.split("+")]
        except ValueError:
            rates = [-1.0]
        if not all(0.0 <= rate <= 1.0 for rate in rates):
            raise ConfigError(f"{self.name}:rates must be numbers from 0 to 1 such as 0.7+0.6, not {self.rates!r}")
        return np.array([rates[min(depth, len(rates) - 1)] for depth in range(self.k)])

    @property
    def beside(self) -> DrafterConfig | None:
        """Config of the drafter that runs beside it, if any. Raises `ConfigError`."""
        if not self.head:
            return None
        found = BESIDE.fullmatch(self.head)
        name, options = found.groups(default="") if found else ("", "")
        config = None
        if name not in ("", OFF, self.name):
            config = parse_spec(f"{name}:{','.join([*filter(None, options.split(';')), f'k={self.k}'])}")
        if config is None:
            raise ConfigError(
                f"{self.name}:head={self.head}: write a drafter's name, with its options in brackets, such as "
                f"head=eagle3[model=FOLDER;weights=bf16]; {self.name} sets its k"
            )
        return config

    def num_weights(self, target: LoadedModel) -> int:
        """Return the size of the drafter beside it; the oracle has no weights."""
        return self.beside.num_weights(target) if self.beside else 0

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter. Raises `ConfigError` for a file that holds no answers."""
        recordings = Recordings(read_answers(Path(self.file), target.config.vocab_size))
        decoder = late_decoder(target)
        if decoder is not None:
            return LateOracleDrafter(self, target, recordings, decoder, self._build_beside(target, load))
        if self.head:
            raise ConfigError(f"{self.name}:head={self.head} needs a target that drafts on its own device")
        return OracleDrafter(self, target.rows, target.config.vocab_size, recordings)

    def _build_beside(self, target: Target, load: Loader) -> LateDrafter | None:
        drafter = self.beside.build(target, load) if self.beside else None
        if drafter is None or drafter.needs.late:
            return cast("LateDrafter | None", drafter)
        raise ConfigError(f"{self.name}:head={self.head} does not draft on the target's device")

    def report(self) -> Mapping[str, Any]:
        """Return facts for the start-up banner."""
        beside = {"beside": self.head} if self.head else {}
        return {"drafter": self.name, "k": self.k, "rates": self.rates} | beside


class Recording(NamedTuple):
    """The recording of a request."""

    prompt_len: int
    answer: NDArray[int64]  # [answer_len]
    uniform: NDArray[float64]  # [answer_len] from 0 to 1: a draft there is right if its rate is above this


class Recordings:
    """Recorded answers of request 0, 1, ...; after the last, answer 0 comes again."""

    def __init__(self, answers: Sequence[NDArray[int64]]) -> None:
        """answers: [num_requests] token ids."""
        self._answers = answers
        self.longest = max(map(len, answers))

    def find(self, request: Request) -> Recording | None:
        """Find a request's answer by its number; None without one."""
        if not (request.request_id.isdecimal() and len(request.request_id) <= MAX_ID_DIGITS):
            return None
        answer = self._answers[int(request.request_id) % len(self._answers)]
        key = noise.key(request.seed, request.choice, noise.Lane.DRAFT, position=0)
        uniform = noise.leading(key, np.arange(len(answer))).astype(np.float64) * 2.0**-32
        return Recording(len(request.prompt_ids), answer, uniform)


class LateOracleDrafter(LateDrafter):
    """The oracle on the target's device, with another drafter beside it or alone."""

    program: LateOracle

    def __init__(
        self,
        config: OracleConfig,
        target: Target,
        recordings: Recordings,
        decoder: LateDecoder,
        beside: LateDrafter | None,
    ) -> None:
        rows, inner = target.rows, beside.program if beside else None
        program = decoder.late_oracle(rows, config.chances, recordings.longest, inner)
        needs = replace(beside.needs if beside else Needs(late=True, stops=True), max_k=config.k, trained_to=())
        vocabulary = beside.vocabulary if beside else None
        super().__init__(config.name, needs, config.report(), program, rows, vocabulary)
        self._recordings = recordings

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Send the request's recording, if there is one."""
        super().admit(row, request, valid_lens)
        recording = self._recordings.find(request)
        if recording is not None:
            self.program.record(row, *recording)


class OracleDrafter(LookupDrafter):
    """Proposes the recorded answer of a row's request, with wrong tokens in it."""

    name = OracleConfig.name

    def __init__(self, config: OracleConfig, rows: RowView, vocab_size: int, recordings: Recordings) -> None:
        super().__init__(config, Needs(max_k=config.k), rows)
        self._vocab_size, self._recordings = vocab_size, recordings
        self._chances = config.chances
        self._recorded: dict[int, Recording] = {}  # by row

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Find the request's answer."""
        recording = self._recordings.find(request)
        if recording is not None:
            self._recorded[row] = recording

    def preview(self, max_drafts: Mapping[int, int]) -> dict[int, RowDraft]:
        """Go on with the recording of each row whose text is that of the recording."""
        found = {row: self._spoilt(row, k) for row, k in max_drafts.items()}
        return {row: RowDraft(token_ids, self.name) for row, token_ids in found.items() if token_ids}

    def _spoilt(self, row: int, k: int) -> list[int]:
        """Return up to k drafts; none for a row that has left its recording."""
        recorded, token_ids = self._recorded.get(row), self._rows.tokens(row)
        start = len(token_ids) - (recorded.prompt_len if recorded else 0)
        if (
            not (k and recorded and 0 < start < len(recorded.answer))
            or recorded.answer[start - 1] != token_ids[-1]
        ):
            return []
        right = recorded.answer[start : start + k]
        kept = recorded.uniform[start : start + k] < self._chances[: len(right)]
        found: list[int] = np.where(kept, right, (right + 1) % self._vocab_size).tolist()
        return found

    def release(self, row: int) -> None:
        """Forget the row's answer."""
        self._recorded.pop(row, None)


def read_answers(path: Path, vocab_size: int) -> list[NDArray[int64]]:
    """Return the answers of a file's first run, in order. Raises `ConfigError`.

    A run ends at the first line of another draft, concurrency or repeat.
    """
    found: list[NDArray[int64]] = []
    first = None
    try:
        if file_size(path) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 20} MB")
        for line in path.read_text(encoding="utf-8").splitlines():
            value = json.loads(line)
            run = [value.get(name) for name in ("draft", "concurrency", "repeat")]
            if run != (first := first or run):
                break
            found.append(np.array(value["token_ids"], np.int64))
            if found[-1].ndim != 1 or ((found[-1] < 0) | (found[-1] >= vocab_size)).any():
                raise ValueError(f"its token ids are not all from 0 to {vocab_size - 1}")
        if not found:
            raise ValueError("it is empty")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(f"oracle:file={path} is no file of --save-tokens: {error}") from None
    return found
