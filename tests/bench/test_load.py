from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from statistics import fmean

import pytest

from paceline import cli
from paceline.bench import session
from paceline.bench.load import DrivenServer, answer_of, arrival_times, drive, driven_server
from paceline.bench.measure import Run, record
from paceline.bench.prompt_file import Prompt, read_prompts
from paceline.bench.session import Session
from paceline.core.errors import ConfigError, PacelineError
from paceline.core.params import SamplingParams
from paceline.serve.terminal.running_server import RunningServer
from tests.serve.conftest import running

PROMPT = Prompt(1, "qa", "x")


def chunk(text, field="content"):
    return {"choices": [{"delta": {field: text}}]}


def test_arrivals_are_poisson():
    times = arrival_times(4000, rate_per_s=50.0, seed=3)
    gaps = [b - a for a, b in pairwise(times)]
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert fmean(g * g for g in gaps) == pytest.approx(2 / 50**2, rel=0.15)  # exponential: E[x^2] = 2 / rate^2
    assert times == arrival_times(4000, rate_per_s=50.0, seed=3)


def test_chunks_add_up_to_the_tokens_of_usage():
    speculation = {"drafted_tokens": 8, "verified_tokens": 7, "accepted_tokens": 4, "acceptance_length": 2.0}
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "speculation": speculation}
    events = [(1.0, {"choices": [{"delta": {"role": "assistant"}}]}), (2.0, chunk("a")), (3.0, chunk("b"))]
    answer = answer_of(PROMPT, 0.5, iter([*events, (4.0, chunk("c")), (4.1, {"choices": [], "usage": usage})]))
    assert answer.arrivals == ((2.0, 1), (3.0, 4.0), (4.0, 4.0))
    assert (answer.first_s, answer.end_s, answer.tpot_s) == (2.0, 4.0, 0.25)
    figures = answer.figures
    assert (figures.decoded_tokens, figures.decode_passes, figures.accepted_tokens) == (8, 4, 4)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_and_calls_arrive_as_text_does(field):
    usage = {"prompt_tokens": 3, "completion_tokens": 5}
    call = [{"index": 0, "function": {"arguments": "{}"}}]
    events = [(1.0, chunk("a", field)), (2.0, chunk("b")), (3.0, chunk(call, "tool_calls"))]
    answer = answer_of(PROMPT, 0.5, iter([*events, (3.1, {"choices": [], "usage": usage})]))
    assert answer.arrivals == ((1.0, 1), (2.0, 2.0), (3.0, 2.0))


def test_an_error_in_a_stream_is_raised():
    with pytest.raises(PacelineError, match="went wrong"):
        answer_of(PROMPT, 0.0, iter([(1.0, chunk("a")), (2.0, {"error": {"message": "went wrong"}})]))
    with pytest.raises(PacelineError, match="usage"):
        answer_of(PROMPT, 0.0, iter([(1.0, chunk("a"))]))


@pytest.mark.parametrize(
    "url",
    [
        *("", "ftp://x", "http://"),
        *("http://127.0.0.1:99999", "http://127.0.0.1:abc", "http://[::1", "http://127.0.0.1:0"),
        *("http://a..b", "http://a b", "http://x/\u00e4"),
    ],
)
def test_a_bad_url_is_refused(url):
    with pytest.raises(ConfigError, match="--url"):
        driven_server(url, {})


def test_nobody_answers():
    with pytest.raises(PacelineError, match="start one with"):
        driven_server("http://127.0.0.1:9", {})


class Broken(BaseHTTPRequestHandler):
    """Answers that break off, and a key that is missing."""

    def do_GET(self):
        self.answer(200, b"5\r\n{")

    def do_POST(self):
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(401 if b"secret" in asked else 200, b"3\r\n{}\n\r\n5\r\n")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_what_breaks_off_is_told_with_its_place():
    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            with pytest.raises(
                ConfigError, match=rf"--url {url} broke off while it listed its models \(Incomplete"
            ):
                driven_server(url, {})
            target = DrivenServer(RunningServer(url), {})
            with pytest.raises(PacelineError, match=rf"^question 1 to {url}: the server's answer broke off"):
                drive(target, [PROMPT], 1, None, seed=0)
            with pytest.raises(PacelineError, match=rf"^question 1 to {url}: .*status 401; set PACELINE_API_KEY"):
                drive(target, [Prompt(1, "qa", "secret")], 1, None, seed=0)
        finally:
            server.shutdown()
    with pytest.raises(PacelineError, match=rf"^question 1 to {url}: no server answers there"):
        drive(target, [PROMPT], 1, None, seed=0)


def test_a_real_server(model, prompts, tmp_path):
    """C clients, then Poisson arrivals; what the server reports is what arrives here."""
    with running(model, "--draft", "ngram:k=3") as found:
        target = driven_server(found.url, {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True})
        asked = read_prompts(prompts)
        for concurrency, rate in ((3, None), (None, 200.0)):
            answers = drive(target, asked, concurrency, rate, seed=0)
            assert [a.prompt for a in answers] == asked
            assert all(a.figures.completion_tokens == 12 for a in answers)
            assert all(a.start_s <= a.first_s <= a.end_s for a in answers)
            figures = record(Run("server", concurrency, 0, tuple(answers), None, None))
            assert 1.0 <= figures["acceptance_length"] <= 4.0
            assert figures["steps"] is None
            assert figures["repeat_share"] is None
        with pytest.raises(PacelineError, match="400"):
            drive(driven_server(found.url, {"temperature": -1.0}), asked[:1], 1, None, seed=0)
        out = tmp_path / "b.json"
        flags = ["--url", found.url, "--prompts", str(prompts), "--max-tokens", "8", "--ignore-eos"]
        assert cli.main(["bench", *flags, "--concurrency", "1,3", "--json", str(out)]) == 0
        runs = json.loads(out.read_text())["runs"]
        assert [(r["draft"], r["concurrency"], r["warm"]) for r in runs] == [
            ("server", 1, False),
            ("server", 3, False),
        ]
        assert all(r["output_tokens"] == 8 * len(asked) for r in runs)
        assert cli.main(["bench", *flags, "--request-rate", "100", "--draft", "ngram:k=3"]) == 0


def test_a_run_against_a_server_finds_no_prompt_of_another_unless_it_may(monkeypatch):
    bodies = []
    monkeypatch.setattr(session, "drive", lambda target, *_: bodies.append(target.body) or [])
    target = DrivenServer(RunningServer("http://127.0.0.1:1"), {"model": "m"})
    for warm in (False, True):
        asked = Session(drafts=("s",), concurrencies=(1, 4), params=SamplingParams(), repeat=2, warm=warm)
        runs = list(session.run_there(target, asked, None, [PROMPT], lambda _: None))
        assert [r.warm for r in runs] == 4 * [warm]
    of_warmup, *cold, _, a, b, c, d = bodies
    assert of_warmup == a == b == c == d == target.body
    assert len({body["cache_salt"] for body in cold}) == 4


def test_nothing_to_ask_is_no_error():
    assert drive(DrivenServer(RunningServer("http://127.0.0.1:1"), {}), [], 1, None, seed=0) == []
