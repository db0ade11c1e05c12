"""Turns between tenants: a slot for each in turn, nothing kept for those who left."""

import asyncio

from gateway.turns import TenantTurns


async def served(turns, tenants):
    """The order in which they are served."""
    order = []

    async def work(tenant):
        async with turns.turn(tenant):
            await asyncio.sleep(0)
            order.append(tenant)

    await asyncio.gather(*(work(tenant) for tenant in tenants))
    return order


async def test_a_tenant_with_many_requests_waits_its_turn_after_each():
    order = await served(TenantTurns(1), ["noisy"] * 6 + ["quiet", "calm"])

    assert order.index("quiet") <= 2
    assert order.index("calm") <= 3
    assert order.count("noisy") == 6


async def test_a_tenant_takes_one_of_several_slots():
    turns, running = TenantTurns(2), asyncio.Semaphore(0)

    async def hold(tenant):
        async with turns.turn(tenant):
            running.release()
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(hold("noisy")) for _ in range(3)]
    await asyncio.wait_for(running.acquire(), 1)
    tasks.append(asyncio.create_task(hold("quiet")))
    await asyncio.wait_for(running.acquire(), 1)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    # Those who were cancelled, holding or waiting, left their places.
    assert await asyncio.wait_for(served(turns, ["noisy", "quiet"]), 1) == ["noisy", "quiet"]


async def test_nothing_is_kept_of_tenants_without_requests():
    turns = TenantTurns(1)
    await served(turns, [str(number) for number in range(100)])

    assert len(turns._places) == 0
