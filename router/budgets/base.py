"""What a tenant has spent, and the interface of the ledgers that keep it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Protocol

from policies import Spent


class Ledger(Protocol):
    """Spending by tenant and UTC day. Neither call fails: answering goes before counting.

    Turns that run at the same time do not see each other's spending, so a budget can be
    passed by as much as they cost together.
    """

    async def spent(self, tenant: str) -> Spent: ...

    async def add(self, tenant: str, spent: Spent) -> None: ...

    async def close(self) -> None: ...


def today() -> str:
    return datetime.now(UTC).strftime("%Y%m%d")


def seconds_left() -> int:
    """Until the next UTC day begins, and with it a new budget."""
    now = datetime.now(UTC)
    midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
    return max(1, int((midnight - now).total_seconds()))


def plus(one: Spent, other: Spent) -> Spent:
    return Spent(money=one.money + other.money, large_tokens=one.large_tokens + other.large_tokens)
