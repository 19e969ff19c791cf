"""Do two models mean the same by a token id?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import DrafterMismatch

if TYPE_CHECKING:
    from paceline.draft.drafter import Vocabulary


def check_vocabulary(target: Vocabulary, drafter: Vocabulary) -> None:
    """Raise `DrafterMismatch` unless both tokenizers spell every id alike.

    Sizes of the embeddings may differ by padding, as 151936 and 152064 do among Qwen models.
    """
    both = f"{drafter.model} ({drafter.size} tokens) cannot draft for {target.model} ({target.size} tokens)"
    sizes = target.tokenizer.vocab_size, drafter.tokenizer.vocab_size
    if sizes[0] != sizes[1]:
        raise DrafterMismatch(
            f"{both}: their tokenizers know {sizes[1]} and {sizes[0]} tokens; use a drafter of the "
            "same model family"
        )
    for token_id in range(sizes[0]):
        spelled = target.tokenizer.token_bytes(token_id), drafter.tokenizer.token_bytes(token_id)
        if spelled[0] != spelled[1]:
            raise DrafterMismatch(
                f"{both}: token {token_id} is {spelled[1]!r} to the drafter and {spelled[0]!r} to the target; "
                "use a drafter with the same tokenizer"
            )
