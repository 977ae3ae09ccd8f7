"""Prices, times and loads of each tier, for the turn at hand."""

from __future__ import annotations

from policies import Economics, TierEconomics
from router.admission.gate import Gate
from router.routing.length import held_tokens, mappable_tokens
from router.savings.books import Books
from router.sessions.base import Session
from router.settings import Settings, Tier, direction
from router.transfer.plan import Transfers
from router.turns.incoming import Subject
from router.workers.pool import Pool


class Fleet:
    def __init__(
        self,
        settings: Settings,
        pool: Pool,
        gates: dict[Tier, Gate],
        books: Books,
        transfers: Transfers,
    ) -> None:
        self._prices = settings.prices
        self._transfer = settings.transfers
        self._pool = pool
        self._gates = gates
        self._books = books
        self._transfers = transfers

    def economics(self, subject: Subject, prompt_tokens: int) -> Economics:
        return Economics(
            tiers={
                tier: self._tier(tier, model, subject, prompt_tokens)
                for tier, model in self._pool.models.items()
            }
        )

    def _tier(self, tier: Tier, model: str, subject: Subject, prompt: int) -> TierEconomics:
        session, price = subject.session, self._prices.of(tier)
        held = min(held_tokens(session, model), prompt)
        uncached = prompt - held
        taken, map_seconds = self._mapped(tier, model, session, prompt)
        worker = self._pool.pick(tier, subject.affinity)
        context = [w.context_tokens for w in self._pool.workers if w.tier == tier]
        return TierEconomics(
            available=worker is not None,
            in_flight=sum(w.in_flight for w in self._pool.workers if w.tier == tier),
            queued=self._gates[tier].queued,
            context_tokens=min((one for one in context if one), default=None),
            prompt_price=price.prompt if price else None,
            cached_price=price.of_cached if price else None,
            completion_price=price.completion if price else None,
            uncached_tokens=uncached,
            lossy=session is not None and session.lineage(model).lossy is not None,
            prefill_seconds=(
                self._books.model(worker.name).predict(uncached, held, 0) if worker else None
            ),
            decode_token_seconds=self._books.decode(worker.name).predict() if worker else None,
            mapped_share=taken / uncached if uncached else 0.0,
            map_seconds=map_seconds,
            retention=self._transfers.pairs.retention(session.model if session else None, model),
        )

    def _mapped(
        self, tier: Tier, model: str, session: Session | None, prompt: int
    ) -> tuple[float, float | None]:
        """Tokens that a map into this tier would take over, by experience, and its seconds."""
        source = session.model if session is not None else None
        if source in (None, model) or not self._transfers.possible(source, model):
            return 0.0, None
        tokens = mappable_tokens(self._transfer, session, model, prompt)
        if tokens == 0:
            return 0.0, None
        model_of = self._books.transfer(direction(tier))
        return tokens * model_of.share(), model_of.predict(tokens)
