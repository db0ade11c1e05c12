"""Blocks of host memory, where preempted sequences may leave their KV."""

from collections import Counter
from collections.abc import Iterable

from engine.errors import InvariantError


class HostPool:
    """Equal blocks; a tenant holds at most `max_blocks_per_tenant` of them. Nothing is shared:
    each block belongs to one parked sequence."""

    def __init__(self, num_blocks: int, max_blocks_per_tenant: int | None = None) -> None:
        self.num_blocks = num_blocks
        self.held_by_tenant: Counter[str] = Counter()
        self._budget = num_blocks if max_blocks_per_tenant is None else max_blocks_per_tenant
        self._free = list(range(num_blocks))
        self._tenants: dict[int, str] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_available(self, tenant: str) -> int:
        """Blocks that this tenant can allocate now."""
        return max(0, min(len(self._free), self._budget - self.held_by_tenant[tenant]))

    def allocate(self, num_blocks: int, tenant: str) -> list[int]:
        """Ids of so many blocks. The caller checked that they are available."""
        assert num_blocks <= self.num_available(tenant), "allocation was not checked"
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        self._tenants.update(dict.fromkeys(block_ids, tenant))
        if num_blocks:
            self.held_by_tenant[tenant] += num_blocks
        return block_ids

    def free(self, block_ids: list[int]) -> float:
        """Nothing is owed for them: block-seconds are those of the pool that computes."""
        for block_id in block_ids:
            tenant = self._tenants.pop(block_id, None)
            assert tenant is not None, f"host block {block_id} freed twice"
            self.held_by_tenant[tenant] -= 1
            if not self.held_by_tenant[tenant]:
                del self.held_by_tenant[tenant]
        self._free += block_ids
        return 0.0

    def owed(self, block_ids: list[int]) -> float:
        return 0.0

    def check(self, tables: Iterable[list[int]]) -> None:
        """Raise InvariantError unless exactly these tables hold what is not free."""
        held = [block_id for table in tables for block_id in table]
        if sorted(held + self._free) != list(range(self.num_blocks)):
            raise InvariantError("host pool: free + held blocks are not all blocks, once each")
        if Counter(self._tenants.values()) != self.held_by_tenant:
            raise InvariantError("host pool: blocks held per tenant do not add up")

    def __repr__(self) -> str:
        return f"<HostPool {self.num_blocks - len(self._free)} held, {len(self._free)} free>"
