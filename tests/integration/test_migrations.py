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
from sqlalchemy.exc import DBAPIError
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
    assert upgrade(database_url) == "0002"
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
    assert results == [("0002\n", "", 0)] * 3
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
    assert upgrade(empty_database_url) == "0002"


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
    assert upgrade(empty_database_url) == "0002"
    with engine.connect() as connection:
        [row] = connection.execute(text("SELECT * FROM policy_versions")).mappings()
        assert (row["weight"], row["priority_class"], row["generation"]) == (3.0, "batch", 7)
        assert (row["kv_floor_blocks"], row["kv_cap_blocks"]) == (0, None)
    change = "UPDATE policy_versions SET kv_floor_blocks = 1"
    with pytest.raises(DBAPIError, match="is append-only"), engine.begin() as connection:
        connection.execute(text(change))


def test_the_newest_step_can_be_taken_back(database_url: str) -> None:
    newest = described(engine_of(database_url))
    run_alembic(command.downgrade, database_url, "0001")
    columns = {c["name"] for c in inspect(engine_of(database_url)).get_columns("policy_versions")}
    assert "limits" in columns
    assert not columns & {"kv_floor_blocks", "kv_cap_blocks"}
    assert upgrade(database_url) == "0002"
    assert described(engine_of(database_url)) == newest


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
            "1, 0, 1, 0, 0, NULL, NULL, 1)",
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
