"""Everything a gateway process holds, and its start and stop."""

from __future__ import annotations

import asyncio

from router import log
from router.admission.gate import Gate
from router.admission.rate import RateLimit
from router.auth.keys import Keys
from router.budgets.base import Ledger
from router.budgets.memory import MemoryLedger
from router.budgets.redis import RedisLedger
from router.drift.desk import Desk
from router.metrics import Metrics
from router.routing.catalog import Catalog
from router.routing.decisions import DecisionLog
from router.routing.economics import Fleet
from router.routing.route import Route
from router.savings.books import Books
from router.sessions.base import Store
from router.sessions.memory import MemoryStore
from router.sessions.redis import RedisStore
from router.settings import Settings, Tier, read_secret
from router.transfer.plan import Transfers
from router.turns.dispatch import Dispatcher
from router.workers.pool import Pool

logger = log.get("gateway")
_LOOK_SECONDS = 2.0


class Gateway:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = metrics = Metrics()
        self.policies = Catalog(settings.policy_sources(), metrics)
        auth = settings.auth
        self.keys = Keys(auth.keys_file) if auth.keys_file else None
        self.admin_key = read_secret(auth.admin_key_file) if auth.admin_key_file else None
        password_file = settings.redis_password_file
        password = read_secret(password_file) if password_file else None
        self.store = _store(settings, password, metrics)
        limits, timeouts = settings.limits, settings.timeouts
        self.rate = (
            RateLimit(
                limits.requests_per_tenant,
                settings.redis_url,
                password,
                timeouts.store_seconds,
                metrics,
            )
            if limits.requests_per_tenant
            else None
        )
        self.pool = Pool(settings, metrics)
        self.gates: dict[Tier, Gate] = {
            tier: Gate(
                tier,
                limits.concurrency_per_tier,
                limits.concurrency_per_tenant,
                limits.queue_per_tier,
                limits.queue_seconds,
                metrics,
            )
            for tier in self.pool.models
        }
        self.transfers = Transfers(settings, metrics)
        self.drift = Desk(settings, self.pool, self.store, self.transfers.client, metrics)
        self.books = Books(metrics)
        fleet = Fleet(settings, self.pool, self.gates, self.books, self.transfers)
        self.route = Route(self.policies, fleet, metrics)
        self.ledger = _ledger(settings, password, metrics)
        self.decisions = DecisionLog(settings.decisions, metrics)
        self.dispatcher = Dispatcher(settings, self.pool, metrics)
        # Readiness is withdrawn first; `closing` ends the requests that outlast the drain.
        self.draining = False
        self.closing = False
        self.running: set[asyncio.Task[None]] = set()
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        if isinstance(self.store, MemoryStore):
            logger.warning(
                "session_state_in_memory",
                note="sessions are lost at a restart and not shared; set redis_url to keep them",
            )
        elif not await self.store.ping():
            logger.warning(
                "session_store_unavailable", note="turns are answered natively until then"
            )
        self.pool.start()
        self.policies.start()
        self._watches = [
            asyncio.create_task(self._look(), name="gauges"),
            asyncio.create_task(self.transfers.pairs.watch(), name="pairs-watch"),
        ]
        self.drift.start()

    async def stop(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self.policies.stop()
        await self.drift.stop()
        await self.pool.stop()
        await self.transfers.close()
        await self.store.close()
        await self.ledger.close()
        if self.rate is not None:
            await self.rate.close()
        self.decisions.close()

    def abort_running(self) -> None:
        """The drain's time is over: open answers end now, with an error that says so."""
        self.closing = True
        for task in self.running:
            task.cancel()

    def observe(self) -> None:
        """Brings the gauges up to date."""
        self.pool.observe()
        self.drift.observe()
        for gate in self.gates.values():
            gate.observe()

    async def _look(self) -> None:
        # So that gauges and /ready are right without traffic, and when another of several
        # processes is asked for the metrics of all.
        while True:
            await self.store.ping()
            self.observe()
            await asyncio.sleep(_LOOK_SECONDS)


def _ledger(settings: Settings, password: str | None, metrics: Metrics) -> Ledger:
    if settings.redis_url.startswith("memory:"):
        return MemoryLedger()
    return RedisLedger(settings.redis_url, password, settings.timeouts.store_seconds, metrics)


def _store(settings: Settings, password: str | None, metrics: Metrics) -> Store:
    ttl = settings.sessions.ttl_seconds
    if settings.redis_url.startswith("memory:"):
        metrics.store_up.set(1)
        return MemoryStore(ttl)
    return RedisStore(settings.redis_url, password, ttl, settings.timeouts.store_seconds, metrics)
