"""What an engine looks like at one instant, as plain records for metrics and pages."""

from collections import Counter
from dataclasses import dataclass

from engine.core import EngineCore


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Whether the engine's loop lives. `ready` also means that it accepts work."""

    alive: bool  # the loop runs, and has stepped recently if it has work
    ready: bool
    reason: str  # "ok", "starting", "draining", "stopped", "stalled" or "failed: ..."
    seconds_since_step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSnapshot:
    """One tenant in one priority class."""

    tenant: str
    rank: int
    num_running: int
    num_waiting: int
    counter: float  # virtual counter: service received over weight


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantMemory:
    """One tenant's KV memory. The last four count up until nothing of the tenant's is left in
    memory for a while; then they may begin again."""

    tenant: str
    held_blocks: int
    cached_blocks: int
    host_blocks: int
    queried_tokens: int  # looked up in the prefix cache at admissions
    hit_tokens: int
    evicted_blocks: int  # of its cached ones, taken for somebody's use
    kv_block_seconds: float  # time that blocks were held, of shared ones its part


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """Counters of this instant."""

    policy: str  # by which it schedules
    num_running: int
    num_waiting: int
    free_blocks: int
    cached_blocks: int
    held_blocks: int
    tenants: tuple[TenantSnapshot, ...]  # active ones, and those whose counter still matters
    memory: tuple[TenantMemory, ...] = ()


def take_snapshot(core: EngineCore) -> EngineSnapshot:
    """Of all stages of the engine together."""
    schedulers = [stage.scheduler for stage in core.stages]
    pools = [scheduler.pool for scheduler in schedulers]
    return EngineSnapshot(
        policy=core.scheduler.policy.name,
        num_running=sum(len(scheduler.running) for scheduler in schedulers),
        num_waiting=sum(len(scheduler.queues) for scheduler in schedulers),
        free_blocks=sum(pool.num_free for pool in pools),
        cached_blocks=sum(pool.num_cached for pool in pools),
        held_blocks=sum(pool.num_held for pool in pools),
        tenants=_tenants(core),
        memory=_memory(core),
    )


def _tenants(core: EngineCore) -> tuple[TenantSnapshot, ...]:
    schedulers = [stage.scheduler for stage in core.stages]
    running = Counter(
        (seq.rank, seq.tenant) for scheduler in schedulers for seq in scheduler.running.values()
    )
    return tuple(
        TenantSnapshot(
            tenant=tenant,
            rank=rank,
            num_running=running[rank, tenant],
            num_waiting=sum(s.queues.num_waiting(rank, tenant) for s in schedulers),
            counter=counter,
        )
        for rank, counters in core.scheduler.counters.items()
        for tenant, counter in counters.as_dict().items()
    )


def _memory(core: EngineCore) -> tuple[TenantMemory, ...]:
    memories = [stage.scheduler.memory for stage in core.stages]
    block_seconds = _block_seconds(core)
    tenants = {tenant for memory in memories for tenant in memory.queried_tokens}
    tenants.update(block_seconds)
    for memory in memories:
        tenants.update(memory.pool.held_by_tenant, memory.host.held_by_tenant)
    return tuple(
        TenantMemory(
            tenant=tenant,
            held_blocks=sum(m.pool.held_by_tenant.get(tenant, 0) for m in memories),
            cached_blocks=sum(m.pool.cached_by_tenant.get(tenant, 0) for m in memories),
            host_blocks=sum(m.host.held_by_tenant.get(tenant, 0) for m in memories),
            queried_tokens=memories[0].queried_tokens[tenant],
            hit_tokens=memories[0].hit_tokens[tenant],
            evicted_blocks=sum(m.pool.evicted_by_tenant.get(tenant, 0) for m in memories),
            kv_block_seconds=block_seconds.get(tenant, 0.0),
        )
        for tenant in sorted(tenants)
    )


def _block_seconds(core: EngineCore) -> dict[str, float]:
    """By tenant, until the last instant that a scheduler was told. O(held blocks)."""
    totals = core.scheduler.memory.meter.accounts()
    for scheduler in (stage.scheduler for stage in core.stages):
        for seq in scheduler.places.holders:
            totals[seq.tenant] = totals.get(seq.tenant, 0.0) + scheduler.memory.owed_by(seq)
    return totals
