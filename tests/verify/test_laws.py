"""The laws are right: exact enumeration where a law's chances can be asked, counting where noise is at work.

Every check returns a p-value or a difference, so that it can also be shown to fail: the mutations at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.core import noise
from paceline.core.noise import Lane
from paceline.core.nouns import RowDraft
from paceline.verify import block_verification
from paceline.verify.law import LAWS, load_law
from paceline.verify.row_scores import RowScores, draft_probs, excess, keep_chance

from . import world as w
from .world import World

RIGHT, WRONG = 1e-3, 1e-6  # a law has p-values above the one, a mutant below the other; seeds are fixed

DRAFTERS = {
    "its own draws": w.draws(Lane.DRAFT),
    "the target's noise": w.draws(Lane.CHOICE, fresh=False),
    "the target's noise, one-hot": w.draws(Lane.CHOICE, fresh=False, probs=False),
    "lookup": w.looks_up,
    "nothing": w.drafts_nothing,
}


# Exact -------------------------------------------------------------------------------------------


def block_chances(world: World, drafted: RowDraft) -> Iterator[tuple[float, np.ndarray]]:
    row = RowScores(world.scores(0, drafted, w.choose_at(1)), 0, len(drafted) + 1)
    prefixes = list(block_verification.prefixes(drafted, row))
    for kept, (chance, rest) in enumerate(prefixes):
        later = np.prod([1 - c for c, _ in prefixes[kept + 1 :]])
        yield (chance if kept else 1.0) * later, rest / rest.sum() if rest.sum() else rest


def rejection_chances(world: World, drafted: RowDraft) -> Iterator[tuple[float, np.ndarray]]:
    alive, last = 1.0, 0
    for index, token in enumerate(drafted.token_ids):
        p, q = world.p(last), draft_probs(drafted, index, world.vocab)
        keep, rest = keep_chance(p, q, token), excess(p, q)
        yield alive * (1 - keep), rest / rest.sum() if rest.sum() else rest
        alive, last = alive * keep, token
    yield alive, world.p(last)


CHANCES = {"rejection": rejection_chances, "block": block_chances}
CHAINS = {"draws": w.every_draw, "lookup": w.one_lookup}


@settings(max_examples=40)
@given(
    st.integers(0, 1 << 20),
    st.integers(2, 4),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.3, 1.5, 5.0]),
    st.sampled_from(sorted(CHANCES)),
    st.sampled_from(sorted(CHAINS)),
)
def test_a_step_emits_exactly_the_target(
    seed: int, vocab: int, k: int, distance: float, law: str, chains: str
) -> None:
    world = World.random(seed, vocab, distance)
    joint, _ = w.exact(world, lambda d: CHANCES[law](world, d), CHAINS[chains], k)
    np.testing.assert_allclose(joint, world.joint(k + 1), atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 2, 3])
def test_block_verification_keeps_no_fewer_than_rejection(seed: int, k: int) -> None:
    world = World.random(seed, 4)
    (_, by_draft), (_, by_token) = (
        w.exact(world, lambda d, chances=CHANCES[law]: chances(world, d), w.every_draw, k)
        for law in ("block", "rejection")
    )
    assert by_draft >= by_token - 1e-12
    if k == 1:
        np.testing.assert_allclose(by_draft, by_token, atol=1e-12)
        np.testing.assert_allclose(by_token, np.minimum(world.p(0), world.q(0)).sum(), atol=1e-12)
    else:
        assert by_draft > by_token + 1e-4


# Counted -----------------------------------------------------------------------------------------


# Block looks at drafts it does not keep, so these must not come back with the same noise: see the mutations.
CASES = [(law, d) for law in sorted(LAWS) for d in DRAFTERS if law != "block" or not d.startswith("the target's")]


@pytest.mark.parametrize(("law", "drafter"), CASES)
def test_texts_of_several_steps_follow_the_target(law: str, drafter: str) -> None:
    assert w.law_fit(load_law(law), DRAFTERS[drafter]) > RIGHT


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_the_real_law_has_its_exact_distribution_after_one_step(law: str) -> None:
    """Ties the counted law to the enumerated chances: how many drafts it keeps."""
    world, k, trials = World.random(5), 3, 4000
    seen = np.zeros(k + 1)
    wanted = np.zeros(k + 1)
    for chance, drafted in w.every_draw(world, k):
        wanted += chance * np.array([c for c, _ in CHANCES[law](world, drafted)])
    for seed in range(trials):
        seen[w.write(world, load_law(law), DRAFTERS["its own draws"], seed, 1, k=k)[1][0][1]] += 1
    assert stats.chisquare(seen, wanted * trials).pvalue > RIGHT


@pytest.mark.parametrize("law", sorted(LAWS))
def test_texts_follow_the_target_under_a_budget_that_does_not_look(law: str) -> None:
    """How much is drafted depends on the text so far, as it does with a budget from history."""

    def drafter(world: World, tokens: list[int], seed: int, choice: int, k: int) -> RowDraft:
        return DRAFTERS["its own draws"](world, tokens, seed, choice, (len(tokens) + tokens[-1]) % 4)

    assert w.law_fit(load_law(law), drafter) > RIGHT


def looks_at_drafts(drafted: RowDraft) -> int:
    """Trim drafts that begin with token 0: a budget that anticipates."""
    return 0 if len(drafted) and drafted.token_ids[0] == 0 else len(drafted)


def test_coupled_stays_lossless_under_a_budget_that_looks_and_rejection_does_not() -> None:
    drafter = DRAFTERS["its own draws"]
    assert w.law_fit(load_law("coupled"), drafter, trim=looks_at_drafts) > RIGHT
    assert w.law_fit(load_law("rejection"), drafter, trim=looks_at_drafts) < WRONG


@pytest.mark.parametrize("drafter", sorted(DRAFTERS))
def test_coupled_writes_one_text_per_seed(drafter: str) -> None:
    world = World.random(3)
    law = load_law("coupled")
    for seed in range(100):
        plain = w.write(world, law, w.drafts_nothing, seed, 8)[0][:8]
        for k in (1, 2, 5):
            assert w.write(world, law, DRAFTERS[drafter], seed, 8, k=k)[0][:8] == plain


# Acceptance --------------------------------------------------------------------------------------


def first_accepted(world: World, law: str, drafter: w.Drafter, trials: int = 6000) -> int:
    return sum(w.write(world, load_law(law), drafter, seed, 1, k=1)[1][0][1] for seed in range(trials))


@pytest.mark.parametrize("number", range(2))
def test_acceptance_is_what_theory_says(number: int) -> None:
    world, trials = World.random(number + 10, vocab=8), 6000
    variation = world.total_variation(0)
    by_token = first_accepted(world, "rejection", DRAFTERS["its own draws"], trials)
    assert stats.binomtest(by_token, trials, 1 - variation).pvalue > RIGHT
    coupled = first_accepted(world, "coupled", DRAFTERS["the target's noise"], trials)
    bound = (1 - variation) / (1 + variation)
    assert stats.binomtest(coupled, trials, bound, alternative="less").pvalue > RIGHT
    # exactly: the same token wins both races with probability sum of 1 / sum(max(p / p_x, q / q_x))
    p, q = world.p(0), world.q(0)
    race = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(world.vocab))
    assert race >= bound
    assert stats.binomtest(coupled, trials, race).pvalue > RIGHT
    lookup = first_accepted(world, "rejection", w.looks_up, trials)
    assert stats.binomtest(lookup, trials, p[1]).pvalue > RIGHT


def test_self_drafting_accepts_everything() -> None:
    world = World.random(1, distance=0.0)
    for law, drafter in (
        ("coupled", "the target's noise"),
        ("rejection", "its own draws"),
        ("block", "its own draws"),
    ):
        for seed in range(50):
            _, steps = w.write(world, load_law(law), DRAFTERS[drafter], seed, 12, k=3)
            assert all(drafted == accepted for drafted, accepted in steps)


# Independence ------------------------------------------------------------------------------------

Name = tuple[int, int, int, int, int]  # seed, choice, lane, position, token id
NEIGHBOURS = {
    "seed": (1, 0, 0, 0, 0),
    "seed, high word": (1 << 32, 0, 0, 0, 0),
    "choice": (0, 1, 0, 0, 0),
    "lane": (0, 0, 1, 0, 0),
    "position": (0, 0, 0, 1, 0),
    "distant position": (0, 0, 0, 256, 0),
    "token id": (0, 0, 0, 0, 1),
}


def drawn(name: Name) -> int:
    """Return a draw's uniform as one of eight bins."""
    *named, token_id = name
    return int(8 * noise.uniform(noise.key(*named), token_id))


def drawn_without_position(name: Name) -> int:
    seed, choice, lane, _, token_id = name
    return drawn((seed, choice, lane, 0, token_id))


def neighbours_independent(step: Name, draw: object = drawn, count: int = 6000) -> float:
    """Return the p-value of a draw being independent of its neighbour's, along every axis in turn."""
    assert callable(draw)
    worst = 1.0
    for axis in ((2, 0, 0, 0, 0), (0, 0, 0, 2, 0), (0, 0, 0, 0, 2)):
        names = [tuple(5 + i * a for a in axis) for i in range(count)]
        names = [(seed, choice - 5, lane - 5, position, token) for seed, choice, lane, position, token in names]
        if len({draw(n) for n in names[:50]}) == 1:
            return 0.0
        there = [draw(tuple(a + b for a, b in zip(n, step, strict=True))) for n in names]
        worst = min(worst, w.independent([draw(n) for n in names], there))
    return min(1.0, 3 * worst)


@pytest.mark.parametrize("axis", sorted(NEIGHBOURS))
def test_noise_is_independent_of_its_neighbours(axis: str) -> None:
    assert neighbours_independent(NEIGHBOURS[axis]) > RIGHT


def test_depth_gives_fresh_noise() -> None:
    pairs = [
        (noise.uniform(noise.key(1, 0, Lane.DRAFT, i, 0)), noise.uniform(noise.key(1, 0, Lane.DRAFT, i, 1)))
        for i in range(6000)
    ]
    xs, ys = (8 * np.array(pairs)).astype(int).T
    assert w.independent(xs, ys) > RIGHT


@pytest.mark.parametrize("law", sorted(LAWS))
def test_texts_of_other_seeds_and_choices_are_independent(law: str) -> None:
    world, drafter, length = World.random(2), DRAFTERS["its own draws"], 2

    def texts(seeds: range, choice: int) -> np.ndarray:
        written = [w.write(world, load_law(law), drafter, s, length, choice=choice)[0][:length] for s in seeds]
        return np.array(written) @ np.array([world.vocab, 1])

    here = texts(range(0, 3000, 2), 0)
    assert w.independent(here, texts(range(1, 3001, 2), 0)) > RIGHT
    assert w.independent(here, texts(range(0, 3000, 2), 1)) > RIGHT


# Mutations, each of which the suite must catch ---------------------------------------------------


def test_mutant_noise_without_the_position() -> None:
    """Neighbouring tokens come from the same noise."""
    assert neighbours_independent(NEIGHBOURS["position"], drawn_without_position) < WRONG
    assert w.law_fit(load_law("coupled"), w.drafts_nothing, position_of=lambda _: 7) < WRONG


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_mutant_shared_lanes(monkeypatch: pytest.MonkeyPatch, law: str) -> None:
    """The coin that judges a draft is the noise that drew it."""

    def coin(row: RowScores, index: int, depth: int = 0) -> float:
        return noise.uniform(row._key(index, Lane.DRAFT, index))

    monkeypatch.setattr(RowScores, "coin", coin)
    assert w.law_fit(load_law(law), DRAFTERS["its own draws"]) < WRONG


@pytest.mark.parametrize("drafter", ["its own draws", "lookup"])
@pytest.mark.parametrize("law", ["rejection", "block"])
def test_mutant_residual_is_the_target(monkeypatch: pytest.MonkeyPatch, law: str, drafter: str) -> None:
    """A rejected draft is replaced from p instead of max(p - q, 0)."""
    real = RowScores.draw
    monkeypatch.setattr(RowScores, "draw", lambda row, index, weights: real(row, index, row.probs(index)))
    assert w.law_fit(load_law(law), DRAFTERS[drafter]) < WRONG


@pytest.mark.parametrize("law", ["rejection", "block"])
def test_mutant_residual_not_renormalised(monkeypatch: pytest.MonkeyPatch, law: str) -> None:
    """The missing mass of max(p - q, 0) falls to the last token."""

    def draw(row: RowScores, index: int, weights: np.ndarray) -> int:
        coin = noise.uniform(row._key(index, Lane.RESIDUAL))
        return min(int(weights.cumsum().searchsorted(coin)), len(weights) - 1)

    monkeypatch.setattr(RowScores, "draw", draw)
    assert w.law_fit(load_law(law), DRAFTERS["its own draws"]) < WRONG


def test_mutant_block_verification_forgets_how_much_is_still_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """c_i of the last draft alone, in place of the product: token-wise chances, and coins for the whole draft."""
    monkeypatch.setattr(block_verification, "keep_chance", lambda p, q, token, _: keep_chance(p, q, token))
    assert w.law_fit(load_law("block"), DRAFTERS["its own draws"]) < WRONG
    world = World.random(0)
    joint, _ = w.exact(world, lambda d: block_chances(world, d), w.every_draw, 2)
    assert abs(joint - world.joint(3)).max() > 1e-3


SENSITIVE = {
    "coins": World.random(5, 2, 4.0),
    "drafts": World.random(4, 2, 2.0),
    "choices": World.random(4, 2, 2.0),
}
REUSING = {"coins": DRAFTERS["its own draws"], "drafts": w.draws(Lane.DRAFT, fresh=False)}
REUSING["choices"] = DRAFTERS["the target's noise"]


@pytest.mark.parametrize("what", sorted(SENSITIVE))
def test_mutant_block_verification_with_noise_that_comes_back(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Coins or drafts behind the kept prefix were looked at; the next step meets them again."""

    def p_value(drafter: w.Drafter) -> float:
        world, law = SENSITIVE[what], load_law("block")
        return w.fit(world, [w.write(world, law, drafter, s, 3, k=4)[0] for s in range(2000)], 3)

    assert p_value(DRAFTERS["its own draws"]) > RIGHT
    if what == "coins":
        real = RowScores.coin
        monkeypatch.setattr(RowScores, "coin", lambda row, index, depth=0: real(row, index))
    assert p_value(REUSING[what]) < WRONG
