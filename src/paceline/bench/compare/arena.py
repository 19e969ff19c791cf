"""Engines that share one target's weights and take turns, each with a policy of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.bench.prompts import spread
from paceline.bench.report import PLAIN
from paceline.bench.run import questions
from paceline.bench.session import SPARE_TOKENS
from paceline.core.errors import ConfigError
from paceline.draft.registry import AUTO, parse_drafters

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.bench.prompts import Prompt
    from paceline.bench.run import Question
    from paceline.core.params import SamplingParams
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine

KS = (1, 2, 3, 4, 6, 8)


class Arena:
    """A target, and an engine for every `--draft` that is asked for, made when it is."""

    def __init__(self, config: EngineConfig, loaded: Loaded, seed: int = 0) -> None:
        self.config, self.loaded, self.seed = config, loaded, seed
        self._engines: dict[str, Engine] = {}

    def engine(self, policy: str) -> Engine:
        """Return an idle engine, one for each name of a policy."""
        from paceline.engine.assembly.build import assemble

        if policy not in self._engines:
            config = replace(self.config, draft=draft_of(policy))
            self._engines[policy] = assemble(config, self.loaded).engine
        return self._engines[policy]

    def keep(self, policies: Iterable[str] = ()) -> None:
        """Let go of all other engines: each has KV of its own, and what is older has it in other memory."""
        self._engines = {name: self._engines[name] for name in policies if name in self._engines}

    def ask(self, prompts: Sequence[Prompt], count: int, params: SamplingParams) -> list[Question]:
        """Return so many questions, evenly spaced over the prompts; with few prompts some come again.

        Raises `ConfigError` if no prompt fits.
        """
        from paceline.serve.prompts import Prompts

        limits = self.config.limits
        room = min(limits.max_len, self.loaded.decoder.config.max_context)
        most = room - params.max_tokens - SPARE_TOKENS
        if most < 1:
            raise ConfigError(f"answers of {params.max_tokens} tokens leave no room for prompts in {room}")
        encode = Prompts(self.loaded.tokenizer, self.loaded.template, limits.max_len)
        fitting = [
            p for p, q in zip(prompts, questions(prompts, encode, params, 0), strict=True) if _len(q) <= most
        ]
        if not fitting:
            raise ConfigError(f"no prompt has at most {most} tokens; raise --max-len")
        asked = spread(fitting, count) * -(-count // len(fitting))
        return questions(asked[:count], encode, params, self.seed)


def _len(question: Question) -> int:
    return len(question.request.prompt_ids)


def drafters(asked: Sequence[str] | None, loaded: Loaded) -> tuple[str, ...]:
    """Return the drafters to compare: those asked for, or else those that `auto` has for this target."""
    return tuple(asked or (config.name for config in parse_drafters(AUTO, loaded.fingerprint).configs))


def static(names: Sequence[str], ks: Sequence[int] = KS) -> tuple[str, ...]:
    """Return every drafter at every k, as `--draft` has them."""
    return tuple(f"{name}{',' if ':' in name else ':'}k={k}" for name in names for k in ks)


def automatic(names: Sequence[str]) -> str:
    """Return the controller that may choose among the drafters."""
    return f"{AUTO}:{'+'.join(names)}"


TWIN = f"{PLAIN} again"  # plain decoding once more: how far apart equal things are measured


def draft_of(name: str) -> str:
    """Return the `--draft` of a policy by the name it has in tables."""
    return PLAIN if name == TWIN else name
