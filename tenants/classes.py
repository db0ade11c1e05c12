"""Priority classes: which there are, and what the operator may change of them."""

from dataclasses import asdict, replace
from typing import TypedDict

from sqlalchemy import select, update

from tenants.audit import open_change
from tenants.database import Database
from tenants.errors import ClassNotFoundError
from tenants.models import PriorityClass
from tenants.policy import ServiceClass
from tenants.queries import service_class


class ClassChanges(TypedDict, total=False):
    """What is to be different; what is left out stays."""

    preemptible: bool
    max_queue_seconds: float | None


async def list_classes(database: Database) -> tuple[ServiceClass, ...]:
    """All of them, the one that goes first first."""
    async with database.reading() as session:
        found = await session.scalars(select(PriorityClass).order_by(PriorityClass.rank))
        return tuple(service_class(one) for one in found)


async def set_class(
    database: Database, name: str, changes: ClassChanges, *, actor: str, now: float
) -> ServiceClass:
    """Raises ClassNotFoundError or InvalidPolicyError."""
    async with open_change(database, actor=actor, now=now) as change:
        stored = await change.session.get(PriorityClass, name)
        if stored is None:
            raise ClassNotFoundError(f"no priority class {name!r}; list the classes")
        before = service_class(stored)
        after = replace(before, **changes)
        await change.session.execute(
            update(PriorityClass)
            .where(PriorityClass.name == name)
            .values(preemptible=after.preemptible, max_queue_seconds=after.max_queue_seconds)
        )
        await change.record("class.updated", name, before=asdict(before), after=asdict(after))
    return after
