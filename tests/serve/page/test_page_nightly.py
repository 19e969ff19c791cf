"""The page over a long time, over a slow network, and on the default model; PAGE_LOAD_MINUTES sets how long."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Event
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from paceline.serve.observe.recent import RATE_S
from tests.serve.conftest import running
from tests.serve.page.test_chromium import REPEATS, figure, last_answer, prepare, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Server

pytestmark = pytest.mark.nightly
MINUTES = float(os.environ.get("PAGE_LOAD_MINUTES", "10"))
WARM_UP_SHARE = 0.3
MAX_HEAP_GROWTH, MAX_RSS_GROWTH = 4 << 20, 24 << 20  # bytes over all rounds after the warm-up
MAX_NODE_GROWTH = 400
ROUND_ANSWERS = 3


def memory(page: Any, session: Any, server: Server) -> tuple[int, int, int]:
    """JavaScript heap after a collection, DOM nodes, and resident bytes of the server's processes."""
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
    metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    process = psutil.Process(server.process.pid)
    resident = sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
    return int(metrics["JSHeapUsedSize"]), int(metrics["Nodes"]), resident


def load_round(page: Any) -> None:
    """A conversation of several answers with the lens, a race, a look at the engine, and a clean table.

    A handle of an element, as `wait_for_selector` returns it, would keep the whole tree that it is part of.
    """
    page.click("#tab-chat")
    page.get_by_role("button", name="New conversation").click()
    for turn in range(ROUND_ANSWERS):
        say(page, f"{REPEATS} {turn}")
        page.locator(".answer[aria-busy=false] .figures").nth(turn).wait_for()
    page.click("#tab-race")
    page.get_by_label("Tokens", exact=True).fill("48")
    page.get_by_role("button", name="Start").click()
    page.locator(".result[data-same=yes]").wait_for()
    page.click("#tab-engine")
    page.locator(".tiles").wait_for()
    page.wait_for_timeout(1000)
    page.click("#tab-chat")
    page.hover(".list li.here")
    page.locator(".list li.here").get_by_role("button", name="Delete").click()


def test_minutes_of_load_leave_nothing_behind(open_page: Any, server: Server):
    page = open_page(server.url)
    page.on("dialog", lambda dialog: dialog.accept())
    prepare(page, max_tokens="256")
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    begin_s, found = time.monotonic(), []
    while (elapsed_s := time.monotonic() - begin_s) < 60 * MINUTES or len(found) < 8:
        load_round(page)
        found.append((elapsed_s, *memory(page, session, server)))
    for elapsed_s, heap, nodes, resident in found:
        print(f"{elapsed_s:6.0f} s  heap {heap / 1e6:6.2f} MB  nodes {nodes:6d}  rss {resident / 1e6:7.1f} MB")  # noqa: T201
    first = found[int(WARM_UP_SHARE * len(found))]
    assert found[-1][1] - first[1] < MAX_HEAP_GROWTH
    assert found[-1][2] - first[2] < MAX_NODE_GROWTH
    assert found[-1][3] - first[3] < MAX_RSS_GROWTH


@contextmanager
def asking(server: Server) -> Iterator[None]:
    """Ask one question after another meanwhile."""
    enough = Event()

    def ask() -> None:
        body = {"messages": [{"role": "user", "content": REPEATS}], "max_tokens": 2000, "temperature": 0}
        with server.client() as client:
            while not enough.is_set():
                client.post("/v1/chat/completions", json=body).raise_for_status()

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
        finally:
            enough.set()
            asked.result()


def test_rates_are_those_of_the_metrics(model: Path, open_page: Any):
    counters = "paceline_output_tokens_total", "paceline_step_seconds_total"
    with running(model) as server:  # of its own: nobody else's tokens are in the windows
        page = open_page(server.url)
        page.click("#tab-engine")
        seen = []
        with asking(server):
            page.locator("[data-figure=tokens_per_s]").wait_for()
            for _ in range(60):
                page.wait_for_timeout(200)
                seen.append((time.monotonic(), figure(page, "tokens_per_s"), *map(server.metric, counters)))
            length = figure(page, "tokens_per_pass")
        ratios = []
        for at_s, shown, tokens, seconds in seen:
            before = [sample for sample in seen if sample[0] <= at_s - RATE_S]
            if before:
                ratios.append(shown * (seconds - before[-1][3]) / (tokens - before[-1][2]))
        assert median(ratios) == pytest.approx(1.0, abs=0.1)
        output, passes = map(server.metric, ("paceline_output_tokens_total", "paceline_decode_passes_total"))
        assert length == pytest.approx(output / passes, rel=0.05)
        page.close()  # before the server ends its feed


def test_the_page_works_with_400_ms_of_latency(open_page: Any, server: Server):
    page = open_page(server.url)
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    slow = {"offline": False, "latency": 400, "downloadThroughput": 200_000, "uploadThroughput": 100_000}
    session.send("Network.emulateNetworkConditions", slow)
    session.send("Network.setCacheDisabled", {"cacheDisabled": True})
    begin_s = time.monotonic()
    page.reload(wait_until="commit")
    page.wait_for_selector(".model-name")
    shown_s = time.monotonic() - begin_s
    print(f"shown with its model after {shown_s:.1f} s")  # noqa: T201
    assert shown_s < 8
    prepare(page, max_tokens="16000")
    say(page, REPEATS)
    page.locator(".lens .pass").nth(5).wait_for(state="attached")
    page.get_by_role("button", name="Stop the answer").click()
    page.wait_for_selector("text=stopped by you", timeout=5000)
    prepare(page)
    say(page, REPEATS)
    page.wait_for_selector("text=48 tokens")


@pytest.mark.default_model
def test_lens_and_race_of_the_default_model_with_auto(open_page: Any):
    with running(Path("default"), "--draft", "auto", "--max-len", "2048") as server:
        page = open_page(server.url)
        prepare(page, max_tokens="64")
        say(page, "Write a Python function that adds two numbers.")
        page.wait_for_selector(".reply .figures", timeout=60_000)
        page.wait_for_timeout(300)
        answer = last_answer(page)
        told, passes = answer["usage"]["speculation"], [p for p in answer["passes"] if not p["prefill"]]
        tokens = sum(len(p["tokens"]) for p in passes)
        assert (len(passes), sum(p["k"] for p in passes)) == (told["decode_passes"], told["verified_tokens"])
        assert tokens / len(passes) == pytest.approx(told["acceptance_length"], abs=1e-3)
        step_ms = sum(p["step_ms"] for p in passes)
        assert step_ms / tokens == pytest.approx(told["ms_per_token"], rel=1e-3)
        if told["saved_ms"] is not None:
            plain_ms = sum(p["plain_ms"] * len(p["tokens"]) for p in passes)
            assert plain_ms - step_ms == pytest.approx(told["saved_ms"], rel=1e-3, abs=0.1)
        page.click("#tab-race")
        page.get_by_label("Tokens", exact=True).fill("64")
        page.get_by_role("button", name="Start").click()
        page.wait_for_selector(".result[data-same=yes]", timeout=90_000)
