"""Drift's Prometheus metrics; labels are directions, parts of an answer and code words."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from router.sessions.base import POSITIONS
from router.sessions.record import Measurement, position

# One answer's mean is noisy and may be negative; zero is a bound so that both sides show.
_NATS = (-1, -0.3, -0.1, -0.03, -0.01, -0.001, 0, 0.001, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 1, 2, 5)
_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
# Labels of the parts of an answer, by the number of the first token in each.
PARTS = tuple(str(first) for first in (0, *POSITIONS))


class DriftMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.audits = Counter(
            "baton_audits_total",
            "Audits by what became of them.",
            ["direction", "outcome"],
            registry=registry,
        )
        self.seconds = Histogram(
            "baton_audit_seconds",
            "Worker time of an audit that ran, waiting left out.",
            registry=registry,
            buckets=_SECONDS,
        )
        self.pieces = Histogram(
            "baton_audit_piece_seconds",
            "Time of an audit's requests: done, failed, or aborted for a user to be begun anew.",
            ["outcome"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.waiting = Gauge(
            "baton_audits_waiting",
            "Audits not begun yet.",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self.nats = Histogram(
            "baton_drift_nats",
            "Mean (mapped - native) log-probability of an audited answer's tokens.",
            ["direction"],
            registry=registry,
            buckets=_NATS,
        )
        self.first_token = Histogram(
            "baton_drift_first_token_nats",
            "The same for the answer's first token.",
            ["direction"],
            registry=registry,
            buckets=_NATS,
        )
        self.by_position = Histogram(
            "baton_drift_position_nats",
            "The same for each token, by the part of the answer that begins at that token.",
            ["direction", "position"],
            registry=registry,
            buckets=_NATS,
        )
        # A histogram with negative values has no sum in Prometheus, and a counter cannot fall:
        # the mean is (above - below) / tokens.
        self.signed_nats = Counter(
            "baton_drift_signed_nats",
            "Sum of the same over tokens likelier (above) and less likely (below) on mapped KV.",
            ["direction", "position", "side"],
            registry=registry,
        )
        self.tokens = Counter(
            "baton_drift_tokens",
            "Tokens that audits have measured.",
            ["direction", "position"],
            registry=registry,
        )
        self.reanchored = Counter(
            "baton_reanchored_total",
            "Lossy lineages that were replaced by exact KV.",
            ["direction", "by"],
            registry=registry,
        )
        self.ahead = Counter(
            "baton_ahead_total",
            "Transfers ahead of a switch by what became of them.",
            ["outcome"],
            registry=registry,
        )
        self.ahead_tokens = Counter(
            "baton_ahead_tokens_total",
            "Tokens mapped ahead of a switch, and how many were used or wasted.",
            ["outcome"],
            registry=registry,
        )

    def observe(self, direction: str, found: Measurement) -> None:
        self.nats.labels(direction).observe(found.per_token)
        self.first_token.labels(direction).observe(found.nats[0])
        for index, nats in enumerate(found.nats):
            part = PARTS[position(index)]
            self.by_position.labels(direction, part).observe(nats)
            self.tokens.labels(direction, part).inc()
            side = "above" if nats > 0 else "below"
            self.signed_nats.labels(direction, part, side).inc(abs(nats))
