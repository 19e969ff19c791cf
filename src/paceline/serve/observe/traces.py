"""OpenTelemetry: a span for each request, with the GenAI attributes and what speculation did.

The packages of the extra `otel` are imported only where an endpoint is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paceline import __version__
from paceline.core.errors import ConfigError
from paceline.serve.observe.access import PROBES, SERVER_FAULT

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from paceline.serve.observe.access import RequestRecord

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
EXPORT_S = 5.0  # time until an export is given up
NS = 1_000_000_000


def url_of_traces(endpoint: str) -> str:
    """Return the URL that takes traces. Raises `ConfigError`.

    An endpoint without a path gets OTLP's own.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--otlp-endpoint must be like http://localhost:4318, not {endpoint[:128]!r}")
    return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1/traces"


class Traces:
    """Sends a span of each request to a collector, from a thread of OpenTelemetry's."""

    def __init__(self, endpoint: str) -> None:
        """Import what is needed. Raises `ConfigError` without the extra."""
        url = url_of_traces(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError:
            raise ConfigError("--otlp-endpoint needs more packages: pip install 'paceline[otel]'") from None
        resource = Resource.create({"service.name": "paceline", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_S)))
        self._tracer: Tracer = self._provider.get_tracer("paceline", __version__)

    def tell(self, record: RequestRecord) -> None:
        """Make a span of a request that has ended; probes have none."""
        if record.path in PROBES:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        operation = OPERATIONS.get(record.path)
        name = f"{operation} {record.model}" if operation and record.model else f"{record.method} {record.path}"
        begin, end = int(record.begin_s * NS), int(record.end_s * NS)
        context = _context_of(record.traceparent)
        span = self._tracer.start_span(
            name, context, SpanKind.SERVER, attributes_of(record), start_time=begin, record_exception=False
        )
        _add_first_token(span, record)
        if record.status >= SERVER_FAULT:
            span.set_status(Status(StatusCode.ERROR, record.reason))
        span.end(end)

    def close(self) -> None:
        """Send what is queued; give up after some seconds."""
        self._provider.force_flush(int(1e3 * EXPORT_S))
        self._provider.shutdown()


def _context_of(traceparent: str | None) -> Any:
    """Return the context of a client's trace, empty for none or a malformed one."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent} if traceparent else {})


def _add_first_token(span: Span, record: RequestRecord) -> None:
    if record.first_token_s is not None:
        at = int((record.begin_s + record.first_token_s) * NS)
        span.add_event("gen_ai.first_token", {"paceline.ttft_s": record.first_token_s}, at)


def attributes_of(record: RequestRecord) -> dict[str, Any]:
    """Return a span's attributes: those that OpenTelemetry names, and ours beginning with `paceline.`."""
    fields, figures = record.fields, record.figures
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status or None,
        "error.type": str(record.status) if record.status >= SERVER_FAULT else None,
        "paceline.request_id": record.request_id,
        "paceline.key": record.key,
        "paceline.refusal": record.reason,
    }
    if record.model is not None:
        found |= {
            "gen_ai.operation.name": OPERATIONS.get(record.path, "chat"),
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "gen_ai.response.id": record.response_id,
            "gen_ai.response.finish_reasons": record.finish_reasons or None,
            "gen_ai.usage.input_tokens": fields.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": fields.get("completion_tokens"),
            "gen_ai.server.time_to_first_token": record.first_token_s,
            "paceline.cached_tokens": fields.get("cached_tokens"),
            "paceline.tokens_per_s": fields.get("tokens_per_s"),
            "paceline.speculation.tokens_per_pass": fields.get("tokens_per_pass"),
            "paceline.speculation.verified_tokens": sum(f.verified_tokens for f in figures),
            "paceline.speculation.accepted_tokens": sum(f.accepted_tokens for f in figures),
        }
        sources = fields.get("tokens_by_source", {})
        found |= {f"paceline.speculation.tokens.{name}": count for name, count in sources.items()}
    return {name: value for name, value in found.items() if value is not None}
