"""One change: its transaction, the new generation, and the entry that says who did what."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, update
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import models
from tenants.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditView:
    """One entry of the audit log. `before` and `after` never hold a secret or a digest."""

    at: float
    actor: str
    action: str
    object_id: str
    generation: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An open transaction that changes the policy store."""

    session: AsyncSession
    generation: int
    actor: str
    now: float

    async def record(
        self,
        action: str,
        object_id: str,
        *,
        before: dict[str, Any] | None,
        after: dict[str, Any] | None,
    ) -> None:
        await self.session.execute(
            insert(models.AuditEntry).values(
                at=self.now,
                actor=self.actor,
                action=action,
                object_id=object_id,
                generation=self.generation,
                before=before,
                after=after,
            )
        )


@asynccontextmanager
async def open_change(database: Database, *, actor: str, now: float) -> AsyncIterator[Change]:
    """Begin a change. The generation's row is locked first, so changes happen one by one."""
    async with database.writing() as session:
        generation = await session.scalar(
            update(models.PolicyState)
            .values(generation=models.PolicyState.generation + 1)
            .returning(models.PolicyState.generation)
            .execution_options(synchronize_session=False)
        )
        assert generation is not None, "policy_state has its row since the first migration"
        yield Change(session=session, generation=generation, actor=actor, now=now)
