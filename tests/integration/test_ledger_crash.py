"""The ledger under several real processes, and under processes that are killed."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import select

from tenants import models
from tenants.ledger import Ledger
from tenants.policy import Limit
from tenants.store import Store
from tests.integration.ledger_worker import LEASE_SECONDS, NOW

ROOT = Path(__file__).parents[2]


@contextmanager
def workers(
    url: str, secret: str, names: list[str], count: str
) -> Iterator[list[subprocess.Popen]]:
    """Processes that have all been told to begin; killed at the end."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integration.ledger_worker", url, secret, name, count],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for name in names
    ]
    try:
        for process in started:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
        for process in started:
            process.stdin.write("\n")
            process.stdin.flush()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


async def secret_of(store: Store, *limits: Limit) -> str:
    await store.create_tenant("acme", limits=limits, actor="op", now=NOW)
    return (await store.create_key("acme", "k", actor="op", now=NOW))[1]


async def counters(store: Store) -> dict[str, tuple[int, int]]:
    async with store.database.reading() as session:
        windows = await session.scalars(select(models.LimitWindow))
        return {one.metric: (one.used, one.reserved) for one in windows}


async def test_three_processes_at_once_admit_exactly_twenty(
    store: Store, database_url: str
) -> None:
    secret = await secret_of(
        store,
        Limit(metric="concurrent", limit=20),
        Limit(metric="tokens_total", limit=10**6, window_seconds=60),
    )
    with workers(database_url, secret, ["a", "b", "c"], "20") as started:
        outputs = [process.communicate(timeout=60) for process in started]
    assert [errors for _, errors in outputs] == [""] * 3
    admitted = [line for output, _ in outputs for line in output.splitlines()]
    assert len(set(admitted)) == 20
    assert await counters(store) == {"concurrent": (0, 20), "tokens_total": (0, 300)}


async def test_what_a_killed_process_held_is_released_and_what_it_settled_stays(
    store: Store, database_url: str
) -> None:
    secret = await secret_of(
        store,
        Limit(metric="concurrent", limit=10**6),
        Limit(metric="requests", limit=10**6, window_seconds=60),
        Limit(metric="tokens_total", limit=10**9, window_seconds=60),
    )
    with workers(database_url, secret, ["a", "b"], "forever") as started:
        # A moment that falls anywhere in a transaction, with work done before it.
        seen = [[process.stdout.readline() for _ in range(20)] for process in started]
        await asyncio.sleep(0.05)
        for process in started:
            process.kill()
        outputs = [
            "".join(lines) + process.stdout.read()
            for lines, process in zip(seen, started, strict=True)
        ]
    words = [line.split() for output in outputs for line in output.splitlines()]
    reserved = {request_id for word, request_id in words if word == "reserved"}
    settled = {request_id for word, request_id in words if word == "settled"}
    assert len(settled) >= 16  # 8 among the first 20 lines of each

    ledger = Ledger(store.database, instance_id="survivor", lease_seconds=LEASE_SECONDS)
    assert await ledger.find_imbalances() == {}
    assert await ledger.expire(now=NOW + LEASE_SECONDS - 1) == []
    lost = set(await ledger.expire(now=NOW + LEASE_SECONDS))

    async with store.database.reading() as session:
        rows = {one.request_id: one for one in await session.scalars(select(models.LedgerEntry))}
    completed = {one.request_id for one in rows.values() if one.status == "completed"}
    # All that was reported is there; each process may have committed one step that it did not
    # live to report.
    assert settled <= completed
    assert len(completed - settled) <= 2
    assert reserved - completed <= lost
    assert lost == rows.keys() - completed
    assert await counters(store) == {
        "concurrent": (0, 0),
        "requests": (len(rows), 0),
        "tokens_total": (12 * len(completed), 0),
    }
