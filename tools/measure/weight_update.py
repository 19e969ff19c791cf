"""Newer weights in a server that answers: seconds, and streams' longest gap.

    python -m tools.measure.weight_update [--model default] [--open 4] [--updates 6]

`--open` streams run all the time. The server takes a copy of the model with a little noise and the model itself in
turn from disk, and a greedy answer tells them apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from safetensors import safe_open
from safetensors.numpy import save_file

from paceline.model.files.pull import resolve
from paceline.serve.terminal.display import plain_table
from tools.served import served

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY = "a-key-for-this-measurement"
TIMEOUT_S = 600.0
NOISE = 1e-2  # of each number
MATRIX = 2  # axes of a matrix
ASKED = {"text": "The capital of France is", "sampling_params": {"temperature": 0, "max_new_tokens": 24}}


Figures = tuple[list[float], list[float], int]


def noisy(folder: Path, source: Path) -> Path:
    """Write a copy of a model with a little noise."""
    copy = folder / source.name
    if source.is_file():
        shutil.copyfile(source, copy)
        _add_noise_to_gguf(copy)
        return copy
    shutil.copytree(source, copy)
    for file in copy.glob("*.safetensors"):
        with safe_open(file, "np") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (it is no mapping)
        save_file({name: with_noise(t) if t.ndim == MATRIX else t for name, t in tensors.items()}, file)
    return copy


def _add_noise_to_gguf(path: Path) -> None:
    """Change the vectors of a file in place; its matrices are in blocks."""
    for tensor in GGUFReader(path, "r+").tensors:
        if tensor.tensor_type == GGMLQuantizationType.F32:
            tensor.data[...] = with_noise(tensor.data)


def with_noise(numbers: NDArray[Any]) -> NDArray[Any]:
    """Return numbers with noise in proportion to them."""
    rng = np.random.default_rng(0)
    changed: NDArray[Any] = numbers * (1 + NOISE * rng.standard_normal(numbers.shape))
    return changed.astype(numbers.dtype)


async def stream(client: httpx.AsyncClient, number: int, gaps: list[float]) -> None:
    """Read a roll-out that is written all the time; note the times between its pieces."""
    sampling = {"temperature": 1.0, "max_new_tokens": 2000, "ignore_eos": True, "sampling_seed": number}
    body = {"text": f"Number {number}:", "sampling_params": sampling, "stream": True}
    while True:
        last_s = perf_counter()
        async with client.stream("POST", "/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    now_s = perf_counter()
                    gaps.append(now_s - last_s)
                    last_s = now_s


async def measure(url: str, places: list[str], num_open: int, updates: int) -> Figures:
    """Return seconds of updates, the longest gap during each, and how many texts there are."""
    headers = {"authorization": f"Bearer {KEY}"}
    limits = httpx.Limits(max_connections=None)
    taken, longest, texts = [], [], set()
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits) as client:
        gaps: list[float] = []
        streams = [asyncio.create_task(stream(client, number, gaps)) for number in range(num_open)]
        await asyncio.sleep(2.0)
        for number in range(updates):
            gaps.clear()
            begun_s = perf_counter()
            body = {"model_path": places[number % len(places)], "weight_version": f"v{number}"}
            response = await client.post("/update_weights_from_disk", json=body)
            response.raise_for_status()
            taken.append(perf_counter() - begun_s)
            sys.stderr.write(f"{taken[-1]:.2f} s\n")
            await asyncio.sleep(1.0)
            longest.append(max(gaps, default=0.0))
            texts.add((await client.post("/generate", json=ASKED)).json()["text"])
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return taken, longest, len(texts)


def main(argv: list[str] | None = None) -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="default")
    parser.add_argument("--draft", default="eagle3:k=4")
    parser.add_argument("--open", type=int, default=4, help="streams that run all the time")
    parser.add_argument("--updates", type=int, default=6)
    args = parser.parse_args(argv)
    os.environ["PACELINE_API_KEY"] = KEY
    source = Path(args.model) if Path(args.model).exists() else resolve(args.model)
    with tempfile.TemporaryDirectory() as folder:
        places = [str(noisy(Path(folder), source)), str(source)]
        with served(["--model", args.model, "--draft", args.draft, "--rl", "--no-access-log"]) as url:
            taken, longest, texts = asyncio.run(measure(url, places, args.open, args.updates))
    rows = [
        ("taken, s", *(f"{f(taken):.2f}" for f in (min, median, max))),
        ("longest gap, s", *(f"{f(longest):.2f}" for f in (min, median, max))),
    ]
    sys.stdout.write(plain_table("", ("", "least", "median", "most"), rows))
    sys.stdout.write(f"{texts} different greedy texts by {len(places)} sets of weights\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
