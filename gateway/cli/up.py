"""`headrace up`: from nothing to a server that answers, in one command."""

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from engine.errors import ModelLoadError
from engine.model.default_model import FETCH_COMMAND, fetch_default_model, find_default_model
from gateway.app import Gateway
from gateway.cli.db import migrate
from gateway.cli.output import CommandError, print_json
from gateway.cli.serve import Addresses, run_server, server_options, server_settings
from gateway.cli.store import actor
from tenants.errors import TenantNotFoundError
from tenants.store import Store

DEMO_TENANT = "demo"


@click.command()
@server_options
def command(
    host: str | None, port: int | None, model: Path | None, public: bool, as_json: bool
) -> None:
    """Serve the default model on 127.0.0.1:8080, making whatever is not there yet.

    The first start makes the database, the tenant `demo` and its API key; later starts keep them.
    Everything lies in HEADRACE_HOME (./headrace-data). Ctrl-C drains, twice stops now.
    """
    settings = server_settings(host, port, model, public)
    started = time.monotonic()
    revision = migrate(settings)
    if settings.model is None:
        _get_default_model()

    async def ready(gateway: Gateway, addresses: Addresses) -> None:
        # Only now: a key that is made before a start that fails would never have been shown.
        api_key = await _first_key(gateway.store)
        if as_json:
            key = {} if api_key is None else {"api_key": api_key}
            print_json(asdict(addresses) | key)
        else:
            click.echo(_picture(gateway, revision, addresses, api_key, time.monotonic() - started))

    run_server(settings, ready)


def _get_default_model() -> None:
    try:
        find_default_model()
    except ModelLoadError:
        click.echo("The default model is not here yet; fetching it (98 MB, once).", err=True)
        try:
            fetch_default_model()
        except ModelLoadError as error:
            raise CommandError(
                "could not get the default model",
                why=str(error),
                next_step=f"{FETCH_COMMAND}, or --model with a model of your own",
            ) from error


async def _first_key(store: Store) -> str | None:
    """The secret of the demo tenant's key if it had to be made; None if there is one."""
    now = time.time()
    try:
        await store.get_tenant(DEMO_TENANT)
    except TenantNotFoundError:
        await store.create_tenant(DEMO_TENANT, actor=actor(), now=now)
    if await store.list_keys(DEMO_TENANT):
        return None
    _, secret = await store.create_key(DEMO_TENANT, "first key", actor=actor(), now=now)
    return secret


def _picture(
    gateway: Gateway, revision: str, addresses: Addresses, api_key: str | None, seconds: float
) -> str:
    """What a person sees once the server is ready."""
    settings, model = gateway.settings, gateway.model
    tick = click.style("✓", fg="green")
    hardware = f"{model.device}, {model.dtype}"
    place = "HEADRACE_DATABASE_URL" if settings.database_url else settings.home / "headrace.db"
    if api_key is None:
        key_lines = [
            "  No new API key: this home has one since its first start.",
            f"  Another:   headrace keys create --tenant {DEMO_TENANT}",
        ]
    else:
        key_lines = ["  API key, shown once and stored hashed:", f"    {api_key}"]
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": addresses.model, "stream": True, "temperature": 0, "messages": [question]}
    admin = [f"  Admin      {addresses.admin_url}"] if addresses.admin_url else []
    return "\n".join(
        [
            f"  {tick} database   {place} (revision {revision})",
            f"  {tick} model      {model.name} ({hardware}), policy {settings.policy}",
            f"  {tick} tenant     {DEMO_TENANT}",
            f"  {tick} ready      in {seconds:.1f} s",
            "",
            *key_lines,
            "",
            f"  API        {addresses.base_url}/v1",
            f"  Metrics    {addresses.metrics_url}",
            *admin,
            "",
            "  Try it:",
            f"    curl -N {addresses.base_url}/v1/chat/completions \\",
            f'      -H "Authorization: Bearer {api_key or "$HEADRACE_API_KEY"}" \\',
            "      -H 'Content-Type: application/json' \\",
            f"      -d '{json.dumps(body)}'",
            "    headrace demo load    # three tenants, one of them noisy",
            "",
            f"  Ctrl-C drains ({settings.drain_seconds:g} s), twice stops now.",
        ]
    )
