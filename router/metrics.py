"""Prometheus metrics. Label values are bounded: no tenant, session, key or request is one."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

_TTFT_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120,
)  # fmt: skip
_TRANSFER_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_DECIDE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1, 1)
MULTIPROC_DIR = "PROMETHEUS_MULTIPROC_DIR"


class Bounded:
    """Keeps a label to its first `size` values, for words that come from another process."""

    def __init__(self, size: int = 64) -> None:
        self._size = size
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._seen:
            if len(self._seen) >= self._size:
                return "other"
            self._seen.add(value)
        return value


class Metrics:
    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.bounded_reason = Bounded()
        self.bounded_pair = Bounded()
        # Policies name their rules, and thereby reasons.
        self.bounded_decision = Bounded(256)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str, mode: str = "livesum") -> Gauge:
            return Gauge(name, text, labels, registry=registry, multiprocess_mode=mode)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, registry=registry, buckets=buckets)

        self.saved = counter(
            "baton_prefill_seconds_saved_total",
            "Predicted native prefill of the tokens taken over, less the time of the transfer.",
            "pair", "direction", "basis",
        )  # fmt: skip
        self.lost = counter(
            "baton_prefill_seconds_lost_total",
            "As above where the transfer took longer than the prefill it replaced.",
            "pair", "direction", "basis",
        )  # fmt: skip
        self.unpriced = counter(
            "baton_transfers_unpriced_total",
            "Confirmed transfers to a worker whose prefill model has too few observations yet.",
            "pair", "direction",
        )  # fmt: skip
        self.unconfirmed = counter(
            "baton_transfers_unconfirmed_total",
            "Transfers answered as applied of which the worker reported no cached token.",
            "pair", "direction",
        )  # fmt: skip
        self.transfers = counter(
            "baton_kv_transfer_total",
            "Changes of model by how the KV cache was carried over, and why.",
            "pair", "direction", "status", "reason",
        )  # fmt: skip
        self.transfer_seconds = histogram(
            "baton_kv_transfer_seconds",
            "Time the gateway waited for a transfer, tokenizing included.",
            _TRANSFER_BUCKETS,
        )
        self.transferred_tokens = counter(
            "baton_kv_transferred_tokens_total",
            "Tokens taken over from another model's cache, as confirmed by the worker.",
            "pair", "direction",
        )  # fmt: skip
        self.ttft = histogram(
            "baton_time_to_first_token_seconds",
            "From the whole request received to the first event of the worker's answer.",
            _TTFT_BUCKETS,
            "tier", "kv",
        )  # fmt: skip
        self.duration = histogram(
            "baton_request_seconds",
            "From the whole request received to the last byte of the answer.",
            _TTFT_BUCKETS,
            "tier",
        )
        self.switches = counter(
            "baton_switches_total", "Changes of tier within a session.", "direction", "reason"
        )
        self.requests = counter(
            "baton_requests_total",
            "Requests by route and status; 499 is a client that went away.",
            "route", "status",
        )  # fmt: skip
        self.turns = counter(
            "baton_turns_total", "Turns sent to a worker, by tier and decision.", "tier", "reason"
        )
        self.tokens = counter(
            "baton_tokens_total",
            "Tokens by kind; basis is reported (by the worker) or counted (by the gateway).",
            "tier", "kind", "basis",
        )  # fmt: skip
        self.decisions = counter(
            "baton_policy_decisions_total",
            "Decisions by policy, arm of a rollout (none without one), tier and reason.",
            "policy", "arm", "tier", "stage", "reason",
        )  # fmt: skip
        self.shadow = counter(
            "baton_policy_shadow_total",
            "What a policy in shadow would have decided beside what was carried out.",
            "policy", "tier", "shadow_tier",
        )  # fmt: skip
        self.decide_seconds = histogram(
            "baton_policy_decide_seconds",
            "Time of one decision: its inputs gathered, and the policy itself.",
            _DECIDE_BUCKETS,
            "policy",
        )
        self.decisions_unwritten = counter(
            "baton_decisions_unwritten_total", "Lines that decisions.log_file did not take."
        )
        self.policy_reloads = counter(
            "baton_policy_reloads_total",
            "Changed policy files by what became of them: taken, or refused as bad.",
            "policy", "outcome",
        )  # fmt: skip
        self.policy_stale = gauge(
            "baton_policy_stale",
            "1 while a policy's file is bad and its last good version decides.",
            "policy",
            mode="livemax",
        )
        self.cascades = counter(
            "baton_cascade_total",
            "Cascade turns by what became of the small tier's answer, and why.",
            "outcome", "reason",
        )  # fmt: skip
        self.cascade_wait = histogram(
            "baton_cascade_hold_seconds",
            "How much later the client's first byte came because of the cascade: the small "
            "tier's answer held back (kept), or all the time spent on it (escalated, failed).",
            _TTFT_BUCKETS,
            "outcome",
        )  # fmt: skip
        self.money = counter(
            "baton_money_total", "What turns cost by the prices in the settings.", "tier"
        )
        self.worker_requests = counter(
            "baton_worker_requests_total", "Requests to workers by outcome.", "worker", "outcome"
        )
        self.retries = counter(
            "baton_worker_retries_total", "Second attempts before the first byte.", "reason"
        )
        self.hedges = counter("baton_worker_hedges_total", "Hedged requests.", "winner")
        self.worker_up = gauge(
            "baton_worker_up", "Whether the worker passes its health check.", "worker", "tier",
            mode="livemin",
        )  # fmt: skip
        self.breaker = gauge(
            "baton_worker_breaker_state", "0 closed, 1 half open, 2 open.", "worker",
            mode="livemax",
        )  # fmt: skip
        self.worker_in_flight = gauge(
            "baton_worker_in_flight", "Requests a worker is answering for this gateway.", "worker"
        )
        self.in_flight = gauge("baton_in_flight", "Admitted turns by tier.", "tier")
        self.queued = gauge("baton_queued", "Turns waiting for admission by tier.", "tier")
        self.rejected = counter(
            "baton_rejected_total", "Requests refused before a worker saw them.", "reason"
        )
        self.store_up = gauge(
            "baton_session_store_up", "Whether the session store answers.", mode="livemin"
        )
        self.store_errors = counter(
            "baton_session_store_errors_total",
            "Failed calls to Redis: of the session store, and for spend and rate.",
            "operation",
        )
        self.mapper_up = gauge(
            "baton_mapper_up", "Whether the mapper answered its last call.", mode="livemin"
        )
        self.prefill_rate = gauge(
            "baton_worker_prefill_seconds_per_1k_tokens",
            "What the worker's prefill model predicts for 1,000 uncached tokens.",
            "worker",
            mode="mostrecent",
        )

    def render(self) -> bytes:
        if os.environ.get(MULTIPROC_DIR):
            registry = CollectorRegistry()
            MultiProcessCollector(registry)
            return generate_latest(registry)
        return generate_latest(self.registry)
