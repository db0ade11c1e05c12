"""The scheduler: which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase: each sequence's computed tokens catch up with its
tokens. A step spends one token budget: first one token for each running sequence that decodes
(stall-free, Sarathi-Serve, OSDI'24), then chunks of prompts, where running prefills and queue
heads compete in policy order. Mechanism only; the policy decides order, victims and charges.
"""

import heapq
import math
from collections import defaultdict

from engine.config import CacheConfig, SchedulerConfig
from engine.errors import DuplicateRequestError, NeverFitsError
from engine.memory.block_pool import BlockPool
from engine.memory.prefix_cache import PrefixCache
from engine.plan import ScheduledChunk, StepPlan
from engine.scheduling.policies import Key, make_policy
from engine.scheduling.queues import WaitingQueues
from engine.scheduling.shares import VirtualCounters
from engine.sequence import Sequence, SequenceStatus

PRUNE_EVERY_STEPS = 1024


class Scheduler:
    """add / schedule / update / finish. Time is an argument, in seconds."""

    def __init__(self, config: SchedulerConfig, cache_config: CacheConfig) -> None:
        self.config = config
        self.policy = make_policy(config.policy)
        self.counters: defaultdict[int, VirtualCounters] = defaultdict(VirtualCounters)  # by rank
        self.queues = WaitingQueues()
        self.running: dict[str, Sequence] = {}
        self.prefix_cache = PrefixCache(cache_config.block_size)
        self.pool = BlockPool(cache_config.num_blocks, on_reuse=self.prefix_cache.forget)
        self._cache_config = cache_config
        self._sequences: dict[str, Sequence] = {}
        self._watermark_blocks = math.ceil(config.watermark * cache_config.num_blocks)
        self._step = 0

    # -- arrivals and ends --------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises NeverFitsError or DuplicateRequestError."""
        self._check_fits(seq)
        if seq.id in self._sequences:
            raise DuplicateRequestError(f"request {seq.id} is already in the engine")
        self._arrive(seq)
        self._sequences[seq.id] = seq
        self.queues.append(seq)

    def _arrive(self, seq: Sequence) -> None:
        """Lift the tenant's counter if the sequence is the first in its queue."""
        waiting = self.queues.tenants(seq.share.rank)
        self._counters(seq).arrive(seq.tenant, seq.share.weight, waiting)

    def _counters(self, seq: Sequence) -> VirtualCounters:
        return self.counters[seq.share.rank]

    def _check_fits(self, seq: Sequence) -> None:
        most = seq.num_prompt_tokens + seq.params.max_tokens
        limit = min(self.config.max_model_len, self._cache_config.num_tokens)
        if seq.num_prompt_tokens < 1 or seq.params.max_tokens < 1 or most > limit:
            raise NeverFitsError(
                f"{seq.num_prompt_tokens} prompt tokens and up to {seq.params.max_tokens} output "
                f"tokens do not fit: this engine holds {limit} tokens per request, and a request "
                "needs at least one of each; shorten the prompt or lower max_tokens"
            )

    def finish(self, seq: Sequence, *, discard: bool = False) -> None:
        """Take a live sequence out; its blocks are freed and the full ones stay cached, unless
        they are to be discarded because their content cannot be trusted."""
        if discard:
            for block_id in seq.block_table:
                self.prefix_cache.discard(self.pool.blocks[block_id])
        if seq.status is SequenceStatus.RUNNING:
            self._release(seq)
        else:
            self._dequeue(seq)
        seq.status = SequenceStatus.FINISHED
        del self._sequences[seq.id]

    def find(self, seq_id: str) -> Sequence | None:
        """The live sequence of exactly this id."""
        return self._sequences.get(seq_id)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    # -- one step -----------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step. Blocks are allocated and prompt tokens charged here, so that the
        plan's own admissions see each other's service."""
        self._step += 1
        if self._step % PRUNE_EVERY_STEPS == 0:
            self._prune_counters()
        preempted: list[Sequence] = []
        decodes = self._schedule_decodes(now, preempted)
        budget = self.config.max_step_tokens - len(decodes)
        chunks, admitted = self._schedule_prompts(now, budget, admit=not preempted)
        return StepPlan(self._step, (*decodes, *chunks), tuple(admitted), tuple(preempted))

    def update(self, plan: StepPlan, token_ids: dict[str, int]) -> None:
        """Account for an executed plan: the KV of its chunks is there, `token_ids` are next."""
        for chunk in plan.chunks:
            seq = chunk.seq
            seq.num_computed_tokens += chunk.num_tokens
            seq.num_reached_tokens = max(seq.num_reached_tokens, seq.num_computed_tokens)
            if chunk.draws and seq.id not in token_ids:
                continue  # its computation failed
            if self._cache_config.enable_prefix_cache and seq.use_prefix_cache:
                self.prefix_cache.publish(seq, self.pool, chunk.start, seq.num_computed_tokens)
            if chunk.draws:
                seq.token_ids.append(token_ids[seq.id])
                self._charge(seq, output=1)

    def _schedule_decodes(self, now: float, preempted: list[Sequence]) -> list[ScheduledChunk]:
        """One token for each running sequence whose prompt is computed; preempts where a
        sequence cannot grow. Prefills never grow: their blocks are allocated at admission."""
        chunks: dict[str, ScheduledChunk] = {}
        for seq in [s for s in self.running.values() if s.is_decoding]:
            while seq.status is SequenceStatus.RUNNING and not self._grow(seq):
                victim = self._choose_victim()
                chunks.pop(victim.id, None)
                self._preempt(victim, now)
                preempted.append(victim)
            if seq.status is SequenceStatus.RUNNING:
                chunks[seq.id] = ScheduledChunk(seq, seq.num_computed_tokens, 1, (seq,))
        return list(chunks.values())

    def _schedule_prompts(
        self, now: float, budget: int, *, admit: bool
    ) -> tuple[list[ScheduledChunk], list[Sequence]]:
        """Spend the budget on chunks of prompts in policy order, admitting on the way.

        Entries carry the key they had when pushed; a charge makes the keys of that tenant stale,
        always too small, so an entry is re-keyed when it surfaces (lazy heap).
        """
        chunks: list[ScheduledChunk] = []
        admitted: list[Sequence] = []
        blocked: list[Sequence] = []
        heap = [self._entry(s) for s in self.running.values() if not s.is_decoding]
        if admit:
            heap += [self._entry(head) for head in self.queues.heads()]
        heapq.heapify(heap)
        while heap and budget > 0:
            entry = heapq.heappop(heap)
            seq = entry[-1]
            if self._entry(seq) > entry:
                heapq.heappush(heap, self._entry(seq))
                continue
            if seq.status is SequenceStatus.WAITING:
                if not self._admit(seq, now, blocked):
                    continue
                admitted.append(seq)
                following = self.queues.next_head(seq)
                if following is not None:
                    heapq.heappush(heap, self._entry(following))
            chunk = self._chunk(seq, budget)
            budget -= chunk.num_tokens
            chunks.append(chunk)
        return chunks, admitted

    def _entry(self, seq: Sequence) -> tuple[Key, int, Sequence]:
        return (self.policy.order(seq, self._counters(seq)), seq.place, seq)

    def _chunk(self, seq: Sequence, budget: int) -> ScheduledChunk:
        num_tokens = min(seq.num_uncomputed_tokens, budget)
        end = seq.num_computed_tokens + num_tokens
        seq.num_recomputed_tokens += max(
            0, min(end, seq.num_reached_tokens) - seq.num_computed_tokens
        )
        fresh = min(end, seq.num_prompt_tokens) - seq.num_charged_tokens
        if fresh > 0:
            seq.num_charged_tokens += fresh
            self._charge(seq, prompt=fresh)
        return ScheduledChunk(
            seq, seq.num_computed_tokens, num_tokens, (seq,) if end == seq.num_tokens else ()
        )

    # -- admission ----------------------------------------------------------------------------

    def _admit(self, seq: Sequence, now: float, blocked: list[Sequence]) -> bool:
        """Give a queue head a slot and blocks for its whole input; False if it must wait.

        A head that does not fit may be passed by its own class or a higher one, by tenants whose
        counter leads its own by at most `max_bypass_lead`, `max_bypasses` times within
        `max_bypass_seconds`; then what is freed is kept for it.
        """
        if len(self.running) >= self.config.max_seqs:
            return False
        if any(self._holds(head, seq, now) for head in blocked):
            return False
        hits = self._match(seq)
        needed = self._num_blocks(seq.num_tokens) - len(hits)
        evicted_hits = sum(not self.pool.blocks[i].ref_count for i in hits)
        spare = 1 + self._watermark_blocks if self.running else 0
        if needed + evicted_hits + spare > self.pool.num_available:
            if seq.blocked_since is None:
                seq.blocked_since = now
            blocked.append(seq)
            return False
        for head in blocked:
            head.num_bypasses += 1
        self._dequeue(seq)
        self.pool.touch(hits, seq.tenant)
        seq.block_table = hits + self.pool.allocate(needed, seq.tenant)
        self._start(seq, len(hits) * self._cache_config.block_size, now)
        return True

    def _holds(self, head: Sequence, other: Sequence, now: float) -> bool:
        """Whether `head`, which does not fit, keeps `other` from passing it."""
        assert head.blocked_since is not None
        return (
            head.num_bypasses >= self.config.max_bypasses
            or other.share.rank > head.share.rank
            or now - head.blocked_since > self.config.max_bypass_seconds
            or self._counters(other)[other.tenant]
            > self._counters(head)[head.tenant] + self.config.max_bypass_lead
        )

    def _match(self, seq: Sequence) -> list[int]:
        if not (self._cache_config.enable_prefix_cache and seq.use_prefix_cache):
            return []
        return self.prefix_cache.match(seq)

    def _start(self, seq: Sequence, num_hit_tokens: int, now: float) -> None:
        self.running[seq.id] = seq
        seq.status = SequenceStatus.RUNNING
        seq.num_computed_tokens = num_hit_tokens
        seq.blocked_since, seq.num_bypasses = None, 0
        if seq.admitted is None:
            seq.admitted = now
        # After a preemption, hits on what was charged before cost nothing again.
        fresh = min(num_hit_tokens, seq.num_prompt_tokens) - seq.num_charged_tokens
        if fresh > 0:
            seq.num_charged_tokens += fresh
            seq.num_cached_tokens += fresh
            self._charge(seq, cached=fresh)

    # -- preemption ---------------------------------------------------------------------------

    def _grow(self, seq: Sequence) -> bool:
        """Make room for the sequence's last token; False if no block is available."""
        missing = self._num_blocks(seq.num_tokens) - len(seq.block_table)
        if missing > self.pool.num_available:
            return False
        seq.block_table += self.pool.allocate(missing, seq.tenant)
        return True

    def _choose_victim(self) -> Sequence:
        def key(seq: Sequence) -> tuple[float, bool, Key]:
            priority_class, *rest = self.policy.victim(seq, self._counters(seq))
            at_bound = seq.num_preemptions >= self.config.max_preemptions
            return (priority_class, at_bound, tuple(rest))

        return min(self.running.values(), key=key)

    def _preempt(self, seq: Sequence, now: float) -> None:
        """By recomputation: tokens, keys and place stay; blocks go, their content stays cached."""
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        seq.queued = now
        self._arrive(seq)
        self.queues.put_back(seq)

    def _release(self, seq: Sequence) -> None:
        del self.running[seq.id]
        self.pool.free(seq.block_table)
        seq.block_table = []

    def _dequeue(self, seq: Sequence) -> None:
        self.queues.remove(seq)
        if not self.queues.num_waiting(seq.share.rank, seq.tenant):
            self._counters(seq).leave(seq.tenant)

    def _charge(self, seq: Sequence, *, prompt: int = 0, cached: int = 0, output: int = 0) -> None:
        service = self.policy.charge(
            self.config.charge, prompt=prompt, cached=cached, output=output
        )
        self._counters(seq).charge(seq.tenant, service)

    def _prune_counters(self) -> None:
        for rank, counters in self.counters.items():
            counters.prune({s.tenant for s in self._sequences.values() if s.share.rank == rank})

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache_config.block_size)

    # -- checks -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless the pool's books balance with the live block tables."""
        self.pool.check(seq.block_table for seq in self._sequences.values())

    def __repr__(self) -> str:
        counters = ", ".join(
            f"{tenant} {counter:.0f}"
            for _, of_class in sorted(self.counters.items())
            for tenant, counter in sorted(of_class.as_dict().items())
        )
        return (
            f"<Scheduler {self.policy.name} [waiting {len(self.queues)} | "
            f"running {len(self.running)} | "
            f"blocks {self.pool.num_held}/{len(self.pool.blocks)} | {counters}]>"
        )
