"""Engines over one target's shared weights, one for each `--draft` that is compared."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.bench.interleave import make_questions
from paceline.bench.prompt_file import spread
from paceline.bench.report import PLAIN
from paceline.bench.session import SPARE_TOKENS
from paceline.core.errors import ConfigError
from paceline.draft.registry import AUTO, FOR_GRAMMARS, usual_specs
from paceline.model.heads.mtp import drafters_within
from paceline.model.template import compiled

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.bench.interleave import Question
    from paceline.bench.prompt_file import Prompt
    from paceline.core.params import SamplingParams
    from paceline.engine.assembly.build import Loaded
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine

KS = (1, 2, 3, 4, 6, 8)
PLAIN_CONTROL = f"{PLAIN} again"  # a second engine of plain decoding: its difference to the first is noise


class EnginePool:
    """A loaded target, and an engine for each policy, made on first use."""

    def __init__(self, config: EngineConfig, loaded: Loaded, seed: int = 0) -> None:
        self.config = config
        self.loaded = loaded
        self.seed = seed
        self._engines: dict[str, Engine] = {}

    def engine(self, policy: str) -> Engine:
        """Return the idle engine of a policy."""
        from paceline.engine.assembly.build import assemble

        if policy not in self._engines:
            config = replace(self.config, draft=draft_of(policy), keep_learnt=False)  # runs begin cold
            self._engines[policy] = assemble(config, self.loaded).engine
        return self._engines[policy]

    def keep(self, policies: Iterable[str] = ()) -> None:
        """Drop all other engines. Engines made at different times have their KV in different memory."""
        self._engines = {name: self._engines[name] for name in policies if name in self._engines}

    def choose(self, prompts: Sequence[Prompt], count: int, params: SamplingParams) -> list[Question]:
        """Return `count` questions of fitting prompts, spread or repeated. Raises `ConfigError` if none fits."""
        from paceline.serve.prompts import Prompts

        limits = self.config.limits
        max_len = min(limits.max_len, self.loaded.decoder.config.max_context)
        max_prompt = max_len - params.max_tokens - SPARE_TOKENS
        if max_prompt < 1:
            raise ConfigError(f"answers of {params.max_tokens} tokens leave no room for prompts in {max_len}")
        encode = Prompts(self.loaded.tokenizer, compiled(self.loaded.template), limits.max_len)
        questions = make_questions(prompts, encode, params, 0)
        fitting = [p for p, q in zip(prompts, questions, strict=True) if len(q.request.prompt_ids) <= max_prompt]
        if not fitting:
            raise ConfigError(f"no prompt has at most {max_prompt} tokens; raise --max-len")
        chosen = spread(fitting, count) * -(-count // len(fitting))
        return make_questions(chosen[:count], encode, params, self.seed)


def drafter_names(requested: Sequence[str] | None, loaded: Loaded) -> tuple[str, ...]:
    """Return the drafters to compare: those requested, or those that `auto` has for this target.

    The prompts have no grammars, so a drafter that drafts only for rows with a grammar is left out.
    """
    usual = usual_specs(loaded.fingerprint, drafters_within(loaded.head_within))
    return tuple(requested or (one for one in usual if one not in FOR_GRAMMARS))


def fixed_policies(drafters: Sequence[str], ks: Sequence[int] = KS) -> tuple[str, ...]:
    """Return the `--draft` of every drafter at every k."""
    return tuple(f"{name}{',' if ':' in name else ':'}k={k}" for name in drafters for k in ks)


def auto_policy(drafters: Sequence[str]) -> str:
    """Return the `--draft` that lets the controller choose among the drafters."""
    return f"{AUTO}:{'+'.join(drafters)}"


def draft_of(policy: str) -> str:
    """Return the `--draft` of a policy."""
    return PLAIN if policy == PLAIN_CONTROL else policy
