"""Text to token ids and back, over the `tokenizers` library, with an exact incremental way back."""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import BadModelFile, RequestError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import tokenizers

LONG_CHARS = 4096  # texts from here on are tokenised while other threads run
_BEFORE = "\n"  # joins no token after it, where a tokenizer puts a space before a text
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Return the printable stand-in of each byte in byte-level BPE (GPT-2): itself, or 256 and up in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (b for b in range(256) if b not in printable)
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = byte_alphabet()


def _byte_level(token: str) -> bytes:
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


# How a token's text is spelled, by a decoder of tokenizer.json that gives it away.
SPELLINGS: dict[str, Callable[[str], bytes]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _sentence_piece,
    "Metaspace": _sentence_piece,
}


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    """Return the steps of one of the tokenizer's own parts, from a Sequence of that name or a single one."""
    whole = json.loads(part.__getstate__()) if part is not None else {}
    return [step for step in whole.get(name, [whole]) if "type" in step]


def _decoders(raw: tokenizers.Tokenizer) -> dict[str, dict[str, object]]:
    """Return the tokenizer's own decoders by type."""
    return {step["type"]: step for step in _steps(raw.decoder, "decoders")}


def _strips_space(decoders: dict[str, dict[str, object]]) -> bool:
    """Whether the first space of a text is the tokenizer's own and not shown."""
    strip, metaspace = decoders.get("Strip", {}), decoders.get("Metaspace", {})
    return strip.get("start") == 1 or metaspace.get("prepend_scheme") in ("always", "first")


# How much text one token may stand for ------------------------------------------------------------------

_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend"})  # steps that drop nothing of a text
_NFC_BYTES = 4  # that may become one: 3.5 is the most, for a Greek letter with two marks


class _Reach(NamedTuple):
    """What the tokens of a text can stand for."""

    most: int  # bytes for each token
    dropped: bytes  # that no token stands for, as the vocabulary was trained without them


def _reach(raw: tokenizers.Tokenizer) -> _Reach | None:
    """Return how much text a token can stand for, or None if that is not certain.

    A step that drops text, a token that takes the spaces around it or one for all that is unknown has no bound.
    """
    normalizing, cutting = _steps(raw.normalizer, "normalizers"), _steps(raw.pre_tokenizer, "pretokenizers")
    vocab, added = raw.get_vocab(with_added_tokens=False), raw.get_added_tokens_decoder().values()
    keeps = all(_keeps(step) for step in [*normalizing, *cutting]) and not any(t.lstrip or t.rstrip for t in added)
    if not keeps or raw.truncation is not None or type(raw.model).__name__ != "BPE":
        return None
    dropped = b""
    if any(step["type"] == "ByteLevel" for step in cutting):
        dropped = bytes(byte for char, byte in _BYTE_OF.items() if char not in vocab)
        most = max(map(len, vocab), default=1)  # a character stands for a byte
    elif raw.model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        most = max(len(token.encode()) for token in vocab)
    else:
        return None
    most = max([most, *(len(token.content.encode()) for token in added)])
    if any(step["type"] == "NFC" for step in normalizing):
        return None if dropped else _Reach(_NFC_BYTES * most, dropped)
    return _Reach(most, dropped)


def _keeps(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == "▁")
    return step["type"] in _KEEPING


class Tokenizer:
    """One model's vocabulary. Ids beyond it (padding rows of the embedding) decode to nothing."""

    def __init__(
        self, raw: tokenizers.Tokenizer, *, eos_ids: Sequence[int] = (), bos_id: int | None = None
    ) -> None:
        """Wrap a tokenizer of the `tokenizers` library. Raises `UnsupportedModel` for an unknown spelling."""
        decoders = _decoders(raw)
        known = [SPELLINGS[kind] for kind in decoders if kind in SPELLINGS]
        if not known:
            raise UnsupportedModel(f"Paceline cannot turn this tokenizer's ids back into text: {sorted(decoders)}")
        self.raw = raw
        self.eos_ids = tuple(eos_ids)
        self.bos_id = bos_id
        self.strips_space = _strips_space(decoders)
        self._spelling = known[0]
        self._added = {i: (t.content, t.special) for i, t in raw.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}  # filled as tokens are seen
        self._shown: dict[int, bytes] = {}  # likewise
        self._reach = _reach(raw)
        self.vocab_size = 1 + max(raw.get_vocab(with_added_tokens=True).values(), default=-1)

    def check_fits(self, vocab_size: int) -> None:
        """Raise `BadModelFile` if the model's embedding has no row for some token."""
        if self.vocab_size > vocab_size:
            raise BadModelFile(
                f"the tokenizer has {self.vocab_size} tokens, the model's embedding only {vocab_size} rows; "
                "they belong to different models"
            )

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the token ids of `text`, with the model's own first tokens if `add_special`.

        Raises `RequestError` for text that is not valid Unicode.
        """
        try:
            if len(text) < LONG_CHARS:
                encoding = self.raw.encode(text, add_special_tokens=add_special)
            else:  # the same ids; `encode` would hold the interpreter's lock to the end
                encoding = self.raw.encode_batch_fast([text], add_special_tokens=add_special)[0]
            return list(encoding.ids)
        except (UnicodeEncodeError, TypeError):  # the library says TypeError for a str it cannot encode
            raise RequestError("the text holds half a surrogate pair; send valid Unicode") from None

    def least_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least, without tokenising it; 0 if that cannot be said."""
        if self._reach is None:
            return 0
        most, dropped = self._reach
        return -(-len(text.encode("utf-8", "replace").translate(None, dropped)) // most)

    def encode_within(self, text: str) -> list[int]:
        """Return the ids of a text that continues another: without a space that the tokenizer puts before a text.

        Raises `RequestError` as `encode`.
        """
        if not self.strips_space:
            return self.encode(text, add_special=False)
        before = self.encode(_BEFORE, add_special=False)
        ids = self.encode(_BEFORE + text, add_special=False)
        return ids[len(before) :] if ids[: len(before)] == before else self.encode(text, add_special=False)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Return the text of `ids`. Bytes that are no UTF-8 become U+FFFD."""
        data = b"".join(self.token_bytes(i) for i in ids if not (skip_special and self.is_special(i)))
        return self._first(data.decode("utf-8", "replace"))

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model and is not text."""
        return self._added.get(token_id, ("", False))[1]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for; not always whole characters."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text: none if it is special."""
        found = self._shown.get(token_id)
        if found is None:
            found = self._shown[token_id] = b"" if self.is_special(token_id) else self.token_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Return one token as text, for log-probabilities; parts of characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id][0].encode()
        token = self.raw.id_to_token(token_id)
        return b"" if token is None else self._spelling(token)

    def _first(self, text: str) -> str:
        return text.removeprefix(" ") if self.strips_space else text


class Detokenizer:
    """Text of a growing answer: all that `push` and `flush` returned, joined, is `decode` of all ids.

    A character whose bytes are split over tokens is held back until it is whole.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = tokenizer.strips_space
        self._between = True  # characters: none has begun

    def push(self, ids: Iterable[int]) -> str:
        """Take further tokens and return the text that became certain."""
        spell = self._tokenizer.shown_bytes if self._skip_special else self._tokenizer.token_bytes
        data = b"".join([spell(i) for i in ids])
        if self._between and not self._at_start and data.isascii():
            return data.decode("ascii")  # as `_emit` does, sooner
        return self._emit(data, final=False)

    def flush(self) -> str:
        """Return what is left of an unfinished character. Call once, at the end."""
        return self._emit(b"", final=True)

    def _emit(self, data: bytes, final: bool) -> str:
        text = self._utf8.decode(data, final)
        self._between = not self._utf8.getstate()[0]
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
