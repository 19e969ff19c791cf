"""The page in Chromium over the real server: chat, lens, race and engine show what the server says."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.conftest import running
from tests.serve.page.browsers import axe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.serve.conftest import Server

REPEATS = "the rider the rider the rider the rider"
SETTINGS = {"max_tokens": "48", "temperature": "0", "seed": "11", "lockSeed": True}


def prepare(page: Any, **settings: Any) -> None:
    """Set what is sent with each request, as if the user had filled in the drawer before."""
    page.evaluate("(s) => localStorage.setItem('paceline.settings', s)", json.dumps(SETTINGS | settings))
    page.reload()
    page.wait_for_selector("#say")


def say(page: Any, text: str) -> None:
    page.fill("#say", text)
    page.keyboard.press("Enter")


def last_answer(page: Any) -> dict[str, Any]:
    """The answer of the newest conversation as the browser keeps it."""
    return page.evaluate(
        """() => new Promise((resolve) => {
            const opened = indexedDB.open("paceline", 1);
            opened.onsuccess = () => {
                const all = opened.result.transaction("whole").objectStore("whole").getAll();
                all.onsuccess = () => {
                    opened.result.close();
                    const newest = all.result.sort((a, b) => b.updated - a.updated)[0];
                    resolve(newest.messages.at(-1).answer);
                };
            };
        })"""
    )


def answering(delta: dict[str, str], *, passes: Any = (), **fields: Any) -> Callable[[Any], None]:
    """Answers a request of the page in one event."""
    choice = {"delta": delta, "speculation": {"passes": list(passes)}, "finish_reason": "stop"}
    body = f"data: {json.dumps({'choices': [choice]} | fields)}\n\ndata: [DONE]\n\n"
    return lambda route: route.fulfill(content_type="text/event-stream", body=body)


def figure(page: Any, name: str) -> float:
    return float(re.sub(r"[^\d.]", "", page.inner_text(f"[data-figure={name}]")))


def test_an_answer_streams_and_the_lens_sums_equal_the_usage(page: Any):
    prepare(page)
    say(page, REPEATS)
    page.wait_for_selector(".reply .figures")
    page.wait_for_timeout(200)  # until it is stored
    answer = last_answer(page)
    told, passes = answer["usage"]["speculation"], [p for p in answer["passes"] if not p["prefill"]]
    assert answer["usage"]["completion_tokens"] == 48
    assert page.inner_text("[data-sum=passes]") == str(told["decode_passes"]) == str(len(passes))
    assert page.inner_text("[data-sum=kept]") == str(told["accepted_tokens"])
    assert float(page.inner_text("[data-sum=tokens_per_pass]")) == round(told["acceptance_length"], 2)
    assert sum(p["k"] for p in passes) == told["verified_tokens"] > 0
    assert page.locator(".lens .pass").count() == len(answer["passes"])
    assert "".join(page.locator(".lens .token").all_text_contents()) == answer["text"]
    assert page.locator(".token.src-ngram").count() == told["accepted_tokens"]
    assert (page.locator(".ghosts").count() > 0) == (told["rejected_tokens"] > 0)
    assert page.inner_text(".figures").startswith("48 tokens")
    page.focus(".strip")
    page.keyboard.press("End")
    assert f"Pass {len(answer['passes'])}" in page.inner_text(".detail")


def test_the_lens_estimates_nothing_that_the_usage_leaves_open(page: Any):
    timed = {"draft_ms": None, "target_ms": 1.0, "step_ms": 2.0, "expected_ms": None}
    drafted = {"drafter": None, "drafts": [], "k": 0, "proposed": 0, "expected": None}
    tokens = [{"id": 1, "text": "a", "from": "target"}]
    one = {"prefill": False, "tokens": tokens, "rows": 1} | timed | drafted
    passes = [one | {"plain_ms": 5.0}, one | {"plain_ms": None}]
    told = {"ms_per_token": 2.0, "plain_ms_per_token": None, "saved_ms": None}
    usage = {"completion_tokens": 2, "total_tokens": 3, "speculation": told}
    page.route("**/completions", answering({"content": "aa"}, usage=usage, passes=passes))
    say(page, "hello")
    page.wait_for_selector(".reply .figures")
    assert page.locator(".sums dd").all_text_contents()[3:] == ["2.0 ms", "–", "–"]


def test_an_answer_is_stopped_edited_retried_renamed_and_deleted(outlasting_page: Any):
    prepare(page := outlasting_page, max_tokens="100000", lens=False, lockSeed=False)
    say(page, "go on")
    page.get_by_role("button", name="Stop the answer").click()
    page.wait_for_selector("text=stopped by you")
    page.get_by_label("Max tokens").fill("8")
    page.get_by_role("button", name="Edit and ask again").click()
    page.get_by_label("Edit the message").fill("go <b>on</b> again")
    page.get_by_role("button", name="Send again").click()
    page.wait_for_selector("text=8 tokens")
    assert page.inner_text(".said p") == "go <b>on</b> again"
    seed = page.inner_text(".figures .link")
    page.get_by_role("button", name=seed).click()  # locks it
    text = page.inner_text(".reply .markdown")
    page.get_by_role("button", name="Answer again").click()
    page.wait_for_selector(".answer[aria-busy=false] .figures")
    assert page.inner_text(".figures .link") == seed
    assert page.inner_text(".reply .markdown") == text
    page.reload()
    page.get_by_role("button", name="go on", exact=True).click()
    page.wait_for_selector("text=8 tokens")
    page.hover(".list li")
    page.get_by_role("button", name="Rename go on").click()
    page.get_by_label("New name").fill("Ours")
    page.keyboard.press("Enter")
    page.hover(".list li")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export Ours").click()
    assert json.loads(download.value.path().read_text())["messages"][0]["content"] == "go <b>on</b> again"
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Delete Ours").click()
    page.wait_for_selector(".list li", state="detached")


def test_the_header_tells_the_context_of_the_conversation_that_is_shown(page: Any):
    prepare(page, lens=False)
    page.route("**/completions", answering({"content": "a"}, usage={"completion_tokens": 1, "total_tokens": 300}))
    say(page, "first")

    def wait_for(used: int) -> None:
        page.wait_for_selector(f".context > span:text-matches('^{used} /')")

    wait_for(300)
    page.get_by_role("button", name="New conversation").click()
    wait_for(0)
    page.unroute("**/completions")
    page.route("**/completions", answering({"content": "a"}))  # without usage, as of an answer that was stopped
    say(page, "second")
    page.wait_for_selector(".reply .figures")
    page.get_by_role("button", name="first", exact=True).click()
    wait_for(300)
    page.get_by_role("button", name="second", exact=True).click()
    wait_for(0)


def test_what_is_typed_while_an_answer_streams_stays(outlasting_page: Any):
    prepare(page := outlasting_page, max_tokens="100000", lens=False)
    say(page, "go on")
    streams = page.locator(".answer[aria-busy=true] .markdown p").first
    streams.wait_for()
    page.hover(".list li")
    page.get_by_role("button", name="Rename go on").click()
    page.get_by_label("New name").press_sequentially("Our own name", delay=10)
    assert page.get_by_label("New name").input_value() == "Our own name"
    page.keyboard.press("Enter")
    page.get_by_label("System prompt").press_sequentially("Be brief", delay=10)
    assert streams.count()
    page.get_by_role("button", name="Stop the answer").click()
    page.wait_for_selector("text=stopped by you")
    page.reload()
    page.get_by_role("button", name="Our own name", exact=True).click()
    page.wait_for_selector("text=stopped by you")
    assert page.get_by_label("System prompt").input_value() == "Be brief"


def test_a_conversation_is_asked_anew_and_deleted_while_its_answer_streams(outlasting_page: Any):
    prepare(page := outlasting_page, max_tokens="100000", lens=False)
    say(page, "go on")
    streams = page.locator(".answer[aria-busy=true] .markdown p").first
    streams.wait_for()
    with page.expect_event("requestfailed"):
        page.get_by_role("button", name="Edit and ask again").click()
        page.get_by_label("Edit the message").fill("go back")
        page.get_by_role("button", name="Send again").click()
    streams.wait_for()
    page.hover(".list li")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export go on").click()
    assert json.loads(download.value.path().read_text())["messages"][0]["content"] == "go back"
    page.on("dialog", lambda dialog: dialog.accept())
    with page.expect_event("requestfailed"):
        page.get_by_role("button", name="Delete go on").click()


def test_two_tabs_keep_each_other_s_messages_and_settings(page: Any):
    prepare(page, max_tokens="8", lens=False, lockSeed=False)
    say(page, "first")
    page.wait_for_selector("text=8 tokens")
    other = page.context.new_page()
    other.goto(page.url)
    other.get_by_role("button", name="first", exact=True).click()
    other.wait_for_selector("text=8 tokens")
    page.get_by_label("Temperature").fill("0.5")
    say(page, "second")
    page.locator(".answer[aria-busy=false] .figures >> nth=1").wait_for()
    other.locator(".figures >> nth=1").wait_for()
    say(other, "third")
    other.locator(".answer[aria-busy=false] .figures >> nth=2").wait_for()
    page.locator(".figures >> nth=2").wait_for()
    for tab in (page, other):
        assert tab.locator(".said p").all_text_contents() == ["first", "second", "third"]
    stored = json.loads(page.evaluate("localStorage.getItem('paceline.settings')"))
    assert stored["temperature"] == "0.5"
    other.on("dialog", lambda dialog: dialog.accept())
    other.hover(".list li")
    other.get_by_role("button", name="Delete first").click()
    page.wait_for_selector(".list li", state="detached")
    page.wait_for_selector(".empty")


def test_a_race_of_the_same_seed_ends_with_the_same_text(page: Any):
    page.click("#tab-race")
    page.get_by_label("Prompt", exact=True).fill(REPEATS)
    page.get_by_label("Tokens", exact=True).fill("40")
    page.get_by_role("button", name="Start").click()
    page.wait_for_selector(".result[data-same=yes]")
    assert page.locator(".lane.off .token.src-ngram").count() == 0
    assert page.locator(".lane.auto .token.src-ngram").count() > 0
    assert "40 tokens compared" in page.inner_text(".result")
    assert page.inner_text(".lane.off .lane-text") == page.inner_text(".lane.auto .lane-text")


def test_the_engine_view_equals_the_metrics(page: Any, server: Server):
    page.click("#tab-engine")
    page.wait_for_selector(".tiles")
    with server.client() as client:
        body = {"messages": [{"role": "user", "content": REPEATS}], "max_tokens": 32, "temperature": 0}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    page.wait_for_selector(".steps tbody tr")
    page.wait_for_selector("[data-figure=rows_running]:text-is('0')")
    page.wait_for_timeout(1500)  # the feed is quiet: one event a second
    assert figure(page, "rows_running") == server.metric("paceline_requests_running")
    assert figure(page, "pages_used") == server.metric("paceline_kv_pages_held")
    ways = page.evaluate(
        "() => [...document.querySelectorAll('.heat td')].reduce((sum, td) => sum + Number(td.textContent), 0)"
    )
    assert ways == server.metric("paceline_decode_passes_total")
    sources = page.locator("[data-source]").all_text_contents()
    assert sum(map(int, sources)) == server.metric("paceline_output_tokens_total")
    assert page.inner_text(".steps .chip >> nth=0") in ("ngram", "none")


def test_the_engine_view_says_that_the_engine_is_not_ready(page: Any):
    body = 'data: {"time": 1, "ready": false, "steps": []}\n\n'
    page.route("**/live", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    page.click("#tab-engine")
    page.wait_for_selector(".fault:has-text('the engine is not ready')")
    page.unroute("**/live")
    page.wait_for_selector(".tiles")
    assert not page.locator(".engine .fault").count()


def test_errors_are_shown_as_they_are(open_page: Any, server: Server):
    page = open_page(server.url)
    prepare(page, temperature="70")
    say(page, "hello")
    shown = page.wait_for_selector(".reply .fault").inner_text()
    assert "temperature" in shown
    assert "400" in shown
    open_page.faults[:] = [fault for fault in open_page.faults if "status of 400" not in fault]


def test_the_key_is_asked_for_and_sent(model: Path, open_page: Any):
    with running(model, "--api-key", "secret") as server:
        page = open_page(server.url)
        page.get_by_label("Key", exact=True).fill("secret\u200b")  # with an invisible character
        page.keyboard.press("Enter")
        assert page.locator("dialog[open] input:invalid").count() == 1
        page.get_by_role("button", name="Cancel").click()
        page.click("#tab-engine")  # where the feed needs the key
        page.get_by_role("button", name="Cancel").click()
        page.wait_for_timeout(3000)  # longer than until the feed is tried again
        assert not page.locator("dialog[open]").count()
        page.click("#tab-chat")
        page.get_by_role("button", name="API key").click()
        page.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog .fault")
        page.get_by_label("Key", exact=True).fill("secret")
        page.keyboard.press("Enter")
        page.wait_for_selector(".model-name")
        assert page.evaluate("localStorage.getItem('paceline.key')") is None
        prepare(page)
        say(page, "hello")
        page.wait_for_selector(".reply .figures")
        open_page.faults[:] = [fault for fault in open_page.faults if "status of 401" not in fault]
        page.close()  # before its server ends, which it would miss


def test_an_answer_comes_after_the_site_s_data_were_cleared(page: Any, server: Server):
    prepare(page, max_tokens="8")
    say(page, "hello")
    page.wait_for_selector("text=8 tokens")
    session = page.context.new_cdp_session(page)
    session.send("Storage.clearDataForOrigin", {"origin": server.url, "storageTypes": "indexeddb"})
    page.get_by_role("button", name="New conversation").click()
    say(page, "hello again")
    page.wait_for_selector("text=8 tokens")
    page.reload()
    page.wait_for_selector(".list .open")
    assert page.locator(".list .open").all_text_contents() == ["hello again"]


HOSTILE = """<img src=x onerror=alert(1)><script>alert(2)</script> [a](javascript:alert(3))
![p](https://example.org/x.png) <a href="data:text/html,x" style="x">b</a>

`<i>`
"""


def elements_of(page: Any, text: str) -> list[list[str | None]]:
    """Elements that the page makes of a text: name, address, names of attributes."""
    return page.evaluate(
        """async (text) => {
            const script = document.querySelector("script[type=module]").src;
            const { toHtml } = await import(new URL("markdown.js", script));
            const template = document.createElement("template");
            template.innerHTML = toHtml(text);
            return [...template.content.querySelectorAll("*")].map((e) =>
                [e.tagName, e.getAttribute("href"), ...e.getAttributeNames().sort()]);
        }""",
        text,
    )


def test_a_list_of_tasks_shows_what_is_done(page: Any):
    page.route("**/completions", answering({"content": "- [x] Buy milk\n- [ ] Cook\n\n1. [x] Eat\n\n2. two"}))
    prepare(page, lens=False)
    say(page, "hello")
    page.wait_for_selector(".reply .figures")
    assert page.locator(".markdown li").all_inner_texts() == ["☑ Buy milk", "☐ Cook", "☑ Eat", "two"]


def test_a_text_of_right_to_left_script_ends_at_its_left(page: Any):
    text = "שלום לך!"
    page.route("**/completions", answering({"content": text}))
    prepare(page, lens=False)
    say(page, text)
    page.wait_for_selector(".markdown p")
    for place in (".said p", ".markdown p"):
        first, last = page.evaluate(
            """(place) => {
                const text = document.querySelector(place).firstChild;
                return [0, text.length - 1].map((at) => {
                    const range = document.createRange();
                    range.setStart(text, at);
                    range.setEnd(text, at + 1);
                    return range.getBoundingClientRect().left;
                });
            }""",
            place,
        )
        assert last < first, place
    assert page.evaluate("getComputedStyle(document.querySelector('.markdown p')).textAlign") == "start"


def test_a_text_of_many_levels_is_shown_as_it_is(page: Any):
    assert [tag for tag, *_ in elements_of(page, "> " * 10_000)] == ["PRE"]


def test_text_of_a_model_is_never_run(page: Any):
    elements = elements_of(page, HOSTILE)
    assert {tag for tag, *_ in elements} == {"P", "A", "BR", "CODE"}
    assert {href for _, href, *_ in elements} == {None, "https://example.org/x.png"}
    assert {name for _, _, *names in elements for name in names} == {"href", "rel", "target"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault_and_nothing_overflows_on_a_phone(open_page: Any, server: Server, scheme: str):
    page = open_page(server.url, viewport={"width": 360, "height": 740}, color_scheme=scheme)
    prepare(page)
    page.evaluate(axe())
    assert not serious(page)
    say(page, REPEATS)
    page.wait_for_selector(".reply .figures")
    page.focus(".strip")
    page.keyboard.press("End")
    assert not serious(page)
    assert overflowing(page) == []
    page.click("#tab-race")
    page.get_by_label("Tokens", exact=True).fill("8")
    page.get_by_role("button", name="Start").click()
    page.wait_for_selector(".result[data-same]")
    assert not serious(page)
    assert overflowing(page) == []
    page.click("#tab-engine")
    page.wait_for_selector(".steps, .none")
    assert not serious(page)
    assert overflowing(page) == []


def serious(page: Any) -> list[str]:
    """Faults that axe-core calls serious or critical."""
    found = page.evaluate("axe.run().then((found) => found.violations)")
    return [
        f"{fault['id']}: {fault['nodes'][0]['html']} {fault['nodes'][0]['failureSummary']}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
    ]


def overflowing(page: Any) -> list[str]:
    """Parts that reach over the edge of the window, but those that scroll by themselves."""
    return page.evaluate(
        """() => [...document.body.querySelectorAll("*")]
            .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".strip, .scroll, pre"))
            .map((e) => e.className || e.tagName)"""
    )


def test_the_fleet_view_equals_the_tables_of_the_fleet(model: Path, open_page: Any):
    """Two replicas: which are up, what each does; one that is killed is seen to be gone, and back."""
    with running(model, "--replicas", "2") as server, server.client() as client:

        def tables() -> dict[str, dict[str, Any]]:
            found = client.get("/v1/fleet").json()["replicas"]
            return {line["replica"]: line for line in found}

        page = open_page(server.url, viewport={"width": 360, "height": 740})
        page.evaluate(axe())
        page.click("#tab-engine")
        page.wait_for_selector(".fleet small:text-is('2 of 2 up')")
        for _ in range(3):
            body = {"prompt": REPEATS, "max_tokens": 24, "temperature": 0}
            assert client.post("/v1/completions", json=body).status_code == 200
        page.wait_for_timeout(1500)  # the feed is quiet: one event a second
        for name, line in tables().items():
            shown = page.locator(f"[data-replica='{name}'] td").all_text_contents()
            assert shown[:4] == [name, line["state"], line["cores"], str(line["rows"])]
            assert shown[7:] == [str(line["pages_held"]), str(line["resumes"])]
        assert not serious(page)
        assert overflowing(page) == []
        gone = page.locator("[data-replica='1'] [data-state]:not([data-state='up'])")
        for _ in range(8):  # it may be back before the page looks; each restart waits longer than the last
            if (pid := tables()["1"]["pid"]) is not None:
                os.kill(pid, signal.SIGKILL)
            page.wait_for_timeout(1500)
            if gone.count():
                break
        else:
            pytest.fail("the page never showed that the replica was gone")
        page.wait_for_selector(".fleet small:text-is('2 of 2 up')")
        page.close()  # before its server ends, which it would miss
