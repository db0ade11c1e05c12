"""The database behind the policy store. SQLite and PostgreSQL are told apart only here."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from psycopg.errors import UndefinedTable
from sqlalchemy import URL, Connection, Engine, event, exc, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from tenants.errors import DatabaseUrlError, StoreUnavailableError

WRITES = "headrace_writes"  # execution option of connections whose transactions write
_BUSY_TIMEOUT_MS = 10_000
_POOL_TIMEOUT_SECONDS = 10
_STATEMENT_TIMEOUT_MS = 10_000


def parse_url(url: str, *, is_async: bool = True) -> URL:
    """`sqlite:///path` or `postgresql://...`, with the driver that this program uses."""
    try:
        parsed = make_url(url)
    except exc.ArgumentError as error:
        raise DatabaseUrlError(
            "the database URL cannot be read; use sqlite:///path or postgresql://host/name"
        ) from error
    backend = parsed.get_backend_name()
    if backend == "sqlite":
        if parsed.database in (None, "", ":memory:"):
            raise DatabaseUrlError(
                "a SQLite database in memory is lost between connections; use sqlite:///path"
            )
        return parsed.set(drivername=f"sqlite+{'aiosqlite' if is_async else 'pysqlite'}")
    if backend in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    raise DatabaseUrlError(f"no support for {backend} databases; use sqlite or postgresql")


def tune(engine: Engine) -> None:
    """Make SQLite safe for concurrent writers. Nothing to do for PostgreSQL."""
    if engine.dialect.name == "sqlite":
        event.listen(engine, "do_connect", _try_sqlite)
        event.listen(engine, "connect", _open_sqlite)
        event.listen(engine, "invalidate", _abandon_sqlite)
        event.listen(engine, "begin", _begin_sqlite)


class Database:
    """Sessions on one database. Made without connecting, so also while the database is down."""

    def __init__(self, url: str) -> None:
        parsed = parse_url(url)
        is_sqlite = parsed.get_backend_name() == "sqlite"
        # SQLite has one writer at a time: few connections, so that waiting is first come, first
        # served in this pool and not by chance in SQLite's busy loop.
        options: dict[str, Any] = (
            {"pool_size": 4, "max_overflow": 0}
            if is_sqlite
            else {
                "pool_size": 10,
                "max_overflow": 10,
                "pool_pre_ping": True,  # a restarted server costs no request
                "connect_args": _postgres_options(parsed),
            }
        )
        self._engine = create_async_engine(
            parsed,
            pool_timeout=_POOL_TIMEOUT_SECONDS,
            hide_parameters=True,  # digests and names stay out of error messages
            **options,
        )
        tune(self._engine.sync_engine)
        writing = self._engine.execution_options(**{WRITES: True})
        self._reading = async_sessionmaker(self._engine, expire_on_commit=False)
        self._writing = async_sessionmaker(writing, expire_on_commit=False)
        self.insert = sqlite.insert if is_sqlite else postgresql.insert

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        """One transaction that changes nothing."""
        with unavailable_as_error():
            async with self._reading.begin() as session:
                yield session

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """One transaction that commits at the end and rolls back on any exception."""
        with unavailable_as_error():
            async with self._writing.begin() as session:
                yield session

    async def close(self) -> None:
        await self._engine.dispose()


@contextmanager
def unavailable_as_error() -> Iterator[None]:
    """Raise StoreUnavailableError for what a driver raises when its database is away or busy."""
    try:
        yield
    except exc.TimeoutError as error:
        raise StoreUnavailableError("every database connection is busy") from error
    except exc.DBAPIError as error:
        if isinstance(error.orig, UndefinedTable):
            message = "the database has no tables yet; run the migrations"
        elif isinstance(error, exc.IntegrityError | exc.DataError | exc.ProgrammingError):
            raise  # says something of the statement, not of the database
        else:
            message = f"the database is not usable now: {error.orig}"
        raise StoreUnavailableError(message) from error


def _postgres_options(url: URL) -> dict[str, Any]:
    """Bounds on every wait, so that a server that is cut off becomes an error and not a hang."""
    bounds = (
        f"-c statement_timeout={_STATEMENT_TIMEOUT_MS} "
        # Also of locks that a gateway holds which is cut off in the middle of a transaction.
        f"-c idle_in_transaction_session_timeout={_STATEMENT_TIMEOUT_MS}"
    )
    own = url.query.get("options", "")
    return {
        "connect_timeout": 5,
        "options": f"{bounds} {own if isinstance(own, str) else ' '.join(own)}",  # the last wins
        "tcp_user_timeout": _STATEMENT_TIMEOUT_MS,  # data sent but never acknowledged
        "keepalives_idle": 5,  # seconds; while only the answer is awaited
        "keepalives_interval": 2,
        "keepalives_count": 3,
    }


def _try_sqlite(_dialect: object, _record: object, args: Any, options: Any) -> None:
    # A file that cannot be opened leaves aiosqlite a thread that still reports to the event loop,
    # and prints a traceback if the loop is closed by then. Fail before there is a thread.
    sqlite3.connect(*args, **options).close()


def _open_sqlite(connection: DBAPIConnection, _record: object) -> None:
    connection.isolation_level = None  # the driver begins nothing by itself; _begin_sqlite does
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {_BUSY_TIMEOUT_MS}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _abandon_sqlite(connection: DBAPIConnection, _record: object, _error: object) -> None:
    # The caller was cancelled in the middle. Closing alone would keep the transaction, and the
    # write lock, for as long as anything still refers to one of its cursors.
    connection.rollback()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later fails at once if another wrote in between;
    # IMMEDIATE takes the write lock at the start, where waiting for it is possible.
    writes = connection.get_execution_options().get(WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
