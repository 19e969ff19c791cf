"""Suffix decoding: the tokens that mostly followed where the text ended like this.

After SuffixDecoding (arXiv 2411.04975). All earlier places whose text ends like the row's are found. The path that
most of them took is proposed, as far as enough places stay on it, and further if the match is longer. Places are
in the row's own text and in past answers of the same salt. Without a salt nothing tells users apart, so such
requests share answers only where the server's owner says so. The paper keeps suffix trees. Here an index of where
each pair of tokens stands, as in LZ77 compressors, answers the same question from a ring of bounded size that
forgets the oldest by itself (compiled: `csrc/host/text_index.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paceline import kernels
from paceline.backend.seam import Pointers
from paceline.core.nouns import BROKEN, RowDraft
from paceline.draft.drafter import MAX_K, Needs
from paceline.draft.late import late_lookup
from paceline.draft.lookup.lookup import LookupDrafter, LookupOptions
from paceline.draft.registry import bounded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.backend.seam import RowView
    from paceline.core.request_nouns import Request
    from paceline.draft.drafter import Drafter, Target
    from paceline.draft.registry import Loader

    Path = tuple[list[int], list[float], int]  # tokens, their shares, and the match that they follow

MAX_MATCH = 64
MAX_SHARED_TOKENS = 1 << 26
SALTED_TOKENS = 1 << 14  # tokens of past answers kept for each salt, unless asked otherwise: 256 KiB
MAX_SALTED_TOKENS = 1 << 16  # most tokens of each salt, however many are asked for: clients choose salts
MAX_SALTS = 64  # most salts with past answers; the longest unused is forgotten first


@dataclass(frozen=True, slots=True)
class SuffixConfig(LookupOptions):
    """`suffix:k=8,min=2,max=32,reach=2,share=0.1,shared=TOKENS`.

    k: most drafts per step. min, max: lengths of the shortest match that counts and of the longest looked for.
    reach: drafts per token of the match. share: a path ends when fewer than this share of its places are still on
    it. shared: tokens of past answers kept for requests without a salt, and for each salt (up to
    `MAX_SALTED_TOKENS`); 0: none. None: `SALTED_TOKENS` for each salt, none without.
    """

    name: ClassVar[str] = "suffix"
    k: int = 8
    min: int = 2
    max: int = 32
    reach: float = 2.0
    share: float = 0.1
    shared: int | None = None

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)
        bounded(self, "max", 2, MAX_MATCH)
        bounded(self, "min", 2, self.max)
        bounded(self, "reach", 0.1, 64.0)
        bounded(self, "share", 0.0, 1.0)
        if self.shared is not None:
            bounded(self, "shared", 0, MAX_SHARED_TOKENS)

    def tokens_of(self, salt: str) -> int:
        """Return how many tokens of past answers are kept for a salt.

        An empty salt stands for all requests without one.
        """
        if self.shared is None:
            return SALTED_TOKENS if salt else 0
        return min(self.shared, MAX_SALTED_TOKENS) if salt else self.shared

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter, on the target's device if that drafts.

        There a row follows the latest of its own longest matches. Past answers are on the host, so with `shared`
        the drafter is there, too.
        """
        if self.shared:
            return SuffixDrafter(self, target.rows)
        pointers = Pointers(self.min, self.max, self.reach, confident=True)
        late = late_lookup(target, self.name, self.k, pointers, self.report())
        return late or SuffixDrafter(self, target.rows)

    def report(self) -> Mapping[str, Any]:
        """Return facts for the start-up banner."""
        tokens = f"{self.shared or SALTED_TOKENS} tokens of past answers"
        shared = f"{tokens}, by salt" if self.shared else f"{tokens} of the same salt; without one by itself"
        shared = "every request by itself" if self.shared == 0 else shared
        return {"drafter": self.name, "k": self.k, "match": f"{self.min} to {self.max} tokens", "from": shared}


class SuffixDrafter(LookupDrafter):
    """Proposes the tokens that followed most earlier places that end like the row."""

    name = SuffixConfig.name

    def __init__(self, config: SuffixConfig, rows: RowView) -> None:
        super().__init__(config, Needs(max_k=config.k, instant=True), rows)
        self.config = config
        self._requests: dict[int, Request] = {}  # by row
        self._kept_len: dict[int, int] = {}  # by row: its first tokens, which are the prompt or kept already
        self._shared: dict[str, kernels.TextIndex] = {}  # by salt, the longest unused first

    def admit(self, row: int, request: Request, valid_lens: Mapping[str, int]) -> None:
        """Remember the salt whose answers it may share.

        A preempted request comes back with a part of its answer. `release` kept that part: it is not kept again.
        """
        self._requests[row] = request
        known_len, prompt_len = self._rows.known_len(row), len(request.prompt_ids)
        self._kept_len[row] = known_len if known_len > prompt_len + len(request.told) else prompt_len

    def preview(self, max_drafts: Mapping[int, int]) -> dict[int, RowDraft]:
        """Propose up to `max_drafts[row]` tokens with confidences; rows without a match are left out."""
        rows, c = [row for row, k in max_drafts.items() if k > 0], self.config
        found = kernels.propose_continuations(
            self._rows.texts(rows), [max_drafts[row] for row in rows], c.min, c.max, c.reach, c.share
        )
        if self._shared:
            found = [self._or_shared(row, max_drafts[row], own) for row, own in zip(rows, found, strict=True)]
        drafts = {}
        for row, (token_ids, shares, match) in zip(rows, found, strict=True):
            if token_ids:
                trust = match / (match + 1)
                drafts[row] = RowDraft(token_ids, self.name, [s * trust for s in shares])
        return drafts

    def _or_shared(self, row: int, k: int, own: Path) -> Path:
        """Return the path of past answers where it promises more than the row's own text."""
        shared, c = self._shared.get(self._requests[row].salt), self.config
        if shared is None:
            return own
        tail = self._rows.tokens(row)[-c.max :]
        return max(own, shared.propose(tail, k, c.min, c.max, c.reach, c.share), key=lambda f: expected(f[1]))

    def release(self, row: int) -> None:
        """Keep the row's answer for others of its salt."""
        request = self._requests.pop(row)
        answer = self._rows.tokens(row)[self._kept_len.pop(row) :]
        answer = answer[answer != BROKEN]  # behind an answer that ended with an error
        if len(answer) and (tokens := self.config.tokens_of(request.salt)):
            shared = self._past_answers(request.salt, tokens)
            shared.extend(answer)
            shared.end_text()

    def _past_answers(self, salt: str, tokens: int) -> kernels.TextIndex:
        salts = [other for other in self._shared if other]
        if salt and salt not in self._shared and len(salts) == MAX_SALTS:
            del self._shared[salts[0]]
        found = self._shared.pop(salt) if salt in self._shared else kernels.TextIndex(tokens)
        self._shared[salt] = found  # now the last one used
        return found

    def forget(self) -> None:
        """Drop past answers."""
        self._shared.clear()


def expected(shares: Sequence[float]) -> float:
    """Return the mean number of tokens kept, if each is kept with its share."""
    total, path = 0.0, 1.0
    for share in shares:
        path *= share
        total += path
    return total
