"""Metrics by vLLM's names, for routers that know those: Kubernetes' endpoint picker and others."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from paceline.core.nouns import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from paceline.engine.gauges import Gauges
    from paceline.engine.stats import DraftCounts, Stats
    from paceline.serve.engines import Engines

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


def _counts(stats: Stats) -> Iterable[DraftCounts]:
    return stats.drafters.values()


class VllmNames(Collector):
    """The newest snapshot under these names, labelled with the model's."""

    def __init__(self, engines: Engines, model: Callable[[], str | None]) -> None:
        """model: returns the name of the model, None before it is known."""
        self._engines, self._model = engines, model

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        snapshot, model = self._engines.snapshot, self._model()
        if snapshot is None or model is None:
            return
        for name, about, value in _GAUGES:
            gauge = GaugeMetricFamily(name, about, labels=["model_name"])
            gauge.add_metric([model], value(snapshot.gauges))
            yield gauge
        for name, about, count in _COUNTERS:
            counter = CounterMetricFamily(name, about, labels=["model_name"])
            counter.add_metric([model], count(snapshot.stats))
            yield counter
        labels, name = ["model_name", "position"], "vllm:spec_decode_num_accepted_tokens_per_pos"
        kept = CounterMetricFamily(name, "Draft tokens kept, by position", labels=labels)
        columns = zip_longest(*(counts.accepted_at for counts in _counts(snapshot.stats)), fillvalue=0)
        for position, column in enumerate(columns):
            kept.add_metric([model, str(position)], sum(column))
        yield kept
        config = GaugeMetricFamily("vllm:cache_config_info", "KV pages", labels=["block_size", "num_gpu_blocks"])
        config.add_metric([str(PAGE_TOKENS), str(snapshot.gauges.num_pages)], 1)
        yield config
