"""The registry of backends: the weight and KV types of each, and its parts' modules."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ConfigError, suggest

if TYPE_CHECKING:
    from paceline.backend.rows import Rows
    from paceline.backend.seam import LoadCutModel, LoadDecoder, LoadHeadRunner

# Bytes of one stored number, scales included.
NUM_BYTES = {"f64": 8.0, "f32": 4.0, "f16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.625}


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Offer of one backend. The engine reads this and never asks which backend it is."""

    name: str
    about: str
    weight_types: tuple[str, ...]  # the first is the default
    kv_types: tuple[str, ...]  # the first is the default; none: that of the weights
    loader: str  # module:function, a `LoadDecoder`
    head_loader: str  # module:function, a `LoadHeadRunner`
    cut_model_loader: str  # module:function, a `LoadCutModel`
    rows_class: str = "paceline.backend.rows:Rows"  # module:class of its per-row state
    needs: str | None = None  # package that only this backend imports, and the extra that installs it

    def load(self) -> LoadDecoder:
        """Import the maker of its decoders."""
        return self._imported(self.loader)  # type: ignore[no-any-return]

    def load_head(self) -> LoadHeadRunner:
        """Import the maker of its runners of draft heads."""
        return self._imported(self.head_loader)  # type: ignore[no-any-return]

    def load_cut_model(self) -> LoadCutModel:
        """Import the maker of its decoders of draft models that share the target's tables."""
        return self._imported(self.cut_model_loader)  # type: ignore[no-any-return]

    def rows(self) -> type[Rows]:
        """Import the class of its per-row state."""
        return self._imported(self.rows_class)  # type: ignore[no-any-return]

    def weight_type(self, asked: str | None) -> str:
        """Return the type of weights to use. Raises `ConfigError`."""
        return self._one_of("--weights", self.weight_types, asked or self.weight_types[0])

    def kv_type(self, asked: str | None, weight_type: str) -> str:
        """Return the type of KV to use. Raises `ConfigError`."""
        known = self.kv_types or (weight_type,)
        return self._one_of("--kv", known, asked or known[0])

    def _one_of(self, flag: str, known: tuple[str, ...], asked: str) -> str:
        if asked not in known:
            raise ConfigError(f"the {self.name} backend has no {flag} {asked}{suggest(asked, known)}")
        return asked

    def _imported(self, path: str) -> Any:
        module, function = path.split(":")
        try:
            return getattr(import_module(module), function)
        except ModuleNotFoundError as error:
            if error.name is None or error.name != self.needs:
                raise
            raise ConfigError(
                f"the {self.name} backend needs {self.needs}: pip install 'paceline[{self.needs}]'"
            ) from None


BACKENDS = {
    spec.name: spec
    for spec in (
        BackendSpec(
            "native",
            "C++ kernels for CPUs; a token's numbers are the same in every batch",
            ("int8", "int4", "bf16", "f32"),
            ("i16", "i8", "f16", "f32"),
            "paceline.backend.native.load:load_decoder",
            "paceline.backend.native.load:load_runner",
            "paceline.backend.native.cut_model:load_cut_model",
        ),
        BackendSpec(
            "reference",
            "readable PyTorch, the definition that the others are compared with",
            ("f32", "f64", "bf16", "f16"),
            (),
            "paceline.backend.reference.decoder:load_decoder",
            "paceline.backend.reference.head:load_runner",
            "paceline.backend.reference.cut_model:load_cut_model",
            needs="torch",
        ),
    )
}
DEFAULT_BACKEND = next(iter(BACKENDS))


def backend_spec(name: str) -> BackendSpec:
    """Return a backend by name. Raises `ConfigError`."""
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}{suggest(name, BACKENDS)}")
    return BACKENDS[name]
