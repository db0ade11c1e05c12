"""`headrace classes`: which priority classes there are, and how they treat what waits and runs."""

import time
from collections.abc import Sequence
from dataclasses import asdict

import click

from gateway.cli.output import WrongUsageError, json_option, print_json, print_rows
from gateway.cli.store import actor, load_settings, with_store
from tenants.classes import ClassChanges, list_classes, set_class
from tenants.policy import ServiceClass
from tenants.store import Store

COLUMNS = ("name", "rank", "preemptible", "max_queue_seconds")


@click.group()
def command() -> None:
    """Priority classes: list, set."""


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


@command.command("set")
@click.argument("name")
@click.option("--preemptible/--not-preemptible", default=None, help="Gives way to higher classes.")
@click.option("--max-queue-seconds", type=float, help="What waits longer is refused with a 429.")
@click.option("--no-max-queue-seconds", is_flag=True, help="Wait as long as it takes.")
@json_option
def set_(
    name: str,
    preemptible: bool | None,
    max_queue_seconds: float | None,
    no_max_queue_seconds: bool,
    as_json: bool,
) -> None:
    """Change class NAME for all its tenants; what is not given stays."""
    changes = ClassChanges()
    if preemptible is not None:
        changes["preemptible"] = preemptible
    if max_queue_seconds is not None or no_max_queue_seconds:
        changes["max_queue_seconds"] = max_queue_seconds
    if not changes or (no_max_queue_seconds and max_queue_seconds is not None):
        raise WrongUsageError(
            f"could not set class {name}",
            why="the options contradict each other" if changes else "nothing is to be changed",
            next_step=f"headrace classes set {name} --max-queue-seconds 30",
        )

    async def work(store: Store) -> ServiceClass:
        return await set_class(store.database, name, changes, actor=actor(), now=time.time())

    changed = with_store(load_settings(), f"set class {name}", work)
    if as_json:
        print_json(asdict(changed))
    else:
        _print_rows([changed])


def _print_rows(classes: Sequence[ServiceClass]) -> None:
    print_rows(COLUMNS, [[asdict(one)[column] for column in COLUMNS] for one in classes])
