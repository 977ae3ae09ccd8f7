"""Spending counted inside one process."""

from __future__ import annotations

from policies import Spent
from router.budgets.base import plus, today


class MemoryLedger:
    def __init__(self) -> None:
        self._day = today()
        self._spent: dict[str, Spent] = {}

    async def spent(self, tenant: str) -> Spent:
        self._turn_page()
        return self._spent.get(tenant, Spent())

    async def add(self, tenant: str, spent: Spent) -> None:
        self._turn_page()
        self._spent[tenant] = plus(self._spent.get(tenant, Spent()), spent)

    async def set(self, tenant: str, spent: Spent) -> None:
        self._turn_page()
        self._spent[tenant] = spent

    async def close(self) -> None:
        return None

    def _turn_page(self) -> None:
        if (day := today()) != self._day:
            self._day, self._spent = day, {}
