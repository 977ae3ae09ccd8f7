"""The mapper's Prometheus metrics; no label carries a tenant, a session or a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mapper.service.protocol import Reason, TransferResult
from mapper.store import DirectoryStore

# A transfer may have ended for these while it was waiting, its models not looked at.
_PERHAPS_UNSEEN = {Reason.DEADLINE, Reason.YIELDED, Reason.ERROR}
# From a millisecond (a few linked pages) to a minute (a very long context on CPU).
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Counters of one mapper process, in a registry of their own."""

    def __init__(self, store: DirectoryStore) -> None:
        self.registry = CollectorRegistry()
        self._transfers = Counter(
            "baton_mapper_transfers",
            "Transfers by outcome",
            ["pair", "status", "reason"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "baton_mapper_transfer_seconds",
            "Time spent on a transfer, in seconds",
            ["pair", "status"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._tokens = Counter(
            "baton_mapper_tokens",
            "Tokens made restorable, by where their pages came from",
            ["pair", "origin"],
            registry=self.registry,
        )
        self.registry.register(_StoreCollector(store))

    def observe(self, result: TransferResult, live: Callable[[], bool]) -> None:
        """A client may send any model name; only pairs that are `live` become label values. That is read from the store,
        and asked only where the transfer may have ended before it looked."""
        known = result.reason not in _PERHAPS_UNSEEN or live()
        pair = result.pair if known and result.reason != Reason.UNKNOWN_MODEL else "unknown"
        self._transfers.labels(pair, result.status, result.reason).inc()
        self._seconds.labels(pair, result.status).observe(result.ms / 1000)
        for origin in ("mapped", "reused", "exact"):
            tokens = getattr(result, f"{origin}_tokens")
            if tokens:
                self._tokens.labels(pair, origin).inc(tokens)


class _StoreCollector(Collector):
    def __init__(self, store: DirectoryStore) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        pages, used = self._store.usage()
        yield GaugeMetricFamily("baton_store_pages", "Pages in the store", pages)
        yield GaugeMetricFamily("baton_store_bytes", "Bytes in the store", used)
        yield GaugeMetricFamily(
            "baton_store_limit_bytes", "The store's limit", self._store.max_bytes
        )
        events = CounterMetricFamily(
            "baton_store_events",
            "Page events seen by this process; bad_* pages were removed and count as misses",
            labels=["event"],
        )
        for event, count in sorted(self._store.counters.items()):
            events.add_metric([event], count)
        yield events
