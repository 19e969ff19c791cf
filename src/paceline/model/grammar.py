"""Grammars of answers, through llguidance: what may come next, and what must.

The state of an answer's grammar is a function of the grammar and the answer's tokens. It is rebuilt by replay
where a request begins again, and an error of the matcher ends its own request only.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from paceline.core.errors import RequestError
from paceline.core.system import usable_cores
from paceline.model.json_schema import supported

if TYPE_CHECKING:
    from collections.abc import Sequence

    import llguidance
    from numpy import int32
    from numpy.typing import NDArray

    from paceline.core.params import Grammar
    from paceline.model.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WORD_BITS = 32
MAX_COMPILED = 64  # grammars kept compiled; the longest unused is dropped first
MAX_MASK_THREADS = 8
CORES_PER_MASK_THREAD = 4  # the other cores compute the pass beside
# JSON as most models and `json.dumps` write it. In free white space a model might loop, and fixed white space is
# drafted at no cost. A schema's own "x-guidance" may set another style.
JSON_STYLE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# llguidance's bounds on one grammar: its symbols and states, and the work to begin and for each token.
LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 2_000_000,
    "step_lexer_fuel": 500_000,
    "step_max_items": 100_000,
    "max_lexer_states": 100_000,
    "max_grammar_size": 500_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
_KEYS = re.compile(r"Unimplemented keys: \[(.*?)\]")
MAX_REASON_CHARS = 300  # most that an error quotes of the library's words


def source(grammar: Grammar) -> str:
    """Return a grammar as llguidance reads it. Raises `RequestError`."""
    from llguidance import LLMatcher

    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(grammar.text)
    return LLMatcher.grammar_from_json_schema(json_source(grammar.text))


def json_source(text: str) -> str:
    """Return the text of a JSON schema as llguidance reads it, style included. Raises `RequestError`."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not JSON: {error}", "grammar") from None
    if not isinstance(schema, dict | bool) or schema is False:
        raise RequestError("the JSON schema must be an object", "grammar")
    known = {} if schema is True else supported(schema)
    own = known.get("x-guidance")
    style = {**JSON_STYLE, **own} if isinstance(own, dict) else JSON_STYLE
    return json.dumps({**known, "x-guidance": style}, separators=(",", ":"))


def check(grammar: Grammar, tokenizer: Tokenizer | None = None) -> None:
    """Raise `RequestError` for a grammar that is ill-formed, not supported, or that no text fits.

    tokenizer: for grammars that name special tokens.
    """
    from llguidance import LLTokenizer

    vocabulary = _vocabulary(tokenizer, tokenizer.vocab_size) if tokenizer else LLTokenizer("byte")
    matcher = _matcher(vocabulary, grammar)
    matcher.compute_bitmask()
    if matcher.is_error():  # compiling does not find out whether anything may begin
        raise RequestError(
            "the grammar cannot be used: nothing may begin it, or its beginning is too much work", "grammar"
        )


def _matcher(vocabulary: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """Return a grammar's matcher before the first token. Raises `RequestError`, which names a keyword."""
    from llguidance import LLMatcher, LLParserLimits

    found = LLMatcher(vocabulary, source(grammar), log_level=0, limits=LLParserLimits(**LIMITS))
    if found.is_error():
        raise _refusal(grammar, found.get_error())
    return found


def _refusal(grammar: Grammar, message: str) -> RequestError:
    """Return the error for a grammar that llguidance refuses."""
    what = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}[grammar.kind]
    if found := _KEYS.search(message):
        keys = ", ".join(json.loads(f"[{found[1]}]"))
        return RequestError(f"the JSON schema uses {keys}, which is not supported", "grammar")
    reason = message.partition("<state>")[0].strip()[:MAX_REASON_CHARS]
    return RequestError(f"the {what} cannot be used: {reason}", "grammar")


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> llguidance.LLTokenizer:
    """Return a tokenizer's tokens as llguidance reads them, padded to a model's vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapped = TokenizerWrapper(_Pieces(tokenizer, vocab_size))
    return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=list(tokenizer.eos_ids))


class _Pieces:
    """Tokens of a tokenizer as bytes; no padding and no special token is ever text."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        if not tokenizer.eos_ids:
            raise RequestError("the model has no end token, so no grammar can end its answer", "grammar")
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], tokenizer.bos_id
        spelling = tokenizer.pieces.spelling
        self.tokens = [spelling.bytes_of(i) for i in range(vocab_size)]
        self.special_token_ids = sorted(spelling.special)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the ids of a text that the grammar forces."""
        known = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode_within(known)


class Grammars:
    """Compiled grammars over one vocabulary, and the states of answers."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: of the model, padding included."""
        self._tokenizer, self.vocab_size = tokenizer, vocab_size
        self.num_words = -(-vocab_size // WORD_BITS)
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher] = OrderedDict()  # the longest unused first

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        """The vocabulary as llguidance reads it, which takes 70 MB for 150,000 tokens."""
        return _vocabulary(self._tokenizer, self.vocab_size)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(max(1, min(MAX_MASK_THREADS, len(usable_cores()) // CORES_PER_MASK_THREAD)))

    def compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        """Return a grammar's matcher before the first token, to be copied. Raises `RequestError`."""
        found = self._compiled.pop(grammar, None) or _matcher(self._vocabulary, grammar)
        self._compiled[grammar] = found
        if len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return found

    def begin(self, grammar: Grammar, answer: Sequence[int] = ()) -> GrammarState:
        """Return the state after some tokens of an answer."""
        return GrammarState(self.compile(grammar), self._tokenizer.eos_ids, answer)

    def masks(self, wanted: Sequence[tuple[GrammarState, Sequence[int]]]) -> list[NDArray[int32]]:
        """Return masks after each state's tokens and each of its drafts, all at once.

        A mask is [1 + num_drafts, num_words]. Behind a draft that leaves the grammar every token is allowed: this
        draft is never kept, so the masks behind it are not read.
        """
        import numpy as np

        starts = np.cumsum([0, *(1 + len(drafts) for _, drafts in wanted)]).tolist()
        return self.fill_masks(wanted, np.empty((starts[-1], self.num_words), np.int32), starts[:-1])

    def fill_masks(
        self, wanted: Sequence[tuple[GrammarState, Sequence[int]]], words: NDArray[int32], starts: Sequence[int]
    ) -> list[NDArray[int32]]:
        """Write masks as `masks` returns them.

        words: [any, num_words]. starts: the first row of each state in `words`.
        """
        matchers = [state.matcher.deep_copy() if drafts else state.matcher for state, drafts in wanted]
        jobs = [
            (matcher, start, list(drafts))
            for matcher, (state, drafts), start in zip(matchers, wanted, starts, strict=True)
            if not state.failed
        ]
        masks = [words[start : start + 1 + len(drafts)] for (_, drafts), start in zip(wanted, starts, strict=True)]
        for mask in masks:
            mask.fill(-1)
        where = words.ctypes.data, 4 * self.num_words, len(words)
        if drafted := [job for job in jobs if job[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, *where)
        if plain := [(matcher, start) for matcher, start, drafts in jobs if not drafts]:
            self._executor.unsafe_compute_mask_ptr(plain, *where)
        for matcher, (state, drafts), mask in zip(matchers, wanted, masks, strict=True):
            if state.failed or matcher.is_error():
                self._mask_one_by_one(state, drafts, mask)
        return masks

    def _mask_one_by_one(self, state: GrammarState, drafts: Sequence[int], mask: NDArray[int32]) -> None:
        """Fill a row's masks position by position; from a matcher's error on nothing is allowed.

        So the answer ends with an error at the same position as without drafts.
        """
        for index in range(len(mask)):
            found = None if state.failed else state.again(drafts[:index])
            if found is not None:
                found.unsafe_compute_mask_ptr(mask[index].ctypes.data, mask[index].nbytes)
            if found is None or found.is_error():
                mask[index:] = 0
                log.warning("a grammar's matcher gave up: %s", found.get_error() if found else "misplaced token")
                break
        state.matcher = state.again(()) or state.matcher


class GrammarState:
    """State of one answer's grammar."""

    def __init__(self, compiled: llguidance.LLMatcher, eos_ids: Sequence[int], answer: Sequence[int] = ()) -> None:
        """compiled: a matcher before the first token. eos_ids: end answers. answer: tokens so far."""
        self._compiled, self._eos_ids = compiled, eos_ids
        self._answer: list[int] = []
        self.matcher = compiled.deep_copy()
        self.failed = False  # True: a token did not fit, which happens only behind an answer's end
        self.take(answer)

    def take(self, token_ids: Sequence[int]) -> None:
        """Take further tokens of the answer. Tokens behind its end are ignored."""
        for token_id in token_ids:
            if self.failed:
                return
            self.failed = token_id < 0 or not self.matcher.consume_token(int(token_id))
            self._answer.append(int(token_id))

    def again(self, drafts: Sequence[int]) -> llguidance.LLMatcher | None:
        """Return a matcher that has read answer and drafts anew; None if unfit."""
        fresh = self._compiled.deep_copy()
        return fresh if fresh.consume_tokens([*self._answer, *drafts]) else None

    def fit(self, drafts: Sequence[int], most: int) -> list[int]:
        """Return the drafts that fit, then forced tokens. most: bound on both together.

        An answer that can only end is followed by the end token. A copy reads ahead: a matcher that is rolled back
        may allow other tokens than one that read the same answer.
        """
        if self.failed:
            return []
        matcher, drafts = self.matcher.deep_copy(), list(drafts)
        kept = drafts[: min(matcher.validate_tokens(drafts), most)] if drafts else drafts
        if len(kept) == most or matcher.is_error():
            return kept
        forced: list[int] = []
        fine = not kept or matcher.consume_tokens(kept)
        if fine and not (kept and kept[-1] in self._eos_ids):
            forced = matcher.compute_ff_tokens()
            fine = not forced or matcher.consume_tokens(forced)
        if fine and matcher.is_stopped() and not (kept and kept[-1] in self._eos_ids):
            forced = [*forced, self._eos_ids[0]]
        return [*kept, *forced][:most]
