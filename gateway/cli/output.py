"""How every command speaks: text or one JSON value, and errors as one block."""

import json
from collections.abc import Sequence
from typing import IO, Any

import click
from rich.console import Console
from rich.table import Table

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON; errors go to stderr as JSON too."
)


class CommandError(click.ClickException):
    """A command failed. Prints what, why and the next step, and ends the process with 1."""

    def __init__(self, what: str, *, why: str, next_step: str) -> None:
        super().__init__(what)
        self.why = why
        self.next_step = next_step
        context = click.get_current_context(silent=True)
        self.as_json = bool(context and context.params.get("as_json"))

    def show(self, file: IO[Any] | None = None) -> None:
        if self.as_json:
            error = {"what": self.message, "why": self.why, "next": self.next_step}
            click.echo(json.dumps({"error": error}), err=True)
            return
        click.secho(f"Error: {self.message}", fg="red", err=True)
        click.echo(f"  why:  {self.why}\n  next: {self.next_step}", err=True)


class WrongUsageError(CommandError):
    """An argument or a HEADRACE_* variable cannot be used."""

    exit_code = 2


class NotFoundError(CommandError):
    """What was named does not exist."""

    exit_code = 3


class RefusedError(CommandError):
    """It would be unsafe, or in conflict with what is there."""

    exit_code = 4


class NoServerError(CommandError):
    """No server answered."""

    exit_code = 5


def print_json(value: object) -> None:
    """One JSON value on stdout."""
    click.echo(json.dumps(value, default=str))


def print_rows(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout."""
    table = Table(*columns, box=None, header_style="bold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    stdout().print(table)


def stdout() -> Console:
    """A console on stdout, as wide as the terminal; wide enough for anything where it is none."""
    console = Console()
    return console if console.is_terminal else Console(width=1000)
