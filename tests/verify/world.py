"""A target and a draft model of a handful of tokens, and an engine of a few lines, to test laws by counting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy import special, stats

from paceline.core import noise
from paceline.core.nouns import Draft, RowDraft, SamplingSpec, Scores
from paceline.core.params import SamplingParams
from paceline.verify.law import Law

PARAMS = SamplingParams()
FIRST_POSITION = 1  # token 0 is the prompt


@dataclass(frozen=True)
class World:
    """Logits of the next token given the last one, of the target and of the draft model."""

    target: np.ndarray  # [vocab, vocab] float64
    draft: np.ndarray  # [vocab, vocab] float64

    @staticmethod
    def random(seed: int, vocab: int = 4, distance: float = 1.2, spread: float = 1.0) -> World:
        rng = np.random.default_rng(seed)
        target = spread * rng.standard_normal((vocab, vocab))
        return World(target, target + distance * rng.standard_normal((vocab, vocab)))

    @property
    def vocab(self) -> int:
        return len(self.target)

    def p(self, last: int) -> np.ndarray:
        return special.softmax(self.target[last])

    def q(self, last: int) -> np.ndarray:
        return special.softmax(self.draft[last])

    def scores(
        self, last: int, drafted: RowDraft, choose: SamplingSpec, position_of: Callable[[int], int] = int
    ) -> Scores:
        """Score one row whose newest token is `last`; `choose.position` is that of its first draft."""
        context = [last, *drafted.token_ids]
        count = len(context)
        specs = [choose._replace(position=position_of(choose.position + i)) for i in range(count)]
        return Scores([0, count], specs, np.full(count, -1), self.target[context], np.arange(count))

    def joint(self, length: int) -> np.ndarray:
        """Return the target's probability of every text of that length after token 0. [vocab ** length]"""
        texts = product(range(self.vocab), repeat=length)
        return np.array(
            [np.prod([self.p(a)[b] for a, b in zip((0, *text), text, strict=False)]) for text in texts]
        )

    def total_variation(self, last: int) -> float:
        return float(1 - np.minimum(self.p(last), self.q(last)).sum())


Drafter = Callable[[World, list[int], int, int, int], RowDraft]  # (world, tokens, seed, choice, k)


def draws(lane: noise.Lane, *, fresh: bool = True, probs: bool = True) -> Drafter:
    """Return a drafter that draws from the draft model. fresh: with noise of its own in every step."""

    def propose(world: World, tokens: list[int], seed: int, choice: int, k: int) -> RowDraft:
        drafts: list[int] = []
        for depth in range(k):
            position = len(tokens) + depth
            logits = world.draft[(tokens + drafts)[-1]]
            key = noise.key(seed, choice, lane, position, depth if fresh else 0)
            drafts.append(noise.noisy_argmax(logits, key))
        context = [tokens[-1], *drafts][:k]
        return RowDraft(drafts, "draws", probs=np.array([world.q(c) for c in context]) if probs else None)

    return propose


def looks_up(world: World, tokens: list[int], seed: int, choice: int, k: int) -> RowDraft:
    """Draft a function of the last token: one-hot."""
    return RowDraft([(tokens[-1] * 3 + 1 + i) % world.vocab for i in range(k)], "lookup")


def drafts_nothing(world: World, tokens: list[int], seed: int, choice: int, k: int) -> RowDraft:
    return RowDraft()


Trim = Callable[[RowDraft], int]
Step = tuple[int, int]  # drafted, accepted


def write(
    world: World,
    law: Law,
    drafter: Drafter,
    seed: int,
    length: int,
    *,
    k: int = 2,
    choice: int = 0,
    trim: Trim = len,
    position_of: Callable[[int], int] = int,
) -> tuple[list[int], list[Step]]:
    """Return a text of at least `length` tokens after token 0, and what each step drafted and accepted."""
    tokens, steps = [0], []
    while len(tokens) <= length:
        drafted = drafter(world, tokens, seed, choice, k)
        kept = trim(drafted)
        probs = None if drafted.probs is None else drafted.probs[:kept]
        drafted = RowDraft(drafted.token_ids[:kept], probs=probs)
        choose = SamplingSpec("logits", PARAMS, seed, choice, len(tokens))
        verdict = law.judge(Draft((drafted,)), world.scores(tokens[-1], drafted, choose, position_of)).rows[0]
        assert list(verdict.token_ids[:-1]) == list(drafted.token_ids[: verdict.num_accepted])
        tokens += verdict.token_ids
        steps.append((len(drafted), verdict.num_accepted))
    return tokens[1:], steps


def fit(world: World, texts: list[list[int]], length: int) -> float:
    """Return the p-value of texts having the target's joint distribution of their first `length` tokens."""
    radix = world.vocab ** np.arange(length - 1, -1, -1)
    cells = np.array([text[:length] for text in texts]) @ radix
    counts = np.bincount(cells, minlength=world.vocab**length)
    wanted = world.joint(length) * len(texts)
    rare = wanted < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
    return float(stats.chisquare(counts, wanted).pvalue)


def law_fit(law: Law, drafter: Drafter, *, trials: int = 2000, length: int = 3, **options: Any) -> float:
    """Return the p-value of a law's texts under the target, over several worlds: the smallest, corrected."""
    p_values = []
    for number, distance in enumerate((0.7, 1.5)):
        world = World.random(number, distance=distance)
        seeds = range(trials * number, trials * (number + 1))
        p_values.append(fit(world, [write(world, law, drafter, s, length, **options)[0] for s in seeds], length))
    return min(1.0, len(p_values) * min(p_values))


def independent(xs: Any, ys: Any) -> float:
    """Return the p-value of two series of small integers being independent."""
    xs, ys = np.asarray(xs), np.asarray(ys)
    table = np.zeros((xs.max() + 1, ys.max() + 1))
    np.add.at(table, (xs, ys), 1)
    table = table[table.sum(axis=1) > 0][:, table.sum(axis=0) > 0]
    return float(stats.chi2_contingency(table).pvalue)


def exact(world: World, chances: Callable[[RowDraft], Any], drafter: Any, k: int) -> tuple[np.ndarray, float]:
    """Return a law's exact distribution of its first k + 1 tokens [vocab ** (k + 1)], and its mean accepted.

    chances(drafted) -> [(probability of keeping exactly i drafts, distribution [vocab] of the next)], i = 0..k.
    `drafter(world)` yields (probability, RowDraft) of every chain. What a step does not emit, the target does.
    """
    vocab = world.vocab
    total = np.zeros((vocab,) * (k + 1))
    accepted = 0.0
    for weight, drafted in drafter(world, k):
        for kept, (chance, following) in enumerate(chances(drafted)):
            accepted += weight * chance * kept
            for token in range(vocab):
                text = (*drafted.token_ids[:kept], token)
                total[text] += weight * chance * following[token] * rest_of(world, token, k - kept)
    return total.ravel(), accepted


def rest_of(world: World, last: int, length: int) -> np.ndarray:
    """Return the target's probability of every text of that length after `last`. [vocab] * length"""
    probs = np.ones(())
    for _ in range(length):  # prepend a token: P(b | a) * P(rest | b)
        probs = np.stack(
            [np.einsum("b,b...->b...", world.p(a), _of(probs, world.vocab)) for a in range(world.vocab)]
        )
    return probs[last] if length else probs


def _of(probs: np.ndarray, vocab: int) -> np.ndarray:
    return np.broadcast_to(probs, (vocab,)) if probs.ndim == 0 else probs


def every_draw(world: World, k: int) -> Any:
    """Yield every chain of the draft model with its probability."""
    for chain in product(range(world.vocab), repeat=k):
        probs = np.array([world.q(c) for c in (0, *chain)[:k]]).reshape(k, world.vocab)
        yield float(np.prod(probs[np.arange(k), chain])), RowDraft(chain, probs=probs)


def one_lookup(world: World, k: int) -> Any:
    """Yield the one chain of a lookup drafter."""
    yield 1.0, looks_up(world, [0], 0, 0, k)


def choose_at(position: int, seed: int = 0) -> SamplingSpec:
    return SamplingSpec("logits", PARAMS, seed, 0, position)
