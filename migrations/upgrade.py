"""Bring a database to the newest schema."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from tenants.database import WRITES, parse_url, tune, unavailable_as_error

_ADVISORY_LOCK = 4_841_072  # any number, the same in every process


def upgrade(url: str) -> str:
    """Apply every missing step in one transaction; returns the revision.

    Processes that start together wait for each other; all but the first find nothing to do.
    Raises DatabaseUrlError or StoreUnavailableError.
    """
    engine = create_engine(
        parse_url(url, is_async=False), poolclass=NullPool, execution_options={WRITES: True}
    )
    tune(engine)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    with unavailable_as_error(), engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # SQLite needs no lock here: its transaction begins as the only writer.
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        revision = MigrationContext.configure(connection).get_current_revision()
    engine.dispose()
    assert revision is not None, "there is at least one step"
    return revision
