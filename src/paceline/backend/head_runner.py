"""The seam between a head's drafter and what executes the head: `HeadRunner`, one for each backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.backend.device import Device
    from paceline.backend.packed import Packed
    from paceline.backend.seam import KV, Decoder, SampledTokens, StepLimit
    from paceline.core.nouns import SamplingSpec
    from paceline.model.heads.checkpoint import Head
    from paceline.model.heads.config import HeadConfig


class HeadInTurn(Protocol):
    """Runs passes of a head in turn, see `backend.MultiStep`; what one makes of a token is the next one's feature.

    A head with a relay runs one pass, over the places of all guesses, and then its relay in turn.
    """

    def __call__(
        self,
        packed: Packed,
        features: NDArray[floating],
        kv: KV,
        specs: Sequence[SamplingSpec],
        ends: Sequence[StepLimit],
    ) -> SampledTokens:
        """Run passes for each row, the first over entries as `HeadRunner.run`."""
        ...


class HeadRunner(Protocol):
    """Executes a head beside its target. Holds the head's weights; all other state is in the stores it makes."""

    config: HeadConfig
    weight_type: str  # of its matrices

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights in memory, those of the target not counted."""
        ...

    @property
    def in_turn(self) -> HeadInTurn | None:
        """What runs several passes in one call, if it can."""
        ...

    def write_also(self, own_ids: NDArray[int64]) -> None:
        """From now on, write these tokens [n], too, and no others beside the vocabulary.

        With the target's rows. Only a head whose config says `own_tokens` is asked.
        """
        ...

    def new_kv(self, num_pages: int) -> KV:
        """Return an empty store of `num_pages` pages for the head's layers."""
        ...

    def fuse(self, tapped: NDArray[floating]) -> NDArray[floating]:
        """Return the feature [n, width] of each token from its taps, one after another [n, tapped_size]."""
        ...

    def run(
        self, packed: Packed, features: NDArray[floating], kv: KV, specs: Sequence[SamplingSpec]
    ) -> tuple[SampledTokens, NDArray[floating]]:
        """Run a pass over entries: tokens, and the features [num_tokens, width] of the tokens before them.

        Writes their keys and values. Chosen tokens and rows of logits are the target's, whatever vocabulary the
        head has. The second result stands for the features of the wanted tokens, [num_wanted, width].
        """
        ...

    def relay(
        self,
        first: NDArray[floating],
        normed: NDArray[floating],
        known: tuple[NDArray[int64], NDArray[floating]] | None,
        specs: Sequence[SamplingSpec],
    ) -> tuple[SampledTokens, NDArray[floating]]:
        """Tell guesses of those before them, and choose them: see `forward.relay`. Only of a head with a relay.

        first, normed: [n, width], second results of a `run`. known: the guesses before [n] and what was told to
        them [n, relay_size]; None where these are the first ones, of which none is chosen here. Returns what is
        chosen, and what the guesses were told.
        """
        ...


class LoadHeadRunner(Protocol):
    """Makes what executes a head on its target's backend."""

    def __call__(self, head: Head, target: Decoder, device: Device | None, weight_type: str | None) -> HeadRunner:
        """Embeds tokens as the target does, unless the head brings an embedding of its own.

        device: where it runs, None for where the target does. weight_type: of its matrices, None for the usual
        one. Raises `ConfigError` if the backend has no drafters of that type.
        """
        ...
