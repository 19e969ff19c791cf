"""Compile kernels for GPUs that need not be there, and read what their machine code is made of.

    python -m tests.backend.cuda.compile_kernels [--capability 90] [TEXT IN NAMES]

Results are kept by the hash of all that they depend on, as a variant takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import paceline.backend.cuda
from paceline.backend.cuda.kernel_launch import ALIGNMENT, Variant, variant_table
from paceline.model.files.pull import cache_folder

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # of one program, by compute capability
OPCODES = ("HGMMA", "QGMMA", "HMMA", "LDGSTS", "FFMA", "STL", "LDL")
DEVICE_CODE = Path(paceline.backend.cuda.__file__).parent / "device_code"


@dataclass(frozen=True)
class Compiled:
    """What a variant's machine code needs and has."""

    registers: int  # per thread
    shared_bytes: int
    stack_bytes: int  # per thread
    opcodes: dict[str, int]  # of `OPCODES`, and how many


def compiled(variant: Variant, capability: int) -> Compiled:
    """Compile a variant, or read the result of an earlier time."""
    kept = cache_folder() / "compiled-kernels" / f"{_hash(variant, capability)}.json"
    if kept.exists():
        return Compiled(**json.loads(kept.read_text(encoding="utf-8")))
    found = _compile(variant, capability)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return found


def _hash(variant: Variant, capability: int) -> str:
    parts = [_sources(), triton.__version__, capability, variant.kernel, dict(variant.arguments)]
    parts += [dict(variant.constants), sorted(variant.aligned), sorted(variant.unaligned), variant.options()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@lru_cache
def _sources() -> str:
    files = [*sorted(DEVICE_CODE.glob("*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


def _compile(variant: Variant, capability: int) -> Compiled:
    target = GPUTarget("cuda", capability, 32)
    code = triton.compile(_source(variant), target=target, options=variant.options())
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(code.asm["cubin"])
        usage, listing = (_output([str(tool), flag, str(cubin)]) for flag in ("--dump-resource-usage", "--dump-sass"))
    resources = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    opcodes = {opcode: len(re.findall(rf"\b{opcode}\b", listing)) for opcode in OPCODES}
    return Compiled(resources["REG"], code.metadata.shared, resources["STACK"], opcodes)


def _source(variant: Variant) -> ASTSource:
    """Return what the compiler reads: types, constants and alignment as a launch would find them."""
    kernel = variant.load()
    names = list(variant.arguments)
    assert kernel.arg_names == [*names, *variant.constants], f"{variant.name}: arguments of {variant.kernel}"
    signature = {n: "constexpr" if kind == "none" else kind for n, kind in variant.arguments.items()}
    signature |= dict.fromkeys(variant.constants, "constexpr")
    constants = {n: None for n, kind in variant.arguments.items() if kind == "none"} | dict(variant.constants)
    aligned = {n for n, kind in variant.arguments.items() if kind[0] == "*"} - variant.unaligned | variant.aligned
    attributes = {(names.index(n),): [["tt.divisibility", ALIGNMENT]] for n in aligned}
    return ASTSource(kernel, signature, constants, attributes)


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def faults(variant: Variant, capability: int) -> list[str]:
    """Compile a variant and return what is wrong with it."""
    code = compiled(variant, capability)
    found = []
    if code.registers > variant.max_registers:
        found.append(f"{code.registers} registers")
    if code.shared_bytes > SHARED_BYTES[capability]:
        found.append(f"{code.shared_bytes} bytes of shared memory")
    if code.opcodes["STL"]:
        found.append(f"{code.opcodes['STL']} stores of spilled registers")
    if capability == 90:
        found += [f"no {opcode}" for opcode in variant.opcodes if not code.opcodes[opcode]]
        found += [f"{opcode}" for opcode in variant.forbidden_opcodes if code.opcodes[opcode]]
    return found


def _line(capability: int, name: str) -> str:
    code = compiled(variant_table()[name], capability)
    counts = ", ".join(f"{n} {opcode}" for opcode, n in code.opcodes.items() if n)
    wrong = "; ".join(faults(variant_table()[name], capability))
    return f"{name:<58}{code.registers:>5}{code.shared_bytes >> 10:>5} KB{code.stack_bytes:>5} B  {counts}  {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile listed kernels and print their machine code's figures.")
    parser.add_argument("text", nargs="?", default="", help="only names that contain this")
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED_BYTES))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    names = [n for n, v in variant_table().items() if args.text in n and v.capability <= args.capability]
    head = f"triton {triton.__version__}, sm_{args.capability}: registers, shared memory, stack, instructions"
    with ProcessPoolExecutor(args.jobs) as pool:
        for line in chain([head], pool.map(partial(_line, args.capability), names)):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
