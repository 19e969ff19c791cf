"""Notes of passes as responses carry them: `choices[].speculation.passes` and sums in the usage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.serve.observe.recent import TARGET

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.pass_notes import PassNote
    from paceline.model.tokenizer import Tokenizer

Json = dict[str, Any]


def with_passes(choice: Json, notes: Sequence[PassNote], tokenizer: Tokenizer) -> Json:
    """Return a choice with the passes that made its tokens, if any were noted."""
    if not notes:
        return choice
    return choice | {"speculation": {"passes": [_pass(note, tokenizer) for note in notes]}}


def _pass(note: PassNote, tokenizer: Tokenizer) -> Json:
    text, num = tokenizer.token_text, note.num_accepted
    sources = [note.drafter] * num + [TARGET] * (len(note.token_ids) - num)
    confidence = note.confidence or [None] * len(note.draft_ids)
    tokens = zip(note.token_ids, sources, strict=True)
    drafts = enumerate(zip(note.draft_ids, confidence, strict=True))
    return {
        "drafter": note.drafter,
        "prefill": note.prefill,
        "tokens": [{"id": i, "text": text(i), "from": source} for i, source in tokens],
        "drafts": [{"id": i, "text": text(i), "confidence": c, "kept": at < num} for at, (i, c) in drafts],
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
