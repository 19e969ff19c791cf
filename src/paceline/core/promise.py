"""Promise keys: engines of equal keys write equal texts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import astuple, dataclass

FINGERPRINT_CHARS = 16  # characters of the key that responses show


@dataclass(frozen=True, slots=True)
class Promise:
    """All that a text depends on beside its request."""

    version: str = ""
    build: str = ""  # digest of the compiled extension, and of the code that packs weights
    numbers: str = ""  # backend, types of weights and KV, instruction set or device, numerics
    content: str = ""  # key of the model's files
    language: str = ""  # digest of tokenizer, chat template and the library of grammars
    law: str = ""

    def key(self, self_test: str) -> str:
        """Return the key. self_test: digest of what this engine computed from a fixed prompt."""
        facts = json.dumps([*astuple(self), self_test])
        return hashlib.sha256(facts.encode()).hexdigest()


def fingerprint(key: str) -> str | None:
    """Return what responses say of a key, OpenAI's `system_fingerprint`; None without one."""
    return f"fp_{key[:FINGERPRINT_CHARS]}" if key else None
