"""The ledger on both databases: exact under concurrency, settled once, refunded where charged."""

import asyncio
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.exc import IntegrityError

from tenants import models
from tenants.classes import delete_class, list_classes
from tenants.errors import (
    DuplicateRequestError,
    LimitExceededError,
    NeverFitsLimitError,
    StoreUnavailableError,
)
from tenants.ledger import Ledger, Settlement, Status, UsageSum
from tenants.policy import Limit, Principal
from tenants.store import Store

# A whole minute, so that windows begin here.
START = 1_000_000_020.0
LEASE_SECONDS = 30.0
DONE = Settlement(status=Status.COMPLETED, finish_reason="stop", tokens_in=10, tokens_out=5)

PLENTY = 10**6
REQUESTS = Limit(metric="requests", limit=20, window_seconds=60)
TOKENS = Limit(metric="tokens_total", limit=300, window_seconds=60)  # 20 of 15
SLOTS = Limit(metric="concurrent", limit=20)
BLOCK_SECONDS = Limit(metric="kv_block_seconds", limit=20, window_seconds=60)  # 20 at once


@pytest.fixture
def ledger(store: Store) -> Ledger:
    return Ledger(store.database, instance_id="gateway-1", lease_seconds=LEASE_SECONDS)


async def secret_of(
    store: Store,
    *,
    platform: Sequence[Limit] = (),
    tenant: Sequence[Limit] = (),
    key: Sequence[Limit] = (),
) -> str:
    await store.set_platform_limits(platform, actor="op", now=START)
    await store.create_tenant("acme", limits=tenant, actor="op", now=START)
    _, secret = await store.create_key("acme", "k", limits=key, actor="op", now=START)
    return secret


async def principal_of(store: Store, **limits: Sequence[Limit]) -> Principal:
    return await store.resolve_key(await secret_of(store, **limits), now=START)


async def reserve(
    ledger: Ledger,
    principal: Principal,
    request_id: str,
    *,
    now: float = START,
    prompt_tokens: int = 10,
) -> bool:
    """Whether it was admitted; always up to five output tokens."""
    try:
        await ledger.reserve(
            principal, request_id, prompt_tokens=prompt_tokens, max_output_tokens=5, now=now
        )
    except LimitExceededError:
        return False
    return True


async def counters(store: Store) -> dict[tuple[str, str, int], tuple[int, int]]:
    """(used, reserved) by scope, metric and window start relative to START."""
    window = models.LimitWindow
    async with store.database.reading() as session:
        return {
            (one.scope, one.metric, one.window_start - int(START) if one.window_seconds else 0): (
                one.used,
                one.reserved,
            )
            for one in await session.scalars(select(window))
        }


async def entry(store: Store, request_id: str) -> models.LedgerEntry:
    async with store.database.reading() as session:
        found = await session.get(models.LedgerEntry, request_id)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "order", list(itertools.permutations(["platform", "tenant", "key"])), ids="-".join
)
async def test_fifty_at_once_against_twenty_admit_exactly_twenty(
    store: Store, ledger: Ledger, order: tuple[str, str, str]
) -> None:
    """The limit in the way stands in each scope in turn, among others with room."""
    binding, wide, wider = order
    chain = {
        binding: [REQUESTS],
        wide: [Limit(metric="tokens_total", limit=PLENTY, window_seconds=60)],
        wider: [Limit(metric="concurrent", limit=PLENTY)],
    }
    principal = await principal_of(store, **chain)
    admitted = await asyncio.gather(*(reserve(ledger, principal, f"r{at}") for at in range(50)))
    assert sum(admitted) == 20
    # The thirty that were refused changed nothing, in no scope.
    assert await counters(store) == {
        (binding, "requests", 0): (0, 20),
        (wide, "tokens_total", 0): (0, 20 * 15),
        (wider, "concurrent", 0): (0, 20),
    }
    assert await ledger.find_imbalances() == {}


@pytest.mark.parametrize(
    "binding", [REQUESTS, TOKENS, SLOTS, BLOCK_SECONDS], ids=lambda limit: limit.metric
)
async def test_each_metric_is_exact_under_concurrency(
    store: Store, ledger: Ledger, binding: Limit
) -> None:
    roomy = [
        Limit(metric=one.metric, limit=PLENTY, window_seconds=one.window_seconds)
        for one in (REQUESTS, TOKENS, SLOTS, BLOCK_SECONDS)
        if one is not binding
    ]
    principal = await principal_of(store, tenant=[binding, *roomy])
    admitted = await asyncio.gather(*(reserve(ledger, principal, f"r{at}") for at in range(50)))
    assert sum(admitted) == 20
    assert await counters(store) == {
        ("tenant", "requests", 0): (0, 20),
        ("tenant", "tokens_total", 0): (0, 300),
        ("tenant", "concurrent", 0): (0, 20),
        ("tenant", "kv_block_seconds", 0): (0, 20),
    }


async def test_of_first_requests_at_once_exactly_one_gets_the_only_slot(
    store: Store, ledger: Ledger
) -> None:
    """No counter exists yet: nothing to lock."""
    principal = await principal_of(store, key=[Limit(metric="concurrent", limit=1)])
    assert await counters(store) == {}
    admitted = await asyncio.gather(*(reserve(ledger, principal, f"r{at}") for at in range(8)))
    assert sum(admitted) == 1
    assert await counters(store) == {("key", "concurrent", 0): (0, 1)}


async def test_a_refused_first_request_leaves_not_even_a_counter(
    store: Store, ledger: Ledger
) -> None:
    principal = await principal_of(
        store, tenant=[TOKENS, REQUESTS], key=[Limit(metric="concurrent", limit=1)]
    )
    assert await reserve(ledger, principal, "r1")
    before = await counters(store)
    # In a new window, whose counters would sort after the slot and before it.
    assert not await reserve(ledger, principal, "r2", now=START + 60)
    assert await counters(store) == before


async def test_what_never_fits_is_another_error_and_changes_nothing(
    store: Store, ledger: Ledger
) -> None:
    context = Limit(metric="context_tokens", limit=100)
    principal = await principal_of(store, platform=[REQUESTS], tenant=[TOKENS], key=[context])
    for prompt_tokens, metric, limit in ((96, "context_tokens", 100), (296, "context_tokens", 100)):
        with pytest.raises(NeverFitsLimitError) as caught:
            await reserve(ledger, principal, "r1", prompt_tokens=prompt_tokens)
        assert (caught.value.metric, caught.value.limit) == (metric, limit)
        assert caught.value.needed == prompt_tokens + 5
    assert await counters(store) == {}
    assert await reserve(ledger, principal, "r1", prompt_tokens=95)


async def test_the_answer_shows_every_limit_as_it_stands(store: Store, ledger: Ledger) -> None:
    principal = await principal_of(store, platform=[SLOTS], tenant=[REQUESTS, TOKENS])
    await reserve(ledger, principal, "r1")
    held = await ledger.reserve(
        principal, "r2", prompt_tokens=7, max_output_tokens=3, now=START + 15
    )
    assert held.request_id == "r2"
    assert [(one.scope, one.metric, one.remaining, one.reset_seconds) for one in held.limits] == [
        ("platform", "concurrent", 18, None),
        ("tenant", "requests", 18, 45.0),
        ("tenant", "tokens_total", 300 - 15 - 10, 45.0),
    ]


async def test_without_limits_nothing_is_counted_and_all_is_settled(
    store: Store, ledger: Ledger
) -> None:
    principal = await principal_of(store)
    assert await reserve(ledger, principal, "r1")
    assert await ledger.settle("r1", DONE, now=START + 1)
    assert await counters(store) == {}
    assert (await entry(store, "r1")).tokens_in == 10


async def test_settling_replaces_the_reservation_by_what_was_used(
    store: Store, ledger: Ledger
) -> None:
    principal = await principal_of(store, tenant=[REQUESTS, TOKENS], key=[SLOTS])
    await reserve(ledger, principal, "r1", prompt_tokens=100)
    settlement = Settlement(
        status=Status.ABORTED,
        finish_reason="abort",
        error_code="client_closed_request",
        tokens_in=100,
        tokens_cached=64,
        tokens_out=3,
        tokens_recomputed=7,
        kv_block_seconds=12.125,
        admitted_at=START + 0.5,
        first_token_at=START + 0.75,
    )
    assert await ledger.settle("r1", settlement, now=START + 2)
    assert await counters(store) == {
        ("tenant", "requests", 0): (1, 0),
        ("tenant", "tokens_total", 0): (103, 0),
        ("key", "concurrent", 0): (0, 0),
    }
    written = await entry(store, "r1")
    columns = models.LedgerEntry.__table__.columns.keys()
    assert {column: getattr(written, column) for column in columns} == {
        "request_id": "r1",
        "tenant_id": principal.tenant_id,
        "key_id": principal.key_id,
        "generation": principal.generation,
        "policy_version": 1,
        "priority_class": "standard",
        "status": "aborted",
        "finish_reason": "abort",
        "error_code": "client_closed_request",
        "tokens_in": 100,
        "tokens_cached": 64,
        "tokens_out": 3,
        "tokens_recomputed": 7,
        "kv_block_seconds": 12.125,
        "arrived_at": START,
        "admitted_at": START + 0.5,
        "first_token_at": START + 0.75,
        "finished_at": START + 2,
    }


async def test_settling_twice_or_at_once_counts_once(store: Store, ledger: Ledger) -> None:
    principal = await principal_of(store, tenant=[REQUESTS, TOKENS], key=[SLOTS])
    await reserve(ledger, principal, "r1")
    won = await asyncio.gather(*(ledger.settle("r1", DONE, now=START + 1) for _ in range(6)))
    assert sorted(won) == [False] * 5 + [True]
    after = await counters(store)
    assert after[("tenant", "tokens_total", 0)] == (15, 0)
    other = Settlement(status=Status.FAILED, tokens_in=10)
    assert not await ledger.settle("r1", other, now=START + 9)
    assert not await ledger.settle("never reserved", DONE, now=START)
    assert await counters(store) == after
    assert (await entry(store, "r1")).status == "completed"


async def test_a_request_that_cost_nothing_is_not_counted(store: Store, ledger: Ledger) -> None:
    principal = await principal_of(store, tenant=[REQUESTS, TOKENS], key=[SLOTS])
    await reserve(ledger, principal, "r1")
    refused = Settlement(status=Status.FAILED, started=False, error_code="server_is_overloaded")
    assert await ledger.settle("r1", refused, now=START + 1)
    assert set((await counters(store)).values()) == {(0, 0)}
    assert (await entry(store, "r1")).error_code == "server_is_overloaded"


async def test_a_refund_goes_to_the_window_that_was_charged(store: Store, ledger: Ledger) -> None:
    principal = await principal_of(store, tenant=[TOKENS, REQUESTS])
    assert await reserve(ledger, principal, "old", now=START + 59.9, prompt_tokens=195)
    assert await reserve(ledger, principal, "new", now=START + 60.05, prompt_tokens=20)
    assert await ledger.settle("old", DONE, now=START + 60.1)
    assert await counters(store) == {
        ("tenant", "tokens_total", 0): (15, 0),
        ("tenant", "requests", 0): (1, 0),
        ("tenant", "tokens_total", 60): (0, 25),
        ("tenant", "requests", 60): (0, 1),
    }


@pytest.mark.parametrize("scope", ["platform", "tenant", "key"])
async def test_block_seconds_are_charged_when_they_are_known_and_bar_what_comes_after(
    store: Store, ledger: Ledger, scope: str
) -> None:
    principal = await principal_of(store, **{scope: [BLOCK_SECONDS]})
    window = (scope, "kv_block_seconds", 0)
    for request_id in ("small", "cold", "large", "long"):
        assert await reserve(ledger, principal, request_id)
    assert await counters(store) == {window: (0, 4)}
    await ledger.settle("small", replace(DONE, kv_block_seconds=2.25), now=START + 1)
    assert await counters(store) == {window: (3, 3)}
    cold = Settlement(status=Status.ABORTED, started=False, kv_block_seconds=0.5)
    await ledger.settle("cold", cold, now=START + 2)
    assert await counters(store) == {window: (3, 2)}
    assert (await entry(store, "cold")).kv_block_seconds == 0.5  # held before it ever ran
    await ledger.settle("large", replace(DONE, kv_block_seconds=15.0), now=START + 3)
    assert await reserve(ledger, principal, "last one")
    with pytest.raises(LimitExceededError) as caught:
        await ledger.reserve(
            principal, "one more", prompt_tokens=1, max_output_tokens=1, now=START + 4
        )
    error = caught.value
    assert (error.metric, error.scope, error.limit, error.used) == (
        "kv_block_seconds",
        scope,
        20,
        20,  # 3 + 15, and two that run
    )
    assert error.retry_after_seconds == 56.0
    # What ran when the window filled overruns it, in its own window alone.
    await ledger.settle("long", replace(DONE, kv_block_seconds=99.5), now=START + 90)
    assert await counters(store) == {window: (118, 1)}
    assert not await reserve(ledger, principal, "in the same window", now=START + 59.9)
    assert await reserve(ledger, principal, "in the next one", now=START + 60)
    assert await ledger.find_imbalances() == {}


async def test_the_class_that_serves_is_the_one_in_the_books(store: Store, ledger: Ledger) -> None:
    """Also when the class is gone before the request has ended."""
    principal = await principal_of(store)
    lowest = (await list_classes(store.database))[-1]
    await reserve(ledger, replace(principal, service_class=lowest), "r1")
    await delete_class(store.database, lowest.name, actor="op", now=START)
    await ledger.settle("r1", DONE, now=START + 1)
    assert (await entry(store, "r1")).priority_class == "batch"


async def test_an_old_window_leaves_no_debt_and_no_credit(store: Store, ledger: Ledger) -> None:
    principal = await principal_of(store, tenant=[TOKENS])
    assert await reserve(ledger, principal, "all", now=START + 59, prompt_tokens=295)
    assert not await reserve(ledger, principal, "one more", now=START + 59.9)
    assert await reserve(ledger, principal, "all again", now=START + 60, prompt_tokens=295)
    assert await ledger.settle("all", DONE, now=START + 60.5)
    assert not await reserve(ledger, principal, "one more", now=START + 61)


async def test_steady_load_just_under_both_limits_is_never_refused(
    store: Store, ledger: Ledger
) -> None:
    """19 of 20 requests and 285 of 300 tokens in each of five windows, each in flight a while."""
    principal = await principal_of(store, tenant=[REQUESTS, TOKENS])
    for window in range(5):
        for at in range(19):
            now = START + 60 * window + 3 * at
            assert await reserve(ledger, principal, f"r{window}-{at}", now=now)
            if at:
                await ledger.settle(f"r{window}-{at - 1}", DONE, now=now)
        await ledger.settle(f"r{window}-18", DONE, now=START + 60 * window + 59.5)
    used = {key: pair for key, pair in (await counters(store)).items() if key[1] == "tokens_total"}
    assert used == {("tenant", "tokens_total", 60 * window): (285, 0) for window in range(5)}


async def test_a_raised_limit_is_there_for_the_next_request(store: Store, ledger: Ledger) -> None:
    secret = await secret_of(store, tenant=[Limit(metric="requests", limit=1, window_seconds=60)])
    assert await reserve(ledger, await store.resolve_key(secret, now=START), "r1")
    for _ in range(3):
        assert not await reserve(ledger, await store.resolve_key(secret, now=START), "r2")
    await store.set_tenant("acme", limits=[REQUESTS], actor="op", now=START)
    assert await reserve(ledger, await store.resolve_key(secret, now=START), "r2")
    assert await counters(store) == {("tenant", "requests", 0): (0, 2)}


async def test_keys_of_one_tenant_share_its_limit_and_other_tenants_do_not(
    store: Store, ledger: Ledger
) -> None:
    one_slot = Limit(metric="concurrent", limit=1)
    principals = []
    for slug in ("acme", "acme", "zeta"):
        if slug not in [tenant.slug for tenant in await store.list_tenants()]:
            await store.create_tenant(slug, limits=[one_slot], actor="op", now=START)
        _, secret = await store.create_key(slug, "k", actor="op", now=START)
        principals.append(await store.resolve_key(secret, now=START))
    admitted = [await reserve(ledger, one, f"r{at}") for at, one in enumerate(principals)]
    assert admitted == [True, False, True]


async def test_a_request_id_is_reserved_once_and_never_again(store: Store, ledger: Ledger) -> None:
    principal = await principal_of(store, tenant=[REQUESTS])
    await reserve(ledger, principal, "r1")
    with pytest.raises(DuplicateRequestError):
        await reserve(ledger, principal, "r1")
    await ledger.settle("r1", DONE, now=START)
    with pytest.raises(DuplicateRequestError):
        await reserve(ledger, principal, "r1")
    assert await counters(store) == {("tenant", "requests", 0): (1, 0)}


async def test_leases_that_are_not_renewed_end(store: Store, ledger: Ledger) -> None:
    principal = await principal_of(store, tenant=[REQUESTS, TOKENS, BLOCK_SECONDS], key=[SLOTS])
    lowest = replace(principal, service_class=(await list_classes(store.database))[-1])
    for request_id, whose in (("dead", lowest), ("alive", principal), ("done", principal)):
        await reserve(ledger, whose, request_id)
    await ledger.settle("done", DONE, now=START + 1)
    assert await ledger.renew(["alive", "done"], now=START + 20) == ["done"]
    other = Ledger(store.database, instance_id="gateway-2", lease_seconds=LEASE_SECONDS)
    assert await other.renew(["dead"], now=START + 20) == ["dead"]  # not its own
    assert await other.expire(now=START + 29.9) == []
    assert await other.expire(now=START + 30) == ["dead"]
    assert await other.expire(now=START + 30) == []
    # The lost one keeps its start, not its tokens, and holds no slot.
    assert await counters(store) == {
        ("tenant", "requests", 0): (2, 1),
        ("tenant", "tokens_total", 0): (15, 15),
        ("tenant", "kv_block_seconds", 0): (0, 1),
        ("key", "concurrent", 0): (0, 1),
    }
    lost = await entry(store, "dead")
    assert (lost.status, lost.error_code, lost.tokens_in) == ("lost", "lease_expired", 0)
    assert (lost.priority_class, lost.kv_block_seconds) == ("batch", 0.0)
    assert lost.finished_at == START + 30
    # Its gateway was only slow: too late.
    assert not await ledger.settle("dead", DONE, now=START + 31)
    assert await ledger.renew(["dead"], now=START + 31) == ["dead"]


async def test_gateways_that_clean_up_at_once_lose_each_request_once(
    store: Store, ledger: Ledger
) -> None:
    principal = await principal_of(store, tenant=[TOKENS, SLOTS])
    for at in range(6):
        await reserve(ledger, principal, f"r{at}")
    settled, *lost = await asyncio.gather(
        ledger.settle("r3", DONE, now=START + 40),
        *(ledger.expire(now=START + 40) for _ in range(4)),
    )
    ids = sorted(request_id for found in lost for request_id in found)
    assert len(ids) == len(set(ids))
    assert len(ids) + settled == 6
    assert await ledger.find_imbalances() == {}
    assert (await counters(store))[("tenant", "concurrent", 0)] == (0, 0)


async def test_a_lease_renewed_at_the_last_moment_is_not_lost(store: Store, ledger: Ledger) -> None:
    principal = await principal_of(store, key=[SLOTS])
    await reserve(ledger, principal, "r1")
    async with store.database.writing() as session:
        await session.execute(
            update(models.Reservation).values(lease_until=START + 2 * LEASE_SECONDS)
        )
        # Sees the old lease, and waits for this transaction to take the reservation away.
        expiring = asyncio.create_task(ledger.expire(now=START + LEASE_SECONDS))
        await asyncio.sleep(0.3)
        assert not expiring.done()
    assert await expiring == []
    assert await ledger.settle("r1", DONE, now=START + LEASE_SECONDS)


async def test_finished_windows_are_forgotten_but_not_while_something_is_held(
    store: Store, ledger: Ledger
) -> None:
    principal = await principal_of(store, tenant=[TOKENS], key=[SLOTS])
    await reserve(ledger, principal, "done")
    await ledger.settle("done", DONE, now=START + 1)
    await reserve(ledger, principal, "held", now=START + 60)
    late = START + 60 + 2 * 3600
    await ledger.renew(["held"], now=late)
    await ledger.expire(now=late)
    assert await counters(store) == {
        ("tenant", "tokens_total", 60): (0, 15),
        ("key", "concurrent", 0): (0, 1),
    }
    assert await ledger.settle("held", DONE, now=late)
    await ledger.expire(now=late)
    assert await counters(store) == {("key", "concurrent", 0): (0, 0)}


async def test_usage_is_the_sum_of_the_ledger(store: Store, ledger: Ledger) -> None:
    generator = random.Random(5)
    principals = []
    for slug in ("acme", "zeta"):
        tenant = await store.create_tenant(slug, actor="op", now=START)
        for name in ("one", "two"):
            _, secret = await store.create_key(slug, name, actor="op", now=START)
            principals.append(await store.resolve_key(secret, now=START))
    expected: dict[tuple[str, str], list[float]] = {}
    for at in range(40):
        principal = generator.choice(principals)
        tokens_in, tokens_out = generator.randrange(1, 99), generator.randrange(99)
        finished = generator.choice([START - 0.1, START, START + 30, START + 59.9, START + 60])
        await reserve(ledger, principal, f"r{at}")
        settlement = Settlement(
            status=Status.COMPLETED,
            tokens_in=tokens_in,
            tokens_cached=tokens_in // 2,
            tokens_out=tokens_out,
            tokens_recomputed=at,
            kv_block_seconds=at / 4,
        )
        await ledger.settle(f"r{at}", settlement, now=finished)
        if START <= finished < START + 60:
            sums = expected.setdefault((principal.tenant_id, principal.key_id), [0] * 6)
            row = (1, tokens_in, tokens_in // 2, tokens_out, at, at / 4)
            sums[:] = [total + more for total, more in zip(sums, row, strict=True)]
    found = await ledger.usage(since=START, until=START + 60)
    assert found == tuple(
        UsageSum(
            tenant_id=tenant_id,
            key_id=key_id,
            num_requests=sums[0],
            tokens_in=sums[1],
            tokens_cached=sums[2],
            tokens_out=sums[3],
            tokens_recomputed=sums[4],
            kv_block_seconds=sums[5],
        )
        for (tenant_id, key_id), sums in sorted(expected.items())
    )
    own = await ledger.usage(since=START, until=START + 60, tenant_id=tenant.id)
    assert own == tuple(one for one in found if one.tenant_id == tenant.id)
    last_used = {key.id: key.last_used_at for key in await store.list_keys()}
    assert last_used.keys() == {principal.key_id for principal in principals}
    assert max(filter(None, last_used.values())) == START + 60


async def test_a_cancelled_reserve_holds_nothing(store: Store, ledger: Ledger) -> None:
    """Clients that leave at every moment of a reserve."""
    principal = await principal_of(store, tenant=[REQUESTS, TOKENS], key=[SLOTS])
    outcomes = set()
    for at in range(40):
        task = asyncio.create_task(reserve(ledger, principal, f"r{at}"))
        await asyncio.sleep(at * 0.0002)
        task.cancel()
        await asyncio.wait({task})
        outcomes.add(task.cancelled())
        if not task.cancelled():
            await ledger.settle(f"r{at}", DONE, now=START)
        assert {reserved for _, reserved in (await counters(store)).values()} <= {0}
    assert True in outcomes


async def test_cancelled_work_leaves_nothing_that_does_not_heal(
    store: Store, ledger: Ledger
) -> None:
    """Tasks that die at every moment of a transaction, with their tracebacks kept."""
    principal = await principal_of(store, tenant=[REQUESTS, TOKENS], key=[SLOTS])
    dead = []

    async def work(at: int) -> None:
        await reserve(ledger, principal, f"r{at}")
        await ledger.settle(f"r{at}", DONE, now=START + 1)
        await ledger.renew([f"r{at}"], now=START + 1)
        await store.list_keys()

    for round_ in range(40):
        tasks = [asyncio.create_task(work(round_ * 3 + at)) for at in range(3)]
        await asyncio.sleep(round_ * 0.0007)
        for task in tasks:
            task.cancel()
        dead.append(await asyncio.gather(*tasks, return_exceptions=True))
        # Soon, whatever was cut off: nobody sits on a lock.
        async with asyncio.timeout(5):
            await ledger.settle("nobody", DONE, now=START)
        assert await ledger.find_imbalances() == {}
    await ledger.expire(now=START + LEASE_SECONDS)
    assert [reserved for _, reserved in (await counters(store)).values()] == [0, 0, 0]
    assert await reserve(ledger, principal, "next", now=START + 60)


@pytest.mark.parametrize("table", ["usage_ledger", "limit_windows", "reservations"])
async def test_a_settle_that_fails_halfway_changes_nothing_and_can_be_repeated(
    store: Store, ledger: Ledger, table: str
) -> None:
    principal = await principal_of(store, tenant=[REQUESTS, TOKENS], key=[SLOTS])
    await reserve(ledger, principal, "r1")
    before = await counters(store)
    async with store.database.writing() as session:
        await session.execute(text(f"ALTER TABLE {table} RENAME TO broken"))
    with pytest.raises(StoreUnavailableError):
        await ledger.settle("r1", DONE, now=START + 1)
    async with store.database.writing() as session:
        await session.execute(text(f"ALTER TABLE broken RENAME TO {table}"))
    assert await counters(store) == before
    assert await ledger.find_imbalances() == {}
    assert await ledger.settle("r1", DONE, now=START + 1)
    assert (await counters(store))[("tenant", "tokens_total", 0)] == (15, 0)


@pytest.mark.parametrize(
    "counts",
    [
        {"tokens_in": -1},
        {"tokens_in": 1, "tokens_cached": 2},
        {"tokens_out": -1},
        {"started": False, "tokens_in": 1},
        {"kv_block_seconds": -0.25},
        {"kv_block_seconds": float("nan")},
        {"kv_block_seconds": float("inf")},
    ],
)
def test_impossible_settlements_cannot_be_made(counts: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"tokens|counts|impossible KV-block-seconds"):
        Settlement(status=Status.COMPLETED, **counts)  # type: ignore[arg-type]


async def test_an_integrity_error_of_another_kind_is_not_taken_for_a_duplicate(
    store: Store, ledger: Ledger
) -> None:
    principal = replace(await principal_of(store, tenant=[REQUESTS]), key_id=None)
    with pytest.raises(IntegrityError):
        await reserve(ledger, principal, "r1")
    assert await counters(store) == {}
