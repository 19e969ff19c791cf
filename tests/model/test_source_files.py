"""A model's file that is replaced while it is read leaves no packed weights behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline import kernels
from paceline.backend.native.load import wanted_matrices
from paceline.backend.native.packing import MappedWeights, kept
from paceline.model import content_key, weights
from paceline.model.files import packed_cache
from paceline.model.files.packed_cache import PART, SUFFIX, PackedCache
from paceline.model.files.source_files import SourceFile, folder_sources, folder_states
from paceline.model.weights import LazyWeights, load_model
from tests.model.helpers import write_gguf
from tests.model.test_safetensors import write_folder
from tests.tiny import tiny_config, tiny_weights

if TYPE_CHECKING:
    from collections.abc import Callable

TEAM = kernels.ThreadPool(1)


@pytest.fixture(autouse=True)
def _small_files_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(packed_cache, "LEAST_BYTES", 0)
    monkeypatch.setattr(content_key, "SETTLED_NS", -1)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["folder", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "folder":
        return write_folder(tmp_path / "model")
    config = tiny_config()
    return write_gguf(tmp_path / "model.gguf", config, tiny_weights(config))


def replace_file(model: Path) -> None:
    """Put a copy of a model's file in its place, which only its state tells apart."""
    path = model / "model.safetensors" if model.is_dir() else model
    (new := path.with_suffix(".new")).write_bytes(path.read_bytes())
    new.replace(path)


def keep(model: Path, before: Callable[[], None] = lambda: None) -> bool:
    loaded = load_model(model)
    before()
    assert isinstance(loaded.weights, LazyWeights)
    mine = loaded.weights.kept_in(PackedCache(1 << 30))
    return isinstance(kept(mine, wanted_matrices(loaded.config, mine, "int8"), TEAM), MappedWeights)


def and_replace(function: Callable[..., Any], model: Path) -> Callable[..., Any]:
    def both(*given: Any) -> Any:
        replace_file(model)
        return function(*given)

    return both


# Who is called at that moment -> its module
MOMENTS = {
    "header to weights": (weights, "choose_tensors"),
    "weights to digest": (content_key, "file_digest"),
    "digest to packing": (packed_cache, "write_packed"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_nothing_is_kept_of_a_file_replaced_while_it_is_read(
    moment: str, model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    module, name = MOMENTS[moment]
    with monkeypatch.context() as patch:
        patch.setattr(module, name, and_replace(getattr(module, name), model))
        assert not keep(model)
    assert "changed or replaced" in caplog.text
    folder = tmp_path / "cache" / "packed"
    assert not [*folder.glob(f"*{SUFFIX}"), *folder.glob(f"*{PART}")]
    assert keep(model)


def test_a_replaced_file_takes_no_packed_file_of_its_own(model: Path) -> None:
    assert keep(model)
    assert not keep(model, lambda: replace_file(model))
    assert keep(model)


def test_a_file_that_came_later_or_is_gone_counts_as_changed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    states, late = folder_states(tmp_path), tmp_path / "late.safetensors"
    late.write_bytes(b"x")
    assert [one.changed for one in folder_sources(tmp_path, states, [late])] == [False, True]
    assert SourceFile(tmp_path / "gone", "").changed
