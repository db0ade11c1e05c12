"""KV floors and caps of tenants, and how long a request of a class may wait.

Plain SQL, which both databases understand: alembic's batches build a table anew on SQLite, and
would lose the trigger that refuses changes of policy_versions.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    double = sa.Double().compile(dialect=op.get_bind().dialect)
    op.execute(
        "ALTER TABLE policy_versions ADD COLUMN kv_floor_blocks BIGINT DEFAULT 0 NOT NULL "
        "CONSTRAINT ck_policy_versions_kv_floor_not_negative CHECK (kv_floor_blocks >= 0)"
    )
    op.execute(
        "ALTER TABLE policy_versions ADD COLUMN kv_cap_blocks BIGINT "
        "CONSTRAINT ck_policy_versions_kv_cap_above_floor "
        "CHECK (kv_cap_blocks >= 1 AND kv_cap_blocks >= kv_floor_blocks)"
    )
    op.execute(
        f"ALTER TABLE priority_classes ADD COLUMN max_queue_seconds {double} "
        "CONSTRAINT ck_priority_classes_max_queue_positive CHECK (max_queue_seconds > 0)"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE priority_classes DROP COLUMN max_queue_seconds")
    op.execute("ALTER TABLE policy_versions DROP COLUMN kv_cap_blocks")
    op.execute("ALTER TABLE policy_versions DROP COLUMN kv_floor_blocks")
