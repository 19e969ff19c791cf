"""The options of drafters with a head, and the drafters they make."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, cast

from paceline.core.errors import ConfigError, DrafterMismatch
from paceline.core.nouns import PAGE_TOKENS
from paceline.draft.drafter import MAX_BRANCHES, MAX_K
from paceline.draft.heads.asked_head import AskedHead, head_needs, head_report
from paceline.draft.heads.block_drafter import BlockHeadDrafter
from paceline.draft.heads.parallel import ParallelHeadDrafter
from paceline.draft.heads.serial import SerialHeadDrafter
from paceline.draft.late import LateDrafter
from paceline.draft.registry import bounded
from paceline.draft.request_vocabulary import RequestVocabulary
from paceline.draft.shipped import shipped_folder, trained_to
from paceline.model.files.pull import resolve
from paceline.model.heads.checkpoint import head_config, load_head, narrowed
from paceline.model.heads.config import BLOCK_HEAD, EAGLE, EAGLE3, MTP, PEAGLE, head_shapes
from paceline.model.heads.mtp import load_mtp

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.backend.seam import HeadRunner, LateHeadRunner
    from paceline.draft.drafter import Drafter, Target
    from paceline.draft.heads.head_drafter import HeadDrafter
    from paceline.draft.registry import Loader
    from paceline.model.config import ModelConfig
    from paceline.model.heads.checkpoint import Head
    from paceline.model.weights import LoadedModel

log = logging.getLogger(__name__)

CHAINS_ONLY = "%s drafts chains: branches go with the law coupled, on the backends native and reference"
_VOCABULARY = 8192  # tokens written with a target's head by default: all would cost more than the layers


class ReadsTaps:
    """Facts of all drafters with a head."""

    __slots__ = ()
    keeps_for_pages: ClassVar[bool] = True  # keys and values, and the target's taps
    stands_alone: ClassVar[bool] = False  # heads read the target's taps and embedding
    reads: ClassVar[str] = "the target's hidden states"  # in every pass


@dataclass(frozen=True, slots=True)
class HeadOptions(ReadsTaps):
    """Options of all heads."""

    name: ClassVar[str]
    k: int = 4
    model: str | None = None  # folder or Hugging Face id of the head; None: the one that ships for the target
    weights: str | None = None  # their type in memory, see `weight_type`; None: the backend's usual one

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)

    def num_weights(self, target: LoadedModel) -> int:
        """Return the size of the head; an embedding of its own is not counted."""
        config = head_config(self.folder(target), target.config)
        return sum(prod(shape) for shape in head_shapes(config).values())

    def folder(self, target: Target | LoadedModel) -> Path:
        """Return where the head's files lie. Raises `ModelError`, or `ConfigError` if none ships."""
        return resolve(self.model) if self.model else shipped_folder(self.name, target.fingerprint)

    def asked(self, target: Target) -> AskedHead:
        """Return what drafting needs of these options."""
        return AskedHead(self.name, self.k, self.model, self.weights, trained_to(self.folder(target)))

    def load(self, target: Target) -> Head:
        """Read the head. Raises `ModelError`, or `DrafterMismatch` if it is not the target's."""
        folder = self.folder(target)
        head = load_head(folder, target.config)
        kind = head.config.algorithm.name
        if kind != self.name:
            raise DrafterMismatch(f"{folder} is a head of another kind; use --draft {kind}:model={folder}")
        return head


@dataclass(frozen=True, slots=True)
class EagleConfig(HeadOptions):
    """`eagle:model=FOLDER`, with `k` drafts per step among the `vocabulary` lowest token ids."""

    name: ClassVar[str] = EAGLE.name
    vocabulary: int | None = None  # None: those that the head's file names, or else a few thousand

    def __post_init__(self) -> None:
        HeadOptions.__post_init__(self)  # super() does not see through slots
        if not self.model:  # nothing here trains one, so none ships
            raise ConfigError(
                f"{self.name} wants model=FOLDER, a head that was trained for this very target; "
                f"`paceline train {EAGLE3.name}` makes a better one, for --draft {EAGLE3.name}:model=FOLDER"
            )

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter. Raises `ModelError`, or `DrafterMismatch` if the head is not the target's."""
        return _drafter(SerialHeadDrafter, self.asked(target), target, _narrow(self, self.load(target), target))


@dataclass(frozen=True, slots=True)
class Eagle3Config(HeadOptions):
    """`eagle3` or `eagle3:model=FOLDER`, with `k` drafts per step and some second choices."""

    name: ClassVar[str] = EAGLE3.name
    branches: int = 0  # second choices beside the drafts, at most; under `auto` as many of these as pay

    def __post_init__(self) -> None:
        HeadOptions.__post_init__(self)  # super() does not see through slots
        bounded(self, "branches", 0, MAX_BRANCHES)

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter. Raises `ModelError`, or `DrafterMismatch` if the head is not the target's."""
        asked = replace(self.asked(target), branches=self.branches)
        _tell_of_chains(asked, target)
        return _drafter(SerialHeadDrafter, asked, target, self.load(target))


@dataclass(frozen=True, slots=True)
class PEagleConfig(HeadOptions):
    """`peagle` or `peagle:model=FOLDER`, with `k` drafts per step."""

    name: ClassVar[str] = PEAGLE.name
    k: int = 6

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter. Raises `ModelError`, or `DrafterMismatch` if the head is not the target's."""
        return _drafter(ParallelHeadDrafter, self.asked(target), target, self.load(target))


@dataclass(frozen=True, slots=True)
class BlockHeadConfig(HeadOptions):
    """`block` or `block:model=FOLDER`, with `k` drafts per step of those in the head's block.

    A head that writes with its target's output matrix does so among the `vocabulary` lowest token ids.
    """

    name: ClassVar[str] = BLOCK_HEAD.name
    k: int = 7  # a head with smaller blocks makes fewer
    vocabulary: int | None = None  # None: those that the head's file names, or else a few thousand

    def row_numbers(self, target: ModelConfig, fingerprint: str, num_rows: int) -> int:
        """Return the number of keys and values in rows' spare pages, padding included."""
        folder = resolve(self.model) if self.model else shipped_folder(self.name, fingerprint)
        config = head_config(folder, target)
        per_token = 2 * sum(heads.kv_size for heads in config.layers.kv_heads())
        return PAGE_TOKENS * per_token * config.spare_pages(num_rows)

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter. Raises `ModelError`, or `DrafterMismatch` if the head is not the target's."""
        head = self.load(target)
        has_own = head.config.own_output or head.config.draft_vocab_size != target.config.vocab_size
        if self.vocabulary is not None and has_own:
            raise ConfigError(f"{self.name}: leave out vocabulary={self.vocabulary}: the head has its own tokens")
        head = head if has_own else _narrow(self, head, target)
        return _drafter(BlockHeadDrafter, self.asked(target), target, head)


def _narrow(options: EagleConfig | BlockHeadConfig, head: Head, target: Target) -> Head:
    """Return a head that writes the asked tokens with its target's output matrix."""
    size = target.config.vocab_size
    if options.vocabulary is not None:
        bounded(options, "vocabulary", 1, size)
        return narrowed(head, options.vocabulary)
    return narrowed(head, min(size, _VOCABULARY)) if head.config.draft_vocab_size == size else head


@dataclass(frozen=True, slots=True)
class MtpConfig(ReadsTaps):
    """`mtp`: the target's own MTP layer, `k` drafts among the `vocabulary` lowest ids."""

    name: ClassVar[str] = MTP.name
    k: int = 3
    weights: str | None = None  # their type in memory, see `weight_type`; None: the backend's usual one
    vocabulary: int | None = None  # None: a few thousand
    branches: int = 0  # as of `Eagle3Config`

    def __post_init__(self) -> None:
        bounded(self, "k", 1, MAX_K)
        bounded(self, "branches", 0, MAX_BRANCHES)

    def num_weights(self, target: LoadedModel) -> int:
        """Return the size of the layer; embedding and output matrix are the target's."""
        config = _head_within(load_mtp(target)).config
        return sum(prod(shape) for shape in head_shapes(config).values())

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter. Raises `ConfigError` if the target's files have no such layer."""
        head, size = _head_within(target.head_within), target.config.vocab_size
        if self.vocabulary is not None:
            bounded(self, "vocabulary", 1, size)
        asked = AskedHead(self.name, self.k, "within the target's files", self.weights, (), self.branches)
        _tell_of_chains(asked, target)
        return _drafter(
            SerialHeadDrafter, asked, target, narrowed(head, min(size, self.vocabulary or _VOCABULARY))
        )


def _tell_of_chains(asked: AskedHead, target: Target) -> None:
    """Log that branches are asked for where only chains are drafted."""
    if asked.branches and (target.law_needs_probs or not target.memory.decoder.capabilities.branches):
        log.warning(CHAINS_ONLY, asked.name)


def _head_within(head: Head | None) -> Head:
    """Return the head within a target's files. Raises `ConfigError` if it has none."""
    if head is None:
        raise ConfigError(
            f"the target's files hold no MTP layer that is known; leave out --draft {MTP.name}, or take the "
            "checkpoint of the model's authors, as converted ones often lack such layers"
        )
    return head


def _drafter(make: type[HeadDrafter], asked: AskedHead, target: Target, head: Head) -> Drafter:
    """Return a drafter on the target's device where that drafts late, else on the host."""
    runner = target.memory.run_head(head, asked.weights)
    if not runner.capabilities.late or target.law_needs_probs or target.apart:
        return make(asked, target, head, runner)
    return _late(make, asked, target, head, runner)


def _late(
    make: type[HeadDrafter], asked: AskedHead, target: Target, head: Head, runner: HeadRunner
) -> LateDrafter:
    """Return a drafter on the device.

    make: class of the drafter on the host, which has the same hints and lag.
    """
    kv = runner.new_kv(target.num_pages + head.config.spare_pages(target.rows.num_rows))
    taps = runner.new_tap_store(target.num_pages)
    needs = head_needs(asked, head, kv, taps, stops=True, late=True)
    program = cast("LateHeadRunner", runner).late_program(target.rows, kv, taps, make.late_rule())
    report = head_report(asked, head.config, runner)
    size = target.config.vocab_size
    tokens = RequestVocabulary(target.rows, head.token_ids, size, runner.set_request_tokens)
    vocabulary = tokens if head.config.request_tokens else None
    return LateDrafter(asked.name, needs, report, program, target.rows, vocabulary, make.entries_lag)
