"""Spans of requests, as a collector gets them."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from paceline.core.errors import ConfigError
from paceline.serve.observe.traces import url_of_traces
from tests.serve.conftest import running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("opentelemetry.sdk")

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


class Collector:
    """A collector that keeps the spans it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                data = self.rfile.read(int(self.headers["content-length"]))
                packed = self.headers.get("content-encoding") == "gzip"
                request = ExportTraceServiceRequest.FromString(gzip.decompress(data) if packed else data)
                collector.spans += [s for r in request.resource_spans for p in r.scope_spans for s in p.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()
    found.server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def test_each_request_becomes_a_span_in_its_client_s_trace(model: Path, collector: Collector) -> None:
    body = {"prompt": "the the the", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    with running(model, "--otlp-endpoint", collector.url) as server, server.client() as http:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
        usage = http.post("/v1/completions", json=body, headers=headers).json()["usage"]
        http.post("/v1/completions", json=body | {"temperature": 99}, headers={"traceparent": "nonsense"})
        http.get("/health")
    assert len(collector.spans) == 2, "sent when the server ends, at the latest; probes have none"
    span, refused = sorted(collector.spans, key=lambda s: s.start_time_unix_nano)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    found = attributes(span)
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.usage.output_tokens"] == 20
    assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["paceline.request_id"] == "mine"
    assert found["paceline.speculation.accepted_tokens"] == usage["speculation"]["accepted_tokens"]
    assert [event.name for event in span.events] == ["gen_ai.first_token"]
    assert span.start_time_unix_nano < span.events[0].time_unix_nano <= span.end_time_unix_nano
    assert attributes(refused)["http.response.status_code"] == 400
    assert "temperature" in attributes(refused)["paceline.refusal"]
    assert not refused.parent_span_id


def test_an_endpoint_without_a_path_gets_otlp_s_own() -> None:
    assert url_of_traces("http://box:4318") == "http://box:4318/v1/traces"
    assert url_of_traces("https://box/otel/v1/traces") == "https://box/otel/v1/traces"
    for bad in ("box:4318", "ftp://box", "http://"):
        with pytest.raises(ConfigError, match="--otlp-endpoint"):
            url_of_traces(bad)


def test_nothing_is_imported_without_the_flag() -> None:
    code = "import paceline.serve.server, sys; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    )
