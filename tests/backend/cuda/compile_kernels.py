"""Compile kernels for GPUs that need not be there, and read what their machine code is made of.

    python -m tests.backend.cuda.compile_kernels [--capability 90] [TEXT IN NAMES]

Exits with 1 if anything is wrong. Results are kept by the hash of what they depend on, as a variant takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

import paceline.backend.cuda
from paceline.backend.cuda.kernel_launch import ALIGNMENT, Variant, variant_table
from paceline.model.files.pull import cache_folder

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}  # of one program, by compute capability
# That are let pass, per thread: for sm_80 the assembler spills some long before it runs out of registers.
SPILLED_BYTES = {80: 16, 90: 0}
OPCODES = re.compile(r"\b(?:[HQ]GMMA\.\d+x\d+x\d+|HMMA|LDGSTS|FFMA|STL)\b")
DEVICE_CODE = Path(paceline.backend.cuda.__file__).parent / "device_code"


@dataclass(frozen=True)
class Compiled:
    """What a variant's machine code needs and has."""

    registers: int  # per thread
    shared_bytes: int
    spilled_bytes: int  # stores of spilled registers, per thread
    opcodes: dict[str, int]  # how many of each of `OPCODES`


def compiled(variant: Variant, capability: int) -> Compiled:
    """Compile a variant, or read the result of an earlier time."""
    kept = cache_folder() / "compiled-kernels" / f"{_hash(variant, capability)}.json"
    if kept.exists():
        return Compiled(**json.loads(kept.read_text(encoding="utf-8")))
    found = _compile(variant, capability)
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial_file = kept.with_suffix(f".{os.getpid()}")  # another process may read meanwhile
    partial_file.write_text(json.dumps(asdict(found)), encoding="utf-8")
    partial_file.replace(kept)
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
    code = triton.compile(_source(variant), target=GPUTarget("cuda", capability, 32), options=variant.options())
    tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(code.asm["cubin"])
        usage, listing = (_output([tool, flag, str(cubin)]) for flag in ("--dump-resource-usage", "--dump-sass"))
        opcodes = dict(Counter(OPCODES.findall(listing)))
        spilled = _spilled_bytes(code.asm["ptx"], capability, Path(folder)) if "STL" in opcodes else 0
    registers = re.findall(r"\bREG:(\d+)", usage)
    return Compiled(int(registers[0]), code.metadata.shared, spilled, opcodes)


def _spilled_bytes(ptx: str, capability: int, folder: Path) -> int:
    """Ask the assembler: not every store to local memory is of a spilled register."""
    source = folder / "kernel.ptx"
    source.write_text(ptx, encoding="utf-8")
    architecture = f"sm_{capability}{'a' * (capability >= 90)}"
    command = [get_ptxas(capability).path, "-v", "--fmad=false", f"--gpu-name={architecture}", str(source)]
    done = subprocess.run([*command, "-o", "/dev/null"], check=True, capture_output=True, text=True, timeout=60)
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr + done.stdout)))


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
    if code.spilled_bytes > SPILLED_BYTES[capability]:
        found.append(f"{code.spilled_bytes} bytes of spilled registers")
    if capability == 90:
        known = {*code.opcodes, *(opcode.partition(".")[0] for opcode in code.opcodes)}
        found += [f"no {opcode}" for opcode in variant.opcodes if opcode not in known]
        found += [opcode for opcode in variant.forbidden_opcodes if opcode in known]
    return found


def _line(capability: int, name: str) -> tuple[str, bool]:
    """Return a variant's line of the table, and True if nothing is wrong with it."""
    code = compiled(variant_table()[name], capability)
    counts = ", ".join(f"{n} {opcode}" for opcode, n in sorted(code.opcodes.items()))
    wrong = "; ".join(faults(variant_table()[name], capability))
    line = (
        f"{name:<58}{code.registers:>5}{code.shared_bytes >> 10:>5} KB{code.spilled_bytes:>5} B  {counts}  {wrong}"
    )
    return line.rstrip(), not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile listed kernels and print their machine code's figures.")
    parser.add_argument("text", nargs="?", default="", help="only names that contain this")
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED_BYTES))
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    names = [n for n, v in variant_table().items() if args.text in n and v.capability <= args.capability]
    head = f"triton {triton.__version__}, sm_{args.capability}: registers, shared memory, spills, instructions"
    good = True
    with ProcessPoolExecutor(args.jobs) as pool:
        for line, right in chain([(head, True)], pool.map(partial(_line, args.capability), names)):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            good &= right
    sys.exit(not good)


if __name__ == "__main__":
    main()
