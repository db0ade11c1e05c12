"""Requests that wait for this process's engine: how many may, and for how long."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tenants.errors import LimitExceededError
from tenants.policy import PLATFORM_ID, Metric, Principal, Scope

_CLASS = "class"  # counted like a scope


@dataclass(slots=True, eq=False)
class Wait:
    """One request's wait, until the engine first begins with it or it is left."""

    max_seconds: float | None = None
    is_over: bool = False
    is_overdue: bool = False  # over because it lasted too long
    _on_end: Callable[[], None] | None = None
    _timer: asyncio.TimerHandle | None = None

    def limit(self, give_up: Callable[[], None]) -> None:
        """Call back once if it lasts too long from now on."""
        if self.max_seconds is not None and not self.is_over:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.max_seconds, self._expire, give_up)

    def end(self) -> None:
        """It is over; later calls change nothing."""
        if self.is_over:
            return
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._on_end is not None:
            self._on_end()

    def _expire(self, give_up: Callable[[], None]) -> None:
        self.is_overdue = True
        self.end()
        give_up()


class WaitingRequests:
    """Holds `queued` limits and the depths of classes. The queue is this engine's own, and so is
    the count: a request is in it from its admission to the policy's limits until the engine begins
    with it."""

    def __init__(self) -> None:
        self._num_waiting: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def place(self, principal: Principal) -> Iterator[Wait]:
        """A place in the queue, given up at the end at the latest. Raises LimitExceededError."""
        self._check(principal)
        # Under all scopes, limited or not: a limit may be set while requests wait.
        scopes: tuple[tuple[str, str], ...] = (
            (Scope.PLATFORM, PLATFORM_ID),
            (Scope.TENANT, principal.tenant_id),
            (Scope.KEY, principal.key_id),
            (_CLASS, principal.service_class.name),
        )
        self._num_waiting.update(scopes)
        wait = Wait(principal.service_class.max_queue_seconds, _on_end=lambda: self._leave(scopes))
        try:
            yield wait
        finally:
            wait.end()

    def _check(self, principal: Principal) -> None:
        for one in principal.limits:
            used = self._num_waiting[one.scope, one.scope_id]
            if one.rule.metric == Metric.QUEUED and used >= one.rule.limit:
                raise _queue_full(one.scope, limit=one.rule.limit, used=used)
        # After the tenant's own limits, of which it can be told more.
        service_class = principal.service_class
        used, depth = self._num_waiting[_CLASS, service_class.name], service_class.max_queued
        if depth is not None and used >= depth:
            raise _queue_full(f"{_CLASS} {service_class.name}", limit=depth, used=used)

    def _leave(self, scopes: tuple[tuple[str, str], ...]) -> None:
        self._num_waiting.subtract(scopes)
        for scope in scopes:
            if not self._num_waiting[scope]:
                del self._num_waiting[scope]


def _queue_full(scope: str, *, limit: int, used: int) -> LimitExceededError:
    return LimitExceededError(
        metric=Metric.QUEUED,
        scope=scope,
        window_seconds=0,
        limit=limit,
        used=used,
        needed=1,
        retry_after_seconds=None,
        limits=(),
    )
