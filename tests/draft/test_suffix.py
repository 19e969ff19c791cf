"""Suffix drafts against their plain definition, and what they keep apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backend.rows import Rows
from paceline.core.errors import ConfigError
from paceline.core.nouns import BROKEN, Batch, BatchRow, Plan, RowPlan
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Admission, Request
from paceline.draft.lookup.suffix import MAX_SALTS, SuffixConfig, SuffixDrafter
from paceline.draft.registry import parse_spec
from paceline.engine.remote.drafter_process import DrafterHost
from paceline.engine.remote.protocol import NewRow, Propose, RowUpdate
from paceline.engine.wire import Submit
from paceline.kernels import TextIndex, extend_rows, propose_continuations
from tests.oracles import lookup as oracle
from tests.oracles.lookup import BORDER

if TYPE_CHECKING:
    from collections.abc import Sequence

INDEX_BYTES_PER_TOKEN = 16  # text, way back, latest place of its slot

texts = st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=4)


def ids(values: Any) -> Any:
    return np.array(values, np.int64)


def filled(capacity: int, parts: list[list[int]]) -> tuple[TextIndex, list[int]]:
    """An index of some texts, the last one still open, and the same as a list."""
    index, text = TextIndex(capacity), []
    for number, part in enumerate(parts):
        if number:
            index.end_text()
            text += [BORDER] if text and text[-1] != BORDER else []
        index.extend(ids(part))
        text += part
    return index, text


@given(
    parts=texts,
    other=st.none() | st.lists(st.integers(0, 3), max_size=12),
    most=st.integers(0, 8),
    min_match=st.integers(2, 4),
    more=st.integers(0, 6),
    reach=st.sampled_from([0.5, 1.0, 2.0]),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_the_index_is_its_plain_definition(
    parts: list[list[int]],
    other: list[int] | None,
    most: int,
    min_match: int,
    more: int,
    reach: float,
    share: float,
) -> None:
    index, text = filled(1000, parts)
    tail = (parts[-1] if parts else []) if other is None else other
    wish = (most, min_match, min_match + more, reach, share)
    assert index.propose(ids(tail), *wish) == oracle.propose(text, tail, *wish)


@given(parts=texts, length=st.integers(1, 200), seed=st.integers(0, 99))
def test_a_full_ring_forgets_the_oldest(parts: list[list[int]], length: int, seed: int) -> None:
    """The ring proposes what a new index of the last texts proposes."""
    index, text = filled(16, parts)
    more = np.random.default_rng(seed).integers(0, 3, length)
    index.extend(more)
    text = [*text, *more.tolist()]
    tail, wish = more[-8:], (4, 2, 8, 1.0, 0.0)
    assert index.propose(tail, *wish) == oracle.propose(text[-16:], tail.tolist(), *wish)


def test_a_full_ring_knows_all_that_it_has_room_for() -> None:
    index, capacity = TextIndex(16), 16
    index.extend(ids([9] * 100))
    index.extend(ids([1, 2, 3, *[7] * (capacity - 5), 1, 2]))
    assert index.propose(ids([1, 2]), 1, 2, 2, 1.0, 0.0)[0] == [3]


def test_most_places_decide_and_the_latest_breaks_ties() -> None:
    index = TextIndex(100)
    index.extend(ids([1, 2, 7, 1, 2, 8, 1, 2, 8, 1, 2, 9, 1, 2]))
    assert index.propose(ids([1, 2]), 1, 2, 2, 1.0, 0.0) == ([8], [0.5], 2)
    index = TextIndex(100)
    index.extend(ids([1, 2, 7, 1, 2, 8, 1, 2]))
    assert index.propose(ids([1, 2]), 1, 2, 2, 1.0, 0.0)[0] == [8]


def test_bad_arguments_are_refused() -> None:
    index = TextIndex(10)
    with pytest.raises(ValueError, match="token id"):
        index.extend(ids([-1]))
    with pytest.raises(ValueError, match="match"):
        index.propose(ids([1]), 4, 1, 2, 1.0, 0.1)
    with pytest.raises(ValueError, match="tokens"):
        TextIndex(0)
    with pytest.raises(TypeError):
        index.extend(np.array([1.0]))
    with pytest.raises(ConfigError, match="shared"):
        parse_spec("suffix:shared=-1")


# The drafter -------------------------------------------------------------------------------------


def admit(
    rows: Rows,
    drafter: SuffixDrafter,
    row: int,
    prompt: list[int],
    salt: str = "",
    written: Sequence[int] = (),
    told: tuple[int, ...] = (),
) -> None:
    """written: tokens of the answer that a preempted request had. told: those it began with."""
    request = Request("r", tuple(prompt), SamplingParams(max_tokens=20), seed=1, salt=salt, told=told)
    rows.apply(Batch(0, (), (Admission(row, request, [*prompt, *told, *written], 0, ()),)))
    drafter.admit(row, request, {})


def append(rows: Rows, row: int, *tokens: int) -> None:
    length = int(rows.length[row])
    rows.token_ids[row, length : length + len(tokens)] = tokens
    rows.length[row] += len(tokens)


def propose(drafter: SuffixDrafter, row: int, k: int = 4) -> list[int]:
    batch = Batch(0, (BatchRow(row, "r", 1, k, samples=True, max_len=64),))
    plan = Plan({row: RowPlan("suffix", k)})
    return list(drafter.propose(batch, plan).rows[0].token_ids)


def answered(config: SuffixConfig, salt: str = "") -> tuple[SuffixDrafter, Rows]:
    """A drafter that has seen one request end, whose answer was 5 6 7 8 9."""
    rows = Rows(2, 64, frozenset())
    drafter = SuffixDrafter(config, rows)
    admit(rows, drafter, 0, [1, 2, 3], salt)
    append(rows, 0, 5, 6, 7, 8, 9)
    assert propose(drafter, 0) == []
    drafter.release(0)
    return drafter, rows


def test_a_row_follows_its_own_text_as_it_grows() -> None:
    rows = Rows(2, 64, frozenset())
    drafter = SuffixConfig().build(SimpleNamespace(rows=rows, local=None), lambda name: None)  # type: ignore[arg-type]
    admit(rows, drafter, 1, [4, 5, 6, 7, 4, 5])
    assert propose(drafter, 1) == [6, 7, 4, 5]
    append(rows, 1, 9, 9, 4, 5)
    assert propose(drafter, 1, k=1) == [9]


def test_a_row_forgets_the_text_it_held_before() -> None:
    rows = Rows(2, 64, frozenset())
    drafter = SuffixDrafter(SuffixConfig(), rows)
    admit(rows, drafter, 1, [4, 5, 6, 7, 4, 5])
    assert propose(drafter, 1) == [6, 7, 4, 5]
    drafter.release(1)
    admit(rows, drafter, 1, [8, 4, 5])
    assert propose(drafter, 1) == []


@pytest.mark.parametrize(
    ("config", "salt", "expected"),
    [
        (SuffixConfig(), "", []),
        (SuffixConfig(shared=100), "", [7, 8, 9]),
        (SuffixConfig(shared=100), "other", []),
    ],
)
def test_without_a_salt_past_answers_are_shared_only_when_asked(
    config: SuffixConfig, salt: str, expected: list[int]
) -> None:
    drafter, rows = answered(config)
    admit(rows, drafter, 1, [30, 5, 6], salt)
    assert propose(drafter, 1) == expected
    drafter.forget()
    assert propose(drafter, 1) == []


@pytest.mark.parametrize(
    ("config", "salt", "expected"),
    [
        (SuffixConfig(), "mine", [7, 8, 9]),
        (SuffixConfig(), "yours", []),
        (SuffixConfig(), "", []),
        (SuffixConfig(shared=0), "mine", []),
    ],
)
def test_past_answers_are_shared_by_those_of_one_salt(
    config: SuffixConfig, salt: str, expected: list[int]
) -> None:
    rows = Rows(2, 64, frozenset())
    drafter = SuffixDrafter(config, rows)
    admit(rows, drafter, 0, [1, 2, 3], "mine")
    append(rows, 0, 5, 6, 7, 8, 9)
    drafter.release(0)
    admit(rows, drafter, 1, [30, 5, 6], salt)
    assert propose(drafter, 1) == expected
    drafter.forget()
    assert propose(drafter, 1) == []


def test_what_salts_keep_is_bounded() -> None:
    """64 salts of 2^14 tokens, whatever is answered: older answers and the longest unused salts go."""
    rows = Rows(1, 4096, frozenset())
    drafter = SuffixDrafter(SuffixConfig(), rows)
    assert SuffixConfig().tokens_of("mine") * MAX_SALTS * INDEX_BYTES_PER_TOKEN <= 16 << 20
    for number in range(40):
        admit(rows, drafter, 0, [1], "mine")
        append(rows, 0, *range(1000 * number, 1000 * number + 1000))
        drafter.release(0)
    admit(rows, drafter, 0, [39_500, 39_501], "mine")
    assert propose(drafter, 0, k=2) == [39_502, 39_503]
    drafter.release(0)
    admit(rows, drafter, 0, [500, 501], "mine")
    assert propose(drafter, 0, k=2) == [], "the first answers are forgotten"


def test_clients_cannot_multiply_what_the_owner_asked_for() -> None:
    """Each salt is bounded, whatever `shared` says; and salts never push out the answers without one."""
    config = SuffixConfig(shared=1 << 22)
    assert config.tokens_of("") == 1 << 22
    assert config.tokens_of("mine") * MAX_SALTS * INDEX_BYTES_PER_TOKEN <= 64 << 20
    drafter, rows = answered(SuffixConfig(shared=100))
    for number in range(MAX_SALTS + 6):
        admit(rows, drafter, 0, [1], str(number))
        append(rows, 0, 15, 16, 17)
        drafter.release(0)
    admit(rows, drafter, 1, [30, 5, 6])
    assert propose(drafter, 1) == [7, 8, 9]


def test_an_answer_that_ended_with_an_error_is_shared_up_to_there() -> None:
    rows = Rows(2, 64, frozenset())
    drafter = SuffixDrafter(SuffixConfig(shared=100), rows)
    admit(rows, drafter, 0, [1, 2, 3])
    append(rows, 0, 5, 6, 7, 8, BROKEN)
    drafter.release(0)
    admit(rows, drafter, 1, [30, 5, 6])
    assert propose(drafter, 1) == [7, 8]


def test_a_preempted_answer_is_kept_once() -> None:
    """Else it would displace all others: at each end of its row it is longer."""
    rows = Rows(2, 64, frozenset())
    drafter = SuffixDrafter(SuffixConfig(shared=48), rows)
    admit(rows, drafter, 0, [1])
    append(rows, 0, *range(20, 30))
    drafter.release(0)
    for length in range(0, 20, 2):
        admit(rows, drafter, 1, [2], written=range(100, 100 + length))
        append(rows, 1, 100 + length, 101 + length)
        drafter.release(1)
    admit(rows, drafter, 0, [20, 21])
    assert propose(drafter, 0) == [22, 23, 24, 25]


def test_told_tokens_of_an_answer_are_shared() -> None:
    rows = Rows(2, 64, frozenset())
    drafter = SuffixDrafter(SuffixConfig(shared=100), rows)
    admit(rows, drafter, 0, [1, 2, 3], told=(5, 6, 7))
    append(rows, 0, 8, 9)
    drafter.release(0)
    admit(rows, drafter, 1, [30, 5, 6])
    assert propose(drafter, 1) == [7, 8, 9]


def test_a_process_keeps_what_was_written_before_it_heard_of_a_row() -> None:
    rows = Rows(2, 64, frozenset())
    host = DrafterHost(SuffixDrafter(SuffixConfig(shared=100), rows), rows)

    def asked(row: int, prompt: tuple[int, ...], written: tuple[int, ...], ended: tuple[int, ...] = ()) -> Any:
        request = Request("r", prompt, SamplingParams(max_tokens=20), seed=1)
        new = NewRow(row, Submit.of(request), written, ())
        reply: Any = host.answer(Propose(ended, (new,), (RowUpdate(row, ()),), (4,), (None,)))
        return reply.rows[0].token_ids

    assert asked(0, (1, 2, 3), (5, 6, 7, 8, 9)) == ()
    assert asked(1, (30, 5, 6), (), ended=(0,)) == (7, 8, 9)


def test_prompts_are_not_shared() -> None:
    drafter, rows = answered(SuffixConfig(shared=100))
    admit(rows, drafter, 1, [1, 2])
    assert propose(drafter, 1) == []


def test_only_so_many_salts_are_remembered() -> None:
    rows = Rows(2, 64, frozenset())
    drafter = SuffixDrafter(SuffixConfig(shared=100), rows)
    for number in range(70):
        admit(rows, drafter, 0, [1], str(number))
        append(rows, 0, 5, 6, 7)
        drafter.release(0)
    assert len(drafter._shared) == MAX_SALTS == 64
    admit(rows, drafter, 0, [5, 6], "0")
    assert propose(drafter, 0) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 8), st.integers(16, 64))
def test_a_text_goes_on_as_its_own_end_is_continued(tokens: list[int], k: int, capacity: int) -> None:
    """Also where it has forgotten how it began."""
    text, ids = TextIndex(capacity), np.array([tokens])
    extend_rows([text], [0], ids, np.array([len(tokens) // 2]))
    extend_rows([text], [0], ids, np.array([len(tokens)]))
    tail = np.array(tokens[-8:])
    assert propose_continuations([text], [k], 2, 8, 2.0, 0.1) == [text.propose(tail, k, 2, 8, 2.0, 0.1)]


def test_rows_that_do_not_fit_their_texts_are_refused() -> None:
    ids = np.zeros((2, 4), np.int64)
    with pytest.raises(ValueError, match="no such row"):
        extend_rows([TextIndex(8)], [2], ids, np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="longer than its room"):
        extend_rows([TextIndex(8)], [0], ids, np.full(2, 5))
    with pytest.raises(ValueError, match="number for each text"):
        propose_continuations([TextIndex(8)], [], 2, 8, 2.0, 0.1)
