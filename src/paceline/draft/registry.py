"""Drafter options as a tagged union: `NAME[:key=value,...]` becomes that drafter's own frozen config."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, get_type_hints, runtime_checkable

from paceline.core.errors import ConfigError, suggest
from paceline.draft.shipped import ships
from paceline.model.files.catalogue import draft_for
from paceline.model.files.pull import is_pulled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.draft.drafter import Drafter, DraftWeights, Target
    from paceline.model.config import ModelConfig
    from paceline.model.weights import LoadedModel

    Loader = Callable[[str, str | None], DraftWeights]  # from a model's name or path, and a type of weights

# A new drafter is one file and one line here.
DRAFTERS = {
    "ngram": "paceline.draft.lookup.ngram:NgramConfig",
    "grammar": "paceline.draft.lookup.forced:GrammarConfig",
    "suffix": "paceline.draft.lookup.suffix:SuffixConfig",
    "oracle": "paceline.draft.lookup.oracle:OracleConfig",
    "draft-model": "paceline.draft.model.draft_model:DraftModelConfig",
    "eagle": "paceline.draft.heads.options:EagleConfig",
    "eagle3": "paceline.draft.heads.options:Eagle3Config",
    "mtp": "paceline.draft.heads.options:MtpConfig",
    "peagle": "paceline.draft.heads.options:PEagleConfig",
    "block": "paceline.draft.heads.options:BlockHeadConfig",
}


class DrafterConfig(Protocol):
    """Config of a drafter: its name, its drafts per step, and its builder."""

    @property
    def name(self) -> str:
        """Name in specs, metrics and tables."""

    @property
    def k(self) -> int:
        """Drafts per row and step."""

    def num_weights(self, target: LoadedModel) -> int:
        """Return the number of its own weights, by its files. Raises `PacelineError`."""

    @property
    def stands_alone(self) -> bool:
        """True if it reads only target tokens, so that it can be another process."""

    @property
    def reads(self) -> str:
        """Name of the numbers that it reads from the target's process; empty: none."""

    def build(self, target: Target, load: Loader) -> Drafter:
        """Make the drafter. Raises `DrafterMismatch` if it does not fit the target."""


@runtime_checkable
class KeepsForRows(Protocol):
    """Config of a drafter that keeps keys and values for rows beside pages."""

    def row_numbers(self, target: ModelConfig, fingerprint: str, num_rows: int) -> int:
        """Return how many numbers it keeps for rows, by its files. Raises `PacelineError`."""


@runtime_checkable
class KeepsForPages(Protocol):
    """Config of a drafter that may have stores over the target's pages."""

    @property
    def keeps_for_pages(self) -> bool:
        """True if it has such stores."""


AUTO = "auto"
BETWEEN_SPECS = re.compile(r"\+(?![0-9.])")  # a + before a number stands within an option
FOR_GRAMMARS = ("grammar",)  # drafters for rows with a grammar only
ALWAYS_USEFUL = (
    "suffix",
    *FOR_GRAMMARS,
)  # drafters that `auto` has for every target: no cost where they do not help
IF_SHIPPED = ("eagle3",)  # drafters that `auto` has if they ship for the target
IF_PULLED = "draft-model:model={}"  # drafter that `auto` has once the catalogue's model for the target is pulled


@dataclass(frozen=True, slots=True)
class Drafters:
    """The drafters of an engine."""

    configs: tuple[DrafterConfig, ...]
    auto: bool  # the controller says how far they draft; otherwise each drafter's own k


def parse_drafters(spec: str, fingerprint: str = "", within: Sequence[str] = ()) -> Drafters:
    """Return what `off`, a drafter's spec, `auto` or `auto:SPEC+SPEC` asks for. Raises `ConfigError`.

    fingerprint: of the target, for which drafters may ship. within: drafters that its own files hold.
    """
    name, _, listed = spec.partition(":")
    if name != AUTO:
        config = parse_spec(spec)
        return Drafters((config,) if config else (), auto=False)
    specs = BETWEEN_SPECS.split(listed) if listed else usual_specs(fingerprint, within)
    configs = [parse_spec(one) for one in specs]
    names = [config.name for config in configs if config]
    if len(set(names)) < len(configs):
        raise ConfigError(f"--draft {spec}: auto takes different drafters, each once, none of them off")
    return Drafters(tuple(config for config in configs if config), auto=True)


def usual_specs(fingerprint: str, within: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the specs of the drafters that `auto` has for a target, see `parse_drafters`."""
    usual = (*ALWAYS_USEFUL, *(one for one in IF_SHIPPED if ships(one, fingerprint)), *within)
    return (*usual, IF_PULLED.format(name)) if is_pulled(name := draft_for(fingerprint)) else usual


def parse_spec(spec: str) -> DrafterConfig | None:
    """Return the config a spec such as `ngram:k=4` names; None for `off`. Raises `ConfigError`."""
    name, _, options = spec.partition(":")
    if name == "off":
        if options:
            raise ConfigError(f"--draft off takes no options, but got {options!r}")
        return None
    if name not in DRAFTERS:
        raise ConfigError(f"unknown drafter {name!r}{suggest(name, ['off', AUTO, *DRAFTERS])}")
    options_class = config_class(name)
    config: DrafterConfig = options_class(**_parse_options(name, options_class, options))
    return config


def config_class(name: str) -> Any:
    """Import the config class of a drafter of the registry."""
    module, _, class_name = DRAFTERS[name].partition(":")
    return getattr(importlib.import_module(module), class_name)


def _parse_options(name: str, options_class: type, options: str) -> dict[str, Any]:
    types = get_type_hints(options_class)
    known = {f.name: types[f.name] for f in fields(options_class)}
    values: dict[str, Any] = {}
    for option in filter(None, options.split(",")):
        key, equals, text = option.partition("=")
        if key not in known:
            raise ConfigError(f"drafter {name!r} has no option {key!r}{suggest(key, known)}")
        if not equals or not text:
            raise ConfigError(f"drafter {name!r}: write {key}=VALUE, not {option!r}")
        values[key] = _convert(f"{name}:{key}", text, known[key])
    return values


def _convert(label: str, text: str, kind: Any) -> Any:
    wanted = next((k for k in (int, float) if kind == k or kind == k | None), str)
    try:
        return wanted(text)
    except ValueError:
        raise ConfigError(f"{label} must be {wanted.__name__}, not {text!r}") from None


def bounded(config: object, field: str, low: float, high: float) -> None:
    """Raise `ConfigError` unless a config's field lies within bounds."""
    value = getattr(config, field)
    if not low <= value <= high:
        name = getattr(config, "name", type(config).__name__)
        raise ConfigError(f"{name}:{field} must be between {low} and {high}, not {value}")
