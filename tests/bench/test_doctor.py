from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from paceline.bench.doctor import CATEGORIES, CategorySpeedup, DrafterEvaluation, evaluation_prompts, measure_steps
from tests.engine.same_text import PLAIN, make_engine
from tests.engine.test_same_text import AUTO


def figures(category, speedup):
    return CategorySpeedup(category, 2.0, (0.6, 0.4), 8.0, 8.0 / speedup, speedup)


def verdict(*speedups, overall):
    parts = tuple(figures(f"kind{i}", s) for i, s in enumerate(speedups))
    return DrafterEvaluation(parts, figures("all", overall)).verdict()


def test_twenty_short_prompts_are_asked_two_of_each_category():
    prompts = evaluation_prompts()
    assert Counter(p.category for p in prompts) == dict.fromkeys(CATEGORIES, 2)
    assert len(prompts) == 20
    assert max(len(p.text) for p in prompts) < 600


def test_the_verdict_follows_the_times():
    assert "is worth it; expect 1.40x" in verdict(1.1, 1.8, overall=1.4)
    assert "1.10x for kind0 to 1.80x for kind1" in verdict(1.1, 1.8, overall=1.4)
    assert "--draft auto" in verdict(0.8, 1.3, overall=1.0)
    assert "--draft off" in verdict(0.8, 0.9, overall=0.85)


@pytest.mark.parametrize(("draft", "k"), [("suffix:k=3", 3), (AUTO, 0)])
def test_drafts_are_timed_where_their_depth_is_fixed(draft, k):
    times = measure_steps(SimpleNamespace(engine=make_engine(draft, PLAIN)), draft)
    assert times.k == k
    assert (times.draft_s > 0.0) == (k > 0)
    assert times.plain_s > 0.0
