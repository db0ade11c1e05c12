"""`headrace tenants`: who is served, with which weight, class and limits."""

import time
from dataclasses import asdict

import click

from gateway.cli.output import json_option, print_json, print_rows
from gateway.cli.store import (
    actor,
    limit_option,
    limits_text,
    load_settings,
    no_limits_option,
    wanted_limits,
    with_store,
)
from tenants.policy import Limit
from tenants.store import STATUSES, Store
from tenants.views import ApiKeyView, TenantView

COLUMNS = ("slug", "name", "status", "weight", "priority_class", "limits", "policy_version")


@click.group()
def command() -> None:
    """Tenants: create, list, show, set."""


@command.command()
@click.argument("slug")
@click.option("--name", help="For people; the slug if not given.")
@click.option("--weight", type=float, default=1.0, show_default=True, help="1 is an equal share.")
@click.option("--class", "priority_class", default="standard", show_default=True)
@limit_option
@json_option
def create(
    slug: str,
    name: str | None,
    weight: float,
    priority_class: str,
    limits: tuple[Limit, ...],
    as_json: bool,
) -> None:
    """Create tenant SLUG. It needs a key next: headrace keys create --tenant SLUG."""

    async def work(store: Store) -> TenantView:
        return await store.create_tenant(
            slug,
            name=name,
            weight=weight,
            priority_class=priority_class,
            limits=limits,
            actor=actor(),
            now=time.time(),
        )

    _print(with_store(load_settings(), f"create tenant {slug}", work), as_json)


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """All tenants, by slug."""
    found = with_store(load_settings(), "list tenants", lambda store: store.list_tenants())
    if as_json:
        print_json([_document(tenant) for tenant in found])
    else:
        print_rows(COLUMNS, [_row(tenant) for tenant in found])


@command.command()
@click.argument("slug")
@json_option
def show(slug: str, as_json: bool) -> None:
    """One tenant with its keys."""

    async def work(store: Store) -> tuple[TenantView, tuple[ApiKeyView, ...]]:
        return await store.get_tenant(slug), await store.list_keys(slug)

    tenant, keys = with_store(load_settings(), f"show tenant {slug}", work)
    if as_json:
        print_json(_document(tenant) | {"keys": [asdict(key) for key in keys]})
        return
    for column, value in zip(COLUMNS, _row(tenant), strict=True):
        click.echo(f"{column:15} {value}")
    for key in keys:
        state = "revoked" if key.revoked_at is not None else "live"
        click.echo(f"{'key':15} {key.id} {key.redacted} {key.name} ({state})")


@command.command("set")
@click.argument("slug")
@click.option("--name")
@click.option("--weight", type=float)
@click.option("--class", "priority_class")
@click.option("--status", type=click.Choice(STATUSES))
@no_limits_option
@limit_option
@json_option
def set_(
    slug: str,
    name: str | None,
    weight: float | None,
    priority_class: str | None,
    status: str | None,
    no_limits: bool,
    limits: tuple[Limit, ...],
    as_json: bool,
) -> None:
    """Change tenant SLUG; what is not given stays. Any --limit replaces all its limits."""
    wanted = wanted_limits(limits, no_limits)

    async def work(store: Store) -> TenantView:
        if status is not None:
            await store.set_tenant_status(slug, status, actor=actor(), now=time.time())
        if any(v is not None for v in (name, weight, priority_class, wanted)):
            await store.set_tenant(
                slug,
                name=name,
                weight=weight,
                priority_class=priority_class,
                limits=wanted,
                actor=actor(),
                now=time.time(),
            )
        return await store.get_tenant(slug)

    _print(with_store(load_settings(), f"set tenant {slug}", work), as_json)


def _print(tenant: TenantView, as_json: bool) -> None:
    if as_json:
        print_json(_document(tenant))
    else:
        print_rows(COLUMNS, [_row(tenant)])


def _document(tenant: TenantView) -> dict[str, object]:
    return asdict(tenant)


def _row(tenant: TenantView) -> list[object]:
    values = _document(tenant) | {"limits": limits_text(tenant.limits)}
    return [values[column] for column in COLUMNS]
