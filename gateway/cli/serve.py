"""`headrace serve`: run the gateway as an operator does, changing nothing on the way."""

import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import click
import httpx

from engine.client import GenerationRequest
from engine.errors import EngineError
from engine.sequence import SamplingParams, TenantShare
from gateway.app import Gateway
from gateway.cli.db import found_revision, needed_revision
from gateway.cli.home import ServerNote, find_note, remove_note, write_note
from gateway.cli.output import CommandError, RefusedError, json_option, print_json
from gateway.cli.store import load_settings, missing_sqlite, readable_errors
from gateway.http_server import listen
from gateway.server import run
from gateway.settings import Settings, SettingsError
from tenants.errors import StoreUnavailableError

F = TypeVar("F", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a server answers."""

    base_url: str
    admin_url: str | None  # None where this version has no admin pages
    metrics_url: str
    model: str


Ready = Callable[[Gateway, Addresses], Awaitable[None]]
"""Called once the engine has stepped and the socket answers."""


def server_options(command: F) -> F:
    """The options that every way of serving has."""
    for option in (
        click.option("--host", help="Address to listen on (HEADRACE_HOST)."),
        click.option(
            "--port", type=click.IntRange(0, 65535), help="0 takes a free one (HEADRACE_PORT)."
        ),
        click.option("--model", type=click.Path(path_type=Path), help="Model folder or GGUF file."),
        click.option("--public", is_flag=True, help="Allow an address that others can reach."),
        json_option,
    ):
        command = option(command)
    return command


@click.command()
@server_options
def command(
    host: str | None, port: int | None, model: Path | None, public: bool, as_json: bool
) -> None:
    """Serve on the database and model that are there; no tenant, key or schema is made.

    Before the first time: headrace db upgrade. Ctrl-C or SIGTERM drains, twice stops now.
    """
    settings = server_settings(host, port, model, public)
    _require_schema(settings)

    async def ready(_: Gateway, addresses: Addresses) -> None:
        if as_json:
            print_json(asdict(addresses))
        else:
            click.echo(f"Serving {addresses.model} at {addresses.base_url}/v1")

    run_server(settings, ready)


def _require_schema(settings: Settings) -> None:
    """A database that is only away may come back; one without its tables would serve nobody.

    Raises RefusedError without them, WrongUsageError for a URL that cannot be used.
    """
    needed = needed_revision()
    with readable_errors("serve"):
        missing = missing_sqlite(settings)
        try:
            found = None if missing else found_revision(settings.resolved_database_url)
        except StoreUnavailableError as error:
            logging.getLogger("headrace").warning("requests get 503 for now: %s", error)
            return
    if found != needed:
        raise RefusedError(
            "the database is not ready",
            why=f"there is no {missing}"
            if missing
            else f"it is at revision {found}, this version needs {needed}",
            next_step="headrace db upgrade",
        )


def server_settings(
    host: str | None, port: int | None, model: Path | None, public: bool
) -> Settings:
    """Settings with what the command line says. Raises RefusedError for a public address."""
    settings = load_settings()
    settings = replace(
        settings,
        host=host or settings.host,
        port=settings.port if port is None else port,
        model=model or settings.model,
    )
    if not public and not _is_loopback(settings.host):
        raise RefusedError(
            f"will not listen on {settings.host}",
            why="others could reach it; there is no TLS, and /metrics needs no key by default",
            next_step="put a TLS proxy and HEADRACE_OPERATOR_TOKEN in place, then add --public",
        )
    return settings


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def run_server(settings: Settings, ready: Ready) -> None:
    """Serve until a signal; exit code 1 if it was stopped without a drain."""
    _configure_logging(settings)

    async def started(gateway: Gateway, base_url: str) -> None:
        await _take_a_step(gateway)
        addresses = await _addresses(gateway, base_url)
        write_note(settings.home, _note(gateway, base_url))
        await ready(gateway, addresses)
        sys.stdout.flush()

    sock = _listen(settings)  # a taken port fails before the model loads
    try:
        drained = run(settings, sock, on_started=started)
    except SettingsError as error:
        raise CommandError(
            "the settings do not fit", why=str(error), next_step="change that variable"
        ) from error
    except EngineError as error:
        raise CommandError(
            "the engine did not start",
            why=str(error),
            next_step="put that right; headrace doctor checks what a server needs",
        ) from error
    finally:
        sock.close()
        remove_note(settings.home, os.getpid())
    if not drained:
        raise click.exceptions.Exit(1)


def _listen(settings: Settings) -> socket.socket:
    try:
        return listen(settings.host, settings.port)
    except OSError as error:
        what = f"cannot listen on {settings.host}:{settings.port}"
        note = find_note(settings.home)
        if note is not None and note.base_url.endswith(f":{settings.port}"):
            raise RefusedError(
                what,
                why=f"this home's server is already running at {note.base_url}",
                next_step=f"use it, or stop it first: kill {note.pid}",
            ) from error
        raise RefusedError(
            what,
            why=error.strerror or str(error),
            next_step="stop what listens there, or HEADRACE_PORT=8081, or --port 0 (a free one)",
        ) from error


def _configure_logging(settings: Settings) -> None:
    """Our own loggers at the level that was set; what libraries warn of; all on stderr."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("headrace", "engine", "gateway", "tenants"):
        logging.getLogger(name).setLevel(settings.log_level.upper())


async def _take_a_step(gateway: Gateway) -> None:
    """Generate one token: the first real request then meets a model that has run."""
    request = GenerationRequest(
        id="warmup",
        share=TenantShare(tenant="_warmup"),  # no slug has an underscore
        namespace="_warmup",
        prompt_token_ids=tuple(gateway.model.encode("Hello")),
        params=SamplingParams(max_tokens=1, temperature=0),
        use_prefix_cache=False,
    )
    async for _ in await gateway.engine.submit(request):
        pass


async def _addresses(gateway: Gateway, base_url: str) -> Addresses:
    """Ask the server itself, over its socket. Raises httpx.HTTPError if it is not ready."""
    async with httpx.AsyncClient(base_url=base_url, trust_env=False) as http:
        (await http.get("/readyz")).raise_for_status()
        has_admin = (await http.get("/admin")).status_code != httpx.codes.NOT_FOUND
    return Addresses(
        base_url=base_url,
        admin_url=f"{base_url}/admin" if has_admin else None,
        metrics_url=f"{base_url}/metrics",
        model=gateway.model.name,
    )


def _note(gateway: Gateway, base_url: str) -> ServerNote:
    scheduler, cache = gateway.config.scheduler, gateway.config.cache
    return ServerNote(
        pid=os.getpid(),
        base_url=base_url,
        model=gateway.model.name,
        max_seqs=scheduler.max_seqs,
        max_step_tokens=scheduler.max_step_tokens,
        max_model_len=scheduler.max_model_len,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
    )
