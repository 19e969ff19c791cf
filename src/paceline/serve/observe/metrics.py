"""Prometheus metrics: the engine's counters from its newest snapshot, and the server's own observations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline import __version__
from paceline.serve.observe.recent import Recent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from paceline.core.figures import Figures
    from paceline.engine.gauges import Gauges
    from paceline.engine.stats import Stats
    from paceline.serve.engines import Engines
    from paceline.serve.observe.access import RequestRecord

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)

# Counters of `Stats` that become metrics unchanged: metric, field, help. A restarted engine counts from 0.
_COUNTERS = (
    ("paceline_steps", "steps", "Engine steps"),
    ("paceline_step_seconds", "step_s", "Time in engine steps"),
    ("paceline_step_core_seconds", "step_core_s", "Processor time of the engine's thread in steps"),
    ("paceline_draft_seconds", "draft_s", "Time drafting"),
    ("paceline_target_seconds", "target_s", "Time in the target's passes"),
    ("paceline_decode_passes", "decode_passes", "Rows times steps in which they decoded"),
    ("paceline_decoded_tokens", "decoded_tokens", "Tokens committed by decode passes"),
    ("paceline_prompt_tokens", "prompt_tokens", "Prompt tokens of requests that got a row"),
    ("paceline_cached_tokens", "cached_tokens", "Prompt tokens found in the prefix cache"),
    ("paceline_prefilled_tokens", "prefilled_tokens", "Tokens computed of prompts, again after a preemption"),
    ("paceline_output_tokens", "output_tokens", "Tokens written"),
    ("paceline_changed_tokens", "changed_tokens", "Tokens that the law typical kept against the target's choice"),
    ("paceline_preemptions", "preemptions", "Requests sent back to the queue for want of pages"),
    ("paceline_resumed_requests", "resumed_requests", "Requests whose answers had begun elsewhere"),
    ("paceline_resumed_tokens", "resumed_tokens", "Answer tokens that came with these requests"),
    ("paceline_drafter_failures", "drafter_failures", "Drafts dropped because a drafter failed"),
    (
        "paceline_waited_rows",
        "waited_rows",
        "Rows that sat out a step, summed over steps, as the host had to see their last outcome",
    ),
    ("paceline_untapped_tokens", "untapped_tokens", "Cached tokens whose hidden states no draft head will see"),
)
# Likewise of `DiskCounts`.
_DISK_COUNTERS = (
    ("paceline_kv_disk_pages_written", "pages_written", "KV pages written to disk"),
    ("paceline_kv_disk_pages_read", "pages_read", "KV pages read from disk instead of computed"),
    ("paceline_kv_disk_pages_lost", "pages_lost", "KV pages evicted before they were written"),
    (
        "paceline_kv_disk_failures",
        "failures",
        "Failed writes of KV pages, broken pages, stalled readings",
    ),
    ("paceline_kv_disk_read_seconds", "read_s", "Time reading KV pages, beside steps"),
)
# Likewise of `Predictions`: the controller's errors, and the estimated time of plain decoding.
_PREDICTED = (
    ("paceline_predicted_step_seconds", "step_s", "Time of steps that were predicted"),
    ("paceline_misprediction_seconds", "error_s", "Time by which predictions were off"),
    (
        "paceline_plain_seconds",
        "plain_s",
        "Time that the tokens of these steps would have taken without drafts, estimated",
    ),
)
_GAUGES = (
    ("paceline_requests_running", "num_running", "Requests that hold a row"),
    ("paceline_requests_waiting", "num_waiting", "Requests that wait for a row"),
    ("paceline_queued_tokens", "num_queued_tokens", "Prompt tokens that wait for a row"),
    ("paceline_kv_pages", "num_pages", "KV pages in all"),
    ("paceline_kv_pages_held", "num_held_pages", "KV pages held by requests, or such a share of memory"),
    ("paceline_drafters", "num_drafters", "Drafters that are loaded; with auto, one that never pays is unloaded"),
    ("paceline_kv_bytes", "kv_bytes", "Memory of the KV cache, drafters included"),
    ("paceline_kv_disk_pages", "num_disk_pages", "KV pages on disk"),
    ("paceline_kv_disk_bytes", "num_disk_bytes", "Bytes of KV pages on disk"),
    ("paceline_kv_use_ratio", "held_share", "Share of KV pages held by requests"),
)


class EngineCollector(Collector):
    """Metrics of the engine's newest snapshot."""

    def __init__(self, client: Engines) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the engine."""
        client = self._client
        yield GaugeMetricFamily("paceline_engine_up", "1 if the engine is ready", int(client.ready is not None))
        about = "Times the engine process was restarted"
        yield CounterMetricFamily("paceline_engine_restarts", about, client.restarts)
        yield GaugeMetricFamily("paceline_requests_open", "Answers the server is waiting for", client.num_open)
        if client.snapshot is not None:
            yield from _counters(client.snapshot.stats)
            yield from _speculation(client.snapshot.stats)
            yield from _gauges(client.snapshot.gauges)


def _counters(stats: Stats) -> Iterator[Metric]:
    for counts, fields in ((stats, _COUNTERS), (stats.kv_disk, _DISK_COUNTERS), (stats.predictions, _PREDICTED)):
        for name, field, about in fields:
            yield CounterMetricFamily(name, about, getattr(counts, field))


def _gauges(gauges: Gauges) -> Iterator[Metric]:
    for name, field, about in _GAUGES:
        yield GaugeMetricFamily(name, about, getattr(gauges, field))
    about = "Memory that running requests take in a drafter's state"
    state = GaugeMetricFamily("paceline_drafter_state_bytes", about, labels=["drafter"])
    for name, num_bytes in gauges.drafter_bytes.items():
        state.add_metric([name], num_bytes)
    yield state


def _speculation(stats: Stats) -> Iterator[Metric]:
    """Yield counts of drafts by drafter and position; accepted / verified estimates survival."""
    drafted = CounterMetricFamily("paceline_drafted_tokens", "Tokens proposed", labels=["drafter"])
    labels = ["drafter", "position"]
    verified = CounterMetricFamily("paceline_verified_tokens", "Drafts scored by the target", labels=labels)
    accepted = CounterMetricFamily("paceline_accepted_tokens", "Drafts kept", labels=labels)
    trimmed = CounterMetricFamily("paceline_trimmed_tokens", "Drafts not worth verifying", labels=["drafter"])
    rejected = CounterMetricFamily("paceline_rejected_tokens", "Drafts verified, not kept", labels=["drafter"])
    for name, counts in stats.drafters.items():
        drafted.add_metric([name], counts.drafted)
        trimmed.add_metric([name], counts.trimmed)
        rejected.add_metric([name], counts.rejected)
        for family, values in ((verified, counts.verified_at), (accepted, counts.accepted_at)):
            for position, value in enumerate(values):
                family.add_metric([name, str(position)], value)
    passes = CounterMetricFamily(
        "paceline_decode_passes_by_k", "Decode passes that verified k drafts", labels=["k"]
    )
    for k, count in enumerate(stats.k_histogram):
        passes.add_metric([str(k)], count)
    yield from (drafted, trimmed, verified, accepted, rejected, passes)


class Metrics:
    """Observations of one server, in a registry of their own."""

    def __init__(self, engines: Collector) -> None:
        """engines: yields their metrics."""
        self.recent = Recent()
        self.registry = CollectorRegistry()
        self.registry.register(engines)
        self.answers = Counter(
            "paceline_requests", "Answers ended, by finish reason", ["finish_reason"], registry=self.registry
        )
        self._refused = Counter(
            "paceline_refused", "Requests answered with an error", ["status"], registry=self.registry
        )
        self._of_keys = Counter(
            "paceline_key_requests", "Requests by the name of their key", ["key"], registry=self.registry
        )
        self._tokens_of_keys = Counter(
            "paceline_key_tokens", "Tokens by the name of their key", ["key", "kind"], registry=self.registry
        )
        self.ttft = self._histogram("paceline_time_to_first_token_seconds", "Arrival to first token", _SECONDS)
        self.tpot = self._histogram(
            "paceline_time_per_output_token_seconds", "Mean time per token after the first", _TOKEN_SECONDS
        )
        self.e2e = self._histogram("paceline_request_seconds", "Arrival to last token", _SECONDS)
        version = Gauge("paceline_build_info", "Version", ["version"], registry=self.registry)
        version.labels(__version__).set(1)

    def first_token(self, wait_s: float) -> None:
        """Observe the time from a request's arrival to its first token."""
        self.ttft.observe(wait_s)
        self.recent.first_token(wait_s)

    def finished(
        self, reason: str, first_s: float, figures: Figures | None, total_s: float, num_told: int = 0
    ) -> None:
        """Observe the end of an answer.

        first_s, total_s: from arrival to the first token and to the end. figures: None if it was cut short.
        num_told: tokens that came with the request.
        """
        self.answers.labels(reason).inc()
        if figures is None:
            return
        self.e2e.observe(total_s)
        if (num_tokens := figures.completion_tokens - num_told) > 1:
            mean_s = (total_s - first_s) / (num_tokens - 1)
            self.tpot.observe(mean_s)
            self.recent.later_tokens(mean_s)

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(str(status)).inc()

    def tell(self, record: RequestRecord) -> None:
        """Count a request by the name of its key in the key file."""
        if record.key is None:
            return
        self._of_keys.labels(record.key).inc()
        for kind in ("prompt", "completion"):
            num_tokens = record.fields.get(f"{kind}_tokens")
            if num_tokens:
                self._tokens_of_keys.labels(record.key, kind).inc(num_tokens)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, about, buckets=buckets, registry=self.registry)
