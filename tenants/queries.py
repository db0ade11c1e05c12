"""How the store reads: statements, and records made of their rows."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, and_, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from tenants.errors import (
    ApiKeyNotFoundError,
    ExpiredKeyError,
    RevokedKeyError,
    TenantNotFoundError,
    TenantSuspendedError,
    UnknownKeyError,
)
from tenants.models import (
    ApiKey,
    ApiKeySecret,
    LedgerEntry,
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
    ScopedLimit,
    ServiceClass,
    parse_limits,
)
from tenants.views import ApiKeyView, TenantView


def select_tenants() -> Select[Any]:
    """Tenants, each with the active version of its policy."""
    return (
        select(Tenant, PolicyVersion)
        .join(Policy, Policy.scope_id == Tenant.id)
        .join(PolicyVersion, _is_active_version())
    )


def tenant_view(row: Row[Any]) -> TenantView:
    tenant, version = row
    return TenantView(
        id=tenant.id,
        slug=tenant.slug,
        name=tenant.name,
        status=tenant.status,
        weight=version.weight,
        priority_class=version.priority_class,
        limits=parse_limits(version.limits),
        kv=_kv_bounds(version),
        policy_version=version.version,
        created_at=tenant.created_at,
    )


async def get_tenant(session: AsyncSession, slug: str) -> TenantView:
    """Raises TenantNotFoundError."""
    row = (await session.execute(select_tenants().where(Tenant.slug == slug))).one_or_none()
    if row is None:
        raise TenantNotFoundError(f"no tenant {slug!r}; create it first, or list the tenants")
    return tenant_view(row)


def select_keys() -> Select[Any]:
    """Keys, each with its secret's ends, its own limits and its last use, from the ledger."""
    last_used_at = (
        select(func.max(LedgerEntry.finished_at))
        .where(LedgerEntry.key_id == ApiKey.id)
        .scalar_subquery()
    )
    return (
        select(ApiKey, ApiKeySecret, Tenant.slug, PolicyVersion.limits, last_used_at)
        .join(ApiKeySecret, ApiKeySecret.api_key_id == ApiKey.id)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .outerjoin(Policy, Policy.scope_id == ApiKey.id)
        .outerjoin(PolicyVersion, _is_active_version())
    )


def key_view(row: Row[Any]) -> ApiKeyView:
    key, secret, slug, limits, last_used_at = row
    return ApiKeyView(
        id=key.id,
        tenant=slug,
        name=key.name,
        redacted=f"{secret.prefix}...{secret.last4}",
        limits=parse_limits(limits or []),
        expires_at=key.expires_at,
        revoked_at=key.revoked_at,
        last_used_at=last_used_at,
        created_at=key.created_at,
    )


async def get_key(session: AsyncSession, key_id: str) -> ApiKeyView:
    """Raises ApiKeyNotFoundError."""
    row = (await session.execute(select_keys().where(ApiKey.id == key_id))).one_or_none()
    if row is None:
        raise ApiKeyNotFoundError(f"no key {key_id!r}; list the keys to see their ids")
    return key_view(row)


async def get_platform_limits(session: AsyncSession) -> tuple[Limit, ...]:
    """Limits of all tenants together; empty until they are first set."""
    document = await session.scalar(
        select(PolicyVersion.limits)
        .join(Policy, _is_active_version())
        .where(Policy.scope_id == PLATFORM_ID)
    )
    return parse_limits(document or [])


def select_principal(digest: bytes) -> Select[Any]:
    """One row for each policy that applies to the secret's key; its tenant's is always there.

    One statement sees one snapshot, so the generation is the one of the limits.
    """
    return (
        select(ApiKeySecret, ApiKey, Tenant, Policy, PolicyVersion, PriorityClass, PolicyState)
        .join(ApiKey, ApiKey.id == ApiKeySecret.api_key_id)
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .join(PolicyState, PolicyState.id == 1)
        .join(Policy, Policy.scope_id.in_([PLATFORM_ID, Tenant.id, ApiKey.id]))
        .join(PolicyVersion, _is_active_version())
        .outerjoin(PriorityClass, PriorityClass.name == PolicyVersion.priority_class)
        .where(ApiKeySecret.digest == digest)
    )


def check_usable(row: Row[Any], now: float) -> None:
    """Raise the KeyRefusedError that applies to a row of select_principal, if one does."""
    secret, key, tenant = row[:3]
    if key.revoked_at is not None or (secret.revoke_at is not None and secret.revoke_at <= now):
        raise RevokedKeyError(f"key {key.id} is revoked")
    if key.expires_at is not None and key.expires_at <= now:
        raise ExpiredKeyError(f"key {key.id} has expired")
    if secret.not_before is not None and now < secret.not_before:
        raise UnknownKeyError(f"this secret of key {key.id} is not valid yet")
    if tenant.status != "active":
        raise TenantSuspendedError(f"tenant {tenant.slug} is {tenant.status}")


def principal(rows: Sequence[Row[Any]]) -> Principal:
    """From all rows of select_principal."""
    by_scope = {row.Policy.scope: row for row in rows}
    own = by_scope[Scope.TENANT]
    return Principal(
        tenant_id=own.Tenant.id,
        tenant=own.Tenant.slug,
        key_id=own.ApiKey.id,
        weight=own.PolicyVersion.weight,
        service_class=service_class(own.PriorityClass),
        kv=_kv_bounds(own.PolicyVersion),
        limits=tuple(
            ScopedLimit(scope=scope, scope_id=by_scope[scope].Policy.scope_id, rule=rule)
            for scope in Scope
            if scope in by_scope
            for rule in parse_limits(by_scope[scope].PolicyVersion.limits)
        ),
        generation=own.PolicyState.generation,
        policy_version=own.PolicyVersion.version,
    )


def service_class(stored: PriorityClass) -> ServiceClass:
    return ServiceClass(
        name=stored.name,
        rank=stored.rank,
        preemptible=stored.preemptible,
        weight=stored.weight,
        max_wait_seconds=stored.max_wait_seconds,
        max_queue_seconds=stored.max_queue_seconds,
        max_queued=stored.max_queued,
    )


def _kv_bounds(version: PolicyVersion) -> KVBounds:
    return KVBounds(floor_blocks=version.kv_floor_blocks, cap_blocks=version.kv_cap_blocks)


def _is_active_version() -> ColumnElement[bool]:
    """The newest version of a policy is the active one."""
    other = aliased(PolicyVersion)
    newest = select(func.max(other.version)).where(other.policy_id == Policy.id).scalar_subquery()
    return and_(PolicyVersion.policy_id == Policy.id, PolicyVersion.version == newest)
