"""Bodies of a kind that no one has decoded before, in several threads at once."""

from __future__ import annotations

import subprocess
import sys

# Garbage is collected all the time, and threads take turns within a microsecond.
_TOGETHER = """
import gc, sys, threading
from typing import Annotated
from msgspec import Meta
from paceline.serve.api.fields import Body

gc.set_threshold(5)
sys.setswitchinterval(1e-6)
types = {f"f{i}": "dict[str, Annotated[int, Meta(ge=0)]] | None" for i in range(20)}
members = {"__annotations__": types, "__module__": __name__, **dict.fromkeys(types)}
for _ in range(600):
    fresh = type(Body)("Fresh", (Body,), dict(members))
    together = threading.Barrier(4)

    def decode():
        together.wait()
        fresh.decode(b'{"f1": {"a": 1}}')

    threads = [threading.Thread(target=decode) for _ in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
"""


def test_first_bodies_may_come_together() -> None:
    subprocess.run([sys.executable, "-c", _TOGETHER], check=True, timeout=300)
