from dataclasses import dataclass

import pytest

from engine.memory.block_pool import BlockPool
from engine.memory.prefix_cache import PrefixCache, block_key, root_key
from engine.sequence import SamplingParams, Sequence, TenantShare

BLOCK = 4


def sequence(tokens: list[int], namespace: str = "acme") -> Sequence:
    return Sequence(
        id="s",
        share=TenantShare(tenant=namespace),
        namespace=namespace,
        token_ids=tokens,
        params=SamplingParams(max_tokens=1),
        arrived=0.0,
    )


@dataclass
class Memory:
    cache: PrefixCache
    pool: BlockPool

    def compute(self, tokens: list[int], namespace: str = "acme") -> list[int]:
        """Allocate, publish and free these tokens; the ids of the blocks used."""
        seq = sequence(tokens, namespace)
        seq.block_table = self.pool.allocate(-(-len(tokens) // BLOCK), namespace)
        self.cache.publish(seq, self.pool, 0, len(tokens))
        self.pool.free(seq.block_table)
        return seq.block_table


@pytest.fixture
def memory() -> Memory:
    cache = PrefixCache(BLOCK)
    return Memory(cache, BlockPool(8, on_reuse=cache.forget))


def test_only_full_blocks_hit_and_one_token_is_always_left(memory: Memory) -> None:
    table = memory.compute(list(range(10)))

    assert memory.cache.match(sequence(list(range(10)))) == table[:2]
    assert memory.cache.match(sequence(list(range(8)))) == table[:1]
    assert memory.cache.match(sequence(list(range(9)))) == table[:2]
    assert memory.cache.match(sequence([0, 1, 2, 3, 99, 5])) == table[:1]
    assert memory.cache.match(sequence([9, *range(1, 10)])) == []


def test_another_namespace_never_hits(memory: Memory) -> None:
    memory.compute(list(range(8)), "acme")

    assert memory.cache.match(sequence(list(range(9)), "zeta")) == []
    assert len(memory.cache.match(sequence(list(range(9)), "acme"))) == 2


def test_a_hash_hit_with_other_content_is_no_hit(memory: Memory) -> None:
    """Even if SHA-256 collided, tokens and namespace are compared."""
    (block_id, _) = memory.compute(list(range(8)))
    memory.pool.blocks[block_id].tokens = (7, 7, 7, 7)
    assert memory.cache.match(sequence(list(range(9)))) == []

    memory.pool.blocks[block_id].tokens = (0, 1, 2, 3)
    memory.pool.blocks[block_id].namespace = "zeta"
    assert memory.cache.match(sequence(list(range(9)))) == []


def test_a_freed_prefix_hits_until_its_block_is_reused(memory: Memory) -> None:
    memory.compute(list(range(9)))
    memory.pool.allocate(6, "zeta")  # the six never published
    assert len(memory.cache.match(sequence(list(range(9))))) == 2

    memory.pool.allocate(1, "zeta")

    assert len(memory.cache.match(sequence(list(range(9))))) == 1  # the deepest went first
    assert len(memory.cache) == 1


def test_duplicate_content_is_published_once(memory: Memory) -> None:
    first = memory.compute([1, 2, 3, 4])
    held = memory.pool.allocate(memory.pool.num_free, "acme")  # keep the second off the first
    memory.pool.free(held)

    second = memory.compute([1, 2, 3, 4])

    assert first != second
    assert memory.cache.match(sequence([1, 2, 3, 4, 5])) == first
    assert memory.pool.num_cached == 1


def test_keys_of_different_inputs_differ() -> None:
    roots = {root_key(name) for name in ("", "a", "ab", "a\0", "a\0b", "b")}
    assert len(roots) == 6
    parent = root_key("a")
    keys = {block_key(parent, tokens) for tokens in ([1], [1, 2], [12], [1, 0], [2**40], [256, 1])}
    assert len(keys) == 6
    assert block_key(root_key("b"), [1]) not in keys
