"""Convert a GGUF file with llama.cpp's quantiser: `python -m tools.peers.requantize FROM.gguf TO.gguf TYPE`."""

from __future__ import annotations

import ctypes
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Write a GGUF file in another type; quantised weights are read as float32 first."""
    source, target, name = argv
    lib = import_module("llama_cpp.llama_cpp")
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.allow_requantize = True
    unfinished = Path(f"{target}.part")
    code = int(lib.llama_model_quantize(source.encode(), str(unfinished).encode(), ctypes.byref(params)))
    if code == 0:
        unfinished.replace(target)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
