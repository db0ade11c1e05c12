"""`headrace db`: the policy database."""

import click

from gateway.cli.output import CommandError, json_option, print_json
from gateway.cli.store import load_settings
from gateway.settings import Settings
from migrations.upgrade import upgrade as apply_migrations


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
