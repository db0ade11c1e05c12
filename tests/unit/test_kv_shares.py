"""KV floors, caps and borrowing; and who may displace whom to be admitted."""

import pytest

from engine.errors import ConfigError, NeverFitsError
from engine.events import Event, SequenceAdmitted, SequenceFinished, SequencePreempted
from engine.memory.block_pool import BlockPool
from engine.sequence import TenantShare
from tests.scripted import add, find, make_core, run_to_end


def victims(events: list[Event]) -> list[str]:
    return [e.request_id for e in events if isinstance(e, SequencePreempted)]


def cached(events: list[Event]) -> dict[str, int]:
    return {e.request_id: e.usage.cached_tokens for e in events if isinstance(e, SequenceFinished)}


# ------------------------------------------------------------------------------- in the pool


def filled(pool: BlockPool, count: int, tenant: str) -> None:
    """So many cached blocks of a tenant."""
    table = pool.allocate(count, tenant)
    for block_id in table:
        pool.blocks[block_id].key = b"%d" % block_id
    pool.free(table)


def test_a_floor_protects_what_its_tenant_caches_from_everybody_else() -> None:
    pool = BlockPool(10, on_reuse=lambda block: None)
    pool.set_floor("acme", 3)
    filled(pool, 4, "acme")
    filled(pool, 4, "zeta")
    assert pool.num_available == 10
    assert pool.available_to("acme") == 10
    assert pool.available_to("zeta") == 7

    pool.allocate(7, "zeta")

    assert pool.cached_by_tenant == {"acme": 3}
    assert pool.available_to("zeta") == 0
    assert pool.available_to("acme") == 3
    pool.allocate(3, "acme")
    assert pool.evicted_by_tenant == {"acme": 4, "zeta": 4}


def test_what_a_tenant_holds_of_its_floor_protects_nothing_more() -> None:
    pool = BlockPool(10, on_reuse=lambda block: None)
    pool.set_floor("acme", 3)
    filled(pool, 4, "acme")
    pool.allocate(2, "acme")  # free ones
    assert pool.available_to("zeta") == 7  # 8 are free or cached, 1 is protected
    assert pool.borrowed_by("acme") == 0
    pool.allocate(2, "acme")
    assert pool.available_to("zeta") == 6
    assert pool.borrowed_by("acme") == 1


# ------------------------------------------------------------------------------- in the scheduler


def test_a_tenant_never_holds_more_than_its_cap_and_gives_way_to_itself() -> None:
    core, _ = make_core(num_blocks=30, block_size=4, watermark=0.0)
    for i in range(3):
        add(core, f"a{i}", "acme", prompt=11, output=12, cap=8)
    add(core, "z", "zeta", prompt=11, output=12)
    events: list[Event] = []
    while core.has_work:
        events += core.step()
        assert core.scheduler.pool.held_by_tenant["acme"] <= 8
    assert victims(events)
    assert all(name.startswith("a") for name in victims(events))
    assert len(cached(events)) == 4


def test_a_head_at_its_cap_holds_nobody_else_up() -> None:
    core, _ = make_core(num_blocks=30, block_size=4, max_bypasses=0)
    add(core, "a0", "acme", prompt=11, output=20, cap=8)
    add(core, "a1", "acme", prompt=23, output=8, cap=8)
    add(core, "z", "zeta", prompt=23, output=8)
    core.step()
    assert set(core.scheduler.running) == {"a0", "z"}
    run_to_end(core)


def test_a_tenant_under_its_floor_gets_it_back_from_borrowers() -> None:
    """zeta fills the pool; acme, of the same class, needs four blocks of its floor of six."""
    core, _ = make_core(num_blocks=16, block_size=4, watermark=0.0, prefix_cache=False)
    for i in range(2):
        add(core, f"z{i}", "zeta", prompt=26, output=6)
    core.step()
    assert core.scheduler.pool.num_available == 2
    add(core, "a", "acme", prompt=13, output=3, floor=6)

    # One step of zeta's, after which acme comes first; one that preempts; one that admits.
    events = [*core.step(), *core.step(), *core.step()]

    assert len(victims(events)) == 1
    assert victims(events)[0].startswith("z")
    assert "a" in core.scheduler.running
    assert len(cached(events + run_to_end(core))) == 3


def test_without_a_floor_it_waits_and_within_ones_own_it_takes_nothing() -> None:
    core, _ = make_core(num_blocks=16, block_size=4, watermark=0.0, prefix_cache=False)
    for i in range(2):
        add(core, f"z{i}", "zeta", prompt=26, output=2, floor=14)
    core.step()
    add(core, "a", "acme", prompt=6, output=2)
    assert victims(core.step()) == []  # acme has no claim
    assert "a" not in core.scheduler.running
    run_to_end(core)


def test_a_cached_prompt_within_the_floor_survives_a_flood() -> None:
    core, _ = make_core(num_blocks=24, block_size=4, max_seqs=4)
    prompt = list(range(21))
    add(core, "a0", "acme", prompt, output=3, floor=8)
    run_to_end(core)
    for i in range(30):
        add(core, f"z{i}", "zeta", prompt=30, output=20)
    events = [event for _ in range(60) for event in core.step()]
    add(core, "a1", "acme", prompt, output=3, floor=8)
    events += run_to_end(core)
    assert cached(events)["a1"] == 20
    assert victims(events)


def test_victims_are_taken_from_the_tenant_most_above_its_floor() -> None:
    core, _ = make_core(num_blocks=24, block_size=4, watermark=0.0, prefix_cache=False)
    add(core, "a", "acme", prompt=31, output=16, floor=12)
    add(core, "b", "beta", prompt=15, output=20)
    add(core, "c", "zeta", prompt=23, output=20)
    events = run_to_end(core)
    assert victims(events)[0] == "c"
    assert "a" not in victims(events)


def test_a_floor_that_comes_later_starves_nobody_who_is_alone() -> None:
    """zeta was let in while nobody had a floor; acme's cached blocks give way when nothing runs."""
    core, _ = make_core(num_blocks=16, block_size=4, watermark=0.0)
    add(core, "z", "zeta", prompt=30, output=30)
    core.step()
    add(core, "a", "acme", prompt=5, output=2, floor=8)
    for _ in range(3):
        core.step()
    add(core, "a1", "acme", prompt=25, output=2, floor=8)
    assert len(cached(run_to_end(core))) == 2


def test_a_higher_class_displaces_what_is_preemptible_and_nothing_else() -> None:
    for preemptible in (True, False):
        core, _ = make_core(max_seqs=2, watermark=0.0)
        for i in range(2):
            add(core, f"low{i}", "zeta", prompt=8, output=30, rank=1, preemptible=preemptible)
        core.step()
        add(core, "high", "acme", prompt=8, output=5, rank=0)
        events = [*core.step(), *core.step()]
        assert len(victims(events)) == preemptible
        assert ("high" in core.scheduler.running) == preemptible
        events += run_to_end(core)
        assert len(cached(events)) == 3
        assert len(victims(events)) == preemptible  # and nothing goes back and forth


def test_nobody_is_displaced_in_vain() -> None:
    """The one preemptible sequence would not make enough room."""
    core, _ = make_core(num_blocks=16, block_size=4, watermark=0.0, prefix_cache=False)
    add(core, "low", "zeta", prompt=4, output=20, rank=1, preemptible=True)
    add(core, "firm", "zeta", prompt=40, output=4, rank=1)
    core.step()
    add(core, "high", "acme", prompt=30, output=4, rank=0)
    assert victims(core.step()) == []
    run_to_end(core)


def test_displaced_sequences_lose_no_token_and_pay_once() -> None:
    core, _ = make_core(max_seqs=1, watermark=0.0)
    add(core, "low", "zeta", prompt=8, output=20, rank=1, preemptible=True)
    for _ in range(5):
        core.step()
    add(core, "high", "acme", prompt=8, output=5, rank=0)
    events = run_to_end(core)
    assert victims(events) == ["low"]
    assert core.scheduler.counters[1]["zeta"] == 8 + 2 * 20
    admitted = [e.request_id for e in events if isinstance(e, SequenceAdmitted)]
    assert admitted == ["high", "low"]


def test_shares_that_mean_nothing_are_refused_when_they_are_set() -> None:
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="positive number"):
            TenantShare(tenant="acme", weight=weight)
    for floor, cap in ((-1, None), (5, 4), (0, 0)):
        with pytest.raises(ConfigError, match="do not go together"):
            TenantShare(tenant="acme", kv_floor_blocks=floor, kv_cap_blocks=cap)


def test_floors_beyond_the_pool_are_refused_and_so_is_what_they_leave_no_room_for() -> None:
    core, _ = make_core(num_blocks=16, block_size=4)
    add(core, "a", "acme", prompt=4, output=2, floor=10)
    with pytest.raises(ConfigError, match="other floors take 10 of 16 blocks"):
        add(core, "b", "beta", prompt=4, output=2, floor=7)
    with pytest.raises(NeverFitsError, match="zeta can have 6"):
        add(core, "z", "zeta", prompt=24, output=2)
    with pytest.raises(NeverFitsError, match="acme can have 3"):
        add(core, "c", "acme", prompt=12, output=2, cap=3, floor=2)
    assert find(core, "a").tenant == "acme"
    run_to_end(core)


def test_a_floor_takes_nothing_back_from_whoever_comes_first() -> None:
    """A borrower of a higher class would be let in again before the head, and so for ever."""
    core, _ = make_core(num_blocks=8, block_size=4, max_step_tokens=8, prefix_cache=False)
    add(core, "z", "zeta", prompt=24, output=4, rank=0)
    core.step()
    add(core, "a", "acme", prompt=9, output=2, floor=3, rank=1)
    events = run_to_end(core)
    assert victims(events) == []
    assert len(cached(events)) == 2
