"""Tokenizers rebuilt from GGUF metadata with the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from paceline.core.errors import BadModelFile, UnsupportedModel, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MAX_TOKEN_CHARS = 1 << 10
_CONTROL, _USER_DEFINED = 3, 4  # token types
# Phi-3 drops white space behind its control tokens, for which GGUF has no field. Only Phi-3 has `_PHI_3`, and it
# keeps the space behind the tokens of `_PHI_3_KEEPS`.
_PHI_3, _PHI_3_KEEPS = "<|placeholder1|>", ("<unk>", "<s>", "<|endoftext|>")
_HARMONY_ENDS = ("<|return|>", "<|call|>")
# Tokens that end a turn; many files do not list them as special tokens.
_TURN_ENDS = ("<end_of_turn>", "<turn|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Pre-tokenizer of byte-level BPE, chosen by `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...]  # regular expressions, applied one after the other
    ignore_merges: bool = False  # a word that is a token is not split
    add_bos: bool = False  # where the file does not say
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = PreTokenizer((_CONTRACTIONS + r"\p{N}{1,3}" + _SPACES,))
_LLAMA3 = replace(_CL100K, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_CONTRACTIONS + r"\p{N}" + _SPACES,), nfc=True)
_SEED = PreTokenizer((_CONTRACTIONS + r"\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+",))
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = PreTokenizer(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ignore_merges=True,
    add_bos=True,
)
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = PreTokenizer(
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)

# By llama.cpp's names. Granite 3 names refact; Granite 4 and Phi-4 name dbrx; SmolLM3 names smaug-bpe.
PRES: dict[str, PreTokenizer] = {
    name: pre
    for names, pre in (
        ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
        ("gpt-2 olmo exaone4", PreTokenizer((_GPT2,))),
        ("smollm refact", PreTokenizer((r"\p{N}", _GPT2))),
        ("dbrx smaug-bpe glm4 chatglm-bpe", _CL100K),
        ("llama-bpe llama3 llama-v3", _LLAMA3),
        ("qwen2 deepseek-r1-qwen", _QWEN2),
        ("seed-coder", _SEED),
        ("tekken", _TEKKEN),
        ("gpt-4o o200k minimax-m2", _O200K),
    )
    for name in names.split()
}


def tokenizer_from_gguf(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """Build the file's tokenizer. Raises `UnsupportedModel`, `BadModelFile`."""
    kind = str(metadata.get("tokenizer.ggml.model"))[:80]
    if kind not in _KINDS:
        raise UnsupportedModel(f"the GGUF tokenizer kind {kind!r} is not supported{suggest(kind, _KINDS)}")
    tokens = _tokens(metadata)
    raw, default_bos = _KINDS[kind](tokens, metadata)
    _add_special(raw, tokens, metadata)
    _add_bos(raw, tokens, metadata, default_bos)
    return raw


class VocabularyFacts(msgspec.Struct, frozen=True):
    """Facts about a vocabulary that a start needs without its tokenizer."""

    num_tokens: int
    digest: str  # digest of what `tokenizer_from_gguf` reads
    special: dict[str, str]  # as `special_texts`
    markers: dict[str, int]  # as `marker_ids`


def vocabulary_facts(metadata: dict[str, Any]) -> VocabularyFacts:
    """Return the facts about a vocabulary. Raises `BadModelFile`."""
    special, markers = special_texts(metadata), marker_ids(metadata)
    return VocabularyFacts(len(_tokens(metadata)), tokenizer_digest(metadata), special, markers)


def tokenizer_digest(metadata: dict[str, Any]) -> str:
    """Return a digest of what `tokenizer_from_gguf` reads."""
    read = {key: value for key, value in metadata.items() if key.startswith("tokenizer.ggml.")}
    return hashlib.sha256(json.dumps(read, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _tokens(metadata: dict[str, Any]) -> list[str]:
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    if not tokens or len(set(tokens)) != len(tokens):
        raise BadModelFile("the GGUF file's list of tokens is empty or names one twice")
    if max(map(len, tokens)) > MAX_TOKEN_CHARS:
        raise BadModelFile(f"the GGUF file has a token of more than {MAX_TOKEN_CHARS} characters")
    return tokens


def _list(metadata: dict[str, Any], key: str, kind: type) -> list[Any]:
    values = metadata.get(key, [])
    if not isinstance(values, list) or (values and type(values[0]) is not kind):  # lists hold one type
        raise BadModelFile(f"the GGUF file's {key} is no list of {kind.__name__}")
    return values


def _byte_level(tokens: list[str], metadata: dict[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a byte-level BPE tokenizer as in GPT-2, with explicit merges."""
    name = str(metadata.get("tokenizer.ggml.pre", "default"))[:80]
    if name not in PRES:
        known = ", ".join(sorted(PRES))  # no suggestion: a similar name splits words in another way
        raise UnsupportedModel(f"the GGUF pre-tokenizer {name!r} is not supported; known: {known}")
    pre = PRES[name]
    vocab = {token: i for i, token in enumerate(tokens)}
    raw = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=_merges(vocab, metadata), ignore_merges=pre.ignore_merges)
    )
    if pre.nfc:
        raw.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    raw.decoder = decoders.ByteLevel()
    return raw, pre.add_bos


def _merges(vocab: dict[str, int], metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs in order of rank, checked, since the library trusts them."""
    merges = []
    for line in _list(metadata, "tokenizer.ggml.merges", str):
        left, _, right = line.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise BadModelFile(f"the GGUF file's merge {line[:80]!r} is not of tokens it has")
        merges.append((left, right))
    return merges


def _sentence_piece(tokens: list[str], metadata: dict[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a SentencePiece BPE tokenizer: best joint score merges first."""
    scores = _list(metadata, "tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise BadModelFile(f"the GGUF file has {len(scores)} scores for {len(tokens)} tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    prefixed = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    return _of_pieces(tokens, metadata, _scored_merges(vocab, scores), prefixed), True


def _gemma4(tokens: list[str], metadata: dict[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    """Return the tokenizer of Gemma 4: pieces as in SentencePiece, with explicit merges."""
    vocab = {token: i for i, token in enumerate(tokens)}
    return _of_pieces(tokens, metadata, _merges(vocab, metadata), prefixed=False), True


def _of_pieces(
    tokens: list[str], metadata: dict[str, Any], merges: list[tuple[str, str]], prefixed: bool
) -> tokenizers.Tokenizer:
    """Return a tokenizer of pieces with "▁" for a space; unknown characters become bytes."""
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = _token(tokens, metadata, "unknown") or "<unk>"
    if unknown not in vocab:
        raise BadModelFile("the GGUF file's SentencePiece tokenizer lacks a token for the unknown")
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    raw = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", "▁")
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    raw.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefixed else back)
    return raw


def _scored_merges(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return token pairs that join to a token, best joint score first, then by ids."""
    ranked = [
        (-scores[i], vocab[token[:cut]], vocab[token[cut:]], token[:cut], token[cut:])
        for token, i in vocab.items()
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    return [(left, right) for *_, left, right in sorted(ranked, key=itemgetter(0, 1, 2))]


# `tokenizer.ggml.model` -> builder; its second result is the default of "a text begins with BOS".
_KINDS: dict[str, Callable[[list[str], dict[str, Any]], tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
    "gemma4": _gemma4,
}


def _add_special(raw: tokenizers.Tokenizer, tokens: list[str], metadata: dict[str, Any]) -> None:
    """Add control and user-defined tokens, which are never split or merged."""
    kinds = _list(metadata, "tokenizer.ggml.token_type", int)
    if kinds and len(kinds) != len(tokens):
        raise BadModelFile(f"the GGUF file has {len(kinds)} token types for {len(tokens)} tokens")
    typed = [(token, kind) for token, kind in zip(tokens, kinds, strict=False) if token]
    is_phi_3 = _PHI_3 in tokens

    def added(kind: int) -> list[AddedToken]:
        own = ((token, is_phi_3 and token not in _PHI_3_KEEPS) for token, its_kind in typed if its_kind == kind)
        return [AddedToken(t, rstrip=strips, normalized=False, special=kind == _CONTROL) for t, strips in own]

    raw.add_special_tokens(added(_CONTROL))
    raw.add_tokens(added(_USER_DEFINED))


def _token(tokens: list[str], metadata: dict[str, Any], role: str) -> str | None:
    token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
    return tokens[token_id] if type(token_id) is int and 0 <= token_id < len(tokens) else None


def _add_bos(raw: tokenizers.Tokenizer, tokens: list[str], metadata: dict[str, Any], default: bool) -> None:
    bos = _token(tokens, metadata, "bos")
    if bos and metadata.get("tokenizer.ggml.add_bos_token", default):
        special = [(bos, metadata["tokenizer.ggml.bos_token_id"])]
        raw.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=special
        )


def marker_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """Return the ids of a vocabulary's ends of turns and tokens of harmony, by text."""
    tokens, known = metadata.get("tokenizer.ggml.tokens"), (*_HARMONY_ENDS, "<|channel|>", *_TURN_ENDS)
    return {text: tokens.index(text) for text in known if text in tokens} if isinstance(tokens, list) else {}


def end_ids(markers: Mapping[str, int], named: Sequence[int], template: str) -> tuple[int, ...]:
    """Return the tokens that end an answer.

    markers: as `marker_ids`. named: end tokens that the file names. template: ends of turns in it are added.

    In harmony, the format of gpt-oss, the end of a call ends an answer, and the end of a message does not.
    """
    ends = [*named, *(markers[text] for text in _TURN_ENDS if text in markers and text in template)]
    if {*_HARMONY_ENDS, "<|channel|>"} <= markers.keys():
        ends = [i for i in ends if i != markers.get("<|end|>")] + [markers[text] for text in _HARMONY_ENDS]
    return tuple(dict.fromkeys(ends))


def special_texts(metadata: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token` and `eos_token` as chat templates name them."""
    tokens = _tokens(metadata)
    return {f"{role}_token": _token(tokens, metadata, role) or "" for role in ("bos", "eos")}
