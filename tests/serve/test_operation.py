"""What operators see and set: request lines, ids, JSON logs, browsers, TLS, names, keys."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from paceline.cli import main, parse, parser_of
from paceline.core import logs
from paceline.core.errors import ConfigError
from paceline.core.figures import Figures
from paceline.engine.gauges import Gauges
from paceline.engine.stats import Stats
from paceline.serve.api.keys import KeyRing, StoredKey, new_key, read_keys
from paceline.serve.observe.access import RequestRecord
from paceline.serve.observe.engine_log import line as doings_line
from paceline.serve.observe.engine_log import tell_doings
from paceline.serve.observe.recent import Recent
from paceline.serve.operation import OperationOptions
from paceline.serve.server import begin_logs, http_config
from paceline.serve.worker.messages import Snapshot
from tests.serve.conftest import running
from tests.serve.test_faults import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.serve.conftest import Server

BODY = {"prompt": "the the the the", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
SECRET = "my own secret prompt"


@pytest.fixture(scope="module")
def logged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with JSON logs, CORS and another name, and the file of its standard error."""
    path = tmp_path_factory.mktemp("logs") / "stderr"
    flags = ["--log-format", "json", "--cors-origin", "https://page.example", "--allowed-host", "box.internal"]
    with path.open("w") as file, running(model, *flags, stderr=file) as server:
        yield server, path


def lines_of(path: Path) -> list[dict[str, Any]]:
    whole, _, _ = path.read_text().rpartition("\n")  # the last one may just be written
    return [json.loads(line) for line in whole.splitlines()]


def line_of(path: Path, request_id: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = []

    def look() -> bool:
        found[:] = [line for line in lines_of(path) if line.get("request_id") == request_id]
        return bool(found)

    assert eventually(look), f"no line of {request_id}"
    return found[0]


def test_a_request_is_told_in_a_line_with_its_figures_and_without_its_text(logged: tuple[Server, Path]) -> None:
    server, path = logged
    with server.client() as http:
        answer = http.post("/v1/completions", json=BODY | {"prompt": SECRET}, headers={"x-request-id": "mine-1"})
    assert answer.headers.get_list("x-request-id") == answer.headers.get_list("request-id") == ["mine-1"]
    line, usage = line_of(path, "mine-1"), answer.json()["usage"]
    assert (line["status"], line["path"], line["method"]) == (200, "/v1/completions", "POST")
    assert line["response_id"] == answer.json()["id"]
    assert line["completion_tokens"] == 24
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["tokens_per_pass"] == pytest.approx(usage["speculation"]["acceptance_length"], abs=1e-3)
    assert sum(line["tokens_by_source"].values()) == 24
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
    assert line["tokens_per_s"] > 0
    assert SECRET not in path.read_text()
    assert all({"time", "level", "process", "pid", "logger", "message"} <= each.keys() for each in lines_of(path))


def test_a_refusal_is_told_with_its_reason(logged: tuple[Server, Path]) -> None:
    server, path = logged
    with server.client() as http:
        headers = {"x-request-id": "refused-1"}
        answer = http.post("/v1/completions", json=BODY | {"temperature": 99}, headers=headers)
        assert answer.status_code == 400
        line = line_of(path, "refused-1")
        assert line["reason"] == answer.json()["error"]["message"]
        lost = http.get("/nowhere%1b%5b2J", headers={"x-request-id": "lost-1"})
        assert lost.status_code == 404
    assert "\x1b" not in line_of(path, "lost-1")["message"]


@pytest.mark.parametrize("asked", ["", "a b", "x" * 129, "é".encode()])
def test_an_id_that_does_not_fit_is_replaced(logged: tuple[Server, Path], asked: str | bytes) -> None:
    server, _ = logged
    with server.client() as http:
        answer = http.get("/version", headers={"x-request-id": asked})
    assert re.fullmatch(r"req-[0-9a-f]{24}", answer.headers["x-request-id"])


def test_probes_are_not_told(logged: tuple[Server, Path]) -> None:
    server, path = logged
    with server.client() as http:
        for route in ("/health", "/metrics"):
            assert http.get(route, headers={"x-request-id": "probe"}).status_code == 200
        http.get("/version", headers={"x-request-id": "after"})
    line_of(path, "after")
    assert not [line for line in lines_of(path) if line.get("request_id") == "probe"]


def test_pages_of_allowed_origins_may_ask_and_no_others(logged: tuple[Server, Path]) -> None:
    server, _ = logged
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    with server.client() as http:
        ours = {"origin": "https://page.example"}
        preflight = http.options("/v1/completions", headers=ours | asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://page.example"
        assert "access-control-allow-credentials" not in preflight.headers
        answer = http.post("/v1/completions", json=BODY, headers=ours)
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        theirs = {"origin": "https://evil.example"}
        assert http.options("/v1/completions", headers=theirs | asks).status_code == 400
        assert "access-control-allow-origin" not in http.get("/version", headers=theirs).headers


def test_without_the_flag_no_origin_is_allowed(http: httpx.Client) -> None:
    answer = http.get("/version", headers={"origin": "https://page.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_an_allowed_host_is_answered_and_no_other(logged: tuple[Server, Path]) -> None:
    server, _ = logged
    with server.client() as http:
        assert http.get("/version", headers={"host": "box.internal:8000"}).status_code == 200
        assert http.get("/version", headers={"host": "evil.example"}).status_code == 421


# TLS -------------------------------------------------------------------------------------------------


def test_a_server_speaks_tls(model: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with running(model, "--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(cert))
        with server.client(verify=trusted) as http:
            assert http.post("/v1/completions", json=BODY).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/version")


def test_files_of_tls_are_checked_before_anything_is_loaded(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    cert, key = certificate
    for options in (
        {"tls_cert": cert},
        {"tls_cert": key, "tls_key": cert},
        {"tls_cert": tmp_path, "tls_key": key},
    ):
        with pytest.raises(ConfigError, match="--tls-"):
            OperationOptions(**options)
    locked = tmp_path / "locked.pem"
    asked = ["openssl", "rsa", "-aes256", "-passout", "pass:sesame", "-in", str(key), "-out", str(locked)]
    subprocess.run(asked, check=True, capture_output=True)
    with pytest.raises(ConfigError, match="encrypted"):
        OperationOptions(tls_cert=cert, tls_key=locked)


@pytest.mark.parametrize(
    "options",
    [{"cors_origins": ("page.example",)}, {"cors_origins": ("*",) * 65}, {"allowed_hosts": ("a b",)}],
)
def test_options_that_say_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        OperationOptions(**options)


# Keys ------------------------------------------------------------------------------------------------


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_each_key_of_a_file_has_its_role_its_salt_and_its_counts(model: Path, tmp_path: Path) -> None:
    keys = {name: new_key(name, role) for name, role in [("ann", "all"), ("bob", "all"), ("prom", "metrics")]}
    path = tmp_path / "keys"
    path.write_text("# clients\n" + "".join(f"{stored.line}\n" for _, stored in keys.values()))
    ann, bob, prom = (keys[name][0] for name in ("ann", "bob", "prom"))
    body = BODY | {"prompt": "the quick brown fox jumps over the lazy dog " * 8}
    with running(model, "--api-key-file", str(path)) as server, server.client() as http:

        def cached(headers: dict[str, str], **extra: Any) -> int:
            answer = http.post("/v1/completions", json=body | extra, headers=headers)
            assert answer.status_code == 200
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert http.post("/v1/completions", json=body).status_code == 401
        assert http.post("/v1/completions", json=body, headers=bearer("pk-wrong")).status_code == 401
        assert cached(bearer(ann)) == 0
        assert cached({"x-api-key": ann}) > 0
        assert cached(bearer(bob)) == 0, "keys share no pages"
        assert cached(bearer(ann), cache_salt="more") == 0
        assert cached(bearer(ann), cache_salt="more") > 0
        assert http.get("/metrics", headers=bearer(prom)).status_code == 200
        refused = http.post("/v1/completions", json=body, headers=bearer(prom))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "key_not_allowed")
        assert server.metric('paceline_key_requests_total{key="ann"}', **bearer(ann)) == 4
        assert server.metric('paceline_key_tokens_total{key="bob",kind="completion"}', **bearer(ann)) == 24

        path.write_text(keys["bob"][1].line)
        server.process.send_signal(signal.SIGHUP)
        assert eventually(lambda: http.get("/version", headers=bearer(ann)).status_code == 401)
        path.write_text("broken")
        server.process.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        assert http.get("/version", headers=bearer(bob)).status_code == 200, "a bad file changes nothing"
        os.kill(server.engine_pid(), signal.SIGHUP)  # as of one to the whole process group
        assert cached(bearer(bob)) > 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must hold 1 to"),
        ("ann:secret", "line 1 is not"),
        (f"ann:{'0' * 64}\nann:{'1' * 64}", "line 2: the name 'ann' is there twice"),
        (f"ann:{'0' * 64}:root", "the role must be one of all, metrics, admin"),
        (f"a b:{'0' * 64}", "line 1 is not"),
    ],
)
def test_a_bad_file_of_keys_is_refused_by_line(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(why)):
        read_keys(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "nothing")


def test_a_new_key_is_shown_once_and_its_line_lets_it_in(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["key", "new", "ann", "--role", "metrics"]) == 0
    said = capsys.readouterr()
    key = re.findall(r"pk-\S+", said.err)[0]
    assert key not in said.out
    path = tmp_path / "keys"
    path.write_text(said.out)
    ring = KeyRing(None, path)
    found = ring.find(key.encode())
    assert found is not None
    assert (found.name, found.role) == ("ann", "metrics")
    assert ring.find(b"") is None
    assert main(["key", "new", "a b"]) == 2


def test_plain_digests_and_the_flag_s_key_fit_too(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ann:2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae")
    ring = KeyRing("sesame", path)
    assert ring.find(b"foo") == StoredKey(
        "ann", "", "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
    )
    found = ring.find(b"sesame")
    assert found is not None
    assert (found.name, found.role) == ("", "admin")


# Lines -----------------------------------------------------------------------------------------------


def test_a_request_s_line_can_be_read() -> None:
    figures = Figures(34, 120, 16, 58, 119, 120, 100, 61, 1, kept_by=(("eagle3", 50), ("suffix", 11)))
    record = RequestRecord("POST", "/v1/chat/completions", "mine", key="ann", begin_s=10.0, end_s=12.0, status=200)
    record.figures, record.first_token_s = [figures], 0.5
    assert record.line == (
        "POST /v1/chat/completions 200 2.000 s, 34 (16 cached) + 120 tokens, first after 0.500 s, 79.3 tok/s, "
        "2.05 a pass, eagle3 50 suffix 11 target 59, key ann, id mine"
    )
    refused = RequestRecord("GET", "/x", "mine", begin_s=1.0, end_s=1.5, status=404, reason="no such route")
    assert refused.line == "GET /x 404 0.500 s, id mine: no such route"


def test_the_engine_s_doings_are_told_while_it_works(caplog: pytest.LogCaptureFixture) -> None:
    recent, stats = Recent(), Stats(steps=10, step_s=0.5, output_tokens=40, decode_passes=10, decoded_tokens=30)
    gauges = Gauges(2, 1, 0, 100, 37, 1, 0)

    async def work() -> None:
        recent.take(Snapshot(Stats(), gauges))
        telling = asyncio.create_task(tell_doings(recent, every_s=0.01))
        await asyncio.sleep(0.02)
        recent.take(Snapshot(stats, gauges))
        while not caplog.records:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        telling.cancel()

    with caplog.at_level("INFO", "paceline.doings"):
        asyncio.run(work())
    assert [record.message for record in caplog.records] == [
        "engine: 2 running, 1 waiting, 80.0 tok/s, 3.00 tokens a pass, 37% of pages"
    ]


def test_lines_keep_off_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar replaces standard error while it is shown, and prints what is written there above itself."""
    monkeypatch.delenv("PACELINE_LOG_FORMAT", raising=False)
    root, shown = logging.getLogger(), io.StringIO()
    kept = root.handlers[:]
    try:
        root.handlers.clear()
        logs.configure()
        monkeypatch.setattr(sys, "stderr", shown)
        logging.getLogger("paceline.anything").warning("a line")
    finally:
        root.handlers[:] = kept
    assert shown.getvalue() == "a line\n"


def test_the_engine_s_line_can_be_read() -> None:
    found = {"running": 3, "waiting": 0, "tokens_per_s": 41.23, "tokens_per_pass": 2.1, "pages_share": 0.37}
    assert doings_line(found | {"plain_tokens_per_s": 22.0}) == (
        "engine: 3 running, 0 waiting, 41.2 tok/s, 2.10 tokens a pass, 37% of pages, est. plain 22.0 tok/s"
    )
    assert "plain" not in doings_line(found | {"plain_tokens_per_s": None})


@pytest.mark.parametrize(("words", "warns"), [(["--api-key", "k"], True), (["--api-key=k"], True), ([], False)])
def test_only_a_key_on_the_command_line_is_warned_of(
    words: list[str], warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "serve", *words])
    args = parse(parser_of("serve"), words, {} if words else {"PACELINE_API_KEY": "k"})
    begin_logs(args)
    assert args.api_key == "k"
    assert ("list of processes" in caplog.text) == warns


def test_an_empty_key_is_refused() -> None:
    words = ["--api-key", ""]
    with pytest.raises(ConfigError, match="visible ASCII"):
        http_config(parse(parser_of("serve"), words, {"PACELINE_API_KEY": "k"}))
