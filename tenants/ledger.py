"""Reserve before the work, settle exactly once after it. One transaction each.

Leases make this safe against crashes: whoever reserves renews; what is not renewed in time is
released by `expire`, in any gateway. A settle that is cancelled or loses the database has either
committed or left nothing, and may simply be called again.
"""

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import ColumnElement, and_, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import models, quota
from tenants.database import Database
from tenants.errors import DuplicateRequestError, LimitStatus
from tenants.policy import Principal
from tenants.quota import Demand, WindowKey

# Counters of finished windows are of no use: usage is in the ledger. The margin is for gateways
# whose clocks run late.
_KEEP_WINDOWS_SECONDS = 3600


class Status(StrEnum):
    """How a request ended, for the ledger."""

    COMPLETED = "completed"
    ABORTED = "aborted"  # the client left, or a deadline or operator stopped it
    FAILED = "failed"
    LOST = "lost"  # its gateway died; written by expire


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What a request holds until it is settled or its lease ends."""

    request_id: str
    limits: tuple[LimitStatus, ...]  # as they stand with this request in


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """How a request ended and what it really used. `started`: it cost some compute."""

    status: Status
    started: bool = True
    finish_reason: str | None = None
    error_code: str | None = None
    tokens_in: int = 0  # of the prompt, computed or from cache
    tokens_cached: int = 0  # those of tokens_in that came from cache
    tokens_out: int = 0
    tokens_recomputed: int = 0
    kv_block_seconds: float = 0.0
    admitted_at: float | None = None
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        counts = (self.tokens_in, self.tokens_cached, self.tokens_out, self.tokens_recomputed)
        if min(counts) < 0 or self.tokens_cached > self.tokens_in:
            raise ValueError(f"impossible token counts: {self}")
        if not 0 <= self.kv_block_seconds < math.inf:
            raise ValueError(f"impossible KV-block-seconds: {self}")
        if not self.started and any(counts):
            raise ValueError(f"tokens of a request that never started: {self}")


_NEVER_STARTED = Settlement(
    status=Status.ABORTED, started=False, error_code="client_closed_request"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageSum:
    """Ledger rows of one key, summed."""

    tenant_id: str
    key_id: str
    num_requests: int
    tokens_in: int
    tokens_cached: int
    tokens_out: int
    tokens_recomputed: int
    kv_block_seconds: float


class Ledger:
    """The books: one final row per request, and counters that never exceed a limit, but that of
    KV-block-seconds, which are known only afterwards."""

    def __init__(self, database: Database, *, instance_id: str, lease_seconds: float) -> None:
        self._database = database
        self._instance_id = instance_id
        self._lease_seconds = lease_seconds

    async def reserve(
        self,
        principal: Principal,
        request_id: str,
        *,
        prompt_tokens: int,
        max_output_tokens: int,
        now: float,
    ) -> Reservation:
        """Hold the request's worst case under every limit that applies, or change nothing.

        Raises NeverFitsLimitError, LimitExceededError or DuplicateRequestError. When cancelled, it
        comes to its end first and lets go of what it got.
        """
        wanted = quota.demands(
            principal.limits,
            prompt_tokens=prompt_tokens,
            max_output_tokens=max_output_tokens,
            now=now,
        )
        work = asyncio.create_task(self._open(principal, request_id, wanted, now=now))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work})
            if not work.cancelled() and work.exception() is None:
                await self.settle(request_id, _NEVER_STARTED, now=now)
            raise

    async def settle(self, request_id: str, settlement: Settlement, *, now: float) -> bool:
        """Replace the reservation by what was used. False if it was settled or lost before."""
        return await self._close(models.Reservation.request_id == request_id, settlement, now=now)

    async def renew(self, request_ids: Collection[str], *, now: float) -> list[str]:
        """Extend the leases of own requests; returns those that hold nothing any more."""
        async with self._database.writing() as session:
            renewed = await session.scalars(
                update(models.Reservation)
                .where(
                    models.Reservation.request_id.in_(request_ids),
                    models.Reservation.owner == self._instance_id,
                )
                .values(lease_until=now + self._lease_seconds)
                .returning(models.Reservation.request_id)
                .execution_options(synchronize_session=False)
            )
            alive = set(renewed)
        return [request_id for request_id in request_ids if request_id not in alive]

    async def expire(self, *, now: float, running: Collection[str] = ()) -> list[str]:
        """Release what crashed owners held and enter it as lost; returns the request ids.

        running   requests of the caller, which knows that they live however old their leases

        Nobody knows what a lost request computed: its tokens are released, its start stays
        counted, also where it was still waiting for the engine. Several gateways may do this at
        once; each request is lost once.
        """
        is_over = and_(
            models.Reservation.lease_until <= now,
            models.Reservation.request_id.not_in(running),
        )
        async with self._database.reading() as session:
            candidates = list(
                await session.scalars(select(models.Reservation.request_id).where(is_over))
            )
        lost = []
        for request_id in candidates:
            settlement = Settlement(status=Status.LOST, error_code="lease_expired")
            # The lease is asked again: its owner may have renewed it just now.
            same = and_(models.Reservation.request_id == request_id, is_over)
            if await self._close(same, settlement, now=now):
                lost.append(request_id)
        await self._forget_old_windows(now)
        return lost

    async def usage(
        self, *, since: float, until: float, tenant_id: str | None = None
    ) -> tuple[UsageSum, ...]:
        """Sums per key over requests that finished in [since, until)."""
        entry = models.LedgerEntry
        query = (
            select(
                entry.tenant_id,
                entry.key_id,
                func.count(),
                func.sum(entry.tokens_in),
                func.sum(entry.tokens_cached),
                func.sum(entry.tokens_out),
                func.sum(entry.tokens_recomputed),
                func.sum(entry.kv_block_seconds),
            )
            .where(entry.finished_at >= since, entry.finished_at < until)
            .group_by(entry.tenant_id, entry.key_id)
            .order_by(entry.tenant_id, entry.key_id)
        )
        if tenant_id is not None:
            query = query.where(entry.tenant_id == tenant_id)
        async with self._database.reading() as session:
            rows = (await session.execute(query)).all()
        # PostgreSQL sums integers to decimals.
        return tuple(
            UsageSum(
                tenant_id=tenant,
                key_id=key,
                num_requests=num_requests,
                tokens_in=int(sums[0]),
                tokens_cached=int(sums[1]),
                tokens_out=int(sums[2]),
                tokens_recomputed=int(sums[3]),
                kv_block_seconds=sums[4],
            )
            for tenant, key, num_requests, *sums in rows
        )

    async def find_imbalances(self) -> dict[WindowKey, tuple[int, int]]:
        """Counters whose `reserved` is not the sum of live reservations; empty if all is well.

        Values are (held by reservations, counted). Exact only while nothing is in flight.
        """
        window = models.LimitWindow
        async with self._database.reading() as session:
            all_items = list(await session.scalars(select(models.Reservation.items)))
            counters = (
                await session.execute(
                    select(*_key_columns(), window.reserved).where(window.reserved != 0)
                )
            ).all()
        held: dict[WindowKey, int] = {}
        for items in all_items:
            for *key, amount in items:
                held[WindowKey(*key)] = held.get(WindowKey(*key), 0) + amount
        counted = {WindowKey(*key): reserved for *key, reserved in counters}
        return {
            key: (held.get(key, 0), counted.get(key, 0))
            for key in held.keys() | counted.keys()
            if held.get(key, 0) != counted.get(key, 0)
        }

    async def _open(
        self, principal: Principal, request_id: str, wanted: tuple[Demand, ...], *, now: float
    ) -> Reservation:
        async with self._database.writing() as session:
            await _check_unused(session, request_id)
            held = await self._add_reserved(session, wanted)
            before = {one.key: held[one.key] - one.amount for one in wanted}
            # Leaving by its exception, or one below, rolls back every counter.
            quota.check_fit(wanted, before, now)
            made = await session.scalar(
                self._database.insert(models.Reservation)
                .values(
                    request_id=request_id,
                    tenant_id=principal.tenant_id,
                    key_id=principal.key_id,
                    generation=principal.generation,
                    policy_version=principal.policy_version,
                    priority_class=principal.service_class.name,
                    items=[[*one.key, one.amount] for one in wanted],
                    owner=self._instance_id,
                    lease_until=now + self._lease_seconds,
                    created_at=now,
                )
                .on_conflict_do_nothing(index_elements=["request_id"])
                .returning(models.Reservation.request_id)
            )
            if made is None:
                raise DuplicateRequestError(f"request {request_id} is already reserved")
        return Reservation(request_id=request_id, limits=quota.statuses(wanted, held, now))

    async def _add_reserved(
        self, session: AsyncSession, wanted: tuple[Demand, ...]
    ) -> dict[WindowKey, int]:
        """Add to each counter, making those of new windows; returns used + reserved afterwards.

        One statement locks the counters in key order and sees them as last committed, so that
        concurrent callers neither deadlock nor miss each other.
        """
        if not wanted:
            return {}
        window = models.LimitWindow
        statement = self._database.insert(window).values(
            [{**one.key._asdict(), "used": 0, "reserved": one.amount} for one in wanted]
        )
        rows = await session.execute(
            statement.on_conflict_do_update(
                index_elements=list(WindowKey._fields),
                set_={"reserved": window.reserved + statement.excluded.reserved},
            ).returning(*_key_columns(), window.used + window.reserved)
        )
        return {WindowKey(*key): held for *key, held in rows}

    async def _close(
        self, which: ColumnElement[bool], settlement: Settlement, *, now: float
    ) -> bool:
        """Settle the one reservation that matches. Deleting it is what makes this happen once."""
        async with self._database.writing() as session:
            closed = (
                await session.execute(
                    delete(models.Reservation)
                    .where(which)
                    .returning(
                        models.Reservation.request_id,
                        models.Reservation.tenant_id,
                        models.Reservation.key_id,
                        models.Reservation.generation,
                        models.Reservation.policy_version,
                        models.Reservation.priority_class,
                        models.Reservation.items,
                        models.Reservation.created_at,
                    )
                    .execution_options(synchronize_session=False)
                )
            ).one_or_none()
            if closed is None:
                return False
            for *key, amount in closed.items:
                await _move_to_used(session, WindowKey(*key), amount, settlement)
            await session.execute(
                insert(models.LedgerEntry).values(
                    request_id=closed.request_id,
                    tenant_id=closed.tenant_id,
                    key_id=closed.key_id,
                    generation=closed.generation,
                    policy_version=closed.policy_version,
                    priority_class=closed.priority_class,
                    status=settlement.status,
                    finish_reason=settlement.finish_reason,
                    error_code=settlement.error_code,
                    tokens_in=settlement.tokens_in,
                    tokens_cached=settlement.tokens_cached,
                    tokens_out=settlement.tokens_out,
                    tokens_recomputed=settlement.tokens_recomputed,
                    kv_block_seconds=settlement.kv_block_seconds,
                    arrived_at=closed.created_at,
                    admitted_at=settlement.admitted_at,
                    first_token_at=settlement.first_token_at,
                    finished_at=now,
                )
            )
        return True

    async def _forget_old_windows(self, now: float) -> None:
        window = models.LimitWindow
        async with self._database.writing() as session:
            await session.execute(
                delete(window)
                .where(
                    window.window_seconds > 0,
                    window.window_start + window.window_seconds < now - _KEEP_WINDOWS_SECONDS,
                    window.reserved == 0,
                )
                .execution_options(synchronize_session=False)
            )


async def _check_unused(session: AsyncSession, request_id: str) -> None:
    """A second reservation under a settled id could never be settled."""
    entry = models.LedgerEntry.request_id
    if await session.scalar(select(entry).where(entry == request_id)):
        raise DuplicateRequestError(f"request {request_id} is in the ledger already")


async def _move_to_used(
    session: AsyncSession, key: WindowKey, amount: int, settlement: Settlement
) -> None:
    """Correct the counter that was charged, by its key: never the window of now."""
    window = models.LimitWindow
    used = quota.settled_amount(
        key.metric,
        started=settlement.started,
        num_tokens=settlement.tokens_in + settlement.tokens_out,
        kv_block_seconds=settlement.kv_block_seconds,
    )
    await session.execute(
        update(window)
        .where(*(column == value for column, value in zip(_key_columns(), key, strict=True)))
        .values(reserved=window.reserved - amount, used=window.used + used)
        .execution_options(synchronize_session=False)
    )


def _key_columns() -> tuple[ColumnElement[str | int], ...]:
    return tuple(getattr(models.LimitWindow, name) for name in WindowKey._fields)
