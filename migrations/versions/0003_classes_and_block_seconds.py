"""Ageing and queue depth of classes; the class and the KV-block-seconds of each request.

Classes can be deleted from here on, so policy_versions name them without a foreign key: old
versions stay, also those that name a class which is gone. Plain SQL as in 0002; where SQLite has
to build policy_versions anew, its constraints stay with their columns, so that 0002 can still be
taken back.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_CLASS_KEY = "fk_policy_versions_priority_class_priority_classes"
_CLASS_REFERENCE = "FOREIGN KEY(priority_class) REFERENCES priority_classes (name)"


def upgrade() -> None:
    double = sa.Double().compile(dialect=op.get_bind().dialect)
    op.execute(
        f"ALTER TABLE priority_classes ADD COLUMN max_wait_seconds {double} "
        "CONSTRAINT ck_priority_classes_max_wait_positive CHECK (max_wait_seconds > 0)"
    )
    op.execute(
        "ALTER TABLE priority_classes ADD COLUMN max_queued BIGINT "
        "CONSTRAINT ck_priority_classes_max_queued_positive CHECK (max_queued >= 1)"
    )
    op.execute("ALTER TABLE reservations ADD COLUMN priority_class VARCHAR")
    op.execute("ALTER TABLE usage_ledger ADD COLUMN priority_class VARCHAR")
    op.execute(
        f"ALTER TABLE usage_ledger ADD COLUMN kv_block_seconds {double} DEFAULT 0 NOT NULL "
        "CONSTRAINT ck_usage_ledger_kv_not_negative CHECK (kv_block_seconds >= 0)"
    )
    if op.get_bind().dialect.name == "sqlite":
        _rebuild_policy_versions()
    else:
        op.execute(f"ALTER TABLE policy_versions DROP CONSTRAINT {_CLASS_KEY}")


def downgrade() -> None:
    _bring_deleted_classes_back()
    if op.get_bind().dialect.name == "sqlite":
        _rebuild_policy_versions(f", CONSTRAINT {_CLASS_KEY} {_CLASS_REFERENCE}")
    else:
        op.execute(f"ALTER TABLE policy_versions ADD CONSTRAINT {_CLASS_KEY} {_CLASS_REFERENCE}")
    op.execute("ALTER TABLE usage_ledger DROP COLUMN kv_block_seconds")
    op.execute("ALTER TABLE usage_ledger DROP COLUMN priority_class")
    op.execute("ALTER TABLE reservations DROP COLUMN priority_class")
    op.execute("ALTER TABLE priority_classes DROP COLUMN max_queued")
    op.execute("ALTER TABLE priority_classes DROP COLUMN max_wait_seconds")


def _bring_deleted_classes_back() -> None:
    """Those that old policy versions name, after all others."""
    op.execute(
        "INSERT INTO priority_classes (name, rank, weight, preemptible) "
        "SELECT name, (SELECT max(rank) FROM priority_classes) "
        "+ row_number() OVER (ORDER BY name), 1, false "
        "FROM (SELECT DISTINCT priority_class AS name FROM policy_versions) AS named "
        "WHERE name NOT IN (SELECT name FROM priority_classes)"
    )


def _rebuild_policy_versions(class_reference: str = "") -> None:
    double = sa.Double().compile(dialect=op.get_bind().dialect)
    op.execute(
        "CREATE TABLE policy_versions_new ("
        "policy_id VARCHAR NOT NULL, "
        "version BIGINT NOT NULL, "
        f"weight {double} CONSTRAINT ck_policy_versions_weight_positive CHECK (weight > 0), "
        "priority_class VARCHAR, "
        "limits JSON NOT NULL, "
        "generation BIGINT NOT NULL, "
        f"created_at {double} NOT NULL, "
        "created_by VARCHAR NOT NULL, "
        "kv_floor_blocks BIGINT DEFAULT 0 NOT NULL "
        "CONSTRAINT ck_policy_versions_kv_floor_not_negative CHECK (kv_floor_blocks >= 0), "
        "kv_cap_blocks BIGINT CONSTRAINT ck_policy_versions_kv_cap_above_floor "
        "CHECK (kv_cap_blocks >= 1 AND kv_cap_blocks >= kv_floor_blocks), "
        "CONSTRAINT pk_policy_versions PRIMARY KEY (policy_id, version), "
        "CONSTRAINT fk_policy_versions_policy_id_policies "
        f"FOREIGN KEY(policy_id) REFERENCES policies (id){class_reference})"
    )
    op.execute("INSERT INTO policy_versions_new SELECT * FROM policy_versions")
    op.execute("DROP TABLE policy_versions")
    op.execute("ALTER TABLE policy_versions_new RENAME TO policy_versions")
    op.execute(
        "CREATE TRIGGER policy_versions_append_only BEFORE UPDATE ON policy_versions "
        "BEGIN SELECT RAISE(ABORT, 'policy_versions is append-only'); END"
    )
