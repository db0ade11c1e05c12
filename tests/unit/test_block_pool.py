import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import InvariantError
from engine.memory.block_pool import BlockPool


def fill(pool: BlockPool, block_ids: list[int]) -> None:
    """Pretend that the blocks were published."""
    for block_id in block_ids:
        pool.blocks[block_id].key = b"key-%d" % block_id


def test_blocks_go_from_free_to_held_to_free() -> None:
    pool = BlockPool(4, on_reuse=lambda block: None)

    table = pool.allocate(3, "acme")

    assert table == [0, 1, 2]
    assert (pool.num_held, pool.num_cached, pool.num_free) == (3, 0, 1)
    assert pool.held_by_tenant == {"acme": 3}
    pool.free(table)
    assert (pool.num_held, pool.num_cached, pool.num_free) == (0, 0, 4)
    assert pool.held_by_tenant == {}


def test_cached_blocks_are_reused_last_deepest_first_and_told() -> None:
    reused: list[int] = []
    pool = BlockPool(4, on_reuse=lambda block: reused.append(block.id))
    table = pool.allocate(3, "acme")
    fill(pool, table)
    pool.free(table)
    assert (pool.num_cached, pool.num_free) == (3, 1)

    assert pool.allocate(3, "zeta") == [3, 2, 1]

    assert reused == [2, 1]
    assert pool.cached_by_tenant == {"acme": 1}
    assert pool.held_by_tenant == {"zeta": 3}


def test_a_touched_block_leaves_the_cache_and_is_shared() -> None:
    pool = BlockPool(2, on_reuse=lambda block: None)
    table = pool.allocate(1, "acme")
    fill(pool, table)
    pool.free(table)

    pool.touch(table, "acme")
    pool.touch(table, "acme")

    assert pool.blocks[table[0]].ref_count == 2
    assert (pool.num_held, pool.num_cached) == (1, 0)
    pool.free(table)
    assert pool.num_held == 1
    pool.free(table)
    assert (pool.num_held, pool.num_cached) == (0, 1)


def test_freeing_twice_is_refused() -> None:
    pool = BlockPool(2, on_reuse=lambda block: None)
    table = pool.allocate(1, "acme")
    pool.free(table)

    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(table)


def test_check_finds_a_leak() -> None:
    pool = BlockPool(2, on_reuse=lambda block: None)
    pool.allocate(1, "acme")

    with pytest.raises(InvariantError, match="reference counts == table entries"):
        pool.check([])


def test_what_holders_owe_is_shared_and_begins_anew_with_each_holding() -> None:
    pool = BlockPool(2, on_reuse=lambda block: None)
    pool.advance(100.0)
    table = pool.allocate(2, "acme")
    pool.blocks[table[0]].key = b"key"
    pool.advance(103.0)
    assert pool.touch(table, "zeta") == 3 + 3
    pool.advance(104.0)
    assert pool.owed(table) == pool.free(table) == 3.5 + 3.5
    pool.advance(106.0)
    assert pool.free(table) == 5.5 + 5.5
    assert pool.held_block_seconds == 6 + 6
    pool.advance(200.0)
    assert pool.touch(table[:1], "zeta") == 0  # it was cached
    (other,) = pool.allocate(1, "zeta")
    pool.advance(201.0)
    assert pool.free([*table[:1], other]) == 1 + 1
    assert pool.held_block_seconds == 12 + 2


class PoolMachine(RuleBasedStateMachine):
    """Random allocate, publish, share and free; the books balance after each."""

    def __init__(self) -> None:
        super().__init__()
        self.cached: dict[int, str] = {}
        self.pool = BlockPool(12, on_reuse=lambda block: self.cached.pop(block.id))
        self.tables: list[tuple[str, list[int]]] = []

    @rule(count=st.integers(1, 5), tenant=st.sampled_from(["a", "b", "c"]))
    def allocate(self, count: int, tenant: str) -> None:
        if count <= self.pool.available_to(tenant):
            self.tables.append((tenant, self.pool.allocate(count, tenant)))

    @rule(tenant=st.sampled_from(["a", "b"]), floor=st.integers(0, 5))
    def set_floor(self, tenant: str, floor: int) -> None:
        self.pool.set_floor(tenant, floor)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        tenant, table = data.draw(st.sampled_from(self.tables))
        for block_id in table:
            if self.pool.blocks[block_id].key is None:
                self.pool.blocks[block_id].key = b"%d" % block_id
                self.cached[block_id] = tenant

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.cached)))
        tenant = self.cached[block_id]
        self.pool.touch([block_id], tenant)
        self.tables.append((tenant, [block_id]))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.pool.free(self.tables.pop(index)[1])

    @invariant()
    def books_balance(self) -> None:
        self.pool.check(table for _, table in self.tables)
        held = {block_id for _, table in self.tables for block_id in table}
        assert self.pool.num_held == len(held)
        assert self.pool.num_cached == len(set(self.cached) - held)
        cached = self.pool.cached_by_tenant
        for tenant in "abc":
            others = sum(
                min(cached[t], max(0, self.pool.floor_of(t) - self.pool.held_by_tenant[t]))
                for t in "abc"
                if t != tenant
            )
            assert self.pool.available_to(tenant) == self.pool.num_available - others


# 400 * 50 = 20,000 random operations.
TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
