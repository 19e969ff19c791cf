"""A head as it was asked for: options, needs, and facts for the banner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.nouns import PAGE_TOKENS
from paceline.draft.drafter import MAX_K, Needs

if TYPE_CHECKING:
    from paceline.backend.seam import KV, HeadRunner, TapStore
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.config import HeadConfig


@dataclass(frozen=True, slots=True)
class AskedHead:
    """A drafter's options, as far as drafting needs them."""

    name: str  # of the drafter
    k: int
    model: str | None  # folder or Hugging Face id; None: the head that ships for the target
    weights: str | None  # type of its matrices; None: the usual one
    trained_to: tuple[float, ...]  # see `Needs`
    branches: int = 0  # second choices that it hands out, at most


def feature_store(name: str) -> str:
    """Return the name of the store of a head's taps."""
    return f"{name} features"


def head_needs(asked: AskedHead, head: Head, kv: KV, taps: TapStore, *, stops: bool, late: bool = False) -> Needs:
    """Return the needs of a drafter with a head and its two stores."""
    block = head.config.block
    return Needs(
        pages="shared",
        stores=(asked.name, feature_store(asked.name)),
        tap_store=feature_store(asked.name),
        kv_bytes_per_token=kv.bytes_per_token + taps.bytes_per_token,
        bytes_per_row=block.spare_pages * PAGE_TOKENS * kv.bytes_per_token if block else 0,
        taps=head.config.taps,
        max_k=min(MAX_K, block.num_drafts) if block else MAX_K,
        stops=stops,
        late=late,
        trained_to=asked.trained_to,
    )


def head_report(asked: AskedHead, config: HeadConfig, runner: HeadRunner) -> dict[str, Any]:
    """Return facts about a drafter with a head for the start-up banner."""
    return {
        "drafter": asked.name,
        "k": min(asked.k, config.block.num_drafts) if config.block else asked.k,
        **({"branches": asked.branches} if asked.branches else {}),
        "model": asked.model or "ships for this target",
        "taps after layers": " ".join(map(str, config.taps)),
        "tokens": config.draft_vocab_size,
        "of the text besides": "all" if config.request_tokens else "none",
        "weights": f"{runner.weight_bytes / 2**20:.1f} MiB of {runner.weight_type}",
    }
