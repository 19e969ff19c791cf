"""A real Ray on this machine's loopback: an application, a killed replica, a data set. Prints what it found.

In a process of its own, since Ray changes the process that it is used in.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli import parse, parser_of
from paceline.engine.assembly.cli_options import engine_config
from paceline.ray.local_ray import start_local_ray
from paceline.serve.server import HttpConfig, HttpServer, http_config, listen

if TYPE_CHECKING:
    from paceline.serve.worker.messages import Ready

STREAMS = 4
ANSWER_TOKENS = 3000
ROWS = 32
KEY = "the-key"
APPLICATION = "tried"
OPTIONS = {"draft": "ngram:k=4", "max_len": 4096, "packed_cache_bytes": 0}
FLAGS = (
    f"--on ray --replicas 2 --threads 1 --port 0 --api-key {KEY} --route round-robin "
    "--draft ngram:k=4 --max-len 4096 --packed-cache-bytes 0"
)


def main(model: str, folder: str) -> dict[str, Any]:
    """Try it all. folder: of Ray, with a short name."""
    begun_s = time.monotonic()
    os.environ["HOME"] = folder  # Ray writes there
    start_local_ray(8, folder, log_to_driver=False, object_store_memory=80 << 20)
    import ray
    from paceline.ray import serve_command
    from ray import serve

    args = parse(parser_of("serve"), [*FLAGS.split(), "--model", model], {})
    http = http_config(args)
    serve_command.deploy(http.fleet.replicas, engine_config(args), args.threads, APPLICATION, joined=False)
    found: dict[str, Any] = {"start_s": time.monotonic() - begun_s}
    found |= asyncio.run(_served(http))
    serve.delete(APPLICATION)
    found |= batches_of_data(model, found["row"])
    serve.shutdown()
    found["row_by_proxy"] = _by_proxy(model)
    found["pss_mb"] = max(found["pss_mb"], _pss_mb())
    ray.shutdown()
    found["whole_s"] = time.monotonic() - begun_s
    return found


async def _served(http: HttpConfig) -> dict[str, Any]:
    """Return what clients find while the engines on Ray are served, as by `paceline serve --on ray`."""
    from paceline.ray.ray_fleet import ray_fleet

    trying: asyncio.Future[asyncio.Future[dict[str, Any]]] = asyncio.get_running_loop().create_future()

    def on_ready(url: str, _: Ready) -> None:
        trying.set_result(asyncio.ensure_future(asyncio.to_thread(_try, f"{url}/v1")))
        trying.result().add_done_callback(lambda _: os.kill(os.getpid(), signal.SIGTERM))

    await HttpServer(http, lambda _: ray_fleet(http.fleet, APPLICATION)).run(on_ready)
    return await trying.result()


def _try(url: str) -> dict[str, Any]:
    return answers_through_a_death(url) | {"pss_mb": _pss_mb(), "listens": _listens(), "row": answer_of_row(url)}


def _by_proxy(model: str) -> str:
    """Return the answer to a row from the application of `serve run`, behind Ray's proxy."""
    from paceline.ray import app
    from ray import serve

    with listen("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(OPTIONS | {"model": model, "api_key": KEY}))
    return answer_of_row(f"http://127.0.0.1:{port}/v1")


def _processes() -> list[Any]:
    import psutil

    return psutil.Process().children(recursive=True)


def _title(process: Any) -> str:
    import psutil

    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


# A death ---------------------------------------------------------------------------------------------


def answers_through_a_death(url: str) -> dict[str, Any]:
    """Stream answers while one replica's worker is killed; compare with those that nothing disturbed."""
    import openai

    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        whole = [ask(client, index)[0] for index in range(STREAMS)]
        cut: dict[int, tuple[str, float]] = {}
        under_way = threading.Barrier(STREAMS + 1)

        def stream(index: int) -> None:
            cut[index] = ask(client, index, under_way)

        threads = [threading.Thread(target=stream, args=(index,)) for index in range(STREAMS)]
        for thread in threads:
            thread.start()
        under_way.wait(30)
        hosts = [p for p in _processes() if "EngineHost" in _title(p)]
        hosts[0].kill()
        killed_s = time.monotonic()
        for thread in threads:
            thread.join(40)
        back_s = _back(hosts[0].pid) - killed_s
        after = ask(client, 0)[0]
    return {
        "hosts": len(hosts),
        "same": [cut[index][0] == whole[index] for index in range(STREAMS)],
        "lengths": [len(text) for text in whole],
        "largest_gap_s": max(gap_s for _, gap_s in cut.values()),
        "back_s": back_s,
        "same_after": after == whole[0],
    }


def ask(client: Any, index: int, under_way: threading.Barrier | None = None) -> tuple[str, float]:
    """Return an answer and the longest time between two of its pieces."""
    stream = client.completions.create(
        model="default",
        prompt=f"the {index}",
        max_tokens=ANSWER_TOKENS,
        temperature=0.9,
        seed=index,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    pieces, last_s, gap_s = [], time.monotonic(), 0.0
    for piece in stream:
        now_s = time.monotonic()
        gap_s, last_s = max(gap_s, now_s - last_s) if pieces else 0.0, now_s
        pieces.append(piece.choices[0].text)
        if len(pieces) == 3 and under_way is not None:
            under_way.wait(30)
            last_s = time.monotonic()
    return "".join(pieces), gap_s


def _back(killed: int) -> float:
    """Wait until there are two engines again."""
    for _ in range(200):
        engines = [p for p in _processes() if "paceline.serve.worker.process" in _title(p)]
        hosts = [p for p in _processes() if "EngineHost" in _title(p) and p.pid != killed]
        if len(hosts) == len(engines) == 2:
            break
        time.sleep(0.1)
    return time.monotonic()


# Data ------------------------------------------------------------------------------------------------


PARAMS = {"max_tokens": 24, "temperature": 0.9, "seed": 5}


def answer_of_row(url: str) -> str:
    """Return the answer to a row of the data set, over HTTP."""
    import openai

    extra = {"ignore_eos": True, "top_k": 0}
    with openai.OpenAI(base_url=url, api_key=KEY) as client:
        asked = client.completions.create(model="default", prompt="row 3", top_p=1, extra_body=extra, **PARAMS)
    return str(asked.choices[0].text)


def batches_of_data(model: str, row: str) -> dict[str, Any]:
    """Answer a data set. row: the answer to `row 3`."""
    import ray
    from paceline.ray import Generate

    begun_s = time.monotonic()
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    rows = [{"prompt": f"row {index % 8}", "id": index} for index in range(ROWS)]
    data = ray.data.from_items(rows, override_num_blocks=4).map_batches(
        Generate,
        fn_constructor_args=(model, {**PARAMS, "ignore_eos": True}),
        fn_constructor_kwargs=OPTIONS,
        concurrency=1,
        batch_size=8,
    )
    found = data.take_all()
    return {
        "rows": len({one["id"] for one in found}),
        "data_same": all(one["text"] == row for one in found if one["prompt"] == "row 3"),
        "data_s": time.monotonic() - begun_s,
    }


# The machine -----------------------------------------------------------------------------------------


def _pss_mb() -> float:
    """Memory of Ray and of what runs on it, without this process, which is the client."""
    import psutil

    total = 0
    for process in _processes():
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total / 1e6


def _listens() -> list[str]:
    """Addresses on which processes listen, beside loopback, and which."""
    import psutil

    found = set()
    for process in [psutil.Process(), *_processes()]:
        try:
            ends = {c.laddr.ip for c in process.net_connections("tcp") if c.status == "LISTEN"}
            found |= {f"{end} {_title(process)[:60]}" for end in ends if not end.endswith(("127.0.0.1", "::1"))}
        except psutil.Error:
            continue
    return sorted(found)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(sys.argv[1], sys.argv[3])))
