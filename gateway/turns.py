"""Turns between tenants at work that few may do at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary


class TenantTurns:
    """Slots for everybody. A tenant holds or awaits at most one of them, whatever it sends."""

    def __init__(self, num_slots: int) -> None:
        self._slots = asyncio.Semaphore(num_slots)
        # Its holder and those who wait for it keep a lock alive, nothing else does.
        self._places: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """First come, first served among the tenant's own requests, then among tenants."""
        place = self._places.setdefault(tenant_id, asyncio.Lock())
        async with place, self._slots:
            yield
