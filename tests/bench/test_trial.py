from __future__ import annotations

from collections import Counter

from paceline.bench.prompts import read_prompts
from paceline.bench.trial import PROMPTS, Expected, Trial


def expected(kind, speedup):
    return Expected(kind, 2.0, (0.6, 0.4), 8.0, 8.0 / speedup, speedup)


def trial(*speedups, all_of_them):
    return Trial(tuple(expected(f"kind{i}", s) for i, s in enumerate(speedups)), expected("all", all_of_them))


def test_there_are_twenty_prompts_of_several_kinds():
    prompts = read_prompts(PROMPTS)
    assert len(prompts) == 20
    assert min(Counter(p.category for p in prompts).values()) >= 2


def test_the_verdict_follows_the_times():
    assert "is worth it; expect 1.40x" in trial(1.1, 1.8, all_of_them=1.4).verdict()
    assert "1.10x for kind0 to 1.80x for kind1" in trial(1.1, 1.8, all_of_them=1.4).verdict()
    assert "--draft auto" in trial(0.8, 1.3, all_of_them=1.0).verdict()
    assert "--draft off" in trial(0.8, 0.9, all_of_them=0.85).verdict()
