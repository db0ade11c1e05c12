"""Priority classes: which there are, and what the operator may change of them."""

from dataclasses import asdict, replace
from typing import Any, TypedDict

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tenants.audit import open_change
from tenants.database import Database
from tenants.errors import ClassConflictError, ClassNotFoundError, InvalidNameError
from tenants.models import PolicyVersion, PriorityClass, Tenant
from tenants.policy import ServiceClass, check_slug
from tenants.queries import select_tenants, service_class

# What a request may ask for instead of a class by its name.
TIER_WORDS = frozenset({"auto", "default", "scale", "flex", "priority", "fast"})
_MAX_NAMED = 3


class ClassChanges(TypedDict, total=False):
    """What is to be different; what is left out stays."""

    rank: int
    weight: float
    preemptible: bool
    max_wait_seconds: float | None
    max_queue_seconds: float | None
    max_queued: int | None


async def list_classes(database: Database) -> tuple[ServiceClass, ...]:
    """All of them, the one that goes first first."""
    async with database.reading() as session:
        found = await session.scalars(select(PriorityClass).order_by(PriorityClass.rank))
        return tuple(service_class(one) for one in found)


async def create_class(
    database: Database, created: ServiceClass, *, actor: str, now: float
) -> None:
    """Raises InvalidNameError or ClassConflictError."""
    name = check_slug("class", created.name)
    if name in TIER_WORDS:
        raise InvalidNameError(
            f"class {name!r}: that word means something else as a request's service_tier"
        )
    async with open_change(database, actor=actor, now=now) as change:
        if await change.session.get(PriorityClass, name) is not None:
            raise ClassConflictError(f"class {name} exists; set it, or choose another name")
        await _check_rank_free(change.session, created)
        await change.session.execute(insert(PriorityClass).values(**asdict(created)))
        await change.record("class.created", name, before=None, after=asdict(created))


async def set_class(
    database: Database, name: str, changes: ClassChanges, *, actor: str, now: float
) -> ServiceClass:
    """Raises ClassNotFoundError, ClassConflictError or InvalidPolicyError."""
    async with open_change(database, actor=actor, now=now) as change:
        before = await _get(change.session, name)
        after = replace(before, **changes)
        await _check_rank_free(change.session, after)
        await change.session.execute(
            update(PriorityClass).where(PriorityClass.name == name).values(**asdict(after))
        )
        await change.record("class.updated", name, before=asdict(before), after=asdict(after))
    return after


async def delete_class(database: Database, name: str, *, actor: str, now: float) -> ServiceClass:
    """Requests that run in it go on. Raises ClassNotFoundError, or ClassConflictError while a
    tenant is in it or it is the only one."""
    async with open_change(database, actor=actor, now=now) as change:
        session = change.session
        before = await _get(session, name)
        if await session.scalar(select(func.count()).select_from(PriorityClass)) == 1:
            raise ClassConflictError(f"{name} is the only class; create another one first")
        rows: Any = await session.execute(
            select_tenants().where(PolicyVersion.priority_class == name).order_by(Tenant.slug)
        )
        if slugs := [row.Tenant.slug for row in rows]:
            raise ClassConflictError(f"{_listed(slugs)} in class {name}; move them first")
        await session.execute(delete(PriorityClass).where(PriorityClass.name == name))
        await change.record("class.deleted", name, before=asdict(before), after=None)
    return before


async def _get(session: AsyncSession, name: str) -> ServiceClass:
    stored = await session.get(PriorityClass, name)
    if stored is None:
        raise ClassNotFoundError(f"no priority class {name!r}; list the classes")
    return service_class(stored)


async def _check_rank_free(session: AsyncSession, wanted: ServiceClass) -> None:
    holder = await session.scalar(
        select(PriorityClass.name).where(
            PriorityClass.rank == wanted.rank, PriorityClass.name != wanted.name
        )
    )
    if holder is not None:
        raise ClassConflictError(
            f"rank {wanted.rank} is that of class {holder}; choose another, or move {holder} first"
        )


def _listed(slugs: list[str]) -> str:
    """`tenant a is`, or `tenants a, b, c and 4 more are`."""
    if len(slugs) == 1:
        return f"tenant {slugs[0]} is"
    more = f" and {len(slugs) - _MAX_NAMED} more" if len(slugs) > _MAX_NAMED else ""
    return f"tenants {', '.join(slugs[:_MAX_NAMED])}{more} are"
