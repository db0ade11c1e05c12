"""KV-block-seconds: how long blocks of the pools were held, and by whom.

A block that stands in n block tables costs each of them 1/n of its time, whichever tenants they
are of. `BlockPool` keeps what each holder of a block owes for it, the integral of dt / n since it
was taken; whoever holds it from t1 to t2 is charged the difference. So a step costs nothing, and a
change of a block table costs the same for each of its blocks, however many share it.

An account is charged what is owed when a block is given up, less what was owed when it was got. It
is exact for whoever holds nothing; of others what they owe now is missing.
"""

import math

from engine.errors import InvariantError
from engine.memory.block_pool import BlockPool


class KVMeter:
    """One clock for all pools of an engine, and an account for each tenant."""

    def __init__(self) -> None:
        self._pools: list[BlockPool] = []
        self._accounts: dict[str, float] = {}
        self._forgotten = 0.0  # of tenants that had no block any more

    def add(self, pool: BlockPool) -> None:
        self._pools.append(pool)

    def advance(self, now: float) -> None:
        """Until `now` every block stayed with whoever held it."""
        for pool in self._pools:
            pool.advance(now)

    def charge(self, tenant: str, block_seconds: float) -> None:
        self._accounts[tenant] = self._accounts.get(tenant, 0.0) + block_seconds

    def accounts(self) -> dict[str, float]:
        return dict(self._accounts)

    def forget_idle(self) -> None:
        """Drop the accounts of tenants that have no block in any pool."""
        for tenant in list(self._accounts):
            if not any(
                tenant in pool.held_by_tenant or tenant in pool.cached_by_tenant
                for pool in self._pools
            ):
                self._forgotten += self._accounts.pop(tenant)

    def check(self) -> None:
        """Raise InvariantError unless the tenants' block-seconds are the integral of held blocks
        over time. O(blocks)."""
        owed = sum(
            block.ref_count * pool.owed([block.id])
            for pool in self._pools
            for block in pool.blocks
            if block.ref_count
        )
        charged = self._forgotten + sum(self._accounts.values()) + owed
        held = sum(pool.held_block_seconds for pool in self._pools)
        if not math.isclose(charged, held, rel_tol=1e-9, abs_tol=1e-6):
            raise InvariantError(f"KV meter: charged {charged} of {held} block-seconds")
