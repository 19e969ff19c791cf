"""Choices about the KV cache: its type where memory decides, and its disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.backend.registry import AUTO, MAX_INT_KV_HEAD, NUM_BYTES
from paceline.core.errors import ConfigError
from paceline.core.system import commit, machine
from paceline.engine.kv_disk import KvDisk
from paceline.engine.kv_files import PageFiles
from paceline.model.config import num_weights
from paceline.model.files.packed_cache import build_mark

if TYPE_CHECKING:
    from paceline.backend.page_bytes import PageBytes
    from paceline.backend.seam import Decoder
    from paceline.engine.assembly.config import EngineConfig
    from paceline.model.config import ModelConfig

MIB, GIB = 2**20, 2**30


def choose_kv_type(config: EngineConfig, model: ModelConfig, share: float) -> tuple[str, str]:
    """Return the type of KV, and why if it is not the usual one.

    It is the backend's small type where free memory, weights taken off, would not hold the KV asked for. Unasked,
    it is so where a share of that memory would not hold one request of the greatest length. Heads that integers do
    not take have a type of their own. Raises `ConfigError`.
    """
    usual, small, wide = config.kv_type, config.backend_spec.small_kv, config.backend_spec.wide_kv
    if config.kv not in (None, AUTO) or small is None or small == usual:
        return usual, ""
    if wide is not None and (dim := model.full_heads.dim) > MAX_INT_KV_HEAD:
        return wide, f"integers take heads of {MAX_INT_KV_HEAD} numbers, not {dim}"
    numbers = 2 * sum(heads.kv_size for heads in model.kv_heads())  # of a token
    tokens = config.kv_tokens or min(config.limits.max_len, model.max_context)
    free = config.free_bytes() - num_weights(model) * NUM_BYTES[config.weight_type]
    most = max(free, 0) * (1.0 if config.kv_tokens else share)
    needed = tokens * numbers * NUM_BYTES[usual]
    if needed <= most:
        return usual, ""
    return (
        small,
        f"{tokens} tokens in {usual} take {needed / MIB:.0f} MiB, and there are {most / MIB:.0f} for them",
    )


def open_folder(config: EngineConfig, decoder: Decoder) -> PageFiles | None:
    """Open the folder of `--kv-disk`, if it is given. Raises `ConfigError`."""
    if config.kv_disk is None:
        return None
    if not decoder.capabilities.moves_pages:
        raise ConfigError(
            f"--kv-disk: the {decoder.name} backend keeps its KV where it computes; leave the option out"
        )
    return PageFiles(Path(config.kv_disk).expanduser(), config.kv_disk_bytes)


def disk_of(files: PageFiles | None, kv: object) -> KvDisk | None:
    """Begin to keep pages of a store in a folder."""
    return None if files is None else KvDisk(files, as_bytes(kv))


def as_bytes(kv: object) -> PageBytes:
    """Return a store whose backend moves pages."""
    return kv  # type: ignore[return-value]  # `Capabilities.moves_pages` says so


def identity(decoder: Decoder, content: str, numerics: str | None) -> str:
    """Return all that a page's bytes depend on beside its tokens.

    For pages that outlive the process. content: key of the model's files.
    """
    assert content, "a model that is loaded for pages on disk has the key of its files"
    here = machine()
    build = (build_mark(), str(commit()), str(here["torch"]), str(here["cpu"]))
    return "\0".join((content, repr(decoder.config), decoder.describe(), str(numerics), *build))


def describe_disk(files: PageFiles) -> str:
    """Return a line for the banner."""
    there = f"{len(files)} pages, {files.num_bytes / GIB:.1f} GiB there"
    return f"{files.folder}, at most {files.max_bytes / GIB:.1f} GiB ({there})"
