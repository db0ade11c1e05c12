"""Tenants, keys, policies, counters, the ledger and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_APPEND_ONLY = ("policy_versions", "usage_ledger", "audit_log")


def upgrade() -> None:
    _create_tenants_and_keys()
    _create_policies()
    _create_counters()
    _create_ledger()
    _create_audit_log()
    for table in _APPEND_ONLY:
        _refuse_updates(table)


def downgrade() -> None:
    for table in (
        "audit_log",
        "usage_ledger",
        "reservations",
        "limit_windows",
        "policy_state",
        "policy_versions",
        "policies",
        "priority_classes",
        "api_key_secrets",
        "api_keys",
        "tenants",
    ):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION headrace_refuse_update()")


def _create_tenants_and_keys() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("slug", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
        sa.UniqueConstraint("slug", name="uq_tenants_slug"),
        sa.CheckConstraint(
            "status IN ('active', 'suspended', 'archived')",
            name=op.f("ck_tenants_status_known"),
        ),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("expires_at", sa.Double()),
        sa.Column("revoked_at", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name="fk_api_keys_tenant_id_tenants"
        ),
    )
    op.create_index("ix_api_keys_tenant_id", "api_keys", ["tenant_id"])
    op.create_table(
        "api_key_secrets",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("api_key_id", sa.String(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("prefix", sa.String(), nullable=False),
        sa.Column("last4", sa.String(), nullable=False),
        sa.Column("not_before", sa.Double()),
        sa.Column("revoke_at", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_api_key_secrets"),
        sa.ForeignKeyConstraint(
            ["api_key_id"], ["api_keys.id"], name="fk_api_key_secrets_api_key_id_api_keys"
        ),
        sa.UniqueConstraint("digest", name="uq_api_key_secrets_digest"),
        sa.CheckConstraint("length(digest) = 32", name=op.f("ck_api_key_secrets_digest_is_sha256")),
    )
    op.create_index("ix_api_key_secrets_api_key_id", "api_key_secrets", ["api_key_id"])


def _create_policies() -> None:
    classes = op.create_table(
        "priority_classes",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("rank", sa.BigInteger(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("preemptible", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_priority_classes"),
        sa.UniqueConstraint("rank", name="uq_priority_classes_rank"),
        sa.CheckConstraint("weight > 0", name=op.f("ck_priority_classes_weight_positive")),
    )
    op.bulk_insert(
        classes,
        [
            {"name": "interactive", "rank": 0, "weight": 1.0, "preemptible": False},
            {"name": "standard", "rank": 1, "weight": 1.0, "preemptible": False},
            {"name": "batch", "rank": 2, "weight": 1.0, "preemptible": True},
        ],
    )
    op.create_table(
        "policies",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("scope_id", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_policies"),
        sa.UniqueConstraint("scope_id", name="uq_policies_scope_id"),
        sa.CheckConstraint(
            "scope IN ('platform', 'tenant', 'key')", name=op.f("ck_policies_scope_known")
        ),
    )
    op.create_table(
        "policy_versions",
        sa.Column("policy_id", sa.String(), nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("weight", sa.Double()),
        sa.Column("priority_class", sa.String()),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("policy_id", "version", name="pk_policy_versions"),
        sa.ForeignKeyConstraint(
            ["policy_id"], ["policies.id"], name="fk_policy_versions_policy_id_policies"
        ),
        sa.ForeignKeyConstraint(
            ["priority_class"],
            ["priority_classes.name"],
            name="fk_policy_versions_priority_class_priority_classes",
        ),
        sa.CheckConstraint("weight > 0", name=op.f("ck_policy_versions_weight_positive")),
    )
    state = op.create_table(
        "policy_state",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_policy_state"),
        sa.CheckConstraint("id = 1", name=op.f("ck_policy_state_only_row")),
    )
    op.bulk_insert(state, [{"id": 1, "generation": 1}])


def _create_counters() -> None:
    op.create_table(
        "limit_windows",
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("scope_id", sa.String(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("window_seconds", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("window_start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.Column("reserved", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "scope",
            "scope_id",
            "metric",
            "window_seconds",
            "window_start",
            name="pk_limit_windows",
        ),
        sa.CheckConstraint("used >= 0", name=op.f("ck_limit_windows_used_not_negative")),
        sa.CheckConstraint("reserved >= 0", name=op.f("ck_limit_windows_reserved_not_negative")),
    )
    op.create_table(
        "reservations",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("items", sa.JSON(), nullable=False),
        sa.Column("owner", sa.String(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_reservations"),
    )
    op.create_index("ix_reservations_lease_until", "reservations", ["lease_until"])


def _create_ledger() -> None:
    op.create_table(
        "usage_ledger",
        sa.Column("request_id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("key_id", sa.String(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("policy_version", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("finish_reason", sa.String()),
        sa.Column("error_code", sa.String()),
        sa.Column("tokens_in", sa.BigInteger(), nullable=False),
        sa.Column("tokens_cached", sa.BigInteger(), nullable=False),
        sa.Column("tokens_out", sa.BigInteger(), nullable=False),
        sa.Column("tokens_recomputed", sa.BigInteger(), nullable=False),
        sa.Column("arrived_at", sa.Double(), nullable=False),
        sa.Column("admitted_at", sa.Double()),
        sa.Column("first_token_at", sa.Double()),
        sa.Column("finished_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_usage_ledger"),
        sa.CheckConstraint(
            "tokens_in >= 0 AND tokens_out >= 0 AND tokens_recomputed >= 0 "
            "AND tokens_cached BETWEEN 0 AND tokens_in",
            name=op.f("ck_usage_ledger_tokens_sane"),
        ),
    )
    op.create_index(
        "ix_usage_ledger_tenant_id_finished_at", "usage_ledger", ["tenant_id", "finished_at"]
    )
    op.create_index("ix_usage_ledger_key_id_finished_at", "usage_ledger", ["key_id", "finished_at"])
    op.create_index("ix_usage_ledger_finished_at", "usage_ledger", ["finished_at"])


def _create_audit_log() -> None:
    op.create_table(
        "audit_log",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(), nullable=False),
        sa.Column("action", sa.String(), nullable=False),
        sa.Column("object_id", sa.String(), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("before", sa.JSON()),
        sa.Column("after", sa.JSON()),
        sa.PrimaryKeyConstraint("id", name="pk_audit_log"),
    )


def _refuse_updates(table: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            f"CREATE TRIGGER {table}_append_only BEFORE UPDATE ON {table} "
            f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        )
        return
    op.execute(
        "CREATE OR REPLACE FUNCTION headrace_refuse_update() RETURNS trigger LANGUAGE plpgsql "
        "AS $$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
    )
    op.execute(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE ON {table} "
        "FOR EACH ROW EXECUTE FUNCTION headrace_refuse_update()"
    )
