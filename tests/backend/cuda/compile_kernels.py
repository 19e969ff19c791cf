"""Compile kernels for GPUs that need not be there, and read what their machine code is made of.

    python -m tests.backend.cuda.compile_kernels [--capability 90] [--anew] [TEXT IN NAMES]
    python -m tests.backend.cuda.compile_kernels --record

Exits with 1 if anything is wrong. Results are kept by the hash of what they depend on, as a variant takes seconds:
those of the everyday variants in `RECORDED`, beside the sources, so that CI compiles only what has changed.
`--record` writes that file; `--anew` compiles again and compares.
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
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

import paceline.backend.cuda
from paceline.backend.cuda.kernel_launch import ALIGNMENT, Variant, variant_table
from paceline.backend.cuda.products import SMALL_BYTES
from paceline.model.files.pull import cache_folder

SHARED_BYTES = {80: 163 << 10, 86: SMALL_BYTES, 90: 227 << 10}  # of one program, by compute capability
# That are let pass, per thread: before Hopper the assembler spills some long before it runs out of registers.
SPILLED_BYTES = {80: 16, 86: 16, 90: 0}
OPCODES = re.compile(r"\b(?:[HQ]GMMA\.\d+x\d+x\d+|HMMA|LDGSTS|UTMALDG|FFMA|STL|DEPBAR(?=\.LE gsb0, 0x[1-9]))\b")
DEVICE_CODE = Path(paceline.backend.cuda.__file__).parent / "device_code"
RECORDED = Path(__file__).parents[2] / "data" / "compiled-kernels.json"
FORM = 1  # of results; a higher one if `compile_anew` reads them in another way
OLDER_STEP = 5  # each fifth variant is compiled for sm_80 every day


@dataclass(frozen=True)
class Compiled:
    """What a variant's machine code needs and has."""

    registers: int  # per thread
    shared_bytes: int
    spilled_bytes: int  # stores of spilled registers, per thread
    opcodes: dict[str, int]  # how many of each of `OPCODES`


def everyday() -> list[tuple[int, str]]:
    """Return the variants that CI looks at: (capability, name)."""
    table = variant_table()
    older = [name for name, variant in table.items() if variant.capability <= 80]
    return [(90, name) for name in table] + [(80, name) for name in older[::OLDER_STEP]]


def compiled(variant: Variant, capability: int) -> Compiled:
    """Compile a variant, or read the result of an earlier time."""
    key = _hash(variant, capability)
    if key in _recorded():
        return Compiled(**_recorded()[key])
    kept = cache_folder() / "compiled-kernels" / f"{key}.json"
    if kept.exists():
        return Compiled(**json.loads(kept.read_text(encoding="utf-8")))
    found = compile_anew(variant, capability)
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial_file = kept.with_suffix(f".{os.getpid()}")  # another process may read meanwhile
    partial_file.write_text(json.dumps(asdict(found)), encoding="utf-8")
    partial_file.replace(kept)
    return found


@lru_cache
def _recorded() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def differs(variant: Variant, capability: int) -> bool:
    """Compile a variant again; return whether that gives another result than the record."""
    recorded = _recorded().get(_hash(variant, capability))
    return recorded is not None and recorded != asdict(compile_anew(variant, capability))


def record() -> None:
    """Write the results of all everyday variants, a line each."""
    table, lines = variant_table(), dict[str, str]()
    for capability, name in everyday():
        lines[_hash(table[name], capability)] = json.dumps(asdict(compiled(table[name], capability)))
    text = ",\n".join(f'"{key}": {line}' for key, line in sorted(lines.items()))
    RECORDED.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def _hash(variant: Variant, capability: int) -> str:
    parts = [_sources(variant.kernel.partition(":")[0]), FORM, OPCODES.pattern, triton.__version__, capability]
    parts += [variant.kernel, dict(variant.arguments), dict(variant.constants)]
    parts += [sorted(variant.aligned), sorted(variant.unaligned), variant.options()]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@lru_cache
def _sources(module: str) -> str:
    """Return the hash of a module of device code and of those that it imports."""
    text = (DEVICE_CODE / f"{module}.py").read_text(encoding="utf-8")
    others = [_sources(name) for name in re.findall(r"device_code\.(\w+) import", text)]
    return hashlib.sha256("".join([text, *others]).encode()).hexdigest()


def compile_anew(variant: Variant, capability: int) -> Compiled:
    """Compile a variant, whatever is known of it."""
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
    if code.shared_bytes > SHARED_BYTES[capability]:
        found.append(f"{code.shared_bytes} bytes of shared memory")
    if code.spilled_bytes > SPILLED_BYTES[capability]:
        found.append(f"{code.spilled_bytes} bytes of spilled registers")
    if capability == 90:
        known = {*code.opcodes, *(opcode.partition(".")[0] for opcode in code.opcodes)}
        found += [f"no {opcode}" for opcode in variant.opcodes if opcode not in known]
        found += [opcode for opcode in variant.forbidden_opcodes if opcode in known]
    return found


def _line(capability: int, anew: bool, name: str) -> tuple[str, bool]:
    """Return a variant's line of the table, and True if nothing is wrong with it."""
    variant = variant_table()[name]
    code = compiled(variant, capability)
    counts = ", ".join(f"{n} {opcode}" for opcode, n in sorted(code.opcodes.items()))
    found = faults(variant, capability)
    if anew and differs(variant, capability):
        found.append("not what is recorded")
    wrong = "; ".join(found)
    line = (
        f"{name:<58}{code.registers:>5}{code.shared_bytes >> 10:>5} KB{code.spilled_bytes:>5} B  {counts}  {wrong}"
    )
    return line.rstrip(), not wrong


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile listed kernels and print their machine code's figures.")
    parser.add_argument("text", nargs="?", default="", help="only names that contain this")
    parser.add_argument("--capability", type=int, default=90, choices=(80, 90))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--anew", action="store_true", help="compile again what is recorded, and compare")
    parser.add_argument("--record", action="store_true", help="write the record of the everyday variants")
    args = parser.parse_args()
    if args.record:
        record()
        return
    names = [n for n, v in variant_table().items() if args.text in n and v.capability <= args.capability]
    head = f"triton {triton.__version__}, sm_{args.capability}: registers, shared memory, spills, instructions"
    good = True
    with ProcessPoolExecutor(args.jobs) as pool:
        for line, right in chain([(head, True)], pool.map(partial(_line, args.capability, args.anew), names)):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            good &= right
    sys.exit(not good)


if __name__ == "__main__":
    main()
