"""Places in the queue are counted exactly and given up exactly once."""

import asyncio
from contextlib import ExitStack

import pytest

from gateway.ratelimits import refusal_message
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

STANDARD = ServiceClass(name="standard", rank=1, preemptible=False)


def principal(
    tenant: str,
    key: str,
    queued: dict[str, int] | None = None,
    *,
    service_class: ServiceClass = STANDARD,
) -> Principal:
    """With a limit on what waits at each scope that is named."""
    ids = {"platform": PLATFORM_ID, "tenant": tenant, "key": key}
    return Principal(
        tenant_id=tenant,
        tenant=tenant,
        key_id=key,
        weight=1.0,
        service_class=service_class,
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


def in_class(
    name: str, slug: str, depth: int | None, queued: dict[str, int] | None = None
) -> Principal:
    one = ServiceClass(name=name, rank=2, preemptible=True, max_queued=depth)
    return principal(slug, f"k-{slug}", queued, service_class=one)


def test_the_depth_of_a_class_is_shared_by_its_tenants_and_by_no_other_class() -> None:
    queue = WaitingRequests()
    with queue.place(in_class("batch", "acme", 2)) as first, queue.place(in_class("batch", "b", 2)):
        for tenant in ("acme", "zeta"):
            with (
                pytest.raises(LimitExceededError) as caught,
                queue.place(in_class("batch", tenant, 2)),
            ):
                pass
            assert (caught.value.metric, caught.value.scope) == ("queued", "class batch")
        with queue.place(in_class("bulk", "acme", 1)), queue.place(in_class("batch", "z", 3)):
            pass
        first.end()
        with queue.place(in_class("batch", "zeta", 2)):
            pass


def test_a_depth_that_is_set_late_counts_those_that_wait_already() -> None:
    queue = WaitingRequests()
    late = in_class("batch", "zeta", 1)
    with queue.place(in_class("batch", "acme", None)), pytest.raises(LimitExceededError):
        queue.place(late).__enter__()
    with queue.place(in_class("batch", "zeta", 1)):
        pass


def test_a_full_class_is_named_without_numbers_and_only_after_a_full_queue_of_ones_own() -> None:
    queue = WaitingRequests()
    with queue.place(in_class("batch", "acme", 1)):
        with pytest.raises(LimitExceededError) as shared, queue.place(in_class("batch", "zeta", 1)):
            pass
        with (
            pytest.raises(LimitExceededError) as own,
            queue.place(in_class("batch", "acme", 1, {"tenant": 1})),
        ):
            pass
    assert refusal_message(shared.value) == (
        "Rate limit reached for the class batch on queued at once. Please try again as soon as "
        "another request ends."
    )
    assert "for this tenant on queued at once: Limit 1, Used 1" in refusal_message(own.value)


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
