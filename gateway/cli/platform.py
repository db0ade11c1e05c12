"""`headrace platform`: limits of all tenants together."""

import time
from dataclasses import asdict

import click

from gateway.cli.output import json_option, print_json
from gateway.cli.store import (
    actor,
    limit_option,
    limits_text,
    load_settings,
    no_limits_option,
    required_limits,
    with_store,
)
from tenants.policy import Limit
from tenants.store import Store


@click.group()
def command() -> None:
    """Limits of all tenants together: show, set."""


@command.command()
@json_option
def show(as_json: bool) -> None:
    """The limits that bound all tenants together."""
    found = with_store(load_settings(), "show the limits", lambda store: store.platform_limits())
    _print(found, as_json)


@command.command("set")
@no_limits_option
@limit_option
@json_option
def set_(no_limits: bool, limits: tuple[Limit, ...], as_json: bool) -> None:
    """Replace the limits of all tenants together; tenants are not told what is used of them."""
    wanted = required_limits(limits, no_limits)

    async def work(store: Store) -> tuple[Limit, ...]:
        await store.set_platform_limits(wanted, actor=actor(), now=time.time())
        return await store.platform_limits()

    _print(with_store(load_settings(), "set the limits", work), as_json)


def _print(limits: tuple[Limit, ...], as_json: bool) -> None:
    if as_json:
        print_json({"limits": [asdict(limit) for limit in limits]})
    else:
        click.echo(limits_text(limits) or "no limits")
