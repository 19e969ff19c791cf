"""Facts of the promise key, and a self-test on a fixed prompt.

No version tells whether another machine computes the same bits: its mathematical library or compiler may differ,
or its processor may be faulty. So a self-test is in the key: where two engines differ in it, texts would, too.
"""

from __future__ import annotations

import hashlib
import json
import struct
from importlib.metadata import version
from typing import TYPE_CHECKING

from paceline.control.fixed import FixedK
from paceline.core.params import MAX_TOP_LOGPROBS, SamplingParams
from paceline.core.promise import Promise
from paceline.core.request_nouns import Request
from paceline.core.version import VERSION
from paceline.model.config import num_weights
from paceline.model.files.packed_cache import build_mark

if TYPE_CHECKING:
    from paceline.backend.seam import Decoder
    from paceline.core.request_nouns import TokenLogprobs
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.engine import Engine
    from paceline.model.template_source import TemplateSource
    from paceline.model.tokenizer import Tokenizer

MOST_TOKENS = 64  # longest prompt of the self-test
MOST_WORK = 10_000_000_000  # most weights times tokens: larger models get shorter prompts, of 1 token at least
STRIDE = 7919  # from one token id to the next: a prime, so that the prompt spreads over the vocabulary


def language_digest(tokenizer: Tokenizer, template: TemplateSource | None) -> str:
    """Return a digest of a model's tokenizer, chat template and reader of grammars.

    It covers end tokens, which may stand in a file of their own, and the version of the reader, as another version
    may allow other tokens.
    """
    ends = [sorted(tokenizer.eos_ids), tokenizer.bos_id]
    source = template and [template.text, sorted(template.special.items())]
    facts = json.dumps([tokenizer.digest, ends, source, version("llguidance")])
    return hashlib.sha256(facts.encode()).hexdigest()


def promise_of(config: EngineConfig, decoder: Decoder, content: str, language: str) -> Promise:
    """Return what the texts of an engine depend on. content, language: of its model."""
    numbers = f"{decoder.describe()}, KV {config.kv_type}, {config.numerics_mode}"
    return Promise(VERSION, build_mark(), numbers, content, language, config.full_law)


def self_test(engine: Engine) -> str:
    """Return a digest of the log-probabilities behind a fixed prompt.

    The engine must be idle, and is cold afterwards. Log-probabilities are made of all logits, in float64, and the
    logits of the keys and values of all tokens before: so the digest tells of all of these.
    """
    config = engine.target.config
    length = max(1, min(MOST_TOKENS, MOST_WORK // num_weights(config), engine.scheduler.max_len - 1))
    prompt_ids = tuple(i * STRIDE % config.vocab_size for i in range(1, length + 1))
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=MAX_TOP_LOGPROBS)
    engine.controller = FixedK()  # the engine's own would trace these steps
    engine.add(Request("self-test", prompt_ids, params, seed=0))
    outcomes = []
    while engine.has_work:
        outcomes += engine.step()
    engine.forget()  # this makes a new controller of the engine's own kind, too
    engine.reset_stats()
    return _digest([entry for outcome in outcomes for entry in outcome.logprobs or ()])


def _digest(entries: list[TokenLogprobs]) -> str:
    whole = hashlib.sha256()
    for entry in entries:
        ids, numbers = (entry.token_id, *entry.top_ids), (entry.logprob, *entry.top_logprobs)
        whole.update(struct.pack(f"<{len(ids)}q{len(numbers)}d", *ids, *numbers))
    return whole.hexdigest()
