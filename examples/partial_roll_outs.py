"""Cut roll-outs short, go on later, and change the weights: no token differs.

`python examples/partial_roll_outs.py` runs a step of a trainer with the default model. The trainer is a
stand-in: its newer weights are the same numbers under another version.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from paceline import AsyncLLM, SamplingParams
from paceline.model.files.pull import resolve

PROMPTS = ("The sea is", "A proof of", "def main():", "Once upon a time", "The king said", "In 1969")
PARAMS = SamplingParams(temperature=1.0, max_tokens=96, ignore_eos=True, logprobs=0)


async def roll_out(llm: AsyncLLM, seed: int, prompt: str) -> list[tuple[int, float]]:
    """Return tokens and log-probabilities of an answer, whole or as far as it came."""
    answer = (await llm.generate(prompt, replace(PARAMS, seed=seed))).choices[0]
    scores = answer.logprobs or ()
    return [(token_id, entry.logprob) for token_id, entry in zip(answer.token_ids, scores, strict=True)]


async def all_of(llm: AsyncLLM) -> list[list[tuple[int, float]]]:
    """Return the roll-outs of all prompts."""
    return list(await asyncio.gather(*(roll_out(llm, seed, prompt) for seed, prompt in enumerate(PROMPTS))))


async def main(model: str = "default", draft: str = "auto") -> dict[str, int]:
    """Run one step and return how many tokens differ where none may."""
    async with AsyncLLM(model, draft=draft, kv_tokens=4096) as llm:
        whole = await all_of(llm)
        begun = asyncio.create_task(all_of(llm))
        await asyncio.sleep(0.5)
        await llm.pause_generation("abort")  # the step is over; what is unfinished waits for the next one
        parts = await begun
        started_s = time.monotonic()
        await llm.update_weights(str(resolve(model) if not Path(model).exists() else model), "step-1")
        print(f"newer weights after {time.monotonic() - started_s:.2f} s: {llm.weight_version}")
        await llm.continue_generation()
        again = await all_of(llm)
    cut = sum(map(_differ, parts, [answer[: len(part)] for answer, part in zip(whole, parts, strict=True)]))
    print(f"cut after {[len(part) for part in parts]} tokens; {cut} of them differ from the whole roll-outs")
    same = sum(map(_differ, again, whole))
    print(f"{sum(map(len, again))} tokens by the same numbers under a new version; {same} differ")
    return {"cut": cut, "again": same}


def _differ(some: list[tuple[int, float]], others: list[tuple[int, float]]) -> int:
    return sum(a != b for a, b in zip(some, others, strict=True))


if __name__ == "__main__":
    asyncio.run(main())
