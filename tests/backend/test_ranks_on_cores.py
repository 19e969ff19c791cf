"""Ranks on cores against one rank: every number of every pass has the same bits, whatever the type of weights."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
import torch

from paceline.backend import rank_processes
from paceline.backend.native.load import repack
from paceline.backend.native.ranked import RankedDecoder, load_decoder
from paceline.backend.native.shares import FollowRows, decode_to_rank
from paceline.backend.rank_processes import RankLine, RankSilence, encode_message
from paceline.core.errors import ConfigError, EngineDied
from paceline.core.nouns import PAGE_TOKENS, SamplingSpec
from paceline.core.params import SamplingParams
from paceline.core.watchdog import PATIENCE, TICK_S
from paceline.engine.assembly.config import MAX_ROWS, EngineConfig
from paceline.model.config import Rope, Sliding
from tests.model.helpers import pack, run_pass
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from paceline.backend.native.decoder import NativeDecoder
    from paceline.backend.seam import PassResult
    from paceline.model.config import ModelConfig

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 16}
CONFIG = tiny_config("qwen2", **SIZES)  # with biases
LOGITS = SamplingSpec("logits", SamplingParams(temperature=0.0))
IDS = [(7 * i * i + 3 * i) % CONFIG.vocab_size for i in range(400)]
NUM_PAGES = 40
PATIENCE_S = 120.0


def decoder_of(
    num_ranks: int, types: tuple[str, str] = ("int8", "i16"), config: ModelConfig = CONFIG, threads: int = 1
) -> NativeDecoder:
    weights = {name: one.numpy() for name, one in tiny_weights(config, dtype=torch.float32).items()}
    return load_decoder(config, weights, *types, threads, num_ranks=num_ranks)


def passes(decoder: NativeDecoder) -> list[PassResult]:
    """A prompt in two chunks beside another row, then single tokens of two rows, then the first layer alone."""
    kv = decoder.new_kv(NUM_PAGES)
    long, short = range(25), range(25, 28)
    work = [
        ([(IDS[:90], 0, long), (IDS[200:230], 0, short)], {"taps": (0, 1, 2)}),
        ([(IDS[90:370], 90, long), (IDS[230:233], 30, short)], {}),
        ([(IDS[370:371], 370, long), (IDS[233:234], 33, short)], {"taps": (2,)}),
        ([(IDS[371:373], 371, long)], {"num_layers": 1}),
    ]
    return [run_pass(decoder, (p := pack(rows)), kv, [LOGITS] * len(p.wanted), **more) for rows, more in work]


def assert_same(got: list[PassResult], expected: list[PassResult]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(one.logits), np.asarray(other.logits))
        for tap, states in other.taps.items():
            np.testing.assert_array_equal(one.taps[tap], states)


@pytest.mark.parametrize(
    "types", [("int8", "i16"), ("int4", "i8"), ("bf16", "f16"), ("f32", "f32")], ids=lambda types: types[0]
)
def test_two_ranks_have_the_bits_of_one(types: tuple[str, str]) -> None:
    assert_same(passes(decoder_of(2, types)), passes(decoder_of(1, types)))


OTHERS = {
    "norms of heads": (4, 1, tiny_config("qwen3", **SIZES | {"num_kv_heads": 8, "intermediate_size": 384})),
    "caps, two threads": (2, 2, tiny_config("gemma2", **SIZES)),
    "windows": (2, 1, tiny_config("gemma3_text", sliding=Sliding(40, frozenset({0}), Rope(theta=900.0)), **SIZES)),
    "sizes of heads": (2, 1, tiny_config("gemma4_unified_text", num_layers=3, **SIZES)),
    "untied": (2, 1, tiny_config("granite", tie_embeddings=False, **SIZES)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_two_ranks_have_the_bits_of_one_for_other_families(case: str) -> None:
    ranks, threads, config = OTHERS[case]
    assert_same(passes(decoder_of(ranks, config=config, threads=threads)), passes(decoder_of(1, config=config)))


def test_long_rows_are_exchanged_in_parts() -> None:
    """A pass of 400 tokens, 8192 inner columns each, is more than the ranks' memory takes at once."""
    config = tiny_config(num_layers=1, **SIZES | {"intermediate_size": 8192})
    rows = pack([(IDS, 0, range(25))])
    one, two = (
        run_pass(d, rows, d.new_kv(NUM_PAGES), [LOGITS] * len(IDS))
        for d in (decoder_of(1, config=config), decoder_of(2, config=config))
    )
    assert_same([two], [one])


def test_a_pass_that_is_refused_leaves_ranks_in_step() -> None:
    decoder, rows = decoder_of(2), pack([(IDS[:90], 0, range(25))])
    wrong = SamplingSpec("noise", LOGITS.params)
    with pytest.raises(ValueError, match="kind"):
        run_pass(decoder, rows, decoder.new_kv(NUM_PAGES), [wrong] * len(rows.wanted))
    assert_same(passes(decoder), passes(decoder_of(1)))


def test_a_rank_is_told_of_many_rows_one_of_which_is_long() -> None:
    rows, num_pages = MAX_ROWS, (1 << 17) // PAGE_TOKENS
    message = FollowRows(1, 2, b"", b"", b"", b"", bytes(8 * rows * num_pages), bytes(8 * rows))
    ours, theirs = (RankLine(end) for end in socket.socketpair())
    sending = Thread(target=ours.send, args=(encode_message(message),), daemon=True)
    sending.start()
    assert decode_to_rank(theirs.receive(PATIENCE_S)) == message
    sending.join()
    ours.close()
    theirs.close()


def test_a_decoder_with_ranks_tells_what_it_is() -> None:
    one, two = decoder_of(1), decoder_of(2)
    assert isinstance(two, RankedDecoder)
    assert two.describe() == f"{one.describe()}, 2 ranks"
    assert two.weight_bytes == one.weight_bytes
    assert two.new_kv(3).page_bytes == one.new_kv(3).page_bytes // 2
    assert not two.capabilities.multi_step


def test_stores_are_forgotten_and_ranks_end_with_their_decoder() -> None:
    decoder = decoder_of(2)
    assert isinstance(decoder, RankedDecoder)
    for _ in range(3):
        assert_same(passes(decoder), passes(decoder_of(1)))
    assert len(decoder.ranks._dropped) <= 1
    (pid,) = decoder.ranks.pids
    del decoder
    gc.collect()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_process(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Rank 0 may wait for it in a pass; the engine is started anew by whoever started it."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(rank_processes, "ENDED_S", 0.1)
    monkeypatch.setattr(rank_processes, "WATCH_S", 0.01)
    monkeypatch.setattr(rank_processes.LIMIT, "seconds", 1.5)  # less, and idle pools of other tests would hang
    decoder = decoder_of(2)
    assert isinstance(decoder, RankedDecoder)
    assert not left
    os.kill(decoder.ranks.pids[0], number)
    end_s = time.monotonic() + PATIENCE_S
    while not left and time.monotonic() < end_s:
        time.sleep(0.01)
    assert left == [rank_processes.EXIT_STATUS]
    assert decoder.ranks.processes[0].process.wait(PATIENCE_S) == -signal.SIGKILL


def test_signals_of_the_process_group_leave_a_rank() -> None:
    decoder = decoder_of(2)
    assert isinstance(decoder, RankedDecoder)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(decoder.ranks.pids[0], number)
    assert_same(passes(decoder), passes(decoder_of(1)))


class Waiting:
    """Ranks, one of them a process that does nothing, that wait for one another."""

    def __init__(self, code: str) -> None:
        self.close, self.awaited = None, 7
        process = subprocess.Popen([sys.executable, "-c", f"print(flush=True)\n{code}"], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        self.processes: Any = [SimpleNamespace(rank=1, process=process)]

    def hang(self, ticks: int, *, go_on: bool = False) -> str:
        """What is seen in so many looks by a thread; this one waits, as rank 0 would in a pass."""
        found: list[str] = []

        def look() -> None:
            silence = RankSilence(self)
            for _ in range(ticks):
                self.awaited += go_on
                time.sleep(0.005)  # the process may just begin to wait
                found.append(silence.hang(self, 2 * TICK_S))

        thread = Thread(target=look)
        thread.start()
        thread.join()
        return found[-1]


@pytest.mark.parametrize(("code", "hangs"), [("import time; time.sleep(60)", True), ("while True: pass", False)])
def test_ranks_that_wait_and_compute_nothing_hang(
    monkeypatch: pytest.MonkeyPatch, code: str, *, hangs: bool
) -> None:
    monkeypatch.setattr(rank_processes.LIMIT, "seconds", 2.0)
    ranks, ticks = Waiting(code), int(rank_processes.LIMIT.seconds / TICK_S)
    try:
        assert bool(ranks.hang(ticks)) == hangs
        assert not ranks.hang(ticks, go_on=True)
        assert ranks.hang(PATIENCE * ticks)
    finally:
        with ranks.processes[0].process as process:
            process.kill()


def test_ranks_of_a_process_that_nobody_watches_are_waited_for() -> None:
    """A debugger may hold one; and compilers work for them while an engine loads."""
    ranks = Waiting("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    try:
        assert not ranks.hang(200)
    finally:
        with ranks.processes[0].process as process:
            process.kill()


def test_what_ends_at_the_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDied, match="rank 1 has ended, with status 1"):
        decoder_of(2)


def test_a_rank_that_cannot_be_started_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def files() -> int:
        links = [link_of(path) for path in Path("/proc/self/fd").iterdir()]
        return sum("paceline-ranks" in link for link in links)

    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = files()
    with pytest.raises(FileNotFoundError):
        decoder_of(2)
    gc.collect()  # what is mapped has a descriptor of its own, up to there
    assert files() == before


def link_of(path: Path) -> str:
    """Target of a link; empty if it is gone."""
    try:
        return str(path.readlink())
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("config", "ranks", "told"),
    [
        (CONFIG, 3, "take 1 or 2"),
        (tiny_config(), 2, "whole panels of 32 rows; take 1"),
        (tiny_config("qwen3_moe"), 2, "do not share a mixture of experts"),
        (tiny_config("olmo2"), 2, "norms over all heads together"),
    ],
)
def test_what_ranks_cannot_share_is_refused(config: ModelConfig, ranks: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        decoder_of(ranks, config=config)


def test_ranks_keep_their_weights() -> None:
    with pytest.raises(ConfigError, match="leave out --tensor-parallel"):
        repack(decoder_of(2), {}, beside=False)


def test_only_targets_have_ranks() -> None:
    with pytest.raises(ConfigError, match="drafters of the native backend run in one process"):
        EngineConfig(backend="native", draft_tensor_parallel=2)
    assert EngineConfig(backend="native", tensor_parallel=8).draft_tensor_parallel == 1
