"""Counters and gauges of one gateway, in Prometheus' text format. Labels are words from closed sets, never a request's data."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_LATENCY_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)


class Metrics:
    """All metrics, in a registry of their own so that two gateways in one test process don't collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sessions = self._gauge("sessions", "Open connections")
        self.requests = self._counter("requests", "Control requests by message and outcome", "message", "outcome")
        self.request_seconds = Histogram(
            "kvgate_request_seconds",
            "Time to answer a control request",
            ["message"],
            registry=self.registry,
            buckets=_LATENCY_BUCKETS,
        )
        self.bound_chunks = self._counter("bound_chunks", "Full chunks of bound requests, by what the index knew", "presence")
        self.acquired = self._counter("acquired_shards", "Shards taken under a hold, by the tier they came from", "tier")
        self.loads = self._counter("loaded_chunks", "Chunks copied by workers, by verdict", "verdict")
        self.reserved = self._counter("reserved_shards", "Answers to reserve", "status")
        self.committed = self._counter("committed_shards", "Ends of open writes", "outcome")
        self.payload_bytes = self._counter("payload_bytes", "Payload bytes made visible", "direction")
        self.quarantined = self._counter("quarantined_shards", "Objects that were not what their address says", "reason")
        self.storage_faults = self._counter("storage_faults", "Storage calls that failed or came too late", "call")
        self.misses = self._counter(
            "misses", "Lookups that missed, once under each of their reasons; see docs/explain.md", "reason"
        )
        self.explain_lost = self._counter("explain_lost", "Notes and questions that the explain index did not take", "what")
        self.variants = self._counter(
            "variants", "Artifacts of transforms: what became of publishing and binding them", "event"
        )
        self.earlier_chunks = Counter(
            "kvgate_earlier_secret_chunks", "Chunks found where an earlier deployment secret put them", registry=self.registry
        )
        self.deadlines = self._counter("deadlines", "Waits that ended at their deadline", "wait")

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        Gauge(f"kvgate_{name}", text, registry=self.registry).set_function(read)

    def text(self) -> bytes:
        """The page for ``/metrics``."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvgate_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"kvgate_{name}", text, registry=self.registry)
