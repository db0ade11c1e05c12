"""The pool of KV blocks: who holds which, which are free, and which stay filled for reuse.

A block is in exactly one state: held (reference count > 0), cached (no holder, but its content
can still be found by key), or free. free + cached + held == total, globally and per tenant.

Cached blocks are kept per tenant, oldest first. Room is taken from the tenant that caches most:
one tenant's flood of prompts pushes out its own, not everybody's.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from engine.errors import InvariantError


@dataclass(slots=True, eq=False)
class Block:
    """One block; `key`, `namespace` and `tokens` describe its content while it can be found."""

    id: int
    ref_count: int = 0
    tenant: str | None = None  # who holds it, or whose content it caches
    key: bytes | None = None
    namespace: str | None = None
    tokens: tuple[int, ...] = ()
    # What each holder owes for it until `owed_at`: integral of dt / ref_count since it was taken.
    owed: float = 0.0
    owed_at: float = 0.0
    # Neighbours in the list it is on (free or cached); None while it is held.
    prev: "Block | None" = None
    next: "Block | None" = None


class _BlockList:
    """Intrusive doubly linked list: O(1) at both ends and from the middle."""

    def __init__(self) -> None:
        self._head = Block(-1)
        self._tail = Block(-2)
        self._head.next, self._tail.prev = self._tail, self._head
        self.size = 0

    def append(self, block: Block) -> None:
        last = self._tail.prev
        assert last is not None
        last.next = self._tail.prev = block
        block.prev, block.next = last, self._tail
        self.size += 1

    def remove(self, block: Block) -> None:
        assert block.prev is not None
        assert block.next is not None
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self.size -= 1

    def pop(self) -> Block:
        block = self._head.next
        assert block is not None
        self.remove(block)
        return block

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next


class BlockPool:
    """Allocates blocks to tenants. Freed blocks whose content is cached are reused last;
    `on_reuse` is told of each such block before its content is lost."""

    def __init__(self, num_blocks: int, on_reuse: Callable[[Block], None]) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.held_by_tenant: Counter[str] = Counter()
        self.cached_by_tenant: Counter[str] = Counter()
        self._on_reuse = on_reuse
        self.evicted_by_tenant: Counter[str] = Counter()  # whose cached content was lost, ever
        self._free = _BlockList()
        self._cached: dict[str, _BlockList] = {}  # by tenant, oldest first
        self._num_cached = 0
        # (-unprotected cached blocks, tenant): holds an entry of every tenant's current count, and
        # outdated ones, which are dropped when they surface.
        self._most_cached: list[tuple[int, str]] = []
        self._floors: dict[str, int] = {}
        self._protected: dict[str, int] = {}  # cached blocks that only their tenant may take
        self._num_protected = 0
        self.now = 0.0  # seconds; told by `advance`
        self.held_block_seconds = 0.0  # integral of `num_held` until now
        for block in self.blocks:
            self._free.append(block)

    @property
    def num_free(self) -> int:
        return self._free.size

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones, then cached ones."""
        return self._free.size + self._num_cached

    def available_to(self, tenant: str) -> int:
        """Of those, the blocks that this tenant may take: all but what floors of others keep."""
        return self.num_available - self._num_protected + self._protected.get(tenant, 0)

    def borrowed_by(self, tenant: str) -> int:
        """Blocks that the tenant holds beyond its floor."""
        return max(0, self.held_by_tenant[tenant] - self._floors.get(tenant, 0))

    def excess_of(self, tenant: str) -> int:
        """The same, where floors are set at all: else nobody has more than its share."""
        return self.borrowed_by(tenant) if self._floors else 0

    @property
    def floors(self) -> dict[str, int]:
        """By tenant that has one."""
        return dict(self._floors)

    def floor_of(self, tenant: str) -> int:
        return self._floors.get(tenant, 0)

    @property
    def num_floor_blocks(self) -> int:
        """Sum of all floors."""
        return sum(self._floors.values())

    def set_floor(self, tenant: str, num_blocks: int) -> None:
        """Blocks that the tenant can always have. What it does not hold of them protects its
        cached ones, which nobody else may take; the rest may be lent."""
        if num_blocks != self._floors.get(tenant, 0):
            self._floors[tenant] = num_blocks
            if not num_blocks:
                del self._floors[tenant]
            self._protect(tenant)

    def _protect(self, tenant: str) -> None:
        """Bring the tenant's protected and unprotected counts up to date."""
        cached = self.cached_by_tenant.get(tenant, 0)
        unheld = max(0, self._floors.get(tenant, 0) - self.held_by_tenant.get(tenant, 0))
        protected = min(cached, unheld)
        self._num_protected += protected - self._protected.pop(tenant, 0)
        if protected:
            self._protected[tenant] = protected
        if cached > protected:
            heapq.heappush(self._most_cached, (protected - cached, tenant))
        if len(self._most_cached) > 4 * len(self.cached_by_tenant) + 64:
            self._most_cached = [
                (self._protected.get(name, 0) - n, name)
                for name, n in self.cached_by_tenant.items()
                if n > self._protected.get(name, 0)
            ]
            heapq.heapify(self._most_cached)

    @property
    def num_held(self) -> int:
        return len(self.blocks) - self.num_available

    def advance(self, now: float) -> None:
        """Nothing was taken or freed until `now`; a time before the last is none."""
        if now > self.now:
            self.held_block_seconds += self.num_held * (now - self.now)
            self.now = now

    def owed(self, block_ids: Iterable[int]) -> float:
        """What one holder of these held blocks owes until now, in block-seconds, as if it had held
        each since it was taken."""
        now, blocks = self.now, [self.blocks[block_id] for block_id in block_ids]
        return sum(b.owed + (now - b.owed_at) / b.ref_count for b in blocks)

    def allocate(self, num_blocks: int, tenant: str) -> list[int]:
        """Ids of `num_blocks` blocks, now held once by `tenant`. The caller checked that they
        are available."""
        assert num_blocks <= self.num_available, "allocation was not checked against the pool"
        return [self._take(tenant) for _ in range(num_blocks)]

    def _take(self, tenant: str) -> int:
        block = self._free.pop() if self._free.size else self._evict(tenant)
        block.ref_count, block.tenant = 1, tenant
        block.owed, block.owed_at = 0.0, self.now
        self._count_held(tenant, 1)
        return block.id

    def _evict(self, taker: str) -> Block:
        """The oldest cached block of the tenant that caches most beyond its floor, emptied; where
        all are protected, of the taker, or, if it was let, of anybody."""
        tenant = taker
        while self._most_cached:
            count, tenant = self._most_cached[0]
            if self.cached_by_tenant.get(tenant, 0) - self._protected.get(tenant, 0) == -count:
                break
            heapq.heappop(self._most_cached)
        else:
            tenant = taker if taker in self._cached else next(iter(self._cached))
        block = next(iter(self._cached[tenant]))
        self._uncache(block)
        self.evicted_by_tenant[tenant] += 1
        self._on_reuse(block)
        block.key, block.namespace, block.tokens = None, None, ()
        return block

    def _cache(self, block: Block) -> None:
        assert block.tenant is not None
        self._cached.setdefault(block.tenant, _BlockList()).append(block)
        self._count_cached(block.tenant, 1)

    def _uncache(self, block: Block) -> None:
        assert block.tenant is not None
        blocks = self._cached[block.tenant]
        blocks.remove(block)
        if not blocks.size:
            del self._cached[block.tenant]
        self._count_cached(block.tenant, -1)

    def _count_cached(self, tenant: str, change: int) -> None:
        self._num_cached += change
        self.cached_by_tenant[tenant] += change
        if not self.cached_by_tenant[tenant]:
            del self.cached_by_tenant[tenant]  # a tenant that left costs nothing
        self._protect(tenant)

    def _count_held(self, tenant: str, change: int) -> None:
        self.held_by_tenant[tenant] += change
        if not self.held_by_tenant[tenant]:
            del self.held_by_tenant[tenant]
        if tenant in self._floors:
            self._protect(tenant)

    def reset(self, tenant: str | None = None) -> int:
        """Empty the cached blocks, of one tenant's own namespaces or all; how many there were."""
        tenants = [tenant] if tenant is not None else list(self._cached)
        blocks = [block for name in tenants for block in self._cached.get(name, ())]
        if tenant is not None:
            blocks = [block for block in blocks if block.namespace is not None]
        for block in blocks:
            self._uncache(block)
            self._on_reuse(block)
            block.key, block.namespace, block.tokens, block.tenant = None, None, (), None
            self._free.append(block)
        return len(blocks)

    def touch(self, block_ids: Iterable[int], tenant: str) -> float:
        """Add one reference to each block; what others owe for them, and the new holder does not.
        Cached blocks become held."""
        now, owed = self.now, 0.0
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                self._uncache(block)
                block.tenant = tenant
                block.owed = 0.0
                self._count_held(tenant, 1)
            else:
                block.owed += (now - block.owed_at) / block.ref_count
            block.owed_at = now
            block.ref_count += 1
            owed += block.owed
        return owed

    def free(self, block_ids: list[int]) -> float:
        """Drop one reference of each block of one block table; what the holder owed for them.

        Deepest first, so that the end of a prefix is reused before its beginning.
        """
        now, owed = self.now, 0.0
        for block_id in reversed(block_ids):
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} freed twice"
            block.owed += (now - block.owed_at) / block.ref_count
            block.owed_at = now
            owed += block.owed
            block.ref_count -= 1
            if block.ref_count:
                continue
            assert block.tenant is not None
            self._count_held(block.tenant, -1)
            if block.key is None:
                block.tenant = None
                self._free.append(block)
            else:
                self._cache(block)
        return owed

    def check(self, block_tables: Iterable[list[int]]) -> None:
        """Raise InvariantError unless the books balance with these live block tables. O(blocks)."""
        references = Counter(block_id for table in block_tables for block_id in table)
        free = list(self._free)
        cached = [block for blocks in self._cached.values() for block in blocks]
        held = [block for block in self.blocks if block.ref_count]
        checks = {
            "free + cached + held == total": len(free) + len(cached) + len(held)
            == len(self.blocks),
            "list sizes": len(free) == self._free.size and len(cached) == self._num_cached,
            "reference counts == table entries": references
            == Counter({block.id: block.ref_count for block in held}),
            "free blocks are empty": all(
                not b.ref_count and b.key is None and b.tenant is None for b in free
            ),
            "cached blocks have content": all(
                not b.ref_count and b.key is not None and b.tenant is not None for b in cached
            ),
            "held per tenant": self.held_by_tenant == Counter(b.tenant for b in held),
            "cached per tenant": self.cached_by_tenant == Counter(b.tenant for b in cached)
            and all(b.tenant == t for t, blocks in self._cached.items() for b in blocks),
            "the tenant that caches most is known": all(
                (self._protected.get(tenant, 0) - n, tenant) in self._most_cached
                for tenant, n in self.cached_by_tenant.items()
                if n > self._protected.get(tenant, 0)
            ),
            "protected blocks": self._protected
            == {
                tenant: protected
                for tenant, floor in self._floors.items()
                if (
                    protected := min(
                        self.cached_by_tenant.get(tenant, 0),
                        max(0, floor - self.held_by_tenant.get(tenant, 0)),
                    )
                )
            }
            and sum(self._protected.values()) == self._num_protected,
        }
        broken = [name for name, holds in checks.items() if not holds]
        if broken:
            raise InvariantError(f"block pool: {'; '.join(broken)}")

    def __repr__(self) -> str:
        return f"<BlockPool {self.num_held} held, {self.num_cached} cached, {self.num_free} free>"
