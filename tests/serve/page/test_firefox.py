"""The page in Firefox, driven by WebDriver BiDi: it starts, answers, shows passes, and logs no error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.serve.page.browsers import Firefox, browser, firefox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serve.conftest import Server


@pytest.fixture(scope="module")
def tab() -> Iterator[Firefox]:
    with firefox(browser("firefox-esr", "firefox", package="firefox-esr")) as found:
        yield found


def test_the_page_answers_races_and_shows_the_engine(tab: Firefox, server: Server):
    tab.open(server.url)
    tab.wait("document.querySelector('#say')")
    stored = '{"max_tokens": "40", "temperature": "0", "seed": "11", "lockSeed": true}'
    tab.run(f"localStorage.setItem('paceline.settings', '{stored}')")
    tab.open(f"{server.url}/#chat")
    tab.open(server.url)
    tab.wait("document.querySelector('#say')")
    tab.run("document.querySelector('#say').focus()")
    tab.type("the rider the rider the rider\ue007")
    tab.wait("document.querySelector('.reply .figures')")
    assert tab.run("document.querySelector('.figures').textContent").startswith("40 tokens")
    assert tab.run("document.querySelectorAll('.lens .pass').length") > 1
    assert tab.run("document.querySelector('.model-name').textContent")
    tab.run("document.querySelector('#tab-race').click()")
    tab.wait("document.querySelector('.race-form')")
    tab.run("document.querySelector('.race-form button.main').click()")
    tab.wait("document.querySelector('.result[data-same=yes]')")
    tab.run("document.querySelector('#tab-engine').click()")
    tab.wait("document.querySelector('.tiles')")
    assert [line for line in tab.logged if line.startswith("error")] == []
