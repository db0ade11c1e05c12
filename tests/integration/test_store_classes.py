"""Priority classes in the policy store, on both databases."""

import asyncio
import dataclasses

import pytest

from tenants.classes import (
    TIER_WORDS,
    ClassChanges,
    create_class,
    delete_class,
    list_classes,
    set_class,
)
from tenants.errors import (
    ClassConflictError,
    ClassNotFoundError,
    InvalidNameError,
    InvalidPolicyError,
)
from tenants.policy import ServiceClass
from tenants.store import Store

NOW = 1_000_000_000.0
FULL = ServiceClass(
    name="gold",
    rank=7,
    preemptible=True,
    weight=2.5,
    max_wait_seconds=0.5,
    max_queue_seconds=30.0,
    max_queued=64,
)


async def test_a_class_changes_for_all_its_tenants(store: Store) -> None:
    await store.create_tenant("acme", actor="op", now=NOW)
    _, secret = await store.create_key("acme", "k", actor="op", now=NOW)
    changed = await set_class(
        store.database, "standard", {"max_queue_seconds": 2.5}, actor="op", now=NOW
    )
    assert changed == ServiceClass(
        name="standard", rank=1, preemptible=False, max_queue_seconds=2.5
    )
    assert (await store.resolve_key(secret, now=NOW)).service_class == changed
    changed = await set_class(
        store.database, "standard", {"preemptible": True}, actor="op", now=NOW
    )
    assert (changed.preemptible, changed.max_queue_seconds) == (True, 2.5)
    await set_class(store.database, "standard", {"max_queue_seconds": None}, actor="op", now=NOW)
    before = await store.get_generation()
    with pytest.raises(ClassNotFoundError):
        await set_class(store.database, "gold", {"preemptible": True}, actor="op", now=NOW)
    with pytest.raises(InvalidPolicyError, match="above 0"):
        await set_class(store.database, "batch", {"max_queue_seconds": 0}, actor="op", now=NOW)
    assert await store.get_generation() == before
    assert [(one.name, one.preemptible) for one in await list_classes(store.database)] == [
        ("interactive", False),
        ("standard", True),
        ("batch", True),
    ]
    [newest, *_] = await store.list_audit()
    assert (newest.action, newest.object_id) == ("class.updated", "standard")
    assert (newest.before or {})["max_queue_seconds"] == 2.5
    assert (newest.after or {})["max_queue_seconds"] is None


async def test_all_of_a_class_is_stored_changed_and_told_with_the_tenant(store: Store) -> None:
    before = await store.get_generation()
    await create_class(store.database, FULL, actor="ann", now=NOW)
    assert await store.get_generation() == before + 1
    assert (await list_classes(store.database))[-1] == FULL
    await store.create_tenant("acme", priority_class="gold", actor="op", now=NOW)
    _, secret = await store.create_key("acme", "k", actor="op", now=NOW)
    assert (await store.resolve_key(secret, now=NOW)).service_class == FULL
    changes: ClassChanges = {
        "rank": 3,
        "weight": 4.0,
        "preemptible": False,
        "max_wait_seconds": None,
        "max_queue_seconds": 1.5,
        "max_queued": 1,
    }
    changed = await set_class(store.database, "gold", changes, actor="bob", now=NOW + 1)
    assert changed == ServiceClass(name="gold", **changes)
    assert (await store.resolve_key(secret, now=NOW)).service_class == changed
    assert await set_class(store.database, "gold", {"rank": 3}, actor="bob", now=NOW) == changed
    updated = (await store.list_audit())[1]
    assert (updated.action, updated.actor) == ("class.updated", "bob")
    assert (updated.before, updated.after) == (
        dataclasses.asdict(FULL),
        dataclasses.asdict(changed),
    )


async def test_a_class_goes_when_no_tenant_is_in_it_whatever_old_policies_say(
    store: Store,
) -> None:
    await create_class(store.database, FULL, actor="op", now=NOW)
    for slug in ("acme", "beta", "cora", "dune", "echo"):
        await store.create_tenant(slug, priority_class="gold", actor="op", now=NOW)
    await store.set_tenant_status("acme", "archived", actor="op", now=NOW)  # may come back
    with pytest.raises(ClassConflictError, match="tenants acme, beta, cora and 2 more are in"):
        await delete_class(store.database, "gold", actor="op", now=NOW)
    for slug in ("beta", "cora", "dune", "echo"):
        await store.set_tenant(slug, priority_class="batch", actor="op", now=NOW)
    with pytest.raises(ClassConflictError, match="tenant acme is in class gold; move"):
        await delete_class(store.database, "gold", actor="op", now=NOW)
    await store.set_tenant("acme", priority_class="standard", actor="op", now=NOW)
    before = await store.get_generation()
    assert await delete_class(store.database, "gold", actor="ann", now=NOW) == FULL
    assert await store.get_generation() == before + 1
    [newest, *_] = await store.list_audit()
    assert (newest.action, newest.object_id, newest.actor) == ("class.deleted", "gold", "ann")
    assert (newest.before, newest.after) == (dataclasses.asdict(FULL), None)
    assert [one.name for one in await list_classes(store.database)] == [
        "interactive",
        "standard",
        "batch",
    ]
    with pytest.raises(InvalidPolicyError, match="use one of: interactive, standard, batch"):
        await store.set_tenant("acme", priority_class="gold", actor="op", now=NOW)
    # The name and the rank are free again.
    await create_class(store.database, FULL, actor="op", now=NOW)


async def test_what_cannot_be_a_class_changes_nothing(store: Store) -> None:
    before = (await store.get_generation(), await list_classes(store.database))
    database = store.database
    for name in ("Gold", "", *TIER_WORDS):
        wanted = dataclasses.replace(FULL, name=name)
        with pytest.raises(InvalidNameError, match="class"):
            await create_class(database, wanted, actor="op", now=NOW)
    wanted = dataclasses.replace(FULL, name="batch")
    with pytest.raises(ClassConflictError, match="class batch exists"):
        await create_class(database, wanted, actor="op", now=NOW)
    with pytest.raises(ClassConflictError, match="rank 1 is that of class standard; choose"):
        await create_class(database, dataclasses.replace(FULL, rank=1), actor="op", now=NOW)
    with pytest.raises(ClassConflictError, match="rank 0 is that of class interactive"):
        await set_class(database, "batch", {"rank": 0, "weight": 2.0}, actor="op", now=NOW)
    with pytest.raises(InvalidPolicyError, match="weight nan"):
        await set_class(database, "batch", {"weight": float("nan")}, actor="op", now=NOW)
    with pytest.raises(ClassNotFoundError, match="no priority class 'gold'"):
        await delete_class(database, "gold", actor="op", now=NOW)
    assert (await store.get_generation(), await list_classes(database)) == before


async def test_the_last_class_stays(store: Store) -> None:
    for name in ("interactive", "standard"):
        await delete_class(store.database, name, actor="op", now=NOW)
    with pytest.raises(ClassConflictError, match="batch is the only class; create another"):
        await delete_class(store.database, "batch", actor="op", now=NOW)


async def test_of_a_deletion_and_a_tenant_that_enters_at_once_one_is_refused(store: Store) -> None:
    """The other order of the two would leave a tenant in a class that is gone."""
    for number in range(6):
        name = f"class-{number}"
        wanted = dataclasses.replace(FULL, name=name, rank=50 + number)
        await create_class(store.database, wanted, actor="op", now=NOW)
        outcomes = await asyncio.gather(
            delete_class(store.database, name, actor="op", now=NOW),
            store.create_tenant(f"t{number}", priority_class=name, actor="op", now=NOW),
            return_exceptions=True,
        )
        refused = [type(one) for one in outcomes if isinstance(one, Exception)]
        assert refused in ([ClassConflictError], [InvalidPolicyError])
        names = {one.name for one in await list_classes(store.database)}
        assert {one.priority_class for one in await store.list_tenants()} <= names
