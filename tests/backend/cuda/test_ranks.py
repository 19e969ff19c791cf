"""Executors that ranks share say what one rank says, and a rank that is lost ends the engine with a message.

Ranks are gloo's, on this machine's cores: threads for sums, processes for passes.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest
import torch

from paceline.backend import rank_processes
from paceline.backend.cuda import load as cuda
from paceline.backend.cuda import rank_pool, rank_process
from paceline.backend.cuda.device_pass import upload
from paceline.backend.cuda.products import finished, multiply, pack_matrix
from paceline.backend.cuda.rank_messages import (
    BeginRank,
    DropNumbers,
    FollowPass,
    JoinGroup,
    TensorShape,
    aligned_bytes,
    joined,
    split_pieces,
)
from paceline.backend.cuda.rank_pool import RankPool, pool_on
from paceline.backend.cuda.rank_process import HostedStack, RankHost, make_group
from paceline.backend.cuda.ranks import (
    ONE_RANK,
    GroupRanks,
    captured_together,
    in_order,
    replayed_together,
    summed_product,
)
from paceline.backend.rank_processes import (
    LineEnded,
    RankLine,
    RankReady,
    RankTrouble,
    decode_from_rank,
    encode_message,
    error_in,
)
from paceline.backend.registry import BACKENDS
from paceline.core.errors import ConfigError, EngineDied
from paceline.engine.assembly.config import EngineConfig
from paceline.model.config import ModelConfig, Rope, Sliding
from paceline.model.heads.checkpoint import Head
from paceline.model.heads.config import read_config
from tests.backend.backends import load_on_host
from tests.backend.cuda.interpreter import run_interpreted
from tests.draft.heads import CORRECTED, draft_ids, head_values, random_weights
from tests.model.helpers import pack
from tests.tiny import PLAIN_FAMILIES, tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOST = torch.device("cpu")
PATIENCE_S = 120.0
PIECES = [(list(range(40, 77)), 0, [2, 0, 4]), (list(range(50, 61)), 0, [5]), ([7], 0, [1])]
NEXT = [([90, 91], 37, [2, 0, 4]), ([92], 11, [5]), ([93], 1, [1])]
THREE_HEADS = {"num_heads": 6, "num_kv_heads": 3}
LOCAL = Sliding(9, frozenset({0, 2}), Rope(theta=1e4))
MODELS: dict[str, tuple[int, ModelConfig]] = {
    **{
        family: (2, tiny_config(family, num_layers=3, tie_embeddings=family == "llama"))
        for family in PLAIN_FAMILIES
    },
    "windows": (2, tiny_config("gemma3_text", num_layers=3, sliding=LOCAL)),
    "all biases": (2, tiny_config(biases=frozenset({"attn_q", "attn_v", "attn_o", "mlp_up", "mlp_down"}))),
    "three": (3, tiny_config("qwen3", **THREE_HEADS)),
    "three, untied": (3, tiny_config(tie_embeddings=False, **THREE_HEADS)),  # 320 tokens: the last rank has fewer
}


# Sums ---------------------------------------------------------------------------------------------


def on_ranks(size: int, folder: Path, call: Callable[[GroupRanks], Any]) -> list[Any]:
    """What a call returns at each of some ranks, which are threads."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        group = make_group(str(folder / f"store{size}"), rank, size, HOST, PATIENCE_S)
        found[rank] = call(GroupRanks(group, rank, size))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("weight_type", ["f64", "f32", "bf16", "fp8", "int4"])
def test_every_rank_has_the_same_bits_and_the_bias_once(size: int, weight_type: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(size)
    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 768), (16, 768), (16,)))
    weight = weight * 768**-0.5
    dtype = torch.float64 if weight_type == "f64" else torch.float32
    whole = pack_matrix(weight, weight_type, dtype, HOST, bias)
    x = x.to(dtype)

    def product(ranks: GroupRanks) -> torch.Tensor:
        part = weight.chunk(size, 1)[ranks.rank]
        own = pack_matrix(part, weight_type, dtype, HOST, bias)
        return finished(summed_product(x.chunk(size, 1)[ranks.rank].contiguous(), own, ranks))

    found = on_ranks(size, tmp_path, product)
    assert all(torch.equal(found[0], other) for other in found[1:])
    near = {"f64": 1e-12, "fp8": 0.1}.get(weight_type, 1e-4)  # fp8 has a scale of its own at each rank
    torch.testing.assert_close(found[0], finished(multiply(x, whole)), rtol=near, atol=near)


def test_parts_are_added_from_the_first_on() -> None:
    parts = torch.tensor([[1e16], [1.0], [-1e16]], dtype=torch.float64)
    assert in_order(parts).item() == 0.0
    assert in_order(parts[[0, 2, 1]]).item() == 1.0


def test_kernels_have_the_bits_of_one_rank_at_borders_of_segments() -> None:
    run_interpreted("interpreted_ranks.py")


# Passes -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def pool() -> Iterator[RankPool]:
    """Three ranks, which all tests of two and three share."""
    yield (own := pool_on(HOST, 3))
    own.close()


def loaded(config: ModelConfig, num_ranks: int, weight_type: str = "f64") -> Any:
    weights: Any = {name: weight.numpy() for name, weight in tiny_weights(config).items()}
    return load_on_host(config, weights, weight_type, weight_type, None, num_ranks=num_ranks)


@pytest.mark.parametrize("model", MODELS)
def test_ranks_say_what_one_rank_says(model: str, pool: RankPool) -> None:
    """Whole texts, then tokens behind them, with rows of the output matrix and taps."""
    size, config = MODELS[model]
    one, several = loaded(config, 1), loaded(config, size)
    assert pool_on(HOST, size) is pool
    stores = one.new_kv(6), several.new_kv(6)
    taps = (0, 1, config.num_layers)
    for pieces in (PIECES, NEXT):
        asked = upload(pack(pieces), HOST)
        (hidden, tapped), (got, got_tapped) = (
            decoder.forward(asked, kv, taps=taps) for decoder, kv in zip((one, several), stores, strict=True)
        )
        torch.testing.assert_close(got, hidden, rtol=1e-11, atol=1e-11)
        for tap in taps:
            torch.testing.assert_close(got_tapped[tap], tapped[tap], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(several.logits(got), one.logits(hidden), rtol=1e-10, atol=1e-10)
    ids = np.array([0, 319, 106, 107, 213, 214, 160, 159])
    assert torch.equal(one.output.rows(ids, one.setup), several.output.rows(ids, several.setup))
    first = config.num_kv_heads // size
    torch.testing.assert_close(stores[1].data, stores[0].data[:, :, :, :first], rtol=1e-11, atol=1e-11)
    assert stores[1].bytes_per_token * size == stores[0].bytes_per_token
    assert several.weight_bytes < one.weight_bytes * 0.9
    assert several.describe().endswith(f"{size} ranks")


@pytest.mark.parametrize("weight_type", ["bf16", "fp8", "int4"])
def test_narrow_weights_are_packed_by_each_rank(weight_type: str) -> None:
    config = tiny_config(num_layers=2, hidden_size=128, intermediate_size=512, num_heads=4, head_dim=64)
    one, several = (loaded_narrow(config, size, weight_type) for size in (1, 2))
    asked = upload(pack(PIECES), HOST)
    ours, theirs = (d.logits(d.forward(asked, d.new_kv(6))[0]) for d in (several, one))
    assert (ours - theirs).norm() < 0.2 * theirs.norm()


def loaded_narrow(config: ModelConfig, num_ranks: int, weight_type: str) -> Any:
    weights: Any = tiny_weights(config, dtype=torch.float32)
    return load_on_host(config, weights, weight_type, "bf16", None, num_ranks=num_ranks)


@pytest.mark.parametrize(("kind", "of_target"), [("eagle", 1), ("eagle3", 2), ("peagle", 3)])
def test_a_heads_layers_are_shared_whatever_its_target_has(kind: str, of_target: int) -> None:
    target = tiny_config(num_layers=3, tie_embeddings=False, **(THREE_HEADS if of_target == 3 else {}))
    config = read_config(head_values(kind, target), target)
    head = Head(config, random_weights(config), draft_ids(config, 320))  # type: ignore[arg-type]
    decoders = loaded(target, 1), loaded(target, of_target)
    runners = [
        cuda.load_runner(head, decoder, None, None, num_ranks)
        for decoder, num_ranks in zip(decoders, (1, 2), strict=True)
    ]
    tapped = torch.randn(49, config.tapped_size, generator=torch.Generator().manual_seed(1))
    asked, found = upload(pack(PIECES), HOST), []
    for runner in runners:
        features = runner.fuse(tapped)
        found.append((*runner.read_out(runner.run_layers(asked, features, runner.new_kv(6))), runner))
        assert runner.output.matrix.shape == runners[0].output.matrix.shape
    for ours, theirs in zip(found[0][:2], found[1][:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    assert runners[1].weight_bytes < runners[0].weight_bytes


@pytest.mark.parametrize(("kind", "of_target"), [("block", 1), (CORRECTED, 2)])
def test_a_block_heads_layers_are_shared(kind: str, of_target: int) -> None:
    """Context goes into every rank's part of the store, and blocks read it there."""
    target = tiny_config(num_layers=3)
    config = read_config(head_values(kind, target), target)
    head = Head(config, random_weights(config), draft_ids(config, 320))  # type: ignore[arg-type]
    tapped = torch.randn(49, config.tapped_size, generator=torch.Generator().manual_seed(1))
    asked, found = upload(pack(PIECES), HOST), []
    seeing_all = replace(
        asked, last_keys=asked.positions[asked.cu_len[1:] - 1].repeat_interleave(asked.cu_len.diff())
    )
    for of, num_ranks in ((1, 1), (of_target, 2)):
        runner: Any = cuda.load_runner(head, loaded(target, of), None, None, num_ranks)
        kv = runner.new_kv(6)
        runner.store_context(asked, runner.fuse(tapped), kv)
        # Half of what was stored is written again by the blocks.
        few = replace(seeing_all, slots=torch.where(asked.positions % 2 == 0, kv.num_slots, asked.slots))
        found.append(runner.run_block(few, kv))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_what_is_forgotten_here_is_forgotten_there(pool: RankPool) -> None:
    decoder = loaded(tiny_config(), 2)
    numbers = [decoder.new_kv(6).number for _ in range(2)]  # nobody keeps them
    gc.collect()
    assert numbers[1] in pool._dropped
    kept = decoder.new_kv(1)
    assert not pool._dropped
    host = RankHost(RankLine(socket.socketpair()[1]), BeginRank(1, "cpu", 1, 1.0))
    host._stores = dict.fromkeys(numbers, kept)
    host.follow(DropNumbers((numbers[1],)))
    assert list(host._stores) == numbers[:1]


@pytest.mark.parametrize("num_wanted", [0, 1, 4])
def test_other_ranks_read_the_same_pass_but_for_its_tokens(
    num_wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many tokens are wanted, too: that chooses the form of attention."""
    decoder, told = loaded(tiny_config(), 2), list[Any]()
    asked = upload(pack(NEXT), HOST)
    asked = replace(asked, wanted=asked.wanted[:num_wanted])
    send = rank_pool.joined
    monkeypatch.setattr(rank_pool, "joined", lambda pieces: told.append(pieces) or send(pieces))
    decoder.forward(asked, decoder.new_kv(6))
    host = RankHost(RankLine(socket.socketpair()[1]), BeginRank(1, "cpu", 1, 1.0))
    host._stores = {0: decoder.new_kv(1)}
    found = list[Any]()
    stack: Any = SimpleNamespace(run=lambda tokens, *_: found.append(tokens))
    host._run_layers(HostedStack(stack, ONE_RANK, None), FollowPass("layers", 0, ()), told[0])  # type: ignore[arg-type]
    assert all(
        torch.equal(getattr(found[0], name), getattr(asked, name))
        for name in ("positions", "slots", "cu_len", "pages", "wanted")
    )


def test_a_replayed_graph_does_what_was_captured(pool: RankPool) -> None:
    """On cores a graph is what was told; the numbers are those of each replay."""
    one, several = loaded(tiny_config(), 1), loaded(tiny_config(), 2)
    stores = one.new_kv(6), several.new_kv(6)
    first, second = (upload(pack([(ids, 0, [3])]), HOST) for ids in ([5, 6, 7], [8, 9, 10]))

    def step(decoder: Any, kv: Any, asked: Any) -> torch.Tensor:
        found: torch.Tensor = decoder.logits(decoder.forward(asked, kv)[0])
        return found

    with captured_together() as captured:
        step(several, stores[1], first)
    with replayed_together(captured):
        got = step(several, stores[1], second)
    torch.testing.assert_close(got, step(one, stores[0], second), rtol=1e-10, atol=1e-10)
    numbers = [graph.number for graph in captured if graph.followers is pool]
    assert all(numbers)
    del captured
    gc.collect()
    assert {*numbers} <= {*pool._dropped}


def test_a_graph_that_ranks_have_no_part_in_is_not_theirs(pool: RankPool) -> None:
    with captured_together() as captured:
        pass
    assert all(graph.number == 0 for graph in captured)


def test_pieces_come_as_they_went() -> None:
    pieces = [torch.arange(3), None, torch.ones(2, 5, dtype=torch.bfloat16), torch.tensor([True])]
    kinds = [None if piece is None else TensorShape.of(piece) for piece in pieces]
    whole = joined(pieces)
    assert len(whole) == sum(map(aligned_bytes, kinds)) == 24 + 24 + 8
    for got, sent in zip(split_pieces(whole, kinds), pieces, strict=True):
        assert got is sent is None or torch.equal(got, sent)


# Options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "changes", "said"),
    [
        (
            2,
            THREE_HEADS,
            r"--tensor-parallel 2: the model has 3 KV heads, which 2 ranks cannot share evenly; take 1$",
        ),
        (3, {}, "4 query heads and 2 KV heads, which 3 ranks cannot share evenly; take 1 or 2$"),
        (2, {"intermediate_size": 49}, "the model has 49 inner columns"),
    ],
)
def test_models_that_ranks_cannot_share_are_refused(num_ranks: int, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loaded(tiny_config(**changes), num_ranks)


def test_a_head_that_ranks_cannot_share_is_refused() -> None:
    target = tiny_config(num_layers=3)
    config = read_config(head_values("eagle3", target), target)
    head = Head(config, random_weights(config), draft_ids(config, 320))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--draft-tensor-parallel 3: the draft head has"):
        cuda.load_runner(head, loaded(target, 1), None, None, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"backend": "reference", "tensor_parallel": 2},
            "--tensor-parallel 2: targets of the reference backend run in one process",
        ),
        (
            {"backend": "reference", "draft_tensor_parallel": 2},
            "--draft-tensor-parallel 2: drafters of the reference backend run in one process",
        ),
        ({"backend": "cuda", "tensor_parallel": 9}, "--tensor-parallel must be between 1 and 8, not 9"),
        ({"backend": "cuda", "tensor_parallel": 0}, "--tensor-parallel must be between 1 and 8, not 0"),
        ({"backend": "cuda", "draft_tensor_parallel": "2"}, "--draft-tensor-parallel must be an integer, not str"),
    ],
)
def test_ranks_are_bounded_and_declared_by_the_backend(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**options)
    assert BACKENDS["cuda"].max_ranks == 8


def test_gpus_that_are_not_there_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match="2 ranks from cuda:2 on need 4 GPUs, and this machine has 3"):
        pool_on(torch.device("cuda", 2), 2)


# Faults -------------------------------------------------------------------------------------------


class fresh_pool:  # noqa: N801
    """A pool of its own for a test that ends it."""

    def __init__(self, size: int, timeout_s: float = PATIENCE_S) -> None:
        self.pool = RankPool(HOST, size, timeout_s=timeout_s)

    def __enter__(self) -> RankPool:
        return self.pool

    def __exit__(self, *_: object) -> None:
        self.pool.close()


def loaded_on(own: RankPool, num_ranks: int) -> Any:
    """A decoder on a pool that is not shared."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_pool, "pool_on", lambda *_: own)
        return loaded(tiny_config(), num_ranks)


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_told_of_in_time_and_ends_the_others(number: signal.Signals) -> None:
    with fresh_pool(3, timeout_s=1.0) as own:
        config = tiny_config(**THREE_HEADS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rank_pool, "pool_on", lambda *_: own)
            decoder = loaded(config, 3)
        kv, asked = decoder.new_kv(6), upload(pack(PIECES), HOST)
        decoder.forward(asked, kv)
        os.kill(own.pids[1], number)
        said = (
            "rank 2 has ended, killed by signal 9"
            if number == signal.SIGKILL
            else "no answer of rank 2 within 1 s"
        )
        with pytest.raises(EngineDied, match=said):
            for _ in range(3):  # what was sent before the end may still be done
                decoder.forward(asked, kv)
        until(lambda: all(map(is_gone, own.pids)))
        with pytest.raises(EngineDied, match="start the engine anew"):
            decoder.new_kv(6)
        assert pool_on(HOST, 3) is not own


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ConfigError("no memory left"), ConfigError("rank 1: no memory left")),
        (KeyError(7), EngineDied("rank 1: KeyError: 7")),
        (RuntimeError("timed out"), EngineDied("rank 1: RuntimeError: timed out")),
    ],
)
def test_what_goes_wrong_at_a_rank_is_told(
    error: Exception, told: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(RankHost, "_join", fail)
    ours, theirs = map(RankLine, socket.socketpair())
    rank = threading.Thread(target=rank_process.run, args=(theirs,))
    rank.start()
    ours.send(encode_message(BeginRank(1, "cpu", 1, 1.0)))
    assert isinstance(decode_from_rank(ours.receive(PATIENCE_S)), RankReady)
    ours.send(encode_message(JoinGroup(2, "nowhere")))
    trouble = decode_from_rank(ours.receive(PATIENCE_S))
    rank.join(PATIENCE_S)
    assert isinstance(trouble, RankTrouble)
    assert (type(error_in(trouble)), str(error_in(trouble))) == (type(told), str(told))


def test_what_ends_at_the_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineDied, match=r"ended, with status 1|ended before it began, with status 1"):
        RankPool(HOST, 2)


def test_ranks_end_with_rank_0_however_that_ends() -> None:
    code = (
        "import os, torch; from paceline.backend.cuda.rank_pool import RankPool\n"
        "pool = RankPool(torch.device('cpu'), 2); print(*pool.pids, flush=True); input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    try:
        (pid,) = map(int, parent.stdout.readline().split())
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    until(lambda: is_gone(pid))


def test_a_rank_that_is_stopped_is_ended_long_before_an_exchange_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "WATCH_S", 0.01)
    monkeypatch.setattr(rank_processes.LIMIT, "seconds", 1.5)  # less, and idle pools of other tests would hang
    with fresh_pool(2, timeout_s=10 * PATIENCE_S) as own:
        decoder = loaded_on(own, 2)
        kv, asked = decoder.new_kv(6), upload(pack(PIECES), HOST)
        os.kill(own.pids[0], signal.SIGSTOP)
        with pytest.raises(EngineDied, match="rank 1 has ended, killed by signal 9"):
            decoder.forward(asked, kv)


def test_on_a_gpu_a_lost_rank_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can be told there: whoever waits for the device waits for ever."""
    left: list[int] = []
    monkeypatch.setattr(rank_processes, "ENDED_S", 0.1)
    monkeypatch.setattr(rank_processes, "WATCH_S", 0.01)
    with fresh_pool(2) as own:
        watch = threading.Thread(target=rank_processes.watch, args=(lambda: own, left.append))
        watch.start()
        time.sleep(0.1)
        assert not left
        os.kill(own.pids[0], signal.SIGKILL)
        watch.join(PATIENCE_S)
    assert left == [rank_processes.EXIT_STATUS]


def test_a_line_takes_no_more_than_its_bound() -> None:
    ours, theirs = map(RankLine, socket.socketpair())
    ours.send(b"a message")
    assert theirs.receive(1.0) == b"a message"
    with pytest.raises(TimeoutError):
        theirs.receive(0.01)
    ours._socket.sendall((1 << 30).to_bytes(4, "little"))
    with pytest.raises(LineEnded):
        theirs.receive(1.0)
    ours.close()
    with pytest.raises(LineEnded):
        theirs.receive(1.0)
    theirs.close()
