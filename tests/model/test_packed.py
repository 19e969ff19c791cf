"""Packed weights: kept in files, mapped by others, packed anew when a file is broken, within a bound."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest

from paceline import kernels
from paceline.backend.native.load import pack_decoder, wanted_matrices
from paceline.backend.native.packing import MappedWeights, kept, pack
from paceline.core.errors import BadModelFile
from paceline.core.nouns import SamplingSpec
from paceline.core.params import SamplingParams
from paceline.model import content_key
from paceline.model.content_key import contents_file, digest_of, file_digest
from paceline.model.files import kept_models as kept_models_module
from paceline.model.files import packed_cache
from paceline.model.files.gguf_file import QUANTS, GgufTensor
from paceline.model.files.kept_models import kept_models
from paceline.model.files.packed_cache import PART, SUFFIX, PackedCache
from paceline.model.files.packed_file import PIECE, Wanted, data_bytes, open_packed, read_table, write_packed
from paceline.model.shapes import read_shape
from paceline.model.weights import LazyWeights
from tests.model.helpers import pack as pack_rows
from tests.model.helpers import run_pass

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.backend.native.decoder import NativeDecoder

TEAM = kernels.ThreadPool(2)
SHAPE = "shape:vocab_size=512,hidden_size=256,num_layers=2"
CONFIG = read_shape(SHAPE).config


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def make_weights(cache: PackedCache, seed: int = 0) -> LazyWeights:
    name = f"{SHAPE},seed={seed}"
    return LazyWeights(read_shape(name).tensors(), (name,)).kept_in(cache)


def make_cache(max_bytes: int = 1 << 30) -> PackedCache:
    return PackedCache(max_bytes)


def files(cache: PackedCache, pattern: str = f"*{SUFFIX}") -> list[Path]:
    return sorted(cache.folder.glob(pattern))


def keep(cache: PackedCache, weight_type: str = "int8", seed: int = 0) -> bool:
    """Pack a decoder's matrices or map them; True if they are mapped now."""
    weights = make_weights(cache, seed)
    return isinstance(kept(weights, wanted_matrices(CONFIG, weights, weight_type), TEAM), MappedWeights)


def _logits(decoder: NativeDecoder) -> np.ndarray:
    packed = pack_rows([(range(40, 60), 0, [0, 1])])
    logits = run_pass(decoder, packed, decoder.new_kv(2), [SamplingSpec("logits", SamplingParams())] * 20).logits
    assert logits is not None
    return logits


# The numbers are the same ------------------------------------------------------------------------


@pytest.mark.parametrize("weight_type", ["int8", "int4_row", "int4", "bf16", "f32"])
def test_logits_of_packed_mapped_and_private_weights_have_the_same_bits(weight_type: str) -> None:
    cache = make_cache()
    found = []
    for weights in (make_weights(PackedCache(0)), make_weights(cache), make_weights(cache)):
        decoder = pack_decoder(CONFIG, weights, TEAM, weight_type, "f32")
        found.append((_logits(decoder), decoder.weight_bytes))
    assert len(files(cache)) == 1
    for logits, num_bytes in found[1:]:
        assert np.array_equal(found[0][0], logits)
        assert num_bytes == found[0][1]


@pytest.mark.parametrize("quant", [q for q in QUANTS.values() if q.name in kernels.block_names()])
@pytest.mark.parametrize("order", [(), (0, 2, 4, 1, 3, 5)])
def test_blocks_are_unpacked_to_the_bits_of_the_numpy_twin(quant, order, tmp_path: Path) -> None:
    """The twin is `dequantize` of the gguf package, on random bytes: infinities and NaN among the scales."""
    out, width = 72, 512
    raw = np.random.default_rng(0).integers(0, 256, (out, width // quant.block * quant.block_bytes), np.uint8)
    raw.tofile(tmp_path / "tensor")
    number = next(i for i, q in QUANTS.items() if q is quant)
    tensor = GgufTensor(tmp_path / "tensor", number, (out, width), 0, order)
    with np.errstate(all="ignore"):
        slow = tensor.read()
    matrix = pack(LazyWeights({"m": tensor}), "m", "f32", TEAM)
    fast = np.empty((out, width), np.float32)
    for index, row in enumerate(fast):
        matrix.row(index, row)
    assert np.array_equal(slow, fast, equal_nan=True)
    assert np.array_equal(np.signbit(slow), np.signbit(fast)) or np.isnan(slow).any()


def test_the_gguf_package_knows_the_same_blocks() -> None:
    sizes = {q.name: (q.block, q.block_bytes) for q in QUANTS.values()}
    for name in kernels.block_names():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == sizes[name]


def test_a_mapped_matrix_is_not_written_to() -> None:
    cache = make_cache()
    keep(cache)
    made = make_weights(cache)
    weights = kept(made, wanted_matrices(CONFIG, made, "int8"), TEAM)
    matrix = pack(weights, "embed", "int8", TEAM)
    assert not matrix.writable
    with pytest.raises(ValueError, match="only read"):
        matrix.put_row(0, np.zeros(CONFIG.hidden_size, np.float32))
    assert kernels.pack(np.zeros((2, 64), np.float32), "int8").writable


def test_a_matrix_that_is_not_in_the_file_is_packed(tmp_path: Path) -> None:
    cache = make_cache()
    weights = kept(make_weights(cache), {"embed": Wanted("int8", 512, 256)}, TEAM)
    assert not pack(weights, "embed", "int8", TEAM).writable
    assert pack(weights, "embed", "bf16", TEAM).writable
    assert pack(weights, "layers.0.attn_q", "int8", TEAM).writable


# Broken files ------------------------------------------------------------------------------------


def _flip(at: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        place = at % len(data)
        return data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :]

    return change


BREAKS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "short": lambda data: data[:10],
    "half": lambda data: data[: len(data) // 2],
    "one byte less": lambda data: data[:-1],
    "one byte more": lambda data: data + b"x",
    "zeros": lambda data: bytes(len(data)),
    "another kind of file": lambda data: b"GGUF" + data,
    "first byte": _flip(0),
    "a weight": _flip(70_001),
    "mark": _flip(-1),
    "digest": _flip(-30),
    "length": _flip(-50),
    "table": _flip(-100),
    "doubled": lambda data: data + data,
}


@pytest.mark.parametrize("change", BREAKS.values(), ids=BREAKS)
def test_a_broken_file_is_noticed_and_packed_anew(change, caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache()
    keep(cache)
    (path,) = files(cache)
    good = path.read_bytes()
    path.write_bytes(change(good))
    with pytest.raises(BadModelFile):
        open_packed(path, path.stem, TEAM)
    assert keep(cache)
    assert "packed anew" in caplog.text
    assert path.read_bytes() == good


def test_a_file_of_another_key_or_another_user_is_foreign() -> None:
    cache = make_cache()
    keep(cache)
    (path,) = files(cache)
    with pytest.raises(BadModelFile, match="something else"):
        open_packed(path, "other", TEAM)
    path.chmod(0o666)
    with pytest.raises(BadModelFile, match="others may write"):
        open_packed(path, path.stem, TEAM)


def test_a_table_that_leads_outside_its_file_is_refused(tmp_path: Path) -> None:
    data = np.zeros(1 << 16, np.uint8)
    for starts in ([0], [1 << 40, 0], [64, 8], [1 << 16, 0], [(1 << 16) - 64, 0], [0, 0, 0]):
        with pytest.raises(ValueError, match="buffer"):
            kernels.matrix_over(data, "int8", 32, 64, starts)
    with pytest.raises(TypeError):
        kernels.matrix_over(data, "int8", 32, 64, [-64, 0])
    with pytest.raises(ValueError, match="blocks do not fit"):
        kernels.matrix_over(data, "Q8_0", 32, 100, [0, 0])


def test_checksums_tell_pieces_apart() -> None:
    data = np.random.default_rng(1).integers(0, 256, 1000, np.uint8)
    sums = kernels.checksums(TEAM, data, 256)
    assert len(sums) == 4
    assert sums == [kernels.checksums(TEAM, data[i : i + 256], 256)[0] for i in range(0, 1000, 256)]
    for place in range(0, 1000, 7):
        for change in (1, 128):
            other = data.copy()
            other[place] ^= change
            assert [a != b for a, b in zip(sums, kernels.checksums(TEAM, other, 256), strict=True)] == [
                i == place // 256 for i in range(4)
            ]
    assert kernels.checksums(TEAM, np.zeros(64, np.uint8), 64) != kernels.checksums(
        TEAM, np.zeros(63, np.uint8), 64
    )


def test_a_file_larger_than_a_piece_comes_back(tmp_path: Path) -> None:
    wanted = {"a": Wanted("f32", 1000, 1031), "b": Wanted("int8", 33, 70)}
    rows = {n: np.random.default_rng(2).standard_normal((w.out, w.width), np.float32) for n, w in wanted.items()}
    path, told = tmp_path / "file", list[int]()
    with path.open("wb", buffering=0) as file:
        write_packed(
            file, "key", {"model": "x"}, wanted, lambda name, dtype: kernels.pack(rows[name], dtype), told.append
        )
    path.chmod(0o600)
    found = open_packed(path, "key", TEAM)
    assert read_table(path) == found.table
    assert len(found.table.sums) == 2
    assert told[-1] < data_bytes(wanted.values()) == found.table.data_bytes > PIECE
    for name, one in wanted.items():
        matrix = found.matrix(name, one.dtype)
        assert matrix is not None
        fresh = kernels.pack(rows[name], one.dtype)
        for mine, theirs in zip(kernels.buffers(matrix), kernels.buffers(fresh), strict=True):
            assert np.array_equal(mine, theirs)
    assert found.matrix("a", "int8") is None
    assert found.matrix("c", "f32") is None


# What the key depends on -------------------------------------------------------------------------


def test_content_types_and_build_have_files_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache()
    for weight_type, seed in (("int8", 0), ("bf16", 0), ("int8", 1)):
        assert keep(cache, weight_type, seed)
    assert len(files(cache)) == 3
    assert keep(make_cache())
    assert len(files(cache)) == 3
    for number in range(3):
        monkeypatch.setattr(packed_cache, "build_mark", lambda mark=f"build {number}": mark)
        assert keep(cache)
    assert len(files(cache)) == 4, "of one build before, the file stays"


def test_the_build_is_told_by_all_code_that_reads_and_packs() -> None:
    home = Path(packed_cache.__file__).parents[2]
    found = [{path.relative_to(home).as_posix() for path in home.glob(pattern)} for pattern in packed_cache._CODE]
    assert all(found)
    assert {"model/heads/checkpoint.py", "backend/native/decoder.py"} <= set().union(*found)


def test_a_file_that_changed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_key, "SETTLED_NS", -1)
    model = tmp_path / "model"
    model.write_bytes(b"a" * 100)
    first = digest_of(model)
    monkeypatch.setattr(content_key, "file_digest", lambda path: pytest.fail("it is remembered"))
    assert digest_of(model) == first
    monkeypatch.setattr(content_key, "file_digest", file_digest)
    before = model.stat()
    model.write_bytes(b"b" * 100)
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy that keeps times
    assert digest_of(model) != first
    contents_file().write_text("[broken")
    assert digest_of(model) == file_digest(model)


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"a")
    digest_of(tmp_path / "model")
    assert not contents_file().exists()


# Where it cannot be kept -------------------------------------------------------------------------


def test_no_room_costs_a_message_only(caplog: pytest.LogCaptureFixture) -> None:
    assert not keep(make_cache(max_bytes=1000))
    assert "packed-cache-bytes" in caplog.text
    assert not keep(make_cache(max_bytes=0))


def test_a_disk_that_fails_costs_a_message_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache, "write_packed", full)
    cache = make_cache()
    assert not keep(cache)
    assert "No space left" in caplog.text
    assert not files(cache, f"*{SUFFIX}") + files(cache, f"*{PART}")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_made_costs_a_message_only(caplog: pytest.LogCaptureFixture) -> None:
    assert not keep(replace(make_cache(), folder=Path("/proc/self/packed")))
    assert "not kept" in caplog.text


def test_a_folder_that_is_only_read_costs_one_message_and_no_digest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:  # as on a volume that is only read; root may write to any folder
        patch.setattr(packed_cache.os, "access", lambda path, mode: not mode & os.W_OK)
        patch.setattr(PackedCache, "_key", lambda *_: pytest.fail("the whole model is read for nothing"))
        assert not keep(make_cache())
        assert not keep(make_cache(), seed=1)
    assert caplog.text.count("cannot be written") == 1
    assert keep(make_cache())
    monkeypatch.setattr(packed_cache.os, "access", lambda path, mode: not mode & os.W_OK)
    assert keep(make_cache()), "a file of this build is mapped from there"


def test_what_cannot_fit_removes_nothing() -> None:
    cache = make_cache()
    for seed in range(2):
        assert keep(cache, seed=seed)
    (name, mark), other = files(cache)[0].stem.split("-"), files(cache)[1]
    for build in range(2):
        other.with_name(f"{name}-{build}{SUFFIX}").write_bytes(b"of another build")
    before = files(cache)
    with pytest.raises(OSError, match="packed-cache-bytes"):
        make_cache(max_bytes=1000)._make_room(1001, cache.folder / f"{name}-{mark}{SUFFIX}")
    assert files(cache) == before


def test_the_bound_holds_and_the_oldest_used_go_first() -> None:
    cache = make_cache()
    for seed in range(3):
        keep(cache, seed=seed)
    sizes = {path: path.stat().st_size for path in files(cache)}
    for age, path in enumerate(sizes):
        os.utime(path, (1e9 - age, 1e9 - age))
    oldest, newest = list(sizes)[-1], next(iter(sizes))
    tight = make_cache(max_bytes=sum(sizes.values()) + 1000)
    assert keep(tight, seed=3)
    assert not oldest.exists()
    assert newest.exists()
    assert sum(path.stat().st_size for path in files(cache)) <= tight.max_bytes


# Several processes -------------------------------------------------------------------------------


def test_engines_that_start_together_pack_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(packed_cache, "write_packed", lambda *a: (calls.append(1), write_packed(*a)))
    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(lambda _: keep(make_cache()), range(2)))
    assert len(calls) == 1


WORKER = f"""
import sys
from paceline import kernels
from paceline.backend.native.load import wanted_matrices
from paceline.backend.native.packing import MappedWeights, kept
from paceline.model import content_key
from paceline.model.content_key import contents_file, digest_of, file_digest
from paceline.model.files import packed_cache
from paceline.model.files.rearranged import head_order
from paceline.model.shapes import read_shape
from paceline.model.weights import LazyWeights
packed_cache.LEAST_BYTES = 0
name = {SHAPE!r} + ",seed=0"
weights = LazyWeights(read_shape(name).tensors(), (name,)).kept_in(packed_cache.PackedCache(1 << 30))
found = kept(weights, wanted_matrices(read_shape(name).config, weights, "int8"), kernels.ThreadPool(1))
sys.exit(0 if isinstance(found, MappedWeights) else 3)
"""


def test_two_processes_pack_at_once() -> None:
    running = [subprocess.Popen([sys.executable, "-c", WORKER]) for _ in range(2)]
    assert [process.wait(240) for process in running] == [0, 0]
    cache = make_cache()
    (path,) = files(cache, "*[!j][!s][!o][!n]")
    assert open_packed(path, path.stem, TEAM).table.about["isa"] == kernels.isa()
    assert keep(cache)


# The commands ------------------------------------------------------------------------------------


def test_packed_files_are_listed_and_removed() -> None:
    cache = make_cache()
    keep(cache)
    (path,) = files(cache)
    (listed,) = [model for model in kept_models() if model.path == path]
    assert listed.name == f"packed:{SHAPE},seed=0"
    assert "int8" in listed.note
    path.write_bytes(b"broken")
    (listed,) = [model for model in kept_models() if model.path == path]
    assert "broken" in listed.note
    listed.remove()
    assert files(cache) == []


def test_a_file_that_goes_while_it_is_listed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine completes it, or makes room."""
    cache = make_cache()
    keep(cache)
    (path,) = files(cache)

    def read(gone: Path) -> None:
        gone.unlink()
        raise FileNotFoundError(gone)

    monkeypatch.setattr(kept_models_module, "read_table", read)
    assert path not in [model.path for model in kept_models()]


def test_who_has_a_file_mapped_is_found_though_its_descriptors_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"weights")

    def closed_just_now(_: Path) -> Path:
        raise FileNotFoundError

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        monkeypatch.setattr(Path, "readlink", closed_just_now)
        assert os.getpid() in kept_models_module.KeptModel("weights", path, 7).users


def test_the_table_is_what_a_person_can_read() -> None:
    cache = make_cache()
    keep(cache)
    (path,) = files(cache)
    table = read_table(path)
    assert json.dumps(table.about)
    assert set(table.matrices) == set(wanted_matrices(CONFIG, make_weights(cache), "int8"))
