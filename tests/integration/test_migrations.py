"""The migrations build the schema that the models describe."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alembic import command, op
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Engine, create_engine, inspect, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.pool import NullPool

from migrations.upgrade import upgrade
from tenants.database import parse_url
from tenants.errors import StoreUnavailableError
from tenants.models import Base

TABLES = sorted(Base.metadata.tables)


def engine_of(url: str) -> Engine:
    return create_engine(parse_url(url, is_async=False), poolclass=NullPool)


def run_alembic(work: Callable[[Config, str], None], url: str, revision: str) -> None:
    """As an operator does from a shell."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[2] / "migrations"))
    with engine_of(url).begin() as connection:
        config.attributes["connection"] = connection
        work(config, revision)


def described(engine: Engine) -> dict[str, Any]:
    """Everything that the database says of its tables, by constraint name."""
    inspector = inspect(engine)

    def named(items: list[Any]) -> list[tuple[str, str]]:
        return sorted((str(item["name"]), repr(sorted(item.items()))) for item in items)

    return {
        table: {
            "columns": named(inspector.get_columns(table)),
            "primary key": repr(inspector.get_pk_constraint(table)),
            "foreign keys": named(inspector.get_foreign_keys(table)),
            "unique": named(inspector.get_unique_constraints(table)),
            "checks": named(inspector.get_check_constraints(table)),
            "indexes": named(inspector.get_indexes(table)),
        }
        for table in TABLES
    }


def test_alembic_sees_no_difference(database_url: str) -> None:
    with engine_of(database_url).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_constraints_and_their_names_agree_too(database_url: str) -> None:
    engine = engine_of(database_url)
    migrated = described(engine)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    assert described(engine) == migrated


def test_upgrading_again_changes_nothing(database_url: str) -> None:
    before = described(engine_of(database_url))
    assert upgrade(database_url) == "0003"
    assert described(engine_of(database_url)) == before


def test_processes_that_start_together_upgrade_once(empty_database_url: str) -> None:
    program = f"from migrations.upgrade import upgrade; print(upgrade({empty_database_url!r}))"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for _ in range(3)
    ]
    results = [(*process.communicate(timeout=60), process.returncode) for process in started]
    assert results == [("0003\n", "", 0)] * 3
    with engine_of(empty_database_url).connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM priority_classes")) == 3
        assert connection.scalar(text("SELECT generation FROM policy_state")) == 1


def test_a_failed_upgrade_leaves_no_table(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = op.create_index

    def fail(name: str, *args: Any, **kwargs: Any) -> None:
        if name == "ix_usage_ledger_finished_at":
            raise RuntimeError("the power went off")
        real(name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(op, "create_index", fail)
        with pytest.raises(RuntimeError, match="power"):
            upgrade(empty_database_url)
    assert inspect(engine_of(empty_database_url)).get_table_names() == []
    assert upgrade(empty_database_url) == "0003"


def test_rows_of_the_schema_before_keep_their_values_and_their_protection(
    empty_database_url: str,
) -> None:
    run_alembic(command.upgrade, empty_database_url, "0001")
    engine = engine_of(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO policies VALUES ('p', 'tenant', 't')"))
        connection.execute(
            text("INSERT INTO policy_versions VALUES ('p', 1, 3, 'batch', '[]', 7, 0, 'op')")
        )
    assert upgrade(empty_database_url) == "0003"
    with engine.connect() as connection:
        [row] = connection.execute(text("SELECT * FROM policy_versions")).mappings()
        assert (row["weight"], row["priority_class"], row["generation"]) == (3.0, "batch", 7)
        assert (row["kv_floor_blocks"], row["kv_cap_blocks"]) == (0, None)
    change = "UPDATE policy_versions SET kv_floor_blocks = 1"
    with pytest.raises(DBAPIError, match="is append-only"), engine.begin() as connection:
        connection.execute(text(change))


NEW_COLUMNS = {
    "0002": {"policy_versions": {"kv_floor_blocks", "kv_cap_blocks"}},
    "0003": {
        "priority_classes": {"max_wait_seconds", "max_queued"},
        "reservations": {"priority_class"},
        "usage_ledger": {"priority_class", "kv_block_seconds"},
    },
}


@pytest.mark.parametrize(("target", "undone"), [("0002", ["0003"]), ("0001", ["0003", "0002"])])
def test_the_newest_steps_can_be_taken_back(
    database_url: str, target: str, undone: list[str]
) -> None:
    newest = described(engine_of(database_url))
    run_alembic(command.downgrade, database_url, target)
    inspector = inspect(engine_of(database_url))
    for step in undone:
        for table, added in NEW_COLUMNS[step].items():
            columns = {column["name"] for column in inspector.get_columns(table)}
            assert columns
            assert not columns & added
    assert upgrade(database_url) == "0003"
    assert described(engine_of(database_url)) == newest


def test_a_step_back_restores_the_schema_that_was(empty_database_url: str) -> None:
    run_alembic(command.upgrade, empty_database_url, "0002")
    before = described(engine_of(empty_database_url))
    assert upgrade(empty_database_url) == "0003"
    run_alembic(command.downgrade, empty_database_url, "0002")
    assert described(engine_of(empty_database_url)) == before
    run_alembic(command.downgrade, empty_database_url, "base")
    assert inspect(engine_of(empty_database_url)).get_table_names() == ["alembic_version"]


OLD_ROWS = (
    "INSERT INTO policies VALUES ('p', 'tenant', 't')",
    "INSERT INTO policy_versions VALUES ('p', 1, 3, 'batch', '[]', 7, 0, 'op', 5, 9)",
    "INSERT INTO reservations VALUES ('a', 't', 'k', 7, 1, '[]', 'gw', 60, 1)",
    "INSERT INTO usage_ledger VALUES ('b', 't', 'k', 7, 1, 'completed', 'stop', NULL, "
    "8, 2, 3, 1, 1, 2, 3, 4)",
    "UPDATE priority_classes SET max_queue_seconds = 30 WHERE name = 'batch'",
)


def rows(url: str) -> dict[str, list[dict[str, Any]]]:
    with engine_of(url).connect() as connection:
        return {
            table: [
                dict(row)
                for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY 1")).mappings()
            ]
            for table in ("policy_versions", "priority_classes", "reservations", "usage_ledger")
        }


def test_rows_keep_their_values_through_the_newest_step_and_back(empty_database_url: str) -> None:
    run_alembic(command.upgrade, empty_database_url, "0002")
    with engine_of(empty_database_url).begin() as connection:
        for statement in OLD_ROWS:
            connection.execute(text(statement))
    before = rows(empty_database_url)
    assert upgrade(empty_database_url) == "0003"
    after = rows(empty_database_url)
    added = {
        "policy_versions": {},
        "priority_classes": {"max_wait_seconds": None, "max_queued": None},
        "reservations": {"priority_class": None},
        "usage_ledger": {"priority_class": None, "kv_block_seconds": 0.0},
    }
    assert after == {
        table: [row | added[table] for row in found] for table, found in before.items()
    }
    run_alembic(command.downgrade, empty_database_url, "0002")
    assert rows(empty_database_url) == before
    assert upgrade(empty_database_url) == "0003"
    for change in (
        "UPDATE policy_versions SET weight = 2",
        "UPDATE usage_ledger SET kv_block_seconds = 1",
    ):
        engine = engine_of(empty_database_url)
        with pytest.raises(DBAPIError, match="is append-only"), engine.begin() as connection:
            connection.execute(text(change))


def test_a_class_that_old_policies_name_comes_back_with_the_step(database_url: str) -> None:
    with engine_of(database_url).begin() as connection:
        connection.execute(text("INSERT INTO policies VALUES ('p', 'tenant', 't')"))
        for version, name in enumerate(("interactive", "batch", "standard"), 1):
            connection.execute(
                text(
                    "INSERT INTO policy_versions "
                    f"VALUES ('p', {version}, 1, '{name}', '[]', 1, 0, 'op', 0, NULL)"
                )
            )
        connection.execute(text("DELETE FROM priority_classes WHERE name <> 'standard'"))
    run_alembic(command.downgrade, database_url, "0002")
    ranks = {row["name"]: row["rank"] for row in rows(database_url)["priority_classes"]}
    assert ranks == {"standard": 1, "batch": 2, "interactive": 3}


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE priority_classes SET max_wait_seconds = 0",
        "UPDATE priority_classes SET max_queued = 0",
        "INSERT INTO usage_ledger (request_id, tenant_id, key_id, generation, policy_version, "
        "status, tokens_in, tokens_cached, tokens_out, tokens_recomputed, kv_block_seconds, "
        "arrived_at, finished_at) VALUES ('r', 't', 'k', 1, 1, 'lost', 0, 0, 0, 0, -1, 0, 0)",
    ],
)
def test_the_database_itself_refuses_what_cannot_be(database_url: str, change: str) -> None:
    with pytest.raises(IntegrityError), engine_of(database_url).begin() as connection:
        connection.execute(text(change))


@pytest.mark.parametrize(
    "url", ["sqlite:////no/such/folder.db", "postgresql://ann@/headrace?host=/no/such/folder"]
)
def test_a_database_that_is_away_cannot_be_upgraded(url: str) -> None:
    with pytest.raises(StoreUnavailableError, match="not usable now"):
        upgrade(url)


@pytest.mark.parametrize(
    ("table", "insert", "change"),
    [
        (
            "policy_versions",
            "INSERT INTO policy_versions VALUES ('p', 1, 1, 'standard', '[]', 1, 0, 'op', 0, NULL)",
            "UPDATE policy_versions SET weight = 2",
        ),
        (
            "audit_log",
            "INSERT INTO audit_log VALUES (1, 0, 'op', 'a', 'o', 1, NULL, NULL)",
            "UPDATE audit_log SET actor = 'nobody'",
        ),
        (
            "usage_ledger",
            "INSERT INTO usage_ledger VALUES ('r', 't', 'k', 1, 1, 'completed', NULL, NULL, "
            "1, 0, 1, 0, 0, NULL, NULL, 1, 'batch', 2.5)",
            "UPDATE usage_ledger SET tokens_out = 0",
        ),
    ],
)
def test_the_database_itself_refuses_to_rewrite_history(
    database_url: str, table: str, insert: str, change: str
) -> None:
    engine = engine_of(database_url)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO policies VALUES ('p', 'tenant', 't')"))
        connection.execute(text(insert))
    with pytest.raises(DBAPIError, match=f"{table} is append-only"), engine.begin() as connection:
        connection.execute(text(change))
