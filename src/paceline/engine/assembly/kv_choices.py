"""Choices about the KV cache: its type where memory decides, its pages and its disk."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline.backend.page_bytes import Budget
from paceline.backend.registry import AUTO, MAX_INT_KV_HEAD, NUM_BYTES
from paceline.core.errors import ConfigError
from paceline.core.nouns import PAGE_TOKENS
from paceline.core.system import commit, machine
from paceline.draft.registry import KeepsForPages, KeepsForRows, parse_drafters
from paceline.engine.assembly.config import Settled
from paceline.engine.kv_disk import KvDisk
from paceline.engine.kv_files import PageFiles
from paceline.engine.pages import PagePool, pages_for
from paceline.engine.sliding_pages import SlidingPool, most_pages
from paceline.engine.window_parts import PartedPool
from paceline.model.config import num_weights
from paceline.model.files.packed_cache import build_mark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.backend.page_bytes import DropsWindows, PageBytes
    from paceline.backend.seam import KV, Decoder
    from paceline.draft.registry import DrafterConfig
    from paceline.engine.assembly.config import EngineConfig
    from paceline.engine.request_table import Limits
    from paceline.model.config import ModelConfig

MIB, GIB = 2**20, 2**30
KV_SHARE = 0.5  # share of the free memory for KV; the rest is for activations, drafters and other programs
MIN_PAGES = 4
GRAPHS_BYTES = 1 << 29  # memory that captured steps take beside their logits
UNASKED_TOKENS = 1 << 16  # most KV slots on a host, or those of one request, where --kv-tokens is not given


def choose_kv_type(config: EngineConfig, model: ModelConfig, share: float) -> tuple[str, str]:
    """Return the type of KV, and why if it is not the usual one.

    The backend's small type is chosen where the free memory, less the weights, would not hold the tokens asked
    for; where none were asked for, if `share` of that memory would not hold one request of the greatest length.
    Heads too large for integers get the backend's wide type. Raises `ConfigError`.
    """
    usual, small, wide = config.kv_type, config.backend_spec.small_kv, config.backend_spec.wide_kv
    if config.kv not in (None, AUTO) or small is None or small == usual:
        return usual, ""
    if wide is not None and (dim := model.full_heads.dim) > MAX_INT_KV_HEAD:
        return wide, f"integers take heads of {MAX_INT_KV_HEAD} numbers, not {dim}"
    tokens = config.kv_tokens or min(config.limits.max_len, model.max_context)
    free = config.free_bytes() - num_weights(model) * NUM_BYTES[config.weight_type]
    most = max(free, 0) * (1 / config.sharers if config.kv_tokens else share)
    needed = _numbers(config, model, tokens) * NUM_BYTES[usual]
    if needed <= most:
        return usual, ""
    return (
        small,
        f"{tokens} tokens in {usual} take {needed / MIB:.0f} MiB, and there are {most / MIB:.0f} for them",
    )


def _numbers(config: EngineConfig, model: ModelConfig, tokens: int) -> int:
    """Return how many numbers the KV of so many tokens has."""
    sliding = model.sliding_kv() if config.drops_windows else ()
    seen = min(tokens, most_pages(max(model.windows), config.limits.prefill_tokens) * PAGE_TOKENS)
    heads = enumerate(model.kv_heads())
    return 2 * sum((seen if i in sliding else tokens) * one.kv_size for i, one in heads)


@dataclass(frozen=True, slots=True)
class KvRoom:
    """Pages of the target's KV."""

    num_pages: int
    why: str
    budget: Budget | None = None  # None: a page takes the same memory whatever rows see of it

    def settled(self, config: EngineConfig, kv: KV) -> Settled:
        """Return the choices for engines that are to have as much."""
        tokens = self.num_pages * PAGE_TOKENS
        total = self.budget.total if self.budget else tokens * kv.bytes_per_token
        return Settled(config.weight_type, config.kv_type, tokens, total)

    def new_pool(self, config: EngineConfig, model: ModelConfig, stores: Sequence[str], kv: KV) -> PagePool:
        """Return the pool of these pages. stores: of drafters. kv: the target's."""
        windows, caching = model.windows, config.prefix_cache
        if self.budget is None:
            if all(windows):
                return SlidingPool(self.num_pages, stores, window=max(windows), caching=caching)
            return PagePool(self.num_pages, stores, caching=caching)
        drops, (num_pages, budget) = cast("DropsWindows", kv), (self.num_pages, self.budget)
        drop, drop_rest, window = drops.drop_window, drops.drop_rest, max(windows)
        return PartedPool(
            num_pages, stores, caching=caching, window=window, budget=budget, drop=drop, drop_rest=drop_rest
        )


def row_bytes(
    config: EngineConfig, target: Decoder, fingerprint: str, drafters: Sequence[DrafterConfig], num_rows: int
) -> int:
    """Return the memory that drafters keep for rows beside pages.

    0 for drafters on a device of their own. fingerprint: of the target. Raises `PacelineError`.
    """
    if config.device_defaults is not None and config.placement.apart:
        return 0
    parts = 1 if config.device_defaults is None else config.tensor_parallel  # ranks, each with a part of the KV
    model, own = target.config, target.new_kv(1).bytes_per_token * parts
    keepers = [one for one in drafters if isinstance(one, KeepsForRows)]
    numbers = sum(one.row_numbers(model, fingerprint, num_rows) for one in keepers)
    return ceil(numbers * own / (2 * sum(heads.kv_size for heads in model.kv_heads())))


def kv_room(
    config: EngineConfig,
    limits: Limits,
    decoder: Decoder,
    mapped_bytes: int = 0,
    beside: int = 0,
    drafters: Sequence[DrafterConfig] = (),
) -> KvRoom:
    """Choose the number of pages, and their memory. Raises `ConfigError` if none fits.

    Where only some layers slide, a row needs window parts for its window only. The memory that is left holds the
    window parts behind windows, for the prefix cache. A drafter may have a page of its own for each page, at most
    as large as a whole page of the target; those beyond the pages that would fit whole come from the KV's share.
    mapped_bytes: bytes of weights that the system counts as free memory. beside: bytes of the KV's share that
    drafters take beside its pages, see `row_bytes`.
    """
    kv, model = decoder.new_kv(1), decoder.config
    free = kv_bytes(config, mapped_bytes, beside, step_bytes(config, limits, decoder))
    affordable = free // (kv.bytes_per_token * PAGE_TOKENS)
    sliding = model.sliding_kv() if config.drops_windows else ()
    if not sliding:
        return KvRoom(*choose_num_pages(config, limits, affordable))
    in_window = cast("DropsWindows", kv).window_bytes_per_token
    most = most_pages(max(model.windows), limits.prefill_tokens)
    part, page = in_window * PAGE_TOKENS, (kv.bytes_per_token - in_window) * PAGE_TOKENS
    of_drafters = page + part if any(isinstance(d, KeepsForPages) and d.keeps_for_pages for d in drafters) else 0
    with_parts_of_one_row = (free - most * part + affordable * of_drafters) // (page + of_drafters)
    num_pages, why = choose_num_pages(config, limits, max(affordable, with_parts_of_one_row))
    least = num_pages * page + min(num_pages, most) * part
    whole = num_pages * (page + part)
    free -= max(num_pages - free // (page + part), 0) * of_drafters
    total = min(whole, max(least, config.kv_budget or free))
    if total == whole:  # all pages fit whole, so none needs to lose its window part
        return KvRoom(num_pages, why)
    about = (
        f"{len(sliding)} of {model.num_layers} layers see {max(model.windows)} tokens, and keep more if it fits"
    )
    return KvRoom(num_pages, f"{why}; {about}", Budget(page, part, total))


def choose_num_pages(config: EngineConfig, limits: Limits, affordable: int) -> tuple[int, str]:
    """Return the number of KV pages, and why. Raises `ConfigError` if none fits.

    affordable: pages that fit the KV's share of the memory.
    """
    if config.kv_tokens is not None:
        return max(pages_for(config.kv_tokens), 1), "as asked"
    wanted = limits.num_rows * pages_for(limits.max_len)
    most = wanted
    if config.device_defaults is None:
        most = pages_for(max(UNASKED_TOKENS, limits.max_len))
    if affordable < MIN_PAGES:
        raise ConfigError("there is no memory left for the KV cache; close other programs or set --kv-tokens")
    num_pages = min(wanted, affordable, most)
    if num_pages == wanted:
        return num_pages, f"room for {limits.num_rows} requests of {limits.max_len} tokens"
    if num_pages == affordable:
        return num_pages, f"up to {kv_share(config):.0%} of the free memory"
    return num_pages, "enough for most loads; --kv-tokens sets more"


def kv_bytes(config: EngineConfig, mapped_bytes: int = 0, beside: int = 0, of_steps: int = 0) -> int:
    """Return the bytes that KV may take: a share of free memory; with --kv-tokens all.

    mapped_bytes, beside: see `kv_room`. of_steps: bytes left for steps in any case, see `step_bytes`.
    """
    share = 1 / config.sharers if config.kv_tokens is not None else kv_share(config)
    free = max(config.free_bytes() - mapped_bytes, 0)
    return max(int(min(free * share, free / config.sharers - of_steps)) - beside, 0)


def step_bytes(config: EngineConfig, limits: Limits, decoder: Decoder) -> int:
    """Return the memory of a device's steps, beside weights and KV; 0 on hosts.

    Captured steps keep the logits of the largest of them. The longest step is not captured: at its widest it has a
    gated layer's inputs and output, and five states as wide as the model.
    """
    if config.device_defaults is None:
        return 0
    model, captured = decoder.config, max(decoder.capabilities.token_buckets, default=0)
    numbers = limits.prefill_tokens * (3 * model.intermediate_size + 5 * model.hidden_size)
    width = max(NUM_BYTES[config.weight_type], NUM_BYTES["bf16"])  # narrower weights compute in 16 bits
    return captured * model.vocab_size * int(NUM_BYTES["f32"]) + int(numbers * width) + GRAPHS_BYTES


def kv_share(config: EngineConfig) -> float:
    """Return the share of the free memory that the target's KV may take."""
    usual = config.device_defaults
    if usual is None:
        share = KV_SHARE
    else:
        share = usual.kv_share_with_drafters if parse_drafters(config.draft).configs else usual.kv_share
    return share / config.sharers


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
    """Return what keeps pages of a store in a folder; None without a folder."""
    return None if files is None else KvDisk(files, as_bytes(kv))


def as_bytes(kv: object) -> PageBytes:
    """Return a store whose backend moves pages."""
    return kv  # type: ignore[return-value]  # `Capabilities.moves_pages` says so


def identity(decoder: Decoder, content: str, numerics: str | None) -> str:
    """Return all that a page's bytes depend on beside its tokens.

    It names pages that outlive the process. content: key of the model's files.
    """
    assert content, "a model that is loaded for pages on disk has the key of its files"
    here = machine()
    build = (build_mark(), str(commit()), str(here["torch"]), str(here["cpu"]))
    return "\0".join((content, decoder.config.lasting_text, decoder.describe(), str(numerics), *build))


def describe_disk(files: PageFiles) -> str:
    """Return a line for the banner."""
    there = f"{len(files)} pages, {files.num_bytes / GIB:.1f} GiB there"
    return f"{files.folder}, at most {files.max_bytes / GIB:.1f} GiB ({there})"
