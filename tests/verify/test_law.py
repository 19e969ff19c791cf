"""The registry; and what laws do with rows that do not sample, have no drafts, or want log-probabilities."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from paceline.core.errors import ConfigError
from paceline.core.nouns import BROKEN, Batch, BatchRow, Draft, RowDraft, SamplingSpec, Scores
from paceline.core.params import SamplingParams
from paceline.core.sampling import choose_token, logprobs
from paceline.verify.coupled import coupled_row
from paceline.verify.law import LAWS, load_law
from paceline.verify.row_scores import judge_rows

VOCAB = 6
LOGITS = np.random.default_rng(4).standard_normal((4, VOCAB)).astype(np.float32)
GREEDY = SamplingSpec("argmax", SamplingParams(temperature=0))


def scores_of(rows: list[list[int]], choose: SamplingSpec) -> Scores:
    """Score rows whose kind needs no logits, or of whose logits each row names the ones at its positions."""
    flat = [value for row in rows for value in row]
    specs = [choose._replace(position=10 + i) for i in range(len(flat))]
    cu_len = [0, *np.cumsum([len(row) for row in rows]).tolist()]
    if choose.kind == "logits":
        return Scores(cu_len, specs, np.full(len(flat), -1), LOGITS, np.array(flat, np.int64))
    return Scores(cu_len, specs, np.array(flat, np.int64))


@pytest.mark.parametrize("name", sorted(LAWS))
def test_laws_are_named_and_declare_their_needs(name: str) -> None:
    law = load_law(name)
    assert law.name == name
    assert law.needs_probs == (name in ("rejection", "block"))


def test_an_unknown_law_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'rejection'"):
        load_law("rejektion")


@pytest.mark.parametrize("name", sorted(LAWS))
def test_greedy_rows_keep_the_drafts_that_the_target_would_choose(name: str) -> None:
    draft = Draft((RowDraft([3, 1, 2]), RowDraft(), RowDraft([5]), RowDraft(), RowDraft([4])))
    scores = scores_of([[3, 1, 0, 2], [], [0, 1], [2], [4, 4]], GREEDY)
    scores.check()
    rows = tuple(
        BatchRow(i, str(i), 1, 3, samples, 99) for i, samples in enumerate([True, False, True, True, True])
    )
    verdict = load_law(name).judge(draft, scores)
    verdict.check(Batch(0, rows), draft)
    assert [list(v.token_ids) for v in verdict.rows] == [[3, 1, 0], [], [0], [2], [4, 4]]
    assert [v.num_accepted for v in verdict.rows] == [2, 0, 0, 0, 1]
    assert all(v.logprobs is None for v in verdict.rows)


@pytest.mark.parametrize("number", range(50))
def test_rows_that_are_chosen_already_are_judged_as_the_rule_judges_them(number: int) -> None:
    """With targets that have no numbers in places, before a draft is refused and behind it."""
    random = Random(number)
    drafts = [[random.randrange(3) for _ in range(random.randrange(5))] for _ in range(6)]
    chosen = [[random.choice([0, 0, 1, 1, 2, BROKEN]) for _ in range(len(d) + 1)] for d in drafts]
    drafts[0], chosen[0] = [], []  # it does not sample
    draft, scores = Draft(tuple(map(RowDraft, drafts))), scores_of(chosen, GREEDY)
    ours, theirs = load_law("coupled").judge(draft, scores), judge_rows(coupled_row, draft, scores)
    for fast, slow in zip(ours.rows, theirs.rows, strict=True):
        assert (list(fast.token_ids), fast.logprobs) == (list(slow.token_ids), slow.logprobs)
        assert fast.num_accepted == slow.num_accepted


@pytest.mark.parametrize("name", sorted(LAWS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_of_the_raw_logits(name: str, temperature: float) -> None:
    choose = SamplingSpec("logits", SamplingParams(temperature=temperature, logprobs=2, top_k=3), seed=5)
    scores = scores_of([[2, 0, 1]], choose)
    drafts = [choose_token(LOGITS[row], scores.specs[i]) for i, row in enumerate([2, 0])]
    verdict = load_law(name).judge(Draft((RowDraft(drafts),)), scores).rows[0]
    assert verdict.logprobs is not None
    assert list(verdict.logprobs) == [
        logprobs(LOGITS[row], token, 2) for row, token in zip([2, 0, 1], verdict.token_ids, strict=False)
    ]


@pytest.mark.parametrize("name", sorted(LAWS))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("least", [0, 1, 2])
def test_drafts_kept_before_the_target_has_no_number_stay(name: str, temperature: float, least: int) -> None:
    """Drafts that no law refuses: q is p where the target draws, and the target's choice for all."""
    choose = SamplingSpec("logits", SamplingParams(temperature=temperature, logprobs=0), seed=5)
    scores = scores_of([[0, 1, 2]], choose)
    drafts = [choose_token(LOGITS[i], scores.specs[i]) for i in range(2)]
    probs = np.exp(LOGITS[:2].astype(float))
    probs /= probs.sum(axis=1, keepdims=True)
    scores.logits = np.where(np.arange(4)[:, None] < least, LOGITS, np.nan)
    verdict = load_law(name).judge(Draft((RowDraft(drafts, probs=probs),)), scores).rows[0]
    assert list(verdict.token_ids) == [*drafts[:least], BROKEN]
    assert verdict.num_accepted == least
    assert verdict.logprobs is not None
    assert [entry.token_id for entry in verdict.logprobs] == drafts[:least]


def test_coupled_chooses_nothing_behind_the_first_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counted(logits: np.ndarray, choose: SamplingSpec) -> int:
        seen.append(choose.position)
        return choose_token(logits, choose)

    monkeypatch.setattr("paceline.verify.row_scores.choose_token", counted)
    choose = SamplingSpec("logits", SamplingParams(top_k=2), seed=1)
    scores = scores_of([[0, 1, 2, 3]], choose)
    first = choose_token(LOGITS[0], scores.specs[0])
    wrong = (choose_token(LOGITS[1], scores.specs[1]) + 1) % VOCAB
    verdict = load_law("coupled").judge(Draft((RowDraft([first, wrong, 0]),)), scores).rows[0]
    assert verdict.num_accepted == 1
    assert seen == [10, 11]


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_banned_token_is_never_kept(name: str) -> None:
    """Not even where the drafter, too, says that it cannot be: 0 / 0."""
    choose = SamplingSpec("logits", SamplingParams(top_k=1), seed=1)
    banned = int(LOGITS[0].argmin())
    probs = np.zeros((1, VOCAB))
    probs[0, (banned + 1) % VOCAB] = 1.0
    for q in (probs, None):
        verdict = load_law(name).judge(Draft((RowDraft([banned], probs=q),)), scores_of([[0, 1]], choose)).rows[0]
        assert list(verdict.token_ids) == [int(LOGITS[0].argmax())]


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_rounding_in_the_drafts_probabilities_leaves_something_to_draw_from(name: str) -> None:
    """q a little above p everywhere: nothing is left of p - q when a coin rejects after all."""
    choose = SamplingSpec("logits", SamplingParams(), seed=0)
    p = np.exp(LOGITS[0].astype(float)) / np.exp(LOGITS[0].astype(float)).sum()
    for seed in range(40):
        scores = scores_of([[0, 1]], choose._replace(seed=seed))
        verdict = load_law(name).judge(Draft((RowDraft([2], probs=2 * p[None]),)), scores).rows[0]
        assert len(verdict.token_ids) == verdict.num_accepted + 1
