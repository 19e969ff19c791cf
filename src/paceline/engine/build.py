"""From an `EngineConfig` to a running engine, with a note of what was chosen and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.engine.config import EngineConfig
    from paceline.engine.engine import Engine
    from paceline.model.template import ChatTemplate
    from paceline.model.tokenizer import Tokenizer
    from paceline.model.weights import LoadedModel

    Progress = Callable[[str, int, int], None]  # (what, done, total), both in bytes


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of the start-up banner."""

    what: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """An engine with what its outside world needs."""

    engine: Engine
    model_name: str
    template: ChatTemplate | None  # None: the model has none, so chat is refused
    max_len: int  # tokens of prompt and answer of one request
    choices: tuple[Choice, ...]


def build(config: EngineConfig, progress: Progress | None = None) -> Built:
    """Load the model and make the engine. Raises `ConfigError` or `ModelError`."""
    raise NotImplementedError
