"""Metrics of a fleet: its own, and those of its engines by replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from paceline.serve.observe.metrics import EngineCollector

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline.serve.fleet.member import Member

_ROUTE_SECONDS = (2e-5, 5e-5, 1e-4, 2e-4, 3e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_RESUME_SECONDS = (0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class FleetMetrics(Collector):
    """Counters of a fleet, which collects those of its engines as well."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self._members, self._own = members, CollectorRegistry()
        self.resumed = self._counter("resumed", "Answers that another replica went on with", "why")
        self.hedged = self._counter(
            "hedged", "Answers that two replicas wrote, by the one ahead in the end", "won"
        )
        self.moved = self._counter("moved", "Answers that were moved from one replica to another")
        self.routed = self._counter("routed", "Answers sent to a replica, by the reason for it", "replica", "why")
        self.audited = self._counter("audited", "Finished answers that another replica has written again")
        self.audit_mismatches = self._counter("audit_mismatches", "Audited answers that came out differently")
        about = "From a replica's loss to the next token"
        self.resume_s = Histogram("paceline_resume_seconds", about, buckets=_RESUME_SECONDS, registry=self._own)
        about = "Time of a routing decision"
        self.route_s = Histogram("paceline_route_seconds", about, buckets=_ROUTE_SECONDS, registry=self._own)

    def forget(self, replica: str) -> None:
        """Drop the series of a replica that was removed."""
        labels = [s.labels for family in self.routed.collect() for s in family.samples]
        for why in {of["why"] for of in labels if of["replica"] == replica}:
            self.routed.remove(replica, why)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        up = GaugeMetricFamily("paceline_replica_up", "1 if the replica takes requests", labels=["replica"])
        families: dict[str, Metric] = {}
        for name, member in self._members.items():
            up.add_metric([name], int(member.alive))
            for family in EngineCollector(member.engines).collect():
                whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                whole.samples += [s._replace(labels={"replica": name} | s.labels) for s in family.samples]
        yield up
        yield from families.values()
        yield from self._own.collect()

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(f"paceline_{name}", about, labels, registry=self._own)
