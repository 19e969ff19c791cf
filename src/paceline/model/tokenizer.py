"""Text to token ids and back with `tokenizers`; `detokenizer` turns ids into text stepwise."""

from __future__ import annotations

import json
import logging
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import BadModelFile, RequestError, UnsupportedModel
from paceline.model.detokenizer import Detokenizer
from paceline.model.spelling import BYTE_DECODERS, BYTE_OF, RawSpelling, TokenBytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import tokenizers

    from paceline.model.spelling import Spelling

log = logging.getLogger(__name__)

LONG_CHARS = 4096  # from this length on, a text is tokenised without holding the interpreter's lock
WHOLE_TEXTS = "the tokenizer's own truncation and padding are switched off: prompts are taken as they are"
_CONTEXT = "\n"  # no token joins it with what follows, even where a tokenizer puts a space before a text


class Tokenizer:
    """Vocabulary of one model. Ids beyond it (padding rows of the embedding) decode to nothing."""

    def __init__(
        self,
        raw: tokenizers.Tokenizer | None,
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        spelling: Spelling | None = None,
        whole: Callable[[], tokenizers.Tokenizer] | None = None,
        digest: str = "",
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library, whose truncation and padding are switched off.

        spelling, whole: in place of `raw` its tokens, and a function that makes it when a text is first tokenised.
        digest: of what it is built from. Raises `UnsupportedModel` if the decoders do not tell how a token is
        written as bytes.
        """
        if raw is not None:
            _use_whole_texts(raw)
            spelling = raw_spelling(raw)
        assert spelling is not None, "a tokenizer is made now or later"
        self._raw, self._whole = raw, whole
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        self.digest = digest
        self.strips_space = spelling.strips_space
        self.pieces = TokenBytes(spelling)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.pieces.spelling.num_tokens

    @property
    def raw(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, whole."""
        if self._raw is None:
            assert self._whole is not None
            whole = self._whole()
            _use_whole_texts(whole)
            self.raw = whole
            return whole
        return self._raw

    @raw.setter
    def raw(self, raw: tokenizers.Tokenizer) -> None:
        self._raw, self._whole = raw, None

    def ending(self, eos_ids: Sequence[int], bos_id: int | None) -> Tokenizer:
        """Return the same tokenizer with other ends of texts."""
        other = copy(self)
        other.eos_ids, other.bos_id = tuple(eos_ids), bos_id
        return other

    def check_fits(self, vocab_size: int) -> None:
        """Raise `BadModelFile` if the model's embedding has no row for some token."""
        if self.vocab_size > vocab_size:
            raise BadModelFile(
                f"the tokenizer has {self.vocab_size} tokens, the model's embedding only {vocab_size} rows; "
                "they belong to different models"
            )

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the token ids of `text`, preceded by the model's own first tokens if `add_special`.

        Raises `RequestError` for text that is not valid Unicode.
        """
        try:
            if len(text) < LONG_CHARS:
                encoding = self.raw.encode(text, add_special_tokens=add_special)
            else:  # the same ids; `encode` would hold the interpreter's lock to the end
                encoding = self.raw.encode_batch_fast([text], add_special_tokens=add_special)[0]
            return list(encoding.ids)
        except (UnicodeEncodeError, TypeError):  # the library raises TypeError for a str that it cannot encode
            raise RequestError("the text holds half a surrogate pair; send valid Unicode") from None
        except BaseException as error:
            if not is_panic(error):
                raise
            raise RequestError("this model's tokenizer cannot take this text; shorten or change it") from None

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound on a text's tokens without tokenising it; 0 if unknown."""
        bound = self._text_bound
        if bound is None:
            return 0
        max_bytes, dropped = bound
        return -(-len(text.encode("utf-8", "replace").translate(None, dropped)) // max_bytes)

    @cached_property
    def _text_bound(self) -> _TextBound | None:
        return _text_bound(self.raw)

    def encode_within(self, text: str) -> list[int]:
        """Return the ids of a text that continues another.

        No space is put before it, as some tokenizers do with a text. Raises `RequestError` as `encode`.
        """
        if not self.strips_space:
            return self.encode(text, add_special=False)
        before = self.encode(_CONTEXT, add_special=False)
        ids = self.encode(_CONTEXT + text, add_special=False)
        return ids[len(before) :] if ids[: len(before)] == before else self.encode(text, add_special=False)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of `ids`. Bytes that are not UTF-8 become U+FFFD."""
        pieces = self._pieces(skip_special)
        text = b"".join([pieces[i] for i in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_space else text

    def detokenizer(self, skip_special: bool = True, *, within: bool = False) -> Detokenizer:
        """Return what makes an answer's text as it grows, `within` another text or not."""
        return Detokenizer(self._pieces(skip_special), self.strips_space and not within)

    def _pieces(self, skip_special: bool) -> Mapping[int, bytes]:
        return self.pieces.visible if skip_special else self.pieces.whole

    def is_special(self, token_id: int) -> bool:
        """Return True if a token steers the model and is not text."""
        return self.pieces.is_special(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for, which need not be whole characters."""
        return self.pieces.whole[token_id]

    def token_text(self, token_id: int) -> str:
        """Return one token as text, for log-probabilities; parts of characters become U+FFFD."""
        return self.pieces.whole[token_id].decode("utf-8", "replace")


def raw_spelling(raw: tokenizers.Tokenizer) -> RawSpelling:
    """Return how the library's tokenizer writes its tokens. Raises `UnsupportedModel`, see `Tokenizer`."""
    decoders = {step["type"]: step for step in _steps(raw.decoder, "decoders")}
    known = [BYTE_DECODERS[kind] for kind in decoders if kind in BYTE_DECODERS]
    if not known:
        raise UnsupportedModel(f"Paceline cannot turn this tokenizer's ids back into text: {sorted(decoders)}")
    # A decoder may drop the space that the tokenizer puts before a text.
    strip, metaspace = decoders.get("Strip", {}), decoders.get("Metaspace", {})
    strips_space = strip.get("start") == 1 or metaspace.get("prepend_scheme") in ("always", "first")
    return RawSpelling(raw, known[0], strips_space=strips_space)


def is_panic(error: BaseException) -> bool:
    """Return True for an error of Rust's, which is no `Exception`."""
    return type(error).__name__ == "PanicException"


def _use_whole_texts(raw: tokenizers.Tokenizer) -> None:
    """Switch truncation and padding off: left from training, they would change prompts silently."""
    if raw.truncation is not None or raw.padding is not None:
        log.warning(WHOLE_TEXTS)
        raw.no_truncation()
        raw.no_padding()


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """Return a tokenizer part's steps: a Sequence's list under `name`, otherwise the part itself."""
    whole = json.loads(part.__getstate__()) if part is not None else {}
    return [step for step in whole.get(name, [whole]) if "type" in step]


# Upper bound of the text of one token -------------------------------------------------------------------

_LOSSLESS = frozenset({"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend"})  # steps that drop no text
_NFC_BYTES = 4  # most bytes that NFC turns into one; really 3.5, for a Greek letter with two marks


class _TextBound(NamedTuple):
    """Bound on the text that tokens stand for."""

    max_bytes: int  # per token
    dropped: bytes  # bytes that no token stands for, as the vocabulary was trained without them


def _text_bound(raw: tokenizers.Tokenizer) -> _TextBound | None:
    """Return the bound on a token's text, None if there is no certain one.

    There is no certain bound with a step that drops text, a token that takes the spaces around it, or a token for
    everything unknown.
    """
    normalizing, cutting = _steps(raw.normalizer, "normalizers"), _steps(raw.pre_tokenizer, "pretokenizers")
    vocab, added = raw.get_vocab(with_added_tokens=False), raw.get_added_tokens_decoder().values()
    lossless = all(_is_lossless(s) for s in [*normalizing, *cutting]) and not any(
        t.lstrip or t.rstrip for t in added
    )
    if not lossless or type(raw.model).__name__ != "BPE":
        return None
    dropped = b""
    if any(step["type"] == "ByteLevel" for step in cutting):
        dropped = bytes(byte for char, byte in BYTE_OF.items() if char not in vocab)
        max_bytes = max(map(len, vocab), default=1)  # a character stands for a byte
    elif raw.model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        max_bytes = max(len(token.encode()) for token in vocab)
    else:
        return None
    max_bytes = max([max_bytes, *(len(token.content.encode()) for token in added)])
    if any(step["type"] == "NFC" for step in normalizing):
        return None if dropped else _TextBound(_NFC_BYTES * max_bytes, dropped)
    return _TextBound(max_bytes, dropped)


def _is_lossless(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == "▁")
    return step["type"] in _LOSSLESS
