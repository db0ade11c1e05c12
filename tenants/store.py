"""The policy store: tenants, keys and policies. One transaction per method."""

import hmac
import secrets
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from tenants import keys, queries
from tenants.audit import AuditView, Change, open_change
from tenants.database import Database
from tenants.errors import (
    InvalidNameError,
    InvalidPolicyError,
    TenantExistsError,
    UnknownKeyError,
)
from tenants.models import (
    ApiKey,
    ApiKeySecret,
    AuditEntry,
    Policy,
    PolicyState,
    PolicyVersion,
    PriorityClass,
    Tenant,
)
from tenants.policy import (
    PLATFORM_ID,
    KVBounds,
    Limit,
    Principal,
    Scope,
    check_limits,
    check_slug,
    check_weight,
)
from tenants.views import ApiKeyView, TenantView

STATUSES = ("active", "suspended", "archived")
DEFAULT_CLASS = "standard"
_MAX_NAME_LENGTH = 200
_NO_DIGEST = bytes(32)
_NO_BOUNDS = KVBounds()


class Store:
    """Reads and audited changes. `actor` is who asks for a change, `now` is in epoch seconds."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @classmethod
    def open(cls, url: str) -> "Store":
        """A store on `sqlite:///path` or `postgresql://...`; connects when first used."""
        return cls(Database(url))

    async def close(self) -> None:
        await self.database.close()

    # --- tenants

    async def create_tenant(
        self,
        slug: str,
        *,
        actor: str,
        now: float,
        name: str | None = None,
        weight: float = 1.0,
        priority_class: str = DEFAULT_CLASS,
        limits: Iterable[Limit] = (),
        kv: KVBounds = _NO_BOUNDS,
    ) -> TenantView:
        """Raises TenantExistsError, InvalidNameError or InvalidPolicyError."""
        check_slug("tenant", slug)
        tenant_id = _new_id("tnt")
        async with open_change(self.database, actor=actor, now=now) as change:
            if await change.session.scalar(select(Tenant.id).where(Tenant.slug == slug)):
                raise TenantExistsError(f"tenant {slug} exists; choose another slug")
            await change.session.execute(
                insert(Tenant).values(
                    id=tenant_id,
                    slug=slug,
                    name=_checked_name(slug if name is None else name),
                    status="active",
                    created_at=now,
                )
            )
            await _put_policy(
                change,
                Scope.TENANT,
                tenant_id,
                limits=check_limits(limits),
                weight=check_weight(weight),
                priority_class=await _checked_class(change.session, priority_class),
                kv=kv,
            )
            created = await queries.get_tenant(change.session, slug)
            await change.record(
                "tenant.created", tenant_id, before=None, after=created.to_document()
            )
        return created

    async def set_tenant(
        self,
        slug: str,
        *,
        actor: str,
        now: float,
        name: str | None = None,
        weight: float | None = None,
        priority_class: str | None = None,
        limits: Iterable[Limit] | None = None,
        kv: KVBounds | None = None,
    ) -> TenantView:
        """Write a new policy version; what is None stays. Raises as create_tenant does."""
        async with open_change(self.database, actor=actor, now=now) as change:
            before = await queries.get_tenant(change.session, slug)
            if name is not None:
                await change.session.execute(
                    update(Tenant).where(Tenant.id == before.id).values(name=_checked_name(name))
                )
            await _put_policy(
                change,
                Scope.TENANT,
                before.id,
                limits=before.limits if limits is None else check_limits(limits),
                weight=before.weight if weight is None else check_weight(weight),
                priority_class=await _checked_class(
                    change.session, priority_class or before.priority_class
                ),
                kv=before.kv if kv is None else kv,
            )
            after = await queries.get_tenant(change.session, slug)
            await change.record(
                "tenant.updated",
                after.id,
                before=before.to_document(),
                after=after.to_document(),
            )
        return after

    async def set_tenant_status(
        self, slug: str, status: str, *, actor: str, now: float
    ) -> TenantView:
        """Suspend, archive or reactivate. Keys of a tenant that is not active open nothing."""
        if status not in STATUSES:
            raise InvalidPolicyError(f"status {status!r}: use one of {', '.join(STATUSES)}")
        async with open_change(self.database, actor=actor, now=now) as change:
            before = await queries.get_tenant(change.session, slug)
            await change.session.execute(
                update(Tenant).where(Tenant.id == before.id).values(status=status)
            )
            after = replace(before, status=status)
            await change.record(
                "tenant.status_set",
                after.id,
                before=before.to_document(),
                after=after.to_document(),
            )
        return after

    async def get_tenant(self, slug: str) -> TenantView:
        """Raises TenantNotFoundError."""
        async with self.database.reading() as session:
            return await queries.get_tenant(session, slug)

    async def list_tenants(self) -> tuple[TenantView, ...]:
        """All of them, archived ones too, by slug."""
        async with self.database.reading() as session:
            rows = await session.execute(queries.select_tenants().order_by(Tenant.slug))
            return tuple(queries.tenant_view(row) for row in rows)

    # --- the platform

    async def platform_limits(self) -> tuple[Limit, ...]:
        """Limits of all tenants together."""
        async with self.database.reading() as session:
            return await queries.get_platform_limits(session)

    async def set_platform_limits(self, limits: Iterable[Limit], *, actor: str, now: float) -> None:
        """Raises InvalidPolicyError."""
        wanted = check_limits(limits)
        async with open_change(self.database, actor=actor, now=now) as change:
            before = await queries.get_platform_limits(change.session)
            await _put_policy(change, Scope.PLATFORM, PLATFORM_ID, limits=wanted)
            await change.record(
                "platform.updated",
                PLATFORM_ID,
                before={"limits": _document(before)},
                after={"limits": _document(wanted)},
            )

    async def get_generation(self) -> int:
        """Grows with every change, so that a reader can tell whether it must read again."""
        async with self.database.reading() as session:
            return (await session.scalars(select(PolicyState.generation))).one()

    async def list_audit(self, *, max_entries: int = 100) -> tuple[AuditView, ...]:
        """The newest entries, newest first."""
        entry = AuditEntry
        async with self.database.reading() as session:
            found = await session.scalars(
                select(entry).order_by(entry.id.desc()).limit(max_entries)
            )
            return tuple(
                AuditView(
                    at=one.at,
                    actor=one.actor,
                    action=one.action,
                    object_id=one.object_id,
                    generation=one.generation,
                    before=one.before,
                    after=one.after,
                )
                for one in found
            )

    # --- keys

    async def create_key(
        self,
        slug: str,
        name: str,
        *,
        actor: str,
        now: float,
        expires_at: float | None = None,
        limits: Iterable[Limit] = (),
    ) -> tuple[ApiKeyView, str]:
        """A new key and its secret, which cannot be read again. Raises TenantNotFoundError,
        InvalidNameError or InvalidPolicyError."""
        if expires_at is not None and not expires_at > now:
            raise InvalidPolicyError("expires_at is over already; give a time to come")
        key_id, secret = _new_id("key"), keys.mint()
        prefix, last4 = keys.display_ends(secret)
        async with open_change(self.database, actor=actor, now=now) as change:
            tenant = await queries.get_tenant(change.session, slug)
            await change.session.execute(
                insert(ApiKey).values(
                    id=key_id,
                    tenant_id=tenant.id,
                    name=_checked_name(name),
                    expires_at=expires_at,
                    created_at=now,
                )
            )
            await change.session.execute(
                insert(ApiKeySecret).values(
                    id=_new_id("sec"),
                    api_key_id=key_id,
                    digest=keys.digest(secret),
                    prefix=prefix,
                    last4=last4,
                    created_at=now,
                )
            )
            if wanted := check_limits(limits):
                await _put_policy(change, Scope.KEY, key_id, limits=wanted)
            created = await queries.get_key(change.session, key_id)
            await change.record("api_key.created", key_id, before=None, after=created.to_document())
        return created, secret

    async def set_key_limits(
        self, key_id: str, limits: Iterable[Limit], *, actor: str, now: float
    ) -> ApiKeyView:
        """Raises ApiKeyNotFoundError or InvalidPolicyError."""
        async with open_change(self.database, actor=actor, now=now) as change:
            before = await queries.get_key(change.session, key_id)
            await _put_policy(change, Scope.KEY, key_id, limits=check_limits(limits))
            after = await queries.get_key(change.session, key_id)
            await change.record(
                "api_key.updated", key_id, before=before.to_document(), after=after.to_document()
            )
        return after

    async def revoke_key(self, key_id: str, *, actor: str, now: float) -> ApiKeyView:
        """From its commit on the key opens nothing. Again: nothing changes any more."""
        async with open_change(self.database, actor=actor, now=now) as change:
            before = await queries.get_key(change.session, key_id)
            after = before if before.revoked_at is not None else replace(before, revoked_at=now)
            await change.session.execute(
                update(ApiKey).where(ApiKey.id == key_id).values(revoked_at=after.revoked_at)
            )
            await change.record(
                "api_key.revoked", key_id, before=before.to_document(), after=after.to_document()
            )
        return after

    async def list_keys(self, slug: str | None = None) -> tuple[ApiKeyView, ...]:
        """Keys of one tenant or of all, oldest first, revoked ones too."""
        query = queries.select_keys().order_by(ApiKey.created_at, ApiKey.id)
        async with self.database.reading() as session:
            if slug is not None:
                query = query.where(
                    ApiKey.tenant_id == (await queries.get_tenant(session, slug)).id
                )
            return tuple(queries.key_view(row) for row in await session.execute(query))

    async def resolve_key(self, secret: str, *, now: float) -> Principal:
        """Whom a secret speaks for. Raises a KeyRefusedError, or StoreUnavailableError."""
        if not keys.is_well_formed(secret):
            raise UnknownKeyError("the key is malformed")
        digest = keys.digest(secret)
        async with self.database.reading() as session:
            rows = (await session.execute(queries.select_principal(digest))).all()
        stored = rows[0].ApiKeySecret.digest if rows else _NO_DIGEST
        if not hmac.compare_digest(stored, digest):
            raise UnknownKeyError("no such key")
        queries.check_usable(rows[0], now)
        return queries.principal(rows)


async def _put_policy(
    change: Change,
    scope: Scope,
    scope_id: str,
    *,
    limits: tuple[Limit, ...],
    weight: float | None = None,
    priority_class: str | None = None,
    kv: KVBounds = _NO_BOUNDS,
) -> None:
    """Write the next version of a policy; being the newest makes it the active one."""
    session = change.session
    policy_id = await session.scalar(select(Policy.id).where(Policy.scope_id == scope_id))
    if policy_id is None:
        policy_id = _new_id("pol")
        await session.execute(
            insert(Policy).values(id=policy_id, scope=scope.value, scope_id=scope_id)
        )
    newest = await session.scalar(
        select(func.max(PolicyVersion.version)).where(PolicyVersion.policy_id == policy_id)
    )
    await session.execute(
        insert(PolicyVersion).values(
            policy_id=policy_id,
            version=(newest or 0) + 1,
            weight=weight,
            priority_class=priority_class,
            limits=_document(limits),
            kv_floor_blocks=kv.floor_blocks,
            kv_cap_blocks=kv.cap_blocks,
            generation=change.generation,
            created_at=change.now,
            created_by=change.actor,
        )
    )


async def _checked_class(session: AsyncSession, name: str) -> str:
    known = list(await session.scalars(select(PriorityClass.name).order_by(PriorityClass.rank)))
    if name not in known:
        raise InvalidPolicyError(f"unknown priority class {name!r}; use one of: {', '.join(known)}")
    return name


def _checked_name(name: str) -> str:
    if not name.strip() or len(name) > _MAX_NAME_LENGTH or not name.isprintable():
        raise InvalidNameError(f"name {name!r}: use 1 to {_MAX_NAME_LENGTH} printable characters")
    return name


def _document(limits: tuple[Limit, ...]) -> list[dict[str, Any]]:
    return [limit.to_document() for limit in limits]


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
