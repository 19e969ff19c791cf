"""The registry of backends: types, devices and modules of each, and the choice of `auto`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from paceline.backend.device import CPU, Device, DeviceDefaults
from paceline.core.errors import ConfigError, UnsupportedModel, suggest
from paceline.core.system import available_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy import floating, int64
    from numpy.typing import NDArray

    from paceline.backend.device import Finding
    from paceline.backend.rows import Rows
    from paceline.backend.seam import CutModelDecoder, Decoder, LoadCutModel, LoadDecoder, LoadHeadRunner
    from paceline.backend.target import Backend
    from paceline.model.config import ModelConfig
    from paceline.model.files.packed_cache import Progress

MAX_INT_KV_HEAD = 256  # largest head that integer KV takes
AUTO = "auto"  # value of `--backend` and of `--weights`
FILE = "file"  # type of weights: each matrix in its file's own values and blocks
# Bytes of one stored number, scales included.
NUM_BYTES = {"f64": 8.0, "f32": 4.0, "f16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.625} | {
    "i16": 2.0,
    "i8": 1.0,
    FILE: 0.65,
}
MAX_DEVICES = 64  # most devices of one kind in a machine


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """Offer of one backend. The engine reads this and never asks which backend it is."""

    name: str
    about: str
    weight_types: tuple[str, ...]  # the first is the default
    kv_types: tuple[str, ...]  # the first is the default; none: KV has the type of the weights
    loader: str  # module:function, a `LoadDecoder`
    head_loader: str  # module:function, a `LoadHeadRunner`
    cut_model_loader: str  # module:function, a `LoadCutModel`
    rows_class: str = "paceline.backend.rows:Rows"  # module:class of its per-row state
    target_class: str = "paceline.backend.target:Backend"  # module:class that scores passes over these rows
    needs: str | None = None  # package that only this backend imports
    extra: str | None = None  # extra that installs that package; None: the extra has the backend's name
    kv_types_by_weights: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by type of weights
    small_kv: str | None = None  # type of KV that is chosen where memory is short
    wide_kv: str | None = None  # type of KV for heads too large for integers
    drops_windows: bool = False  # True: on a host, stores that no ranks share are `DropsWindows`
    devices: tuple[str, ...] = ()  # kinds that `--device` may name, the default first; none: the machine's cores
    device_defaults: Mapping[str, DeviceDefaults] = field(default_factory=dict)  # kind of device -> its limits
    numerics: tuple[str, ...] = ()  # values of `--numerics`, the default first; none: there is one way
    # module:function(Device | None) -> findings. It is quick and imports nothing heavy. `auto` prefers a backend
    # with a probe where that finds nothing wrong.
    probe: str | None = None
    free_memory: str | None = None  # module:function(Device | None) -> bytes for KV; None: the machine's memory
    memory_returner: str | None = None  # module:function(), see `return_memory`; None: it keeps no freed memory
    max_ranks: int = 1  # processes that may share the target's layers, each on a device or cores of its own
    max_draft_ranks: int = 1  # processes that may share a drafter's layers
    features: tuple[str, ...] | None = None  # those of `ModelConfig.needs` that its decoders have; None: all
    weights_chooser: str | None = None  # module:function(config, weights) -> type of `--weights auto`, and why
    narrower: str | None = None  # module:function(decoder, token_ids), see `narrow`; None: it has none
    # module:function(asked | None, target's type, others) -> type of a drafter's weights; None: of `weight_types`
    draft_type_chooser: str | None = None
    tuner: str | None = None  # module:function(decoder, progress), see `tune`; None: nothing to tune
    repacker: str | None = None  # module:function(decoder, weights, beside), see `repack`; None: it cannot
    cores_backend: str | None = None  # backend of drafters that stand alone on cores; None: this one

    # Parts ---------------------------------------------------------------------------------------

    def load(self, numerics: str | None = None, num_ranks: int = 1) -> LoadDecoder:
        """Import the maker of its decoders. numerics: None for the usual."""
        loader = self._imported(self.loader)
        loader = partial(loader, numerics=numerics) if numerics else loader
        return self._checked(_with_ranks(loader, num_ranks), lambda config: config)  # type: ignore[no-any-return]

    def load_head(self, num_ranks: int) -> LoadHeadRunner:
        """Import the maker of its runners of draft heads."""
        loader = _with_ranks(self._imported(self.head_loader), num_ranks)
        return self._checked(loader, lambda head: head.config.layers)  # type: ignore[no-any-return]

    def load_cut_model(self, num_ranks: int) -> LoadCutModel:
        """Import the maker of its decoders of draft models that share the target's tables."""
        loader = _with_ranks(self._imported(self.cut_model_loader), num_ranks)
        return self._checked(loader, lambda model: model.config)  # type: ignore[no-any-return]

    def narrow(self, decoder: Decoder, token_ids: NDArray[int64]) -> CutModelDecoder:
        """Return a decoder of the same weights that writes these tokens, and requests' own.

        token_ids: [n] ascending. Only for a backend with a `narrower`.
        """
        assert self.narrower is not None
        return self._imported(self.narrower)(decoder, token_ids)  # type: ignore[no-any-return]

    def tune(self, decoder: Decoder, progress: Progress | None = None) -> None:
        """Tune a target to this machine, if the backend can. progress: what, done, total."""
        if self.tuner:
            self._imported(self.tuner)(decoder, progress)

    def repack(
        self, decoder: Decoder, weights: Mapping[str, NDArray[floating]], *, beside: bool = False
    ) -> tuple[Decoder, Callable[[], None]]:
        """Return a decoder over other weights of its shape, and what puts them in place.

        The second result is called between passes. beside: passes run meanwhile, and keep half of the threads.
        Raises `ConfigError` where weights cannot be replaced.
        """
        if self.repacker is None:
            able = " or ".join(name for name, spec in BACKENDS.items() if spec.repacker)
            raise ConfigError(f"the {self.name} backend keeps its first weights: choose --backend {able}")
        return self._imported(self.repacker)(decoder, weights, beside)  # type: ignore[no-any-return]

    def rows(self) -> type[Rows]:
        """Import the class of its per-row state."""
        return self._imported(self.rows_class)  # type: ignore[no-any-return]

    def target(self) -> type[Backend]:
        """Import the class that executes the target."""
        return self._imported(self.target_class)  # type: ignore[no-any-return]

    # Options -------------------------------------------------------------------------------------

    def weight_type(self, asked: str | None) -> str:
        """Return the type of weights to use. Raises `ConfigError`."""
        return self._one_of("--weights", self.weight_choices, asked or self.weight_types[0])

    @property
    def weight_choices(self) -> tuple[str, ...]:
        """Values of `--weights`, the default first."""
        return (*self.weight_types, AUTO) if self.weights_chooser else self.weight_types

    def settled_weights(
        self, asked: str | None, config: ModelConfig, weights: Mapping[str, NDArray[floating]]
    ) -> tuple[str, str]:
        """Return the type of weights for a model, and why. Raises `ConfigError`."""
        found = self.weight_type(asked)
        if found != AUTO or self.weights_chooser is None:
            return found, "the default" if asked is None else "as asked"
        kind, why = self._imported(self.weights_chooser)(config, weights)
        return kind, f"auto: {why}"

    def draft_model_weights(
        self,
        asked: str | None,
        target_type: str,
        config: ModelConfig,
        weights: Mapping[str, NDArray[floating]],
    ) -> str:
        """Return a draft model's type of weights beside a target's. Raises `ConfigError`.

        With `file`, matrices stay as stored only if most of its own file is of kinds that kernels take.
        """
        if self.draft_type_chooser and asked not in self.weight_choices:
            return self._imported(self.draft_type_chooser)(asked, target_type, self.weight_choices)  # type: ignore[no-any-return]
        asked = asked or target_type
        asked = AUTO if asked == FILE and self.weights_chooser else asked
        return self.settled_weights(asked, config, weights)[0]

    def kv_type(self, asked: str | None, weight_type: str) -> str:
        """Return the type of KV to use. Raises `ConfigError`."""
        known = self.kv_types_by_weights.get(weight_type) or self.kv_types or (weight_type,)
        return self._one_of("--kv", known, known[0] if asked in (None, AUTO) else str(asked))

    @property
    def all_kv_types(self) -> tuple[str, ...]:
        """Types of KV, with any weights; none: KV always has the type of the weights."""
        own = (kind for kinds in self.kv_types_by_weights.values() for kind in kinds)
        return self.kv_types or tuple(dict.fromkeys(own))

    def numerics_of(self, asked: str | None) -> str | None:
        """Return the numerics to use; None where there is one way only. Raises `ConfigError`."""
        if asked is None:
            return self.numerics[0] if self.numerics else None
        if not self.numerics:
            raise ConfigError(f"the {self.name} backend computes in one way only: leave out --numerics {asked}")
        return self._one_of("--numerics", self.numerics, asked)

    def device(self, asked: str | None) -> Device | None:
        """Return the target's device; None for the machine's cores. Raises `ConfigError`."""
        if not self.devices:
            if asked is not None:
                raise ConfigError(
                    f"--device {asked}: the {self.name} backend runs on this machine's cores; leave the option "
                    f"out, or choose another --backend"
                )
            return None
        text = asked or self.devices[0]
        kind, numbered, number = text.partition(":")
        is_number = number.isascii() and number.isdecimal() and len(number) < 3
        right = not numbered or (kind != CPU and is_number and int(number) < MAX_DEVICES)
        if kind not in self.devices or not right:
            known = ", ".join(kind if kind == CPU else f"{kind}, {kind}:N" for kind in self.devices)
            raise ConfigError(f"--device {text}: the {self.name} backend runs on {known}")
        return Device(torch_name=text)

    def check_ranks(self, target: int, draft: int) -> None:
        """Raise `ConfigError` if so many ranks cannot share the target, or a drafter."""
        for flag, asked, limit, what in (
            ("--tensor-parallel", target, self.max_ranks, "targets"),
            ("--draft-tensor-parallel", draft, self.max_draft_ranks, "drafters"),
        ):
            if asked > limit:
                most = "one process" if limit == 1 else f"up to {limit} ranks"
                raise ConfigError(f"{flag} {asked}: {what} of the {self.name} backend run in {most}")

    def defaults_on(self, device: Device | None) -> DeviceDefaults | None:
        """Return the limits on a device; None: those of a host."""
        kind = "" if device is None or device.torch_name is None else device.torch_name.partition(":")[0]
        return self.device_defaults.get(kind)

    # The machine ---------------------------------------------------------------------------------

    def findings(self, device: Device | None) -> Sequence[Finding]:
        """Return what it needs on a device and what was found, nothing without a probe."""
        return self._imported(self.probe)(device) if self.probe else ()

    def problem(self, device: Device | None) -> str | None:
        """Return why it cannot run on a device; None if it can."""
        return next((found.text for found in self.findings(device) if not found.ok), None)

    def free_bytes(self, device: Device | None) -> int:
        """Return the memory that is free where KV lies."""
        return self._imported(self.free_memory)(device) if self.free_memory else available_bytes()

    def return_memory(self) -> None:
        """Return freed memory that is kept for later use to the system."""
        if self.memory_returner:
            self._imported(self.memory_returner)()

    def check_model(self, config: ModelConfig) -> None:
        """Raise `UnsupportedModel` if its decoders lack something that a model needs."""
        lacking = [need for need in config.needs if self.features is not None and need not in self.features]
        if lacking:
            able = " or ".join(name for name, spec in BACKENDS.items() if spec.features is None)
            raise UnsupportedModel(
                f"the {self.name} backend does not run this {config.family} model, which needs"
                f" {', '.join(lacking)}: choose --backend {able}"
            )

    def _checked(self, loader: Any, config_of: Callable[[Any], ModelConfig]) -> Any:
        """Return a loader that first checks the config of its first argument."""

        def load(model: Any, *arguments: Any, **named: Any) -> Any:
            self.check_model(config_of(model))
            return loader(model, *arguments, **named)

        return load

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
                f"the {self.name} backend needs {self.needs}: pip install 'paceline[{self.extra or self.needs}]'"
            ) from None


def _with_ranks(loader: Any, num_ranks: int) -> Any:
    return loader if num_ranks == 1 else partial(loader, num_ranks=num_ranks)


BACKENDS = {
    spec.name: spec
    for spec in (
        BackendSpec(
            "native",
            "C++ kernels for CPUs; a token's numbers are the same in every batch",
            ("int8", "int4", "bf16", "f32", FILE),
            ("i16", "i8", "f16", "f32"),
            "paceline.backend.native.ranked:load_decoder",
            "paceline.backend.native.load:load_runner",
            "paceline.backend.native.cut_model:load_cut_model",
            weights_chooser="paceline.backend.native.packing:choose_weights",
            small_kv="i8",
            narrower="paceline.backend.native.cut_model:narrowed",
            draft_type_chooser="paceline.backend.native.load:draft_weight_type",
            repacker="paceline.backend.native.load:repack",
            tuner="paceline.backend.native.prefetching:tune",
            wide_kv="f16",
            drops_windows=True,
            max_ranks=8,
        ),
        BackendSpec(
            "reference",
            "readable PyTorch, the definition that the others are compared with",
            ("f32", "f64", "bf16", "f16"),
            (),
            "paceline.backend.reference.decoder:load_decoder",
            "paceline.backend.reference.block_head:load_runner",
            "paceline.backend.reference.cut_model:load_cut_model",
            needs="torch",
            drops_windows=True,
            narrower="paceline.backend.reference.cut_model:narrowed",
            repacker="paceline.backend.reference.decoder:repack",
        ),
        BackendSpec(
            "cuda",
            "Triton kernels for NVIDIA GPUs; in exact numerics a token's numbers are the same in every batch",
            ("bf16", "f16", "f32", "f64", "fp8", "int4"),
            (),
            "paceline.backend.cuda.load:load_decoder",
            "paceline.backend.cuda.load:load_runner",
            "paceline.backend.cuda.load:load_cut_model",
            rows_class="paceline.backend.cuda.device_rows:DeviceRows",
            target_class="paceline.backend.cuda.late_target:LateTarget",
            needs="torch",
            extra="cuda",
            kv_types_by_weights={
                "bf16": ("bf16", "fp8"),
                "f16": ("f16", "fp8"),
                "fp8": ("bf16", "fp8"),
                "int4": ("bf16", "fp8"),
            },
            devices=("cuda", "cpu"),
            device_defaults={"cuda": DeviceDefaults(256, 4096, 0.9, 0.5)},
            numerics=("exact", "fast"),
            probe="paceline.backend.cuda.probe:findings",
            free_memory="paceline.backend.cuda.device_memory:free_bytes",
            memory_returner="paceline.backend.cuda.device_memory:return_memory",
            max_ranks=8,
            max_draft_ranks=8,
            features=(),
            cores_backend="native",
        ),
    )
}
DEFAULT_BACKEND = next(iter(BACKENDS))  # where no backend with a probe can run


def backend_spec(name: str) -> BackendSpec:
    """Return a backend by name. Raises `ConfigError`."""
    return choose_backend(name)[0]


def choose_backend(name: str) -> tuple[BackendSpec, str]:
    """Return the backend of a `--backend`, and why. Raises `ConfigError`."""
    if name == AUTO:
        return _choose()
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}{suggest(name, [AUTO, *BACKENDS])}")
    return BACKENDS[name], "as asked"


@lru_cache(maxsize=1)
def _choose() -> tuple[BackendSpec, str]:
    """Return the first backend whose probe finds nothing wrong, else the default."""
    found = {spec.name: spec.problem(None) for spec in BACKENDS.values() if spec.probe}
    fit = next((BACKENDS[name] for name, problem in found.items() if problem is None), None)
    if fit is not None:
        return fit, f"auto: {fit.name} has what it needs here"
    wrong = "; ".join(f"no {name}, as {problem}" for name, problem in found.items())
    return BACKENDS[DEFAULT_BACKEND], f"auto: {wrong}"
