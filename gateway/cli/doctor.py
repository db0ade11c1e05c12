"""`headrace doctor`: what would keep a server from starting here, and what to do about it."""

import os
import platform
import shutil
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import click
import torch

from engine.errors import ModelLoadError
from engine.model.default_model import find_default_model
from gateway.cli.db import found_revision, needed_revision
from gateway.cli.home import find_note
from gateway.cli.output import json_option, print_json
from gateway.cli.store import load_settings, missing_sqlite
from gateway.settings import Settings
from tenants.database import parse_url
from tenants.errors import TenancyError

MIN_FREE_BYTES = 500 * 2**20
# A machine without a clock battery starts decades ago; quota windows would then never reset.
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding, and what to do should it not be ok."""

    name: str
    ok: bool
    detail: str
    next_step: str | None = None


def check_python(settings: Settings) -> Check:
    return Check(
        name="python",
        ok=sys.version_info >= (3, 11),
        detail=f"{platform.python_version()} at {sys.executable}",
        next_step="make install PYTHON=python3.11",
    )


def check_torch(settings: Settings) -> Check:
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return Check(
        name="torch",
        ok=settings.device != "cuda" or gpu is not None,
        detail=f"{torch.__version__}, device {gpu or f'cpu ({torch.get_num_threads()} threads)'}",
        next_step="unset HEADRACE_DEVICE, or install a CUDA build of torch and a driver",
    )


def check_port(settings: Settings) -> Check:
    place = f"{settings.host}:{settings.port}"
    note = find_note(settings.home)
    if note is not None:
        return Check(name="port", ok=True, detail=f"this home's server runs at {note.base_url}")
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            detail = f"{place}: {error.strerror}"
            return Check(
                name="port", ok=False, detail=detail, next_step="headrace up --port 0 (a free one)"
            )
    return Check(name="port", ok=True, detail=f"{place} is free")


def check_model(settings: Settings) -> Check:
    if settings.model is not None:
        return Check(
            name="model",
            ok=settings.model.exists(),
            detail=f"{settings.model} {'is there' if settings.model.exists() else 'is missing'}",
            next_step="set HEADRACE_MODEL to a model folder or GGUF file",
        )
    try:
        path = find_default_model()
    except ModelLoadError as error:
        return Check(name="model", ok=False, detail=str(error), next_step="headrace up")
    return Check(name="model", ok=True, detail=f"{path.name}, sha256 as published")


def check_clock(settings: Settings) -> Check:
    now = datetime.now(UTC)
    step = time.get_clock_info("monotonic").resolution
    return Check(
        name="clock",
        ok=now >= EARLIEST and step <= 0.001,
        detail=f"{now:%Y-%m-%d %H:%M:%S} UTC, steps of {1e9 * step:.0f} ns",
        next_step="set the system clock (timedatectl set-ntp true)",
    )


def check_disk(settings: Settings) -> Check:
    place = next(p for p in (settings.home, *settings.home.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    writable = os.access(place, os.W_OK)
    return Check(
        name="disk",
        ok=free >= MIN_FREE_BYTES and writable,
        detail=f"{free / 2**30:.1f} GiB free at {place.absolute()}"
        + ("" if writable else ", not writable"),
        next_step="free some space, or set HEADRACE_HOME to a folder elsewhere",
    )


def check_database(settings: Settings) -> Check:
    upgrade = "headrace db upgrade"
    try:
        place = parse_url(settings.resolved_database_url).render_as_string(hide_password=True)
        if missing_sqlite(settings) is not None:
            return Check(name="database", ok=True, detail="none yet; headrace up makes it")
        revision = found_revision(settings.resolved_database_url)
    except TenancyError as error:
        return Check(name="database", ok=False, detail=str(error), next_step=upgrade)
    needed = needed_revision()
    detail = f"{place} at revision {revision}"
    if revision != needed:
        detail += f", this version needs {needed}"
    return Check(name="database", ok=revision == needed, detail=detail, next_step=upgrade)


CHECKS = (
    check_python,
    check_torch,
    check_model,
    check_database,
    check_port,
    check_clock,
    check_disk,
)


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Check what a server needs here; exit code 1 if something is in the way."""
    settings = load_settings()
    findings = [check(settings) for check in CHECKS]
    if as_json:
        print_json([asdict(one) | ({"next_step": None} if one.ok else {}) for one in findings])
    else:
        for finding in findings:
            mark = click.style("✓", fg="green") if finding.ok else click.style("✗", fg="red")
            click.echo(f"  {mark} {finding.name:9} {finding.detail}")
            if not finding.ok:
                click.echo(f"{'':14}next: {finding.next_step}")
    if not all(finding.ok for finding in findings):
        raise click.exceptions.Exit(1)
