"""Metrics by vLLM's names, as a router scrapes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from paceline.engine.gauges import Gauges
from paceline.engine.stats import DraftCounts, Stats
from paceline.serve.observe.metrics import Metrics
from paceline.serve.observe.vllm_names import VllmNames
from paceline.serve.worker.messages import Snapshot
from tests.serve.conftest import running

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_router_finds_queue_pages_and_hits(model: Path, replicas: str) -> None:
    flags = ("--metrics-names", "vllm", "--served-model-name", "tiny", "--replicas", replicas)
    with running(model, *flags) as server, server.client() as client:
        for _ in range(2):
            body = {"model": "tiny", "prompt": list(range(40, 80)), "max_tokens": 9, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).status_code == 200
        text = client.get("/metrics").text
    found = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    assert found["vllm:num_requests_waiting"].value == found["vllm:num_requests_running"].value == 0
    assert found["vllm:num_requests_running"].labels == {"model_name": "tiny", "engine": "0"}
    assert 0 <= found["vllm:kv_cache_usage_perc"].value <= 1
    assert found["vllm:cache_config_info"].labels["block_size"] == "16"
    assert int(found["vllm:cache_config_info"].labels["num_gpu_blocks"]) > 0
    assert found["vllm:prompt_tokens_total"].value == 80
    assert found["vllm:generation_tokens_total"].value == 18
    assert found["vllm:prefix_cache_hits_total"].value == 32
    assert found["vllm:prefix_cache_queries_total"].value == 80
    assert found["vllm:request_success_total"].labels["finished_reason"] == "length"
    assert found["vllm:request_success_total"].value == 2
    for name in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency"):
        assert found[f"vllm:{name}_seconds_count"].value == 2
        assert found[f"vllm:{name}_seconds_sum"].value > 0
    assert "paceline_steps_total" in text, "our own names are there in any case"


def test_drafts_are_those_that_were_scored() -> None:
    """As in vLLM, whose share of accepted drafts is of these; others were trimmed before."""
    stats = Stats(drafters={"a": DraftCounts(100, [30, 20], [25, 15]), "b": DraftCounts(8, [4], [1], beside=2)})
    engines: Any = SimpleNamespace(snapshot=Snapshot(stats, Gauges.none()))
    families = list(VllmNames(engines, Metrics(CollectorRegistry()), lambda: "tiny").collect())
    found = {sample.name: sample.value for family in families for sample in family.samples}
    assert found["vllm:spec_decode_num_drafts_total"] == 34
    assert found["vllm:spec_decode_num_draft_tokens_total"] == 56
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == 41
    [kept] = [f for f in families if f.name.endswith("_per_pos")]
    assert [(s.name, s.labels["position"], s.value) for s in kept.samples] == [
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0", 26),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1", 15),
    ]


def test_without_the_flag_there_are_none(http) -> None:
    assert "vllm:" not in http.get("/metrics").text
