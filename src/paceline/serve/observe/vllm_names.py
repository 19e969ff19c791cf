"""Metrics by vLLM's names, for routers that know those: Kubernetes' endpoint picker and others."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Histogram
    from prometheus_client.metrics_core import Metric

    from paceline.engine.gauges import Gauges
    from paceline.engine.stats import DraftCounts, Stats
    from paceline.serve.engines import Engines
    from paceline.serve.observe.metrics import Metrics

_GAUGES: tuple[tuple[str, str, Callable[[Gauges], float]], ...] = (
    ("vllm:num_requests_running", "Requests that hold a row", lambda g: g.num_running),
    ("vllm:num_requests_waiting", "Requests that wait for a row", lambda g: g.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of KV pages held by requests, from 0 to 1", lambda g: g.held_share),
)
_COUNTERS: tuple[tuple[str, str, Callable[[Stats], float]], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens of requests that got a row", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Tokens written", lambda s: s.output_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache", lambda s: s.prompt_tokens),
    ("vllm:prefix_cache_hits", "Prompt tokens found there", lambda s: s.cached_tokens),
    ("vllm:num_preemptions", "Requests sent back to the queue", lambda s: s.preemptions),
    ("vllm:spec_decode_num_drafts", "Drafts scored", lambda s: sum(sum(c.verified_at[:1]) for c in _counts(s))),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens scored", lambda s: sum(c.verified for c in _counts(s))),
    ("vllm:spec_decode_num_accepted_tokens", "Draft tokens kept", lambda s: sum(c.accepted for c in _counts(s))),
)
_HISTOGRAMS: tuple[tuple[str, Callable[[Metrics], Histogram]], ...] = (
    ("vllm:time_to_first_token_seconds", lambda m: m.ttft),
    ("vllm:request_time_per_output_token_seconds", lambda m: m.tpot),
    ("vllm:e2e_request_latency_seconds", lambda m: m.e2e),
)
_LABELS = ["model_name", "engine"]
_ENGINE = "0"  # replicas are told apart by names of ours


def _counts(stats: Stats) -> Iterable[DraftCounts]:
    return stats.drafters.values()


class VllmNames(Collector):
    """The newest snapshot and the server's observations by vLLM's names, with the model as label."""

    def __init__(self, engines: Engines, metrics: Metrics, model: Callable[[], str | None]) -> None:
        """model: returns the name of the model, None before it is known."""
        self._engines, self._metrics, self._model = engines, metrics, model

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        snapshot, model = self._engines.snapshot, self._model()
        if snapshot is None or model is None:
            return
        own = [model, _ENGINE]
        for name, about, value in _GAUGES:
            gauge = GaugeMetricFamily(name, about, labels=_LABELS)
            gauge.add_metric(own, value(snapshot.gauges))
            yield gauge
        for name, about, count in _COUNTERS:
            counter = CounterMetricFamily(name, about, labels=_LABELS)
            counter.add_metric(own, count(snapshot.stats))
            yield counter
        yield _kept_by_position(own, snapshot.stats)
        labels = ["block_size", "num_gpu_blocks", "engine"]
        config = GaugeMetricFamily("vllm:cache_config_info", "KV pages", labels=labels)
        config.add_metric([str(PAGE_TOKENS), str(snapshot.gauges.num_pages), _ENGINE], 1)
        yield config
        yield from self._observed(own)

    def _observed(self, own: list[str]) -> Iterator[Metric]:
        """Yield the server's own observations."""
        for name, histogram in _HISTOGRAMS:
            yield _renamed(histogram(self._metrics), name, own)
        ended = CounterMetricFamily("vllm:request_success", "Answers ended", labels=[*_LABELS, "finished_reason"])
        for family in self._metrics.answers.collect():
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    ended.add_metric([*own, sample.labels["finish_reason"]], sample.value)
        yield ended


def _kept_by_position(own: list[str], stats: Stats) -> Metric:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    kept = CounterMetricFamily(name, "Draft tokens kept, by position", labels=[*_LABELS, "position"])
    columns = zip_longest(*(counts.accepted_at for counts in _counts(stats)), fillvalue=0)
    for position, column in enumerate(columns):
        kept.add_metric([*own, str(position)], sum(column))
    return kept


def _renamed(histogram: Histogram, name: str, own: list[str]) -> Metric:
    """Return a histogram without labels under another name."""
    [family] = histogram.collect()
    buckets = [(s.labels["le"], s.value) for s in family.samples if s.name.endswith("_bucket")]
    [total] = [s.value for s in family.samples if s.name.endswith("_sum")]
    made = HistogramMetricFamily(name, family.documentation, labels=_LABELS)
    made.add_metric(own, buckets, total)
    return made
