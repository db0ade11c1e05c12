"""What is charged to whom: tokens when they are computed, and, at the end of a step, a top-up for
the blocks that a tenant held in it, where the policy weighs memory."""

from collections import Counter
from collections.abc import Iterable

from engine.config import SchedulerConfig
from engine.memory.block_pool import BlockPool
from engine.scheduling.classes import ClassClock
from engine.scheduling.own_policy import policy_named
from engine.scheduling.places import Places
from engine.scheduling.policies import Policy
from engine.sequence import Sequence

Account = tuple[int, str]
"""(rank of the class, tenant)."""


class Charging:
    """Charges the counters of tenants and classes by the policy in force. Tenants are topped up for
    what they hold of this pool; counters and classes are one set for both of two pools."""

    def __init__(
        self,
        config: SchedulerConfig,
        places: Places,
        pool: BlockPool,
        prefill: "Charging | None",
    ) -> None:
        self.classes: ClassClock = prefill.classes if prefill else ClassClock(config)
        self._rates = config.charge
        self._places = places
        self._pool = pool
        self.switch_policy(policy_named(config.policy))

    def switch_policy(self, policy: Policy) -> None:
        self.policy = policy
        # Service since the last step ended, before division by weights; only if it is asked for.
        self._service: dict[Account, float] = {}

    def charge(
        self, rank: int, tenant: str, *, prompt: int = 0, cached: int = 0, output: int = 0
    ) -> None:
        """Tokens that were computed, or found in the cache."""
        service = self.policy.charge(self._rates, prompt=prompt, cached=cached, output=output)
        self._places.counters[rank].charge(tenant, service)
        self.classes.charge(rank, service)
        if self.policy.weighs_memory:
            account = (rank, tenant)
            self._service[account] = self._service.get(account, 0.0) + service

    def charge_prompt(self, seq: Sequence, end: int) -> None:
        """The sequence computes up to token `end`. What it computed before costs nothing again."""
        fresh = min(end, seq.num_prompt_tokens) - seq.num_charged_tokens
        if fresh > 0:
            seq.num_charged_tokens += fresh
            self.charge(seq.rank, seq.tenant, prompt=fresh)

    def end_step(self, drawn: Iterable[Sequence]) -> None:
        """Each of `drawn` got an output token."""
        outputs = Counter((seq.rank, seq.share.tenant) for seq in drawn)
        for (rank, tenant), number in outputs.items():
            self.charge(rank, tenant, output=number)
        if self.policy.weighs_memory:
            self._top_up()

    def _top_up(self) -> None:
        """Charge what runs for its part of the pool: classes go by tokens alone, and so only the
        tenants' counters grow. A tenant's part is what it took first, shared or not; where it has
        sequences in several classes, each bears as much of it as those have in their tables. What
        a failed step charged counts in the next."""
        service, self._service = self._service, {}
        total = sum(service.values())
        if not total:
            return
        in_tables: Counter[Account] = Counter()
        of_tenant: Counter[str] = Counter()
        for seq in self._places.running.values():
            tenant, num_blocks = seq.share.tenant, len(seq.block_table)
            in_tables[seq.rank, tenant] += num_blocks
            of_tenant[tenant] += num_blocks
        for (rank, tenant), num_blocks in in_tables.items():
            held = self._pool.held_by_tenant.get(tenant, 0) * num_blocks / of_tenant[tenant]
            top_up = self.policy.top_up(
                service.get((rank, tenant), 0.0), total=total, part=held / len(self._pool.blocks)
            )
            self._places.counters[rank].charge(tenant, top_up)
