"""Databases for tests that need one: each test gets its own, migrated, of both kinds."""

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from migrations.upgrade import upgrade
from tenants.store import Store
from tests.conftest import skip_or_fail
from tests.postgres import Cluster, find_programs, running_cluster

BOTH = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(scope="session")
def postgres_cluster() -> Iterator[Cluster]:
    """A running server with the database `migrated` as a template."""
    programs = find_programs()
    if programs is None:
        skip_or_fail("postgres", "its programs initdb and pg_ctl are not on this machine")
    with running_cluster(programs) as cluster:
        cluster.execute("CREATE DATABASE migrated")
        upgrade(cluster.url("migrated"))
        yield cluster


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "migrated.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(params=BOTH)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh database at the newest schema."""
    if request.param == "postgres":
        with request.getfixturevalue("postgres_cluster").database("migrated") as url:
            yield url
    else:
        shutil.copy(request.getfixturevalue("migrated_sqlite"), tmp_path / "headrace.db")
        yield f"sqlite:///{tmp_path / 'headrace.db'}"


@pytest.fixture(params=BOTH)
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A fresh database without any table."""
    if request.param == "postgres":
        with request.getfixturevalue("postgres_cluster").database() as url:
            yield url
    else:
        yield f"sqlite:///{tmp_path / 'empty.db'}"


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    store = Store.open(database_url)
    yield store
    await store.close()


@pytest.fixture
def sqlite_url(migrated_sqlite: Path, tmp_path: Path) -> str:
    """A fresh SQLite database at the newest schema."""
    shutil.copy(migrated_sqlite, tmp_path / "headrace.db")
    return f"sqlite:///{tmp_path / 'headrace.db'}"
