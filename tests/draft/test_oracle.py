"""The oracle keeps as many drafts as it is asked to, and changes no text."""

from __future__ import annotations

import json
from math import sqrt
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from paceline.backend.cuda.graphs import Uncaptured
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from paceline.draft.lookup.oracle import OracleConfig, read_answers
from paceline.draft.registry import parse_drafters, parse_spec
from tests.draft.heads import trained_head
from tests.engine.same_text import PLAIN, VOCAB, Answer, assert_same, make_engine, plain_answers, run, target

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.nouns import Verdict
    from paceline.engine.engine import Engine
    from paceline.engine.step import StepInput, StepScores

RATES = (0.681, 0.574, 0.52)
REQUESTS = [
    Request(
        str(i),
        tuple(range(40 + i, 60)),
        SamplingParams(temperature=(0.0, 0.9)[i % 2], max_tokens=150, ignore_eos=True),
        seed=i,
    )
    for i in range(16)
]


@pytest.fixture(scope="module")
def plain() -> dict[str, Answer]:
    return plain_answers(REQUESTS)


@pytest.fixture(scope="module")
def file(plain: dict[str, Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "plain.jsonl"
    runs = [{"draft": "off", "concurrency": 16, "repeat": repeat} for repeat in (0, 1)]
    lines = [one | {"question_id": name, "token_ids": a.token_ids} for one in runs for name, a in plain.items()]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def counted(engine: Engine) -> tuple[list[int], list[int]]:
    """Return lists that get how many drafts were tested and kept at each depth."""
    judge, tested, kept = engine.judge, [0] * 4, [0] * 4

    def watched(drafted: StepInput, scored: StepScores) -> Verdict:
        verdict = judge(drafted, scored)
        for draft, row in zip(drafted.draft.rows, verdict.rows, strict=True):
            for depth in range(min(len(draft), row.num_accepted + 1)):
                tested[depth] += 1
                kept[depth] += depth < row.num_accepted
        return verdict

    engine.judge = watched  # type: ignore[method-assign]
    return tested, kept


HEAD = "head=eagle3[model={eagle3}]"
BESIDE = ["", HEAD, "head=draft-model[model=noisy]", "head=ngram[min=1;max=4]"]  # that run beside it on a device


@pytest.mark.parametrize(("types", "beside"), [("f64", ""), *(("cuda", beside) for beside in BESIDE)])
def test_drafts_are_kept_as_often_as_asked_at_each_depth(
    plain: dict[str, Answer], file: Path, types: str, beside: str
) -> None:
    """Within four deviations of a binomial; a fourth draft has the last rate."""
    if beside == HEAD:
        beside = HEAD.format(eagle3=trained_head("eagle3", target().decoder))  # type: ignore[arg-type]
    spec = f"oracle:file={file},rates={'+'.join(map(str, RATES))},k=4"
    engine = make_engine(f"{spec},{beside}", PLAIN, types=types)
    tested, kept = counted(engine)
    assert_same(plain, run(engine, REQUESTS, stagger=1))
    assert engine.stats().drafter_failures == 0
    for depth, rate in enumerate((*RATES, RATES[-1])):
        assert tested[depth] > 100
        deviation = sqrt(rate * (1 - rate) / tested[depth])
        assert kept[depth] / tested[depth] == pytest.approx(rate, abs=4 * deviation)


@pytest.mark.parametrize("types", ["f64", "cuda"])
@pytest.mark.parametrize("rate", [0, 1])
def test_no_draft_is_kept_or_all(plain: dict[str, Answer], file: Path, rate: int, types: str) -> None:
    engine = make_engine(f"oracle:file={file},rates={rate},k=3", PLAIN, types=types)
    tested, kept = counted(engine)
    assert_same(plain, run(engine, REQUESTS))
    assert tested[0] > 100
    assert kept == [rate * count for count in tested]


def test_drafting_that_is_padded_and_captured_drafts_the_same(plain: dict[str, Answer], file: Path) -> None:
    """Pointers beside the oracle, as many rows as there are; on a host what is captured runs as it is."""
    counts = []
    for captured in (False, True):
        engine = make_engine(f"oracle:file={file},rates=0.6,k=3,head=suffix", PLAIN, types="cuda")
        target: Any = engine.target
        if captured:
            target.rows.capture = Uncaptured
        assert_same(plain, run(engine, REQUESTS[:5]) | {r.request_id: plain[r.request_id] for r in REQUESTS[5:]})
        assert engine.stats().drafter_failures == 0
        counts.append(engine.stats().drafters["oracle"])
    assert counts[0] == counts[1]
    assert counts[0].verified_at[0] > 100


@pytest.mark.parametrize("types", ["f64", "cuda"])
def test_a_row_that_has_left_the_recording_drafts_nothing(
    plain: dict[str, Answer], tmp_path: Path, types: str
) -> None:
    other = tmp_path / "other.jsonl"
    lines = [{"token_ids": [(t + 1) % VOCAB for t in a.token_ids]} for a in plain.values()]
    other.write_text("\n".join(map(json.dumps, lines)))
    engine = make_engine(f"oracle:file={other}", PLAIN, types=types)
    assert_same(plain, run(engine, REQUESTS))
    assert not engine.stats().drafters


@pytest.mark.parametrize("types", ["f64", "cuda"])
def test_requests_without_a_number_have_no_recording(file: Path, types: str) -> None:
    """They do not get the recording of the request that had their row before."""
    engine = make_engine(f"oracle:file={file}", PLAIN, types=types)
    run(engine, REQUESTS)
    before = engine.stats().drafters["oracle"].drafted
    run(engine, [Request(name, (5, 9, 13), REQUESTS[0].params, seed=0) for name in ("a", "-1", "9" * 5000)])
    assert engine.stats().drafters["oracle"].drafted == before


def test_the_first_run_of_a_file_is_read(plain: dict[str, Answer], file: Path) -> None:
    answers = read_answers(file, VOCAB)
    assert [a.tolist() for a in answers] == [a.token_ids for a in plain.values()]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "[]",
        "{}",
        '{"token_ids": null}',
        '{"token_ids": ["a"]}',
        '{"token_ids": [[1], [2]]}',
        '{"token_ids": [-1]}',
        '{"token_ids": [320]}',
        '{"token_ids": [99999999999999999999999]}',
        "[" * 100_000,
    ],
)
def test_files_that_hold_no_answers_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="oracle:file="):
        read_answers(path, VOCAB)
    with pytest.raises(ConfigError, match="oracle:file="):
        read_answers(tmp_path / "missing.jsonl", VOCAB)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("oracle", "wants file=FILE"),
        ("oracle:file=x,rates=a", "numbers from 0 to 1"),
        ("oracle:file=x,rates=0.5+1.5", "numbers from 0 to 1"),
        ("oracle:file=x,rates=nan", "numbers from 0 to 1"),
        ("oracle:file=x,k=17", "between 1 and 16"),
        ("oracle:file=x,head=eagle9", "unknown drafter"),
        ("oracle:file=x,head=eagle3[model=x", "in brackets"),
        ("oracle:file=x,head=off", "in brackets"),
        ("oracle:file=x,head=oracle[file=x]", "in brackets"),
        ("oracle:file=x,head=ngram[most=3]", "has no option 'most'"),
    ],
)
def test_bad_options_say_what_to_do(spec: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_spec(spec)


def test_a_head_beside_it_needs_a_target_that_drafts_on_its_device(file: Path) -> None:
    with pytest.raises(ConfigError, match="on its own device"):
        make_engine(f"oracle:file={file},head=ngram", PLAIN)
    with pytest.raises(ConfigError, match="does not draft on"):
        make_engine(f"oracle:file={file},head=suffix[shared=9]", PLAIN, types="cuda")


def test_a_head_beside_it_has_its_options_and_the_oracles_k() -> None:
    found = parse_spec("oracle:file=x,k=3,head=eagle3[model=some/head;weights=bf16]")
    assert isinstance(found, OracleConfig)
    assert found.beside == parse_spec("eagle3:model=some/head,weights=bf16,k=3")


def test_rates_may_stand_in_a_list_of_drafters() -> None:
    found = parse_drafters("auto:oracle:rates=0.6+.5+0.4,file=x,k=4+suffix").configs
    assert [config.name for config in found] == ["oracle", "suffix"]
    assert isinstance(found[0], OracleConfig)
    assert np.array_equal(found[0].chances, [0.6, 0.5, 0.4, 0.4])
