"""Who goes next, who gives way, what it costs: pure functions of each policy.

`order` and `victim` return sort keys, least first; they read the sequence and the counters and
change nothing. The scheduler is the mechanism; this file is the policy.
"""

from collections.abc import Mapping
from typing import Protocol

from engine.config import ChargeRates
from engine.errors import ConfigError
from engine.scheduling.shares import VirtualCounters
from engine.sequence import Sequence

Key = tuple[float, ...]


class Policy(Protocol):
    name: str
    is_flat: bool  # knows no priority classes: all tenants have one queue and one set of counters
    weighs_memory: bool  # tenants are charged what `charge_memory` says, if tokens cost less

    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        """Least first: which sequence's prompt is computed, or admitted, next."""
        ...

    def victim(self, seq: Sequence, counters: VirtualCounters) -> Key:
        """Least first: which running sequence gives up its blocks. The first element is the
        class; the bound on preemptions protects a sequence only against others of its class."""
        ...

    def charge(self, rates: ChargeRates, *, prompt: int, cached: int, output: int) -> float:
        """Service units of some tokens, before division by the tenant's weight."""
        ...

    def charge_memory(self, *, part: float, total: float) -> float:
        """Service units of having held that part of the pool's blocks in a step, in which all
        tenants together were charged `total` for tokens. Asked only if `weighs_memory`."""
        ...


class WeightedFair:
    """Strict by class; inside a class the tenant with the least virtual counter (VTC, OSDI'24,
    made weighted, chunked and preemptive; bound in docs/decisions.md)."""

    name = "wfq"
    is_flat = False
    weighs_memory = False

    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return (seq.rank, counters[seq.tenant], seq.place)

    def victim(self, seq: Sequence, counters: VirtualCounters) -> Key:
        """Lowest class, then most service ahead, then least to redo, then newest."""
        return (-seq.rank, -counters[seq.tenant], seq.num_computed_tokens, -seq.place)

    def charge(self, rates: ChargeRates, *, prompt: int, cached: int, output: int) -> float:
        return rates.prompt * prompt + rates.cached * cached + rates.output * output

    def charge_memory(self, *, part: float, total: float) -> float:
        return 0.0


class FlatVirtualTokens(WeightedFair):
    """VTC as published (OSDI'24, algorithm 2): no classes, and prefix hits cost what prompts do."""

    name = "vtc"
    is_flat = True

    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return (counters[seq.tenant], seq.place)

    def victim(self, seq: Sequence, counters: VirtualCounters) -> Key:
        """Most service ahead, then newest; the published scheduler never preempts."""
        return (0, -counters[seq.tenant], -seq.place)

    def charge(self, rates: ChargeRates, *, prompt: int, cached: int, output: int) -> float:
        return rates.prompt * (prompt + cached) + rates.output * output


class DeficitRoundRobin(WeightedFair):
    """Strict by class; inside a class tenants take turns of `QUANTUM` service units per unit of
    weight (DRR, Shreedhar and Varghese 1995, charged as tokens are computed).

    A tenant whose counter is in round r has used up its quantum of the rounds before; what it took
    too much of in one round is missing in the next. Counters of two backlogged tenants differ by a
    quantum more than under `wfq`, and requests of one tenant run together.
    """

    name = "drr"
    QUANTUM = 1024.0

    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return (seq.rank, counters[seq.tenant] // self.QUANTUM, seq.place)


class DominantShare(WeightedFair):
    """`wfq` over two resources: a counter advances by the larger of the tenant's token service and
    its part of the pool, the whole of which costs in a step what all tokens of the step do, over
    weight (dominant resource fairness, Ghodsi et al., NSDI'11). As in DRFQ (SIGCOMM'12) nothing
    long past counts: of tokens that cost more than memory did, a step's budget is remembered.

    Who holds much for long gets fewer tokens, and so holds less.
    """

    name = "drf"
    weighs_memory = True

    def charge_memory(self, *, part: float, total: float) -> float:
        return part * total


class Priority(WeightedFair):
    """Strict by class, then first come first served."""

    name = "priority"

    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return (seq.rank, seq.place)

    def victim(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return (-seq.rank, -seq.place)


class FirstCome(WeightedFair):
    """First come, first served, whoever comes; the newest gives way (vLLM's default)."""

    name = "fcfs"
    is_flat = True

    def order(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return (seq.place,)

    def victim(self, seq: Sequence, counters: VirtualCounters) -> Key:
        return (0, -seq.place)


POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        *(WeightedFair, FlatVirtualTokens, DeficitRoundRobin),
        *(DominantShare, Priority, FirstCome),
    )
}


def make_policy(name: str) -> Policy:
    """The policy of that name. Raises ConfigError, naming those that exist."""
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
