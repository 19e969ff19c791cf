"""Captures: streams of their devices, and the longest step that runs beside them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from paceline.backend.cuda import graphs
from paceline.backend.cuda.buckets import bucket
from paceline.backend.cuda.graphs import Uncaptured, recorded
from paceline.backend.cuda.step_graphs import StepGraphs
from paceline.core.errors import ConfigError
from paceline.core.params import SamplingParams
from paceline.core.request_nouns import Request
from tests.engine.same_text import PLAIN, assert_same, make_engine, plain_answers, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.backend.cuda.late_target import LateTarget

REQUESTS = [Request("0", tuple(range(40, 60)), SamplingParams(max_tokens=9), seed=1)]


class FakeGraph:
    """A graph that holds nothing."""

    def pool(self) -> None: ...


def test_a_device_captures_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of another device would make that the current one, where kernels are launched."""
    taken: list[str] = []

    @contextmanager
    def capture(graph: FakeGraph, *, stream: str = "the first device's", **_: Any) -> Iterator[None]:
        taken.append(stream)
        yield

    for name, stand_in in (
        ("Stream", lambda device: f"{device}'s"),
        ("graph", capture),
        ("synchronize", lambda device: None),
        ("current_stream", lambda device: None),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(graphs, "_stream_on", graphs._stream_on.__wrapped__)  # which remembers
    kept: Any = [FakeGraph() for _ in range(3)]
    for graph, index in zip(kept, (1, 0, 1), strict=True):
        with recorded(graph, torch.device("cuda", index)):
            pass
    assert taken == ["cuda:1's", "cuda:0's", "cuda:1's"]


class Tried(Uncaptured[Any]):
    """Stand-in for a graph that runs its function once when it is made, as graphs do."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__(function, inputs)
        self(*inputs)


def watched_target(
    patch: pytest.MonkeyPatch, lengths: list[int], most: int | None = None
) -> tuple[Any, LateTarget]:
    """Engine and target whose steps of up to four tokens are captured, on a device with room for `most`."""
    engine = make_engine("off", PLAIN, types="cuda")
    target: LateTarget = engine.target  # type: ignore[assignment]
    target.graphs = StepGraphs(target, Tried, (1, 4))
    forward = target.decoder.forward

    def run_forward(tokens: Any, *args: Any, **named: Any) -> Any:
        lengths.append(len(tokens.token_ids))
        if most is not None and lengths[-1] > most:
            raise torch.OutOfMemoryError
        return forward(tokens, *args, **named)

    patch.setattr(target.decoder, "forward", run_forward)
    return engine, target


def test_the_longest_step_runs_before_the_first_request_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    engine, target = watched_target(monkeypatch, lengths)
    target.prepare(50)
    assert lengths[-1] == bucket(50 + target.rows.num_rows)
    target.prepare(1 << 20)
    assert lengths[-1] == bucket(target.kv.num_slots + target.rows.num_rows), "no prompt is longer than all KV"
    assert_same(plain_answers(REQUESTS, "cuda"), run(engine, REQUESTS))


@pytest.mark.parametrize(
    ("most", "said"), [(3, "no memory left for the graphs"), (4, "left for a step of --prefill-tokens 50")]
)
def test_memory_that_steps_lack_is_missed_at_the_start(
    most: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target = watched_target(monkeypatch, [], most)
    with pytest.raises(ConfigError, match=said):
        target.prepare(50)
