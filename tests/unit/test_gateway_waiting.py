"""Places in the queue are counted exactly and given up exactly once."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway.waiting import Wait, WaitingRequests
from tenants.errors import LimitExceededError
from tenants.policy import (
    PLATFORM_ID,
    KVBounds,
    Limit,
    Principal,
    Scope,
    ScopedLimit,
    ServiceClass,
)


def principal(tenant: str, key: str, queued: dict[str, int] | None = None) -> Principal:
    """With a limit on what waits at each scope that is named."""
    ids = {"platform": PLATFORM_ID, "tenant": tenant, "key": key}
    return Principal(
        tenant_id=tenant,
        tenant=tenant,
        key_id=key,
        weight=1.0,
        service_class=ServiceClass(name="standard", rank=1, preemptible=False),
        kv=KVBounds(),
        limits=tuple(
            ScopedLimit(
                scope=Scope(scope),
                scope_id=ids[scope],
                rule=Limit(metric="queued", limit=limit),
            )
            for scope, limit in (queued or {}).items()
        ),
        generation=1,
        policy_version=1,
    )


@pytest.mark.parametrize(
    ("scope", "others"),
    [
        ("key", [("acme", "k2"), ("zeta", "k3")]),
        ("tenant", [("zeta", "k3")]),
        ("platform", []),
    ],
)
def test_a_limit_holds_in_its_scope_alone(scope: str, others: list[tuple[str, str]]) -> None:
    queue = WaitingRequests()
    every = [("acme", "k1"), ("acme", "k2"), ("zeta", "k3")]
    with queue.place(principal("acme", "k1")), queue.place(principal("acme", "k1")):
        for tenant, key in every:
            limited = principal(tenant, key, {scope: 2})
            if (tenant, key) in others:
                with queue.place(limited):
                    pass
                continue
            with pytest.raises(LimitExceededError) as caught, queue.place(limited):
                pass
            assert (caught.value.metric, caught.value.scope) == ("queued", scope)
            assert (caught.value.used, caught.value.limit) == (2, 2)
    with queue.place(principal("acme", "k1", {scope: 1})):
        pass


def test_who_has_begun_waits_no_more_and_leaves_once() -> None:
    queue, acme = WaitingRequests(), principal("acme", "k1", {"tenant": 1})
    with ExitStack() as running:
        for _ in range(3):
            wait = running.enter_context(queue.place(acme))
            wait.end()
            wait.end()
        running.enter_context(queue.place(acme))
        with pytest.raises(LimitExceededError), queue.place(acme):
            pass
    with queue.place(acme), pytest.raises(LimitExceededError), queue.place(acme):
        pass


async def test_a_wait_that_lasts_too_long_is_given_up_once() -> None:
    calls: list[str] = []
    late, early, begun = Wait(0.01), Wait(0.01), Wait(0.01)
    begun.end()
    for name, wait in (("late", late), ("early", early), ("begun", begun)):
        wait.limit(lambda name=name: calls.append(name))
    early.end()
    await asyncio.sleep(0.05)
    assert calls == ["late"]
    assert [wait.is_overdue for wait in (late, early, begun)] == [True, False, False]
