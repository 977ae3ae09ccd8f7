"""Books what a transfer saved or lost, once the worker has confirmed it."""

from __future__ import annotations

from dataclasses import dataclass

from router.metrics import Metrics
from router.relay.parser import Usage
from router.savings.model import PrefillModel
from router.savings.pace import DecodeModel, TransferModel
from router.transfer.outcome import Outcome
from router.workers.worker import Worker


@dataclass(frozen=True)
class Booking:
    tokens: int = 0
    # Negative when the transfer took longer than the prefill it replaced; None when the
    # worker's prefill model cannot say yet.
    seconds: float | None = 0.0


class Books:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._models: dict[str, PrefillModel] = {}
        self._decode: dict[str, DecodeModel] = {}
        self._transfers: dict[str, TransferModel] = {}

    def model(self, worker: str) -> PrefillModel:
        return self._models.setdefault(worker, PrefillModel())

    def decode(self, worker: str) -> DecodeModel:
        return self._decode.setdefault(worker, DecodeModel())

    def transfer(self, direction: str) -> TransferModel:
        return self._transfers.setdefault(direction, TransferModel())

    def observe(self, worker: Worker, usage: Usage, seconds: float) -> None:
        """A prefill without transferred KV that had the worker to itself."""
        cached = usage.cached_tokens or 0
        model = self.model(worker.name)
        model.observe(usage.prompt_tokens - cached, cached, seconds)
        if (per_1k := model.predict(1000, 0, 0)) is not None:
            self._metrics.prefill_rate.labels(worker.name).set(per_1k)

    def book(self, worker: Worker, outcome: Outcome, usage: Usage) -> Booking:
        """Only what the worker reports as cached counts, and never what was a prefix hit anyway."""
        pair, direction = outcome.pair, outcome.direction
        if outcome.status != "applied" or outcome.tokens == 0:
            return Booking()
        cached = usage.cached_tokens or 0
        # Exact before, or in the lineage since an earlier transfer: found without this one.
        found = max(outcome.exact_tokens, outcome.tokens - outcome.fresh_tokens)
        taken = max(0, min(cached, outcome.tokens) - found)
        if taken == 0 and outcome.fresh_tokens:
            self._metrics.unconfirmed.labels(pair, direction).inc()
        self._metrics.transferred_tokens.labels(pair, direction).inc(taken)
        rest = max(0, usage.prompt_tokens - cached)
        native = self.model(worker.name).predict(taken, cached - taken, rest) if taken else 0.0
        if native is None:
            self._metrics.unpriced.labels(pair, direction).inc()
            return Booking(taken, None)
        seconds = native - outcome.seconds
        series = self._metrics.saved if seconds >= 0 else self._metrics.lost
        series.labels(pair, direction, "estimated").inc(abs(seconds))
        return Booking(taken, seconds)
