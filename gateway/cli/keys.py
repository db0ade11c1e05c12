"""`headrace keys`: the API keys of tenants. A secret is shown once, when it is made."""

import time
from dataclasses import asdict
from datetime import UTC, datetime

import click

from gateway.cli.output import json_option, print_json, print_rows
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
from tenants.views import ApiKeyView

COLUMNS = ("id", "tenant", "name", "key", "state", "last used", "limits")
DAY_SECONDS = 86_400


@click.group()
def command() -> None:
    """API keys: create, list, set, revoke."""


@command.command()
@click.option("--tenant", required=True, help="Slug of the tenant.")
@click.option("--name", default="key", show_default=True, help="For people.")
@click.option("--expires-days", type=click.FloatRange(min=0, min_open=True))
@limit_option
@json_option
def create(
    tenant: str,
    name: str,
    expires_days: float | None,
    limits: tuple[Limit, ...],
    as_json: bool,
) -> None:
    """Make a key. Its secret is printed now and cannot be read again."""

    async def work(store: Store) -> tuple[ApiKeyView, str]:
        now = time.time()
        expires_at = None if expires_days is None else now + expires_days * DAY_SECONDS
        return await store.create_key(
            tenant, name, actor=actor(), now=now, expires_at=expires_at, limits=limits
        )

    key, secret = with_store(load_settings(), f"make a key for {tenant}", work)
    if as_json:
        print_json(asdict(key) | {"api_key": secret})
        return
    click.echo(f"API key of {tenant} - shown once, stored hashed:\n  {secret}\nid: {key.id}")


@command.command("list")
@click.option("--tenant", help="Only this tenant's.")
@json_option
def list_(tenant: str | None, as_json: bool) -> None:
    """Keys with both ends of their secrets, oldest first, revoked ones too."""
    keys = with_store(load_settings(), "list keys", lambda store: store.list_keys(tenant))
    if as_json:
        print_json([asdict(key) for key in keys])
    else:
        print_rows(COLUMNS, [_row(key, time.time()) for key in keys])


@command.command("set")
@click.argument("key_id")
@no_limits_option
@limit_option
@json_option
def set_(key_id: str, no_limits: bool, limits: tuple[Limit, ...], as_json: bool) -> None:
    """Replace the limits of the key with this id, which apply besides its tenant's."""
    wanted = required_limits(limits, no_limits)

    async def work(store: Store) -> ApiKeyView:
        return await store.set_key_limits(key_id, wanted, actor=actor(), now=time.time())

    key = with_store(load_settings(), f"set the limits of {key_id}", work)
    if as_json:
        print_json(asdict(key))
    else:
        print_rows(COLUMNS, [_row(key, time.time())])


@command.command()
@click.argument("key_id")
@json_option
def revoke(key_id: str, as_json: bool) -> None:
    """Revoke the key with this id (not its secret): from now on it opens nothing."""

    async def work(store: Store) -> ApiKeyView:
        return await store.revoke_key(key_id, actor=actor(), now=time.time())

    key = with_store(load_settings(), f"revoke {key_id}", work)
    if as_json:
        print_json(asdict(key))
    else:
        click.echo(f"Key {key.id} of {key.tenant} is revoked.")


def _row(key: ApiKeyView, now: float) -> list[object]:
    expired = key.expires_at is not None and key.expires_at <= now
    state = "revoked" if key.revoked_at is not None else "expired" if expired else "live"
    used = (
        "never"
        if key.last_used_at is None
        else f"{datetime.fromtimestamp(key.last_used_at, UTC):%Y-%m-%d %H:%M}"
    )
    return [key.id, key.tenant, key.name, key.redacted, state, used, limits_text(key.limits)]
