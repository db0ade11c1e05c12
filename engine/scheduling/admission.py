"""Whether a queue head can run, why not, and what happens when it can."""

import math
from dataclasses import dataclass
from typing import Protocol

from engine.config import CacheConfig, SchedulerConfig
from engine.cost_model import StepTimes
from engine.memory.kv_memory import KVMemory
from engine.scheduling.bypass import BlockedHeads
from engine.scheduling.order import PromptStep
from engine.scheduling.places import Places
from engine.sequence import Sequence, SequenceStatus
from engine.waits import WaitCause


class Charge(Protocol):
    def __call__(self, rank: int, tenant: str, *, cached: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Need:
    """A queue head with those bound to it, and what they lack; a number <= 0 is no lack."""

    hits: list[tuple[Sequence, list[int]]]  # each with its cached blocks
    num_blocks: int
    num_slots: int
    num_over_cap: int


class Admission:
    """Slots and blocks for queue heads."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        memory: KVMemory,
        places: Places,
        charge: Charge,
        step_times: StepTimes,
    ) -> None:
        self._config = config
        self._block_size = cache_config.block_size
        self._watermark_blocks = math.ceil(config.watermark * cache_config.num_blocks)
        self._memory = memory
        self._places = places
        self._charge = charge
        self._step_times = step_times

    @property
    def has_slots(self) -> bool:
        return self._num_free_slots > 0

    @property
    def _num_free_slots(self) -> int:
        return self._config.max_seqs - self._places.num_slots - self._places.num_handed_over

    def stop_cause(self, step: PromptStep) -> WaitCause:
        """Why a step that has come to its end did not look at the next head."""
        if not step.can_admit:
            return WaitCause.PREEMPTING
        if not self.has_slots:
            return WaitCause.SLOTS
        return WaitCause.BUDGET if step.admit else WaitCause.NOT_REACHED

    def need_of(self, head: Sequence) -> Need:
        """What the head and those bound to it lack."""
        members = [one for one in head.gang if one.status is SequenceStatus.WAITING]
        hits = [(one, self._memory.match(one)) for one in members]
        # An admission leaves blocks over, so that what runs can grow.
        spare = 1 + self._watermark_blocks if self._places.running else 0
        return Need(
            hits=hits,
            num_blocks=self._memory.num_missing(hits, alone=not self._places.running) + spare,
            num_slots=sum(one.num_slots for one in members) - self._num_free_slots,
            num_over_cap=self._memory.num_over_cap(hits),
        )

    def lack_of(self, head: Sequence, now: float) -> Need | None:
        """What the head lacks, if it is something that others could give it."""
        need = self.need_of(head)
        lacks = need.num_blocks > 0 or need.num_slots > 0
        if not lacks or need.num_over_cap > 0 or self._is_too_late(head, need, now):
            return None
        return need

    def admit(
        self, head: Sequence, now: float, blocked: BlockedHeads
    ) -> WaitCause | list[Sequence]:
        """Give a queue head, and those bound to it, slots and blocks for all their tokens: who
        runs now, or why it must wait."""
        if blocked.hold(head):
            return WaitCause.HEAD_HELD
        need = self.need_of(head)
        if self._is_too_late(head, need, now):
            return WaitCause.TOO_LATE
        if need.num_over_cap > 0:
            return WaitCause.CAP  # its tenant's own sequences must end first
        if len(blocked.delayed) < self._config.max_seqs and self._delays(head, need):
            blocked.delay(head)
            return WaitCause.TWIN
        if need.num_slots > 0 or need.num_blocks > 0:
            blocked.add(head)
            return WaitCause.KV if need.num_blocks > 0 else WaitCause.SLOTS
        blocked.count_pass()
        self._places.dequeue(head)
        for one, found in need.hits:
            self._memory.hold(one, found)  # of all, before one's blocks evict another's hits
        for one, found in need.hits:
            self._start(one, found, now)
        return [one for one, _ in need.hits]

    def _is_too_late(self, head: Sequence, need: Need, now: float) -> bool:
        """Whether a head that never ran would have its first token after its deadline even if the
        steps from now on were its own. What ran before has something to show for it, and ends
        when its deadline passes.

        Prices are learned by running. So what costs nobody anything is tried, and so is a prompt
        now and then: a price that was once too high must not keep every prompt out for ever.
        """
        cost = self._step_times.cost
        if head.deadline is None or head.admitted is not None or cost is None:
            return False
        if not self._places.running or not self._step_times.knows_prompts:
            return False
        num_tokens = head.num_tokens - len(need.hits[0][1]) * self._block_size
        seconds = cost.prompt_seconds(num_tokens, self._config.max_step_tokens)
        return now + seconds > head.deadline

    def _delays(self, head: Sequence, need: Need) -> bool:
        """Whether the head should wait, within its bound, because its tenant's running prompts are
        about to compute most of what it lacks (the idea: TensorRT-LLM's capacity scheduler). What
        follows it in its queue may go first."""
        if head.parked is not None or head.num_prefix_delays >= self._config.max_prefix_delays:
            return False
        num_hits = len(need.hits[0][1])
        coming = self._memory.num_coming_tokens(head, num_hits)
        if 2 * coming < head.num_tokens - num_hits * self._block_size:
            return False
        head.num_prefix_delays += 1
        return True

    def _start(self, seq: Sequence, hits: list[int], now: float) -> None:
        self._places.count_fetched(seq)
        seq.num_hit_tokens = self._memory.admit(seq, hits)
        self._places.run(seq)
        seq.blocked_since, seq.num_bypasses, seq.num_prefix_delays = None, 0, 0
        if seq.admitted is None:
            seq.admitted = now
        # After a preemption, hits on what was charged before cost nothing again.
        fresh = min(seq.num_hit_tokens, seq.num_prompt_tokens) - seq.num_charged_tokens
        if fresh > 0:
            seq.num_charged_tokens += fresh
            seq.num_cached_tokens += fresh
            self._charge(seq.rank, seq.tenant, cached=fresh)
