"""Who gives way, and whether its KV is moved to host memory or computed again."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.memory.kv_memory import KVMemory
from engine.plan import StepPlan
from engine.scheduling.policies import Key
from engine.sequence import Sequence as EngineSequence

SMOOTHING = 0.3  # weight of the newest measurement
TRY_AGAIN = 16  # recomputations after which one swap is made, to see what it costs by now


@dataclass(slots=True)
class PreemptionCosts:
    """Moving averages of two rates, from what steps really took; None until measured."""

    seconds_per_swapped_block: float | None = None  # one way
    seconds_per_token: float | None = None  # of a step that mostly computes prompts
    num_recomputed: int = 0  # decisions against swapping since the last swap

    def observe(self, plan: StepPlan, seconds: float, swap_seconds: float) -> None:
        """Learn from a step that took so long, of which so much went into swapping."""
        num_swapped = len(plan.copies.swapped_out) + len(plan.copies.swapped_in)
        if num_swapped:
            self.seconds_per_swapped_block = _smoothed(
                self.seconds_per_swapped_block, swap_seconds / num_swapped
            )
        num_decodes = sum(chunk.num_tokens == 1 for chunk in plan.chunks)
        if plan.num_tokens > 2 * num_decodes:
            self.seconds_per_token = _smoothed(
                self.seconds_per_token, (seconds - swap_seconds) / plan.num_tokens
            )

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving the blocks out and in again beats computing the tokens again. Before
        anything was swapped it does: that is how its cost becomes known."""
        if self.seconds_per_swapped_block is None or self.seconds_per_token is None:
            return True
        swapping = 2 * num_blocks * self.seconds_per_swapped_block
        if swapping >= num_tokens * self.seconds_per_token:
            self.num_recomputed += 1
            if self.num_recomputed < TRY_AGAIN:
                return False
        self.num_recomputed = 0
        return True


def _smoothed(average: float | None, value: float) -> float:
    return value if average is None else (1 - SMOOTHING) * average + SMOOTHING * value


VictimKey = tuple[float, bool, int, Key]


def victim_order(
    seq: EngineSequence, policy_key: Key, excess: int, max_preemptions: int
) -> VictimKey:
    """Least first: the policy's class, then whoever is not at the bound of preemptions, then of the
    tenant with the most blocks in excess of its floor, then the rest of the policy's key."""
    priority_class, *rest = policy_key
    at_bound = seq.num_preemptions >= max_preemptions
    return (priority_class, at_bound, -excess, tuple(rest))


def has_claim(head: EngineSequence, running: Iterable[EngineSequence]) -> bool:
    """Whether a queue head may displace anybody at all."""
    if head.share.kv_floor_blocks:
        return True
    return any(one.rank > head.rank and one.share.is_preemptible for one in running)


def displaced_by(
    head: EngineSequence,
    num_blocks: int,
    num_slots: int,
    *,
    may_reclaim: bool,
    max_preemptions: int,
    is_behind: Callable[[EngineSequence], bool],
    victims: Iterable[EngineSequence],
    memory: KVMemory,
) -> list[EngineSequence]:
    """Those of `victims`, which come in the order in which they give way, that make room for a
    queue head; none if all together would not. Only borrowers of its tenant's KV floor and
    preemptible sequences of a lower class are ever preempted to admit.

    num_blocks, num_slots  what the head lacks
    may_reclaim            the head's tenant would still be within its KV floor
    max_preemptions        after so many in a row, each before it had come any further, a higher
                           class leaves a sequence alone until it has: what the turns of its class
                           compute must not be lost for ever
    is_behind              comes after the head in policy order; who comes before would be let in
                           again before it, and so for ever
    """
    taken: list[EngineSequence] = []
    borrowed: dict[str, int] = {}
    for seq in victims:
        if num_blocks <= 0 and num_slots <= 0:
            break
        freed = sum(memory.pool.blocks[block_id].ref_count == 1 for block_id in seq.block_table)
        left = borrowed.setdefault(seq.tenant, memory.pool.borrowed_by(seq.tenant))
        is_lower = (
            seq.rank > head.rank
            and seq.share.is_preemptible
            and (seq.num_fruitless < max_preemptions or _has_advanced(seq))
        )
        reclaims = may_reclaim and num_slots <= 0 and seq.tenant != head.tenant and left > 0
        if not is_behind(seq) or not (is_lower or reclaims):
            continue
        if not is_lower and freed > left:
            continue  # its tenant would fall below its own floor
        taken.append(seq)
        num_blocks -= freed
        num_slots -= seq.num_slots
        borrowed[seq.tenant] -= freed
    return taken if num_blocks <= 0 and num_slots <= 0 else []


def count_preemption(seq: EngineSequence) -> None:
    """It gives way. Was what it has computed since the last time all there before?"""
    seq.num_fruitless = 0 if _has_advanced(seq) else seq.num_fruitless + 1
    seq.num_tokens_at_preemption = seq.num_reached_tokens
    seq.num_preemptions += 1


def _has_advanced(seq: EngineSequence) -> bool:
    return seq.num_reached_tokens > seq.num_tokens_at_preemption


def swaps(
    members: Sequence[EngineSequence],
    memory: KVMemory,
    costs: PreemptionCosts,
    config: SchedulerConfig,
) -> bool:
    """Whether these, which are preempted as one, go to host memory: all or none."""
    num_blocks = sum(memory.num_blocks(one.num_computed_tokens) for one in members)
    if config.preemption == "recompute" or num_blocks == 0:
        return False
    if num_blocks > memory.host.num_available(members[0].tenant):
        return False
    lost = sum(one.num_computed_tokens - memory.num_shared_tokens(one) for one in members)
    return config.preemption == "swap" or costs.prefers_swap(num_blocks, lost)
