"""`headrace classes`: which priority classes there are, and how they treat what waits and runs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any, cast

import click

from gateway.cli.output import WrongUsageError, json_option, print_json, print_rows
from gateway.cli.store import actor, load_settings, readable_errors, with_store
from tenants.classes import (
    ClassChanges,
    create_class,
    delete_class,
    list_classes,
    set_class,
)
from tenants.policy import ServiceClass
from tenants.store import Store

COLUMNS = tuple(field.name for field in fields(ServiceClass))
# What a class may be without, and how to say so.
REMOVABLE = {
    "max_wait_seconds": "Its turn is never brought forward.",
    "max_queue_seconds": "Wait as long as it takes.",
    "max_queued": "Any number may wait.",
}

Command = Callable[..., None]


def class_options(command: Command) -> Command:
    """What both a new class and a change can say; None where it is not given."""
    for option in (
        click.option(
            "--max-queued",
            type=int,
            help="How many of its requests, all tenants' together, may wait for one engine; the "
            "next one is refused with a 429. A tenant's own limit is --limit queued=N.",
        ),
        click.option(
            "--max-queue-seconds", type=float, help="What waits longer is refused with a 429."
        ),
        click.option(
            "--max-wait-seconds", type=float, help="What waits longer brings its turn forward."
        ),
        click.option(
            "--preemptible/--not-preemptible", default=None, help="Gives way to higher classes."
        ),
        click.option(
            "--weight", type=float, help="Its share, with HEADRACE_CLASS_SHARING=weighted."
        ),
    ):
        command = option(command)
    return command


def removing_options(command: Command) -> Command:
    for name, meaning in REMOVABLE.items():
        flag = f"--no-{name.replace('_', '-')}"
        command = click.option(flag, is_flag=True, help=meaning)(command)
    return command


@click.group()
def command() -> None:
    """Priority classes: list, create, set, delete."""


@command.command("list")
@json_option
def list_(as_json: bool) -> None:
    """All classes, the one that goes first first."""

    async def work(store: Store) -> tuple[ServiceClass, ...]:
        return await list_classes(store.database)

    found = with_store(load_settings(), "list classes", work)
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        _print_rows(found)


@command.command()
@click.argument("name")
@click.option("--rank", type=int, required=True, help="0 goes first; each class has its own.")
@class_options
@json_option
def create(name: str, as_json: bool, **given: Any) -> None:
    """Create class NAME. Tenants enter it with headrace tenants set SLUG --class NAME."""
    given["preemptible"] = bool(given["preemptible"])
    what = f"create class {name}"
    with readable_errors(what):
        wanted = ServiceClass(name=name, **{k: v for k, v in given.items() if v is not None})

    async def work(store: Store) -> None:
        await create_class(store.database, wanted, actor=actor(), now=time.time())

    with_store(load_settings(), what, work)
    _print(wanted, as_json)


@command.command("set")
@click.argument("name")
@click.option("--rank", type=int, help="0 goes first; each class has its own.")
@class_options
@removing_options
@json_option
def set_(name: str, as_json: bool, **given: Any) -> None:
    """Change class NAME for all its tenants; what is not given stays."""
    changes = _changes(name, given)

    async def work(store: Store) -> ServiceClass:
        return await set_class(store.database, name, changes, actor=actor(), now=time.time())

    _print(with_store(load_settings(), f"set class {name}", work), as_json)


@command.command()
@click.argument("name")
@json_option
def delete(name: str, as_json: bool) -> None:
    """Delete class NAME. Refused while a tenant is in it."""

    async def work(store: Store) -> ServiceClass:
        return await delete_class(store.database, name, actor=actor(), now=time.time())

    _print(with_store(load_settings(), f"delete class {name}", work), as_json)


def _changes(name: str, given: dict[str, Any]) -> ClassChanges:
    """What the options of `set` say. Raises WrongUsageError."""
    removed = {column for column in REMOVABLE if given.pop(f"no_{column}")}
    changes = {column: value for column, value in given.items() if value is not None}
    if removed & changes.keys() or not (removed or changes):
        raise WrongUsageError(
            f"could not set class {name}",
            why="the options contradict each other" if changes else "nothing is to be changed",
            next_step=f"headrace classes set {name} --max-queue-seconds 30",
        )
    return cast(ClassChanges, changes | dict.fromkeys(removed))


def _print(one: ServiceClass, as_json: bool) -> None:
    if as_json:
        print_json(asdict(one))
    else:
        _print_rows([one])


def _print_rows(classes: Sequence[ServiceClass]) -> None:
    print_rows(COLUMNS, [[asdict(one)[column] for column in COLUMNS] for one in classes])
