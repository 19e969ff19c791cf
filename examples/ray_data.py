"""Answer a file of prompts on all cores: `python examples/ray_data.py prompts.jsonl answers`.

Each line of the file is an object with a field `prompt`. Needs `pip install '.[ray]'` in a checkout.
"""

from __future__ import annotations

import sys

from paceline.ray import Generate, start_local_ray

PARAMS = {"max_tokens": 128, "temperature": 0.7, "seed": 1}  # the same seed gives the same answers


def main(source: str, folder: str, engines: int = 1) -> None:
    """Read prompts, answer them with some engines, and write JSON lines."""
    start_local_ray()
    import ray

    prompts = ray.data.read_json(source, lines=True)
    answers = prompts.map_batches(
        Generate,
        fn_constructor_args=("default", PARAMS),
        concurrency=engines,
        batch_size=32,
    )
    answers.write_json(folder)


if __name__ == "__main__":
    main(*sys.argv[1:3])
