"""Virtual counters: the service that each tenant has received, divided by its weight.

Each priority class has counters of its own. Shared ones would let the low counter of a starved
class define the level to which a newcomer of a higher class is lifted.

The counter of a tenant that returns from idle is lifted, so that idleness saves up no claim. The
rule is the published one (VTC, OSDI'24, algorithm 2): when a tenant's queue turns non-empty, to
the least counter of the tenants that wait; when nobody waits, to that of the tenant whose queue
emptied last. Running tenants that wait for nothing do not define the level: a tenant that sends a
trickle keeps a low counter for ever, and would hand that credit to every newcomer.
"""

import heapq
from collections.abc import Collection, Iterable

from engine.errors import ConfigError


class VirtualCounters:
    """Counters of one class by tenant, in service units per unit of weight."""

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._last_to_leave: str | None = None
        # (counter, tenant) of those that wait, and outdated entries: counters only grow, so an
        # entry that surfaces with another counter is pushed again.
        self._levels: list[tuple[float, str]] = []

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def copy(self) -> "VirtualCounters":
        """As they are now; the two then go their own ways."""
        other = VirtualCounters()
        other._counters, other._weights = self._counters.copy(), self._weights.copy()
        other._levels, other._last_to_leave = self._levels.copy(), self._last_to_leave
        return other

    def as_dict(self) -> dict[str, float]:
        return dict(self._counters)

    def arrive(self, tenant: str, weight: float, waiting: Collection[str]) -> None:
        """A request of `tenant` joins the queue; `waiting` are the tenants in it before."""
        if not 0 < weight < float("inf"):
            raise ConfigError(f"weight of {tenant} must be a positive number, not {weight}")
        self._weights[tenant] = weight
        self.lift(tenant, waiting)

    def lift(self, tenant: str, waiting: Collection[str]) -> None:
        """A sequence of `tenant` joins the queue, new or again."""
        if tenant in waiting:
            return
        level = self._least(waiting)
        if level is None:
            level = self[self._last_to_leave] if self._last_to_leave is not None else 0.0
        self._counters[tenant] = max(self[tenant], level)
        heapq.heappush(self._levels, (self[tenant], tenant))

    def _least(self, waiting: Collection[str]) -> float | None:
        """The least counter of those that wait, if any does."""
        levels = self._levels
        if len(levels) > 2 * len(waiting) + 64:
            levels[:] = [(self[tenant], tenant) for tenant in waiting]
            heapq.heapify(levels)
        while levels:
            counter, tenant = levels[0]
            if tenant not in waiting:
                heapq.heappop(levels)
            elif counter != self[tenant]:
                heapq.heapreplace(levels, (self[tenant], tenant))
            else:
                return counter
        return None

    def leave(self, tenant: str) -> None:
        """The last queued request of `tenant` was admitted or aborted."""
        self._last_to_leave = tenant

    def charge(self, tenant: str, service: float) -> None:
        self._counters[tenant] = self[tenant] + service / self._weights[tenant]

    def prune(self, active: Iterable[str]) -> None:
        """Forget idle tenants whose counter a lift would override anyway.

        What remains is exact: a tenant that is ahead keeps its counter, however long it stays
        away, so that leaving and returning launders nothing.
        """
        keep = set(active)
        if self._last_to_leave is not None:
            keep.add(self._last_to_leave)
        level = min((self[tenant] for tenant in keep), default=0.0)
        for tenant in [t for t, c in self._counters.items() if t not in keep and c <= level]:
            del self._counters[tenant], self._weights[tenant]
