"""Chromium over the page of a real server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import OUTLASTING, PATIENCE_S, running
from tests.serve.page.browsers import CHROMIUM_FLAGS, absent, browser

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A running Chromium, driven by Playwright."""
    path = browser("chromium", "chromium-browser", "google-chrome", package="chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("playwright is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS)
        yield started
        started.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Any]:
    """Opens the page of a server in a browser without memory; fails if its console has an error."""
    contexts, faults = [], []

    def open_it(url: str, **options: Any) -> Any:
        context = chromium.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda said: said.type in ("error", "warning") and faults.append(said.text))
        page.set_default_timeout(1000 * PATIENCE_S)
        page.goto(url)
        page.wait_for_selector("#tab-chat")
        return page

    open_it.faults = faults  # type: ignore[attr-defined]
    yield open_it
    for context in contexts:
        context.close()
    assert faults == []


@pytest.fixture
def page(open_page: Any, server: Server) -> Any:
    return open_page(server.url)


@pytest.fixture(scope="module")
def outlasting_server(long_model: Path) -> Iterator[Server]:
    with running(long_model, *OUTLASTING) as found:
        yield found


@pytest.fixture
def outlasting_page(open_page: Any, outlasting_server: Server) -> Any:
    """The page of a server whose longest answers no test outlasts."""
    return open_page(outlasting_server.url)
