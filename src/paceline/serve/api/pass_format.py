"""Notes of passes as responses carry them: `choices[].speculation.passes` and sums in the usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.serve.observe.recent import TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.pass_notes import PassNote
    from paceline.core.request_nouns import Request
    from paceline.model.detokenizer import Detokenizer
    from paceline.model.tokenizer import Tokenizer

Json = dict[str, Any]


class PassReader:
    """Reader of the notes of one answer's passes.

    The texts of all passes, joined, are the answer's text, except for what a stop hides. A character of several
    tokens comes with the last of these tokens.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        self._tokenizer, self._text = tokenizer, tokenizer.detokenizer(within=request.within)
        self._text.push(request.told)

    def read(self, notes: Sequence[PassNote], *, ends: bool) -> list[Json]:
        """Return further passes. ends: no others follow."""
        passes = [_pass(note, self._text, self._tokenizer) for note in notes]
        if ends and passes[-1]["tokens"]:
            passes[-1]["tokens"][-1]["text"] += self._text.flush()
        return passes


def _pass(note: PassNote, text: Detokenizer, tokenizer: Tokenizer) -> Json:
    num = note.num_accepted
    sources = [note.drafter] * num + [TARGET] * (len(note.token_ids) - num)
    confidence = note.confidence or [None] * len(note.draft_ids)
    tokens = zip(note.token_ids, sources, strict=True)
    drafts = enumerate(zip(note.draft_ids, confidence, strict=True))
    return {
        "drafter": note.drafter,
        "prefill": note.prefill,
        "tokens": [{"id": i, "text": text.push((i,)), "from": source} for i, source in tokens],
        "drafts": [
            {"id": i, "text": tokenizer.token_text(i), "confidence": c, "kept": at < num} for at, (i, c) in drafts
        ],
        "k": len(note.draft_ids),
        "proposed": note.num_proposed,
        "draft_ms": _ms(note.draft_s),
        "target_ms": _ms(note.target_s),
        "step_ms": _ms(note.step_s),
        "rows": note.num_rows,
        "expected": note.expected_tokens,
        "expected_ms": _ms(note.expected_s),
        "plain_ms": _ms(note.plain_s),
        **({"changed": list(note.changed)} if note.changed else {}),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 4)


def times_per_token(notes: Sequence[PassNote]) -> Json:
    """Return the milliseconds per decoded token, measured and estimated without drafts; empty without notes.

    A plain step gives a row one token, so a pass saves its tokens' plain steps less its own time.
    """
    passes = [note for note in notes if not note.prefill]
    num_tokens = sum(len(note.token_ids) for note in passes)
    if not num_tokens:
        return {}
    step_s = sum(note.step_s for note in passes)
    found: Json = {"ms_per_token": _ms(step_s / num_tokens)}
    estimated = [note for note in passes if note.plain_s is not None]
    if len(estimated) < len(passes):
        return found | {"plain_ms_per_token": None, "saved_ms": None}
    plain_s = sum((note.plain_s or 0.0) * len(note.token_ids) for note in passes)
    return found | {"plain_ms_per_token": _ms(plain_s / num_tokens), "saved_ms": _ms(plain_s - step_s)}
