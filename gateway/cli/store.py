"""The policy store as commands use it: opened for one piece of work, its errors made readable."""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click

from gateway.cli.output import (
    CommandError,
    NotFoundError,
    RefusedError,
    WrongUsageError,
)
from gateway.settings import Settings, SettingsError
from tenants.database import parse_url
from tenants.errors import (
    ApiKeyNotFoundError,
    ClassConflictError,
    ClassNotFoundError,
    DatabaseUrlError,
    InvalidNameError,
    InvalidPolicyError,
    TenancyError,
    TenantExistsError,
    TenantNotFoundError,
)
from tenants.policy import WINDOWED, Limit
from tenants.store import Store

T = TypeVar("T")

_NEXT: dict[type[TenancyError], tuple[type[CommandError], str]] = {
    TenantNotFoundError: (NotFoundError, "headrace tenants list"),
    ApiKeyNotFoundError: (NotFoundError, "headrace keys list"),
    ClassNotFoundError: (NotFoundError, "headrace classes list"),
    TenantExistsError: (RefusedError, "headrace tenants set SLUG changes it"),
    ClassConflictError: (RefusedError, "headrace classes list"),
    InvalidNameError: (WrongUsageError, "the same command with another name"),
    InvalidPolicyError: (WrongUsageError, "the same command with another value"),
    DatabaseUrlError: (WrongUsageError, "set HEADRACE_DATABASE_URL"),
}


def load_settings() -> Settings:
    """Settings from the environment. Raises WrongUsageError."""
    try:
        return Settings.from_env(os.environ)
    except SettingsError as error:
        raise WrongUsageError(
            "the settings cannot be used", why=str(error), next_step="change or unset that variable"
        ) from error


def missing_sqlite(settings: Settings) -> Path | None:
    """The SQLite file that the settings name, if it is not there: opening would create it."""
    if settings.database_url is not None and not settings.database_url.startswith("sqlite"):
        return None
    file = Path(parse_url(settings.resolved_database_url).database or "")
    return None if file.exists() else file


def actor() -> str:
    """Who changes things from a shell, for the audit log."""
    return f"cli:uid-{os.getuid()}"


def with_store(settings: Settings, what: str, work: Callable[[Store], Awaitable[T]]) -> T:
    """The result of `work` on an open store; `what` begins the error if it fails."""

    async def run() -> T:
        store = Store.open(settings.resolved_database_url)
        try:
            return await work(store)
        finally:
            await store.close()

    with readable_errors(what):
        missing = missing_sqlite(settings)
        if missing is not None:
            raise CommandError(
                f"could not {what}", why=f"there is no {missing}", next_step="headrace db upgrade"
            )
        return asyncio.run(run())


@contextmanager
def readable_errors(what: str) -> Iterator[None]:
    """Raise the CommandError that suits a TenancyError; `what` begins it."""
    try:
        yield
    except TenancyError as error:
        kind, next_step = _NEXT.get(type(error), (CommandError, "headrace db upgrade"))
        raise kind(f"could not {what}", why=str(error), next_step=next_step) from error


class LimitType(click.ParamType[Limit]):
    """METRIC=N, or METRIC=N/SECONDS for what is counted in a window."""

    name = "METRIC=N[/SECONDS]"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Limit:
        match = re.fullmatch(r"([a-z_]+)=(\d+)(?:/(\d+))?", str(value))
        if match is None:
            self.fail(f"{value!r} is not like requests=60/60 or concurrent=8", param, ctx)
        if match[1] in WINDOWED and match[3] is None:
            self.fail(f"{value!r} has no window: add one in seconds, {value}/60", param, ctx)
        try:
            return Limit(metric=match[1], limit=int(match[2]), window_seconds=int(match[3] or 0))
        except InvalidPolicyError as error:
            self.fail(str(error), param, ctx)


limit_option = click.option(
    "--limit",
    "limits",
    type=LimitType(),
    multiple=True,
    help="Repeatable. requests=60/60, tokens_total=100000/86400, kv_block_seconds=36000/3600, "
    "concurrent=8, queued=16, context_tokens=4096. KV-block-seconds are counted when a request "
    "ends, so what runs when a window fills may overrun it.",
)


no_limits_option = click.option("--no-limits", is_flag=True, help="Take every limit away.")


def wanted_limits(limits: tuple[Limit, ...], no_limits: bool) -> tuple[Limit, ...] | None:
    """What --limit and --no-limits say together; None where neither is given.

    Raises WrongUsageError if both are.
    """
    if no_limits and limits:
        raise WrongUsageError(
            "could not set the limits",
            why="--no-limits and --limit contradict each other",
            next_step="give one of them",
        )
    return limits if limits or no_limits else None


def required_limits(limits: tuple[Limit, ...], no_limits: bool) -> tuple[Limit, ...]:
    """The same for a command that sets nothing else. Raises WrongUsageError if neither is given."""
    wanted = wanted_limits(limits, no_limits)
    if wanted is None:
        raise WrongUsageError(
            "could not set the limits",
            why="no limit is given",
            next_step="add --limit, or --no-limits to take them away",
        )
    return wanted


def limits_text(limits: tuple[Limit, ...]) -> str:
    """Limits in the form that --limit reads."""
    return " ".join(
        f"{one.metric}={one.limit}" + (f"/{one.window_seconds}" if one.window_seconds else "")
        for one in limits
    )
