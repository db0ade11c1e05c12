"""The schema. Times (`*_at`, `lease_until`, ...) are UTC in epoch seconds; tokens are integers."""

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  # the name and type that DeclarativeBase asks for
        int: BigInteger,
        float: Double,
        str: String,
        bytes: LargeBinary,
        list[Any]: JSON,
        dict[str, Any]: JSON(none_as_null=True),
    }


class Tenant(Base):
    __tablename__ = "tenants"
    __table_args__ = (
        UniqueConstraint("slug"),
        CheckConstraint("status IN ('active', 'suspended', 'archived')", name="status_known"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    slug: Mapped[str]
    name: Mapped[str]
    status: Mapped[str]
    created_at: Mapped[float]


class ApiKey(Base):
    """A key's identity, which outlives its secrets."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str]
    expires_at: Mapped[float | None]
    # Set means revoked, whatever the clocks of the gateways say.
    revoked_at: Mapped[float | None]
    created_at: Mapped[float]


class ApiKeySecret(Base):
    """A secret that opens a key from `not_before` until `revoke_at`, if those are set."""

    __tablename__ = "api_key_secrets"
    __table_args__ = (
        UniqueConstraint("digest"),
        CheckConstraint("length(digest) = 32", name="digest_is_sha256"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    api_key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"), index=True)
    digest: Mapped[bytes]
    prefix: Mapped[str]
    last4: Mapped[str]
    not_before: Mapped[float | None]
    revoke_at: Mapped[float | None]
    created_at: Mapped[float]


class PriorityClass(Base):
    __tablename__ = "priority_classes"
    __table_args__ = (
        UniqueConstraint("rank"),
        CheckConstraint("weight > 0", name="weight_positive"),
        CheckConstraint("max_queue_seconds > 0", name="max_queue_positive"),
        CheckConstraint("max_wait_seconds > 0", name="max_wait_positive"),
        CheckConstraint("max_queued >= 1", name="max_queued_positive"),
    )

    name: Mapped[str] = mapped_column(primary_key=True)
    rank: Mapped[int]  # lower goes first
    weight: Mapped[float]  # where classes share by weight
    preemptible: Mapped[bool]
    max_queue_seconds: Mapped[float | None]  # a request that waits longer is refused
    max_wait_seconds: Mapped[float | None]  # after which the class's turn is brought forward
    max_queued: Mapped[int | None]  # of its requests at one engine at once


class Policy(Base):
    """Something that has a policy. Its newest version is the active one, so there is always one."""

    __tablename__ = "policies"
    __table_args__ = (
        UniqueConstraint("scope_id"),  # ids of different scopes never coincide
        CheckConstraint("scope IN ('platform', 'tenant', 'key')", name="scope_known"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    scope: Mapped[str]
    scope_id: Mapped[str]


class PolicyVersion(Base):
    """Never changed once written (a trigger refuses): old bills stay explicable."""

    __tablename__ = "policy_versions"
    __table_args__ = (
        CheckConstraint("weight > 0", name="weight_positive"),
        CheckConstraint("kv_floor_blocks >= 0", name="kv_floor_not_negative"),
        CheckConstraint(
            "kv_cap_blocks >= 1 AND kv_cap_blocks >= kv_floor_blocks", name="kv_cap_above_floor"
        ),
    )

    policy_id: Mapped[str] = mapped_column(ForeignKey("policies.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    # A tenant has both; the platform and keys have neither. An old version's class may be gone.
    weight: Mapped[float | None]
    priority_class: Mapped[str | None]
    limits: Mapped[list[Any]]
    # Of a tenant; 0 and none elsewhere.
    kv_floor_blocks: Mapped[int] = mapped_column(server_default=text("0"))
    kv_cap_blocks: Mapped[int | None]
    generation: Mapped[int]  # from which it was active
    created_at: Mapped[float]
    created_by: Mapped[str]


class PolicyState(Base):
    """One row. Its generation grows with every change of a tenant, key or policy."""

    __tablename__ = "policy_state"
    __table_args__ = (CheckConstraint("id = 1", name="only_row"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    generation: Mapped[int]


class LimitWindow(Base):
    """One counter. Without a window (concurrent requests) both window columns are 0."""

    __tablename__ = "limit_windows"
    __table_args__ = (
        CheckConstraint("used >= 0", name="used_not_negative"),
        CheckConstraint("reserved >= 0", name="reserved_not_negative"),
    )

    scope: Mapped[str] = mapped_column(primary_key=True)
    scope_id: Mapped[str] = mapped_column(primary_key=True)
    metric: Mapped[str] = mapped_column(primary_key=True)
    window_seconds: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    window_start: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    used: Mapped[int]
    reserved: Mapped[int]


# Reservations and the ledger name tenants and keys without foreign keys: checking those would lock
# the same few rows in every request, and tenants and keys are never deleted.


class Reservation(Base):
    """A request in flight. The row exists exactly as long as the request holds something."""

    __tablename__ = "reservations"

    request_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str]
    key_id: Mapped[str]
    generation: Mapped[int]
    policy_version: Mapped[int]
    priority_class: Mapped[str | None]  # that serves it; None of a gateway before this column
    items: Mapped[list[Any]]  # [[*WindowKey, amount], ...] in lock order
    owner: Mapped[str]
    lease_until: Mapped[float] = mapped_column(index=True)
    created_at: Mapped[float]


class LedgerEntry(Base):
    """What one request used. Written once, never changed (a trigger refuses)."""

    __tablename__ = "usage_ledger"
    __table_args__ = (
        Index(None, "tenant_id", "finished_at"),
        Index(None, "key_id", "finished_at"),
        Index(None, "finished_at"),
        CheckConstraint(
            "tokens_in >= 0 AND tokens_out >= 0 AND tokens_recomputed >= 0 "
            "AND tokens_cached BETWEEN 0 AND tokens_in",
            name="tokens_sane",
        ),
        CheckConstraint("kv_block_seconds >= 0", name="kv_not_negative"),
    )

    request_id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str]
    key_id: Mapped[str]
    generation: Mapped[int]
    policy_version: Mapped[int]
    priority_class: Mapped[str | None]  # that served it, which its tier chose; None of old rows
    status: Mapped[str]
    finish_reason: Mapped[str | None]
    error_code: Mapped[str | None]
    tokens_in: Mapped[int]  # cached ones included
    tokens_cached: Mapped[int]
    tokens_out: Mapped[int]
    tokens_recomputed: Mapped[int]  # after preemptions; charged to nobody
    kv_block_seconds: Mapped[float] = mapped_column(server_default=text("0"))
    arrived_at: Mapped[float]
    admitted_at: Mapped[float | None]
    first_token_at: Mapped[float | None]
    finished_at: Mapped[float]


class AuditEntry(Base):
    """Who changed what. Written in the transaction of the change, never changed (a trigger)."""

    __tablename__ = "audit_log"

    # SQLite numbers rows by itself only under the type INTEGER.
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    at: Mapped[float]
    actor: Mapped[str]
    action: Mapped[str]
    object_id: Mapped[str]
    generation: Mapped[int]
    before: Mapped[dict[str, Any] | None]
    after: Mapped[dict[str, Any] | None]
