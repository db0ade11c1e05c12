"""`headrace db`: the policy database."""

import asyncio
from pathlib import Path

import click
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

import migrations
from gateway.cli.output import CommandError, json_option, print_json
from gateway.cli.store import load_settings
from gateway.settings import Settings
from migrations.upgrade import upgrade as apply_migrations
from tenants.database import Database


@click.group()
def command() -> None:
    """The policy database."""


@command.command()
@json_option
def upgrade(as_json: bool) -> None:
    """Bring the database to the newest schema; safe to repeat and to run while serving."""
    revision = migrate(load_settings())
    if as_json:
        print_json({"revision": revision})
    else:
        click.echo(f"Database at revision {revision}.")


def migrate(settings: Settings) -> str:
    """Make the home folder and the schema; the revision. Raises CommandError."""
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
        return apply_migrations(settings.resolved_database_url)
    # Drivers, alembic and the file system each have an error tree of their own.
    except Exception as error:
        raise CommandError(
            "could not upgrade the database",
            why=f"{type(error).__name__}: {error}",
            next_step="headrace doctor",
        ) from error


def needed_revision() -> str | None:
    """The newest schema, which this version works with."""
    assert migrations.__file__ is not None
    return ScriptDirectory(str(Path(migrations.__file__).parent)).get_current_head()


def found_revision(url: str) -> str | None:
    """The database's schema; None if it has none. Raises a TenancyError if it is away."""

    async def find() -> str | None:
        database = Database(url)
        try:
            async with database.reading() as session:
                connection = await session.connection()
                return await connection.run_sync(
                    lambda sync: MigrationContext.configure(sync).get_current_revision()
                )
        finally:
            await database.close()

    return asyncio.run(find())
