"""An answer is written the same whether its tokens are looked at together or one by one."""

from __future__ import annotations

from random import Random

import pytest

from paceline.core.nouns import BROKEN
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.engine.output import StopChecker
from paceline.engine.stops import StopCheck
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer(320)
EOS = 319
PARAMS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=40, min_tokens=20),
    SamplingParams(max_tokens=40, stop_token_ids=(70, 90), min_tokens=5),
    SamplingParams(max_tokens=40, stop_token_ids=(70, 90), include_stop=True),
    SamplingParams(max_tokens=40, stop=("ab", "q")),
]


def _written(
    params: SamplingParams, drafts: list[list[int]], method: str
) -> tuple[list[tuple[StopCheck, str]], str]:
    writer = StopChecker(Request("r", (1,), params, seed=0), frozenset({EOS}), TOKENIZER.detokenizer())
    found: list[tuple[StopCheck, str]] = []
    for drafted in drafts:
        taken: StopCheck = getattr(writer, method)(drafted)
        found.append((taken, writer.text()))
        if taken.finish_reason is not None:
            break
    return found, writer.flush()


@pytest.mark.parametrize("params", PARAMS)
def test_tokens_together_are_written_as_one_by_one(params: SamplingParams) -> None:
    """Tokens are any bytes, so characters are split over tokens and steps; now and then the answer ends."""
    endings = set()
    for number in range(300):
        random = Random(number)
        ids = [random.choice([*range(256), *range(60, 120), EOS, 70, 90]) for _ in range(60)]
        ids += [BROKEN] if number % 10 == 0 else []
        random.shuffle(ids)
        cuts = sorted(random.sample(range(1, len(ids)), 25))
        drafts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
        together, rest = _written(params, drafts, "take")
        assert (together, rest) == _written(params, drafts, "take_each")
        endings.add(together[-1][0].finish_reason)
    assert {"error", "length"} <= endings
    assert params.ignore_eos or "stop" in endings
