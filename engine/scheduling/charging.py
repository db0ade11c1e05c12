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
        self._max_ahead = config.max_step_tokens * config.charge.prompt
        self._places = places
        self._pool = pool
        self.switch_policy(policy_named(config.policy))

    def switch_policy(self, policy: Policy) -> None:
        self.policy = policy
        # Where memory is weighed, before division by weights: service since the last step ended,
        # and how far it exceeded what memory cost before, up to a step's budget. Tokens come in
        # bursts: did a prompt not count for the steps after it, a tenant would be charged for
        # tokens and for memory by turns, and the more so the fewer sequences it has.
        self._service: dict[Account, float] = {}
        self.ahead: dict[Account, float] = {}

    def charge(
        self, rank: int, tenant: str, *, prompt: int = 0, cached: int = 0, output: int = 0
    ) -> None:
        """Tokens that were computed, or found in the cache."""
        service = self.policy.charge(self._rates, prompt=prompt, cached=cached, output=output)
        self._charge_tenant((rank, tenant), service)
        self.classes.charge(rank, service)

    def _charge_tenant(self, account: Account, service: float) -> None:
        rank, tenant = account
        self._places.counters[rank].charge(tenant, service)
        if self.policy.weighs_memory:
            self._service[account] = self._service.get(account, 0.0) + service

    def charge_chunk(self, seq: Sequence, start: int, end: int) -> None:
        """The sequence computes tokens [start, end). For what it computed before, and lost, its
        tenant pays nothing again, but its class's turn is spent."""
        again = max(0, min(end, seq.num_reached_tokens) - start)
        if again:
            seq.num_recomputed_tokens += again
            self.classes.compute_again(seq.rank, self._rates.prompt * again)
        fresh = min(end, seq.num_prompt_tokens) - seq.num_charged_tokens
        if fresh > 0:
            seq.num_charged_tokens += fresh
            self.charge(seq.rank, seq.tenant, prompt=fresh)

    def end_step(self, drawn: Iterable[Sequence]) -> None:
        """Each of `drawn` got an output token."""
        of_class: dict[int, float] = {}
        outputs = Counter((seq.rank, seq.share.tenant) for seq in drawn)
        for account, number in outputs.items():
            service = self.policy.charge(self._rates, prompt=0, cached=0, output=number)
            self._charge_tenant(account, service)
            of_class[account[0]] = of_class.get(account[0], 0.0) + service
        for rank, service in of_class.items():
            self.classes.charge(rank, service)
        if self.policy.weighs_memory:
            self._top_up()

    def _top_up(self) -> None:
        """Charge tenants for their part of the pool, as far as it exceeds their tokens; classes go
        by tokens alone. The part is what a tenant took first, whoever shares it by now. Where it
        has sequences in several classes, each bears as much of it as those have in their tables.
        What a failed step charged counts in the next."""
        service, self._service = self._service, {}
        total = sum(service.values())
        in_tables: dict[Account, int] = {}
        for seq in self._places.running.values():
            account = (seq.rank, seq.share.tenant)
            in_tables[account] = in_tables.get(account, 0) + len(seq.block_table)
        of_tenant: Counter[str] = Counter()
        for (_, tenant), num_blocks in in_tables.items():
            of_tenant[tenant] += num_blocks
        ahead: dict[Account, float] = {}
        for account, num_blocks in in_tables.items():
            rank, tenant = account
            held = self._pool.held_by_tenant[tenant] * num_blocks / of_tenant[tenant]
            due = self.policy.charge_memory(part=held / len(self._pool.blocks), total=total)
            balance = self.ahead.get(account, 0.0) + service.get(account, 0.0) - due
            if balance < 0:
                self._places.counters[rank].charge(tenant, -balance)
            elif balance > 0:
                ahead[account] = min(balance, self._max_ahead)
        self.ahead = ahead
