"""Make the guide's pictures of the page, in Chromium.

    python -m tools.page_pictures [--url http://127.0.0.1:8000] [--browser /usr/bin/chromium]

Starts `paceline serve` unless --url names a server. Needs playwright (the extra `dev`) and a Chromium.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tools.entry import exit_status
from tools.served import served

PICTURES = Path(__file__).resolve().parents[1] / "docs/guide/pictures"
MAX_BYTES = 150_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
DESK, TALL, PHONE = ({"width": w, "height": h} for w, h in ((1180, 800), (1060, 900), (360, 740)))
QUESTION = "Write a Python function that returns the n-th Fibonacci number."
SETTINGS = {"max_tokens": "160", "temperature": "0", "seed": "7", "lockSeed": True}
WAIT_MS = 120_000
ENGINE_S = 20  # of load before the picture of the engine
FLEET_S = 2


def tab_of(browser: Any, url: str, scheme: str, size: dict[str, int], **settings: Any) -> Any:
    """Return a new tab with the page, as a user with these settings sees it."""
    tab = browser.new_context(viewport=size, color_scheme=scheme).new_page()
    tab.set_default_timeout(WAIT_MS)
    tab.goto(url)
    tab.evaluate("(s) => localStorage.setItem('paceline.settings', s)", json.dumps(SETTINGS | settings))
    tab.reload()
    tab.locator("#say").wait_for()
    return tab


def ask(tab: Any, text: str) -> None:
    """Ask in the chat and wait for the end of the answer."""
    tab.locator("#say").fill(text)
    tab.keyboard.press("Enter")
    tab.locator(".answer[aria-busy=false] .figures").last.wait_for()


def keep(tab: Any, name: str) -> None:
    """Write a picture and say how large it is."""
    path = PICTURES / f"{name}.png"
    tab.screenshot(path=path)
    size = path.stat().st_size
    sys.stdout.write(f"{path.name} {size} bytes\n")
    if size > MAX_BYTES:
        raise SystemExit(f"error: {path.name} has more than {MAX_BYTES} bytes")


def chat_pictures(browser: Any, url: str) -> None:
    """Picture an answer under the lens: light, dark, and on a phone."""
    for scheme, size, name in (("light", TALL, "chat"), ("dark", TALL, "chat-dark"), ("light", PHONE, "phone")):
        tab = tab_of(browser, url, scheme, size)
        ask(tab, QUESTION)
        passes = tab.locator(".lens .bar:has(.kept)")
        tab.locator(f".bar[data-pass='{passes.nth(4).get_attribute('data-pass')}'] .hit").hover()
        tab.locator(".detail").wait_for()
        tab.locator(".messages").evaluate("(view) => { view.scrollTop = view.scrollHeight; }")
        keep(tab, name)
        tab.context.close()


def race_picture(browser: Any, url: str) -> None:
    """Picture a race that ended."""
    tab = tab_of(browser, url, "light", DESK)
    tab.locator("#tab-race").click()
    tab.locator("form.race-form button.main").click()
    tab.locator(".result[data-same=yes]").wait_for()
    keep(tab, "race")
    tab.context.close()


def engine_picture(browser: Any, url: str) -> None:
    """Picture the engine while it answers two clients."""
    viewer = tab_of(browser, url, "dark", TALL)
    viewer.locator("#tab-engine").click()
    askers = [tab_of(browser, url, "light", DESK, max_tokens="400", lens=False) for _ in range(2)]
    for asker in askers:
        asker.locator("#say").fill(QUESTION)
        asker.keyboard.press("Enter")
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < ENGINE_S and askers[0].locator(".answer[aria-busy=true]").count():
        viewer.wait_for_timeout(250)
    keep(viewer, "engine")


def fleet_picture(browser: Any, url: str) -> None:
    """Picture the replicas of a fleet while they answer four clients."""
    viewer = tab_of(browser, url, "light", DESK)
    viewer.locator("#tab-engine").click()
    askers = [tab_of(browser, url, "light", DESK, max_tokens="400", lens=False) for _ in range(4)]
    for asker in askers:
        asker.locator("#say").fill(QUESTION)
        asker.keyboard.press("Enter")
    viewer.locator(".fleet").wait_for()
    viewer.wait_for_timeout(1e3 * FLEET_S)
    keep(viewer, "fleet")


def main(argv: list[str]) -> int:
    """Make all pictures."""
    from playwright.sync_api import sync_playwright  # needed here only

    parser = argparse.ArgumentParser(prog="python -m tools.page_pictures")
    parser.add_argument("--url", help="of a server that runs; without it one is started")
    parser.add_argument("--only", choices=("page", "fleet"), help="those of one server, or those of a fleet")
    parser.add_argument("--browser", default=shutil.which("chromium"), help="path of a Chromium")
    args = parser.parse_args(argv)
    PICTURES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=args.browser, args=FLAGS)
        if args.only != "fleet":
            with nullcontext(args.url) if args.url else served() as url:
                _pictures(browser, url)
        if args.only != "page":
            with served(["--replicas", "2"]) as url:
                fleet_picture(browser, url)
        browser.close()
    return 0


def _pictures(browser: Any, url: str) -> None:
    chat_pictures(browser, url)
    race_picture(browser, url)
    engine_picture(browser, url)


if __name__ == "__main__":
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
