"""`headrace tenants`: who is served, with which weight, class and limits."""

import time
from dataclasses import asdict

import click

from gateway.cli.home import find_note
from gateway.cli.output import RefusedError, WrongUsageError, json_option, print_json, print_rows
from gateway.cli.store import (
    actor,
    limit_option,
    limits_text,
    load_settings,
    no_limits_option,
    wanted_limits,
    with_store,
)
from gateway.settings import Settings
from tenants.policy import KVBounds, Limit
from tenants.store import STATUSES, Store
from tenants.views import ApiKeyView, TenantView

COLUMNS = ("slug", "name", "status", "weight", "priority_class", "limits", "kv", "policy_version")

kv_floor_option = click.option(
    "--kv-floor", type=int, help="KV blocks that it can always have, whoever holds them."
)
kv_cap_option = click.option("--kv-cap", type=int, help="The most KV blocks that it may hold.")


@click.group()
def command() -> None:
    """Tenants: create, list, show, set."""


@command.command()
@click.argument("slug")
@click.option("--name", help="For people; the slug if not given.")
@click.option("--weight", type=float, default=1.0, show_default=True, help="1 is an equal share.")
@click.option("--class", "priority_class", default="standard", show_default=True)
@limit_option
@kv_floor_option
@kv_cap_option
@json_option
def create(
    slug: str,
    name: str | None,
    weight: float,
    priority_class: str,
    limits: tuple[Limit, ...],
    kv_floor: int | None,
    kv_cap: int | None,
    as_json: bool,
) -> None:
    """Create tenant SLUG. It needs a key next: headrace keys create --tenant SLUG."""

    settings = load_settings()

    async def work(store: Store) -> TenantView:
        kv = KVBounds(floor_blocks=kv_floor or 0, cap_blocks=kv_cap)
        await _check_floors_fit(settings, store, slug, kv)
        return await store.create_tenant(
            slug,
            name=name,
            weight=weight,
            priority_class=priority_class,
            limits=limits,
            kv=kv,
            actor=actor(),
            now=time.time(),
        )

    _print(with_store(settings, f"create tenant {slug}", work), as_json)


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
@kv_floor_option
@kv_cap_option
@click.option("--no-kv-cap", is_flag=True, help="Take the cap away.")
@json_option
def set_(
    slug: str,
    name: str | None,
    weight: float | None,
    priority_class: str | None,
    status: str | None,
    no_limits: bool,
    limits: tuple[Limit, ...],
    kv_floor: int | None,
    kv_cap: int | None,
    no_kv_cap: bool,
    as_json: bool,
) -> None:
    """Change tenant SLUG; what is not given stays. Any --limit replaces all its limits."""
    settings, wanted = load_settings(), wanted_limits(limits, no_limits)
    if no_kv_cap and kv_cap is not None:
        raise WrongUsageError(
            f"could not set tenant {slug}",
            why="--no-kv-cap and --kv-cap contradict each other",
            next_step="give one of them",
        )

    async def work(store: Store) -> TenantView:
        kv = None
        if kv_floor is not None or kv_cap is not None or no_kv_cap:
            kv = (await store.get_tenant(slug)).kv
            kv = KVBounds(
                floor_blocks=kv.floor_blocks if kv_floor is None else kv_floor,
                cap_blocks=None if no_kv_cap else kv.cap_blocks if kv_cap is None else kv_cap,
            )
            await _check_floors_fit(settings, store, slug, kv)
        if status is not None:
            await store.set_tenant_status(slug, status, actor=actor(), now=time.time())
        if any(v is not None for v in (name, weight, priority_class, wanted, kv)):
            await store.set_tenant(
                slug,
                name=name,
                weight=weight,
                priority_class=priority_class,
                limits=wanted,
                kv=kv,
                actor=actor(),
                now=time.time(),
            )
        return await store.get_tenant(slug)

    _print(with_store(settings, f"set tenant {slug}", work), as_json)


async def _check_floors_fit(settings: Settings, store: Store, slug: str, kv: KVBounds) -> None:
    """Refuse floors that together go beyond the pool of the server of this home, if one runs."""
    note = find_note(settings.home)
    if note is None or not kv.floor_blocks:
        return
    others = [t for t in await store.list_tenants() if t.slug != slug and t.status != "archived"]
    kept = sum(tenant.kv.floor_blocks for tenant in others)
    if kept + kv.floor_blocks > note.num_blocks:
        raise RefusedError(
            f"could not set the KV floor of {slug}",
            why=f"{kv.floor_blocks} blocks do not fit: other floors take {kept} of the "
            f"{note.num_blocks} that the server at {note.base_url} has",
            next_step="headrace tenants list",
        )


def _print(tenant: TenantView, as_json: bool) -> None:
    if as_json:
        print_json(_document(tenant))
    else:
        print_rows(COLUMNS, [_row(tenant)])


def _document(tenant: TenantView) -> dict[str, object]:
    return asdict(tenant)


def _row(tenant: TenantView) -> list[object]:
    cap = "" if tenant.kv.cap_blocks is None else tenant.kv.cap_blocks
    bounds = {"limits": limits_text(tenant.limits), "kv": f"{tenant.kv.floor_blocks}-{cap}"}
    values = _document(tenant) | bounds
    return [values[column] for column in COLUMNS]
