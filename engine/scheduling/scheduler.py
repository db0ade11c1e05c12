"""The scheduler: which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase: each sequence's computed tokens catch up with its
tokens. A step spends one token budget: first one token for each running sequence that decodes
(stall-free, Sarathi-Serve, OSDI'24), then chunks of prompts, where running prefills and queue
heads compete in policy order. Mechanism only; the policy decides order, victims and charges, and
memory/ moves the blocks.
"""

from functools import partial

from engine.config import CacheConfig, SchedulerConfig
from engine.cost_model import StepTimes
from engine.memory.kv_memory import KVMemory
from engine.plan import ScheduledChunk, StepPlan
from engine.scheduling.admission import Admission
from engine.scheduling.bypass import BlockedHeads
from engine.scheduling.charging import Charging
from engine.scheduling.journal import Journal
from engine.scheduling.limits import check_fits
from engine.scheduling.order import ClassHeaps, Entry, PromptStep, pop_least
from engine.scheduling.own_policy import GuardedPolicy, policy_named
from engine.scheduling.places import Places
from engine.scheduling.policies import Policy
from engine.scheduling.preemption import (
    PreemptionCosts,
    VictimKey,
    count_preemption,
    displaced_by,
    has_claim,
    swaps,
    victim_order,
)
from engine.sequence import SamplingParams, Sequence, SequenceStatus, TenantShare
from engine.waits import WaitCause

PRUNE_EVERY_STEPS = 1024


class Scheduler:
    """add / schedule / update / finish. Time is an argument, in seconds.

    With `prefill`, this one only decodes: sequences come from that scheduler when their prompt is
    computed, and go back to it when it must be computed again. Both charge the same counters.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache_config: CacheConfig,
        prefill: "Scheduler | None" = None,
    ) -> None:
        self.config = config
        self.places: Places = Places(prefill.places if prefill is not None else None)
        self.counters = self.places.counters  # by rank of the class
        self.queues = self.places.queues
        self.running = self.places.running
        journal = prefill.journal if prefill else None
        self.journal: Journal = Journal(self.queues, self.places.counter, journal)
        self.memory: KVMemory = KVMemory(cache_config, prefill.memory if prefill else None)
        self.pool = self.memory.pool
        self.costs: PreemptionCosts = prefill.costs if prefill else PreemptionCosts()
        self._cache_config = cache_config
        charged = prefill.charging if prefill else None
        self.charging: Charging = Charging(config, self.places, self.pool, charged)
        self.policy = self.charging.policy
        self.step_times = StepTimes()
        self._admission = Admission(
            config, cache_config, self.memory, self.places, self.charging.charge, self.step_times
        )
        self._step = 0
        self._heads = ClassHeaps(self._entry, self.queues.is_head)

    # -- arrivals and ends --------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence, which `check_fits` has let pass."""
        self.memory.prefix_cache.enter(seq)
        self.pool.set_floor(seq.tenant, seq.share.kv_floor_blocks)
        seq.rank = 0 if self.policy.is_flat else seq.share.rank
        self.charging.classes.set_weight(seq.rank, seq.share.class_weight)
        self.places.add(seq)
        self.journal.arrived(seq)

    def adopt(self, seq: Sequence) -> None:
        """Take over a sequence as another scheduler had it, where it was."""
        self.places.adopt(seq)
        self.journal.arrived(seq)

    def switch_policy(self, policy: Policy) -> None:
        """Serve by another policy from the next step on; no tenant's requests are reordered."""
        self.policy = policy
        self.charging.switch_policy(policy)
        self.places.reclassify(lambda seq: 0 if policy.is_flat else seq.share.rank)
        self._heads = ClassHeaps(self._entry, self.queues.is_head)

    def check_fits(
        self, num_prompt_tokens: int, params: SamplingParams, share: TenantShare
    ) -> None:
        """Raise NeverFitsError for a request that could not run even alone, and ConfigError where
        floors do not fit the pool."""
        kept = self.pool.num_floor_blocks - self.pool.floor_of(share.tenant)
        check_fits(num_prompt_tokens, params, share, self.config, self._cache_config, kept)

    def finish(self, seq: Sequence, now: float, *, discard: bool = False) -> None:
        """Take a live sequence out; its full blocks stay cached, unless they are to be discarded
        because their content cannot be trusted."""
        self.memory.meter.advance(now)
        if seq.status is SequenceStatus.RUNNING:
            self.places.remove_running(seq)
            self.memory.release(seq, discard=discard)
        elif seq.status is SequenceStatus.WAITING:
            self.places.dequeue(seq)
            if seq.parked is not None:
                self.places.count_fetched(seq)
                self.memory.unpark(seq)
        seq.status = SequenceStatus.FINISHED
        del self.places.live[seq.id]

    def owns(self, seq: Sequence) -> bool:
        """Whether the sequence waits or runs here."""
        return seq.id in self.places.live

    @property
    def has_work(self) -> bool:
        return bool(self.places.live)

    # -- one step -----------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step. Blocks are allocated and prompt tokens charged here, so that the
        plan's own admissions see each other's service."""
        self._step += 1
        self.memory.meter.advance(now)
        if isinstance(self.policy, GuardedPolicy) and self.policy.error is not None:
            self.switch_policy(policy_named("fcfs"))
        self.journal.begin(now)
        if self._step % PRUNE_EVERY_STEPS == 0:
            self.places.prune_counters()
            self.memory.forget_idle()
        self._heads.push(self.journal.take_new_heads())
        preempted = self._make_room(now)
        decodes = self._schedule_decodes(now, preempted)
        budget = self.config.max_step_tokens - len(decodes)
        prompts = self._schedule_prompts(now, budget, admit=not preempted)
        plan = StepPlan(
            step=self._step,
            chunks=(*decodes, *prompts.chunks),
            admitted=tuple(prompts.admitted),
            preempted=tuple(preempted),
            too_late=tuple(prompts.too_late),
            copies=self.memory.take_copies(),
        )
        self.journal.planned(plan, len(decodes), len(self.running), self.pool.num_free)
        return plan

    def update(self, plan: StepPlan, token_ids: dict[str, int], now: float) -> None:
        """Account for a plan that was executed by `now`: its copies are made, the KV of its chunks
        is there, and `token_ids` are next, by id of the sequence that drew them. What a beam drew
        is not yet its next token: the search decides which is."""
        self.memory.commit(now)
        for seq in plan.admitted:
            self.memory.publish(seq, 0)  # what was copied in
        all_drawn: list[Sequence] = []
        for seq, start, num_tokens, draws in plan.chunks:
            seq.num_computed_tokens = end = start + num_tokens
            if end > seq.num_reached_tokens:
                seq.num_reached_tokens = end
            drawn = [one for one in draws if one.id in token_ids]
            if draws and not drawn:
                continue  # its computation failed
            self.memory.publish(seq, start)
            if len(draws) > 1:
                self._fork(seq)
            all_drawn += drawn
            for one in drawn:
                if one.group is not None:
                    one.group.num_drawn += 1
                if not one.is_beam:
                    one.token_ids.append(token_ids[one.id])
        self.charging.end_step(all_drawn)
        self.places.measure_groups()

    def fail(self, plan: StepPlan, now: float) -> list[Sequence]:
        """The plan's execution failed: memory was told, and its chunks' sequences were finished.
        Whoever else had blocks copied computes again; those that were running until now."""
        for seq in plan.preempted:
            if seq.status is SequenceStatus.WAITING and seq.parked is not None:
                self.places.dequeue(seq)
                members = [one for one in seq.gang if one.parked is not None]
                for one in members:
                    self.memory.unpark(one)
                self.places.put_back_to_compute(members)
                self.journal.preempted(members, now, swapped=False, whom=None)
        written = plan.copies.written
        preempted: list[Sequence] = []
        for seq in list(self.running.values()):
            if seq.id in self.running and not written.isdisjoint(seq.block_table):
                preempted += self._preempt(seq, now, may_swap=False, discard=True)
        return preempted

    # -- decodes ------------------------------------------------------------------------------

    def _schedule_decodes(self, now: float, preempted: list[Sequence]) -> list[ScheduledChunk]:
        """One token for each running sequence whose prompt is computed; preempts where a
        sequence cannot grow. Prefills never grow: their blocks are allocated at admission.

        A sequence for which enough blocks are being swapped out already waits for the next step.
        """
        chunks: dict[str, ScheduledChunk] = {}
        stalled: set[str] = set()
        for seq in [s for s in self.running.values() if s.is_decoding]:
            if seq.group is not None and not self.places.is_ready(seq):
                continue  # beams wait for one another
            while seq.id in self.running and (
                missing := self.memory.grow(seq, alone=len(self.running) == 1)
            ):
                if missing <= self.memory.num_leaving_for(seq):
                    stalled.update(one.id for one in seq.gang)
                    break
                candidates = filter(partial(self.memory.can_take_from, seq), self.running.values())
                victim = min(candidates, key=self._victim_order)
                victims = self._preempt(victim, now, seq)
                preempted += victims
                for one in victims:
                    chunks.pop(one.id, None)
            if seq.id in self.running:
                chunks[seq.id] = ScheduledChunk(seq, seq.num_computed_tokens, 1, (seq,))
        return [chunk for seq_id, chunk in chunks.items() if seq_id not in stalled]

    # -- prompts ------------------------------------------------------------------------------

    def _schedule_prompts(self, now: float, budget: int, *, admit: bool) -> PromptStep:
        """Spend the budget on chunks of prompts, class by class, admitting on the way."""
        step = PromptStep(
            budget=budget,
            can_admit=admit,
            blocked=BlockedHeads(self.config, now, self.places.counter),
            others=ClassHeaps(self._entry, lambda seq: True),
        )
        step.others.push(seq for seq in self.running.values() if not seq.is_decoding)
        for rank in self.charging.classes.turns(step.ranks(self._heads), self._heads.firsts(), now):
            self.charging.classes.begin(rank, is_spare=step.begin(rank, self._heads))
            self._serve_class(rank, step, now)
        # Whose turn would have been next, and why it was not: the reason of all who wait.
        following = min(self._heads.firsts(), key=lambda head: head.rank, default=None)
        self.journal.stopped(self._admission.stop_cause(step), following)
        self._heads.push(step.passed)
        return step

    def _serve_class(self, rank: int, step: PromptStep, now: float) -> None:
        """Chunks of prompts of one class in policy order, while the budget lasts."""
        while step.budget > 0:
            admit = step.admit and self._admission.has_slots
            seq = pop_least(rank, self._heads if admit else None, step.others)
            if seq is None:
                return
            is_waiting = seq.status is SequenceStatus.WAITING
            if is_waiting and not (admit and self._admit(seq, step, now)):
                continue
            chunk = self._chunk(seq, step.budget)
            if chunk is not None:
                step.budget -= chunk.num_tokens
                step.chunks.append(chunk)

    def _admit(self, seq: Sequence, step: PromptStep, now: float) -> bool:
        """Let a queue head in, if it fits, and see to it that what follows it is looked at."""
        blocked = step.blocked
        verdict = self._admission.admit(seq, now, blocked)
        cause, members = (verdict, []) if isinstance(verdict, WaitCause) else (None, verdict)
        self.journal.looked(seq, cause)
        step.admitted += members
        step.others.push(members[1:])
        if cause is WaitCause.TOO_LATE:
            self.places.dequeue(seq)
            seq.status = SequenceStatus.PENDING  # until the core ends it, with its request
            step.too_late.append(seq)
        elif not members:
            step.passed.append(seq)
        self._heads.push(self.journal.take_new_heads())
        if blocked.delayed and (members or seq.id in blocked.delayed):
            following = self.queues.next_head(seq, blocked.delayed)
            if following is not None and not self.queues.is_head(following):
                step.others.push([following])
        return bool(members)

    def _entry(self, seq: Sequence) -> Entry:
        return (self.policy.order(seq, self.places.counters_of(seq)), seq.place, seq.index, seq)

    def _chunk(self, seq: Sequence, budget: int) -> ScheduledChunk | None:
        """The sequence's next tokens, within the budget. Beams leave their last one to be decoded
        together; there may be nothing else left."""
        num_tokens = min(seq.num_uncomputed_tokens - seq.is_beam, budget)
        if num_tokens == 0:
            return None
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        self.charging.charge_chunk(seq, start, end)
        draws: tuple[Sequence, ...] = ()
        if end == seq.num_tokens and seq.params.max_tokens:
            draws = seq.gang
        return ScheduledChunk(seq, start, num_tokens, draws)

    # -- preemption ---------------------------------------------------------------------------

    def _make_room(self, now: float) -> list[Sequence]:
        """Preempt for the first queue head, where it has a claim and does not fit."""
        ranks = self._heads.ranks
        entry = self._heads.peek(min(ranks)) if ranks else None
        if entry is None or not has_claim(entry[-1], self.running.values()):
            return []
        need = self._admission.lack_of(entry[-1], now)
        if need is None:
            return []
        victims = displaced_by(
            entry[-1],
            need.num_blocks,
            need.num_slots,
            may_reclaim=self.memory.is_within_floor(need.hits),
            max_preemptions=self.config.max_preemptions,
            is_behind=lambda one: self._entry(one) > entry,
            victims=sorted(self.running.values(), key=self._victim_order),
            memory=self.memory,
        )
        gone = (self._preempt(one, now, entry[-1]) for one in victims if one.id in self.running)
        return [one for members in gone for one in members]

    def _preempt(
        self,
        victim: Sequence,
        now: float,
        whom: Sequence | None = None,
        *,
        may_swap: bool = True,
        discard: bool = False,
    ) -> list[Sequence]:
        """Send a running sequence, and those bound to it, back to its place in the queue, for
        somebody's sake; all of them. Tokens, keys and place stay. Blocks go, to host memory or to
        be computed again."""
        members = [one for one in victim.gang if one.status is SequenceStatus.RUNNING]
        swapped = may_swap and swaps(members, self.memory, self.costs, self.config)
        for one in members:
            self.places.stop(one, now)
            if swapped:
                self.memory.swap_out(one)
            else:
                self.memory.release(one, discard=discard)
                one.num_computed_tokens = 0
            count_preemption(one)
        if swapped:
            self.places.put_back(members)
        else:
            self.places.put_back_to_compute(members)
        self.journal.preempted(members, now, swapped=swapped, whom=whom)
        return members

    def _victim_order(self, seq: Sequence) -> VictimKey:
        policy_key = self.policy.victim(seq, self.places.counters_of(seq))
        excess = self.pool.excess_of(seq.tenant)
        return victim_order(seq, policy_key, excess, self.config.max_preemptions)

    # -- groups -------------------------------------------------------------------------------

    def _fork(self, leader: Sequence) -> None:
        """The shared prompt is computed: the group's other sequences begin beside the first."""
        assert leader.group is not None
        leader.group.is_forked = True
        for child in leader.group.sequences[1:]:
            child.fork_from(leader)
            self.memory.fork(leader, child)
            self.places.fork(child)
            self.journal.forked(leader, child)

    # -- two pools ----------------------------------------------------------------------------

    def hand_over(self, now: float) -> None:
        """Pass what is ready to decode to the decoding scheduler, which fetches the KV when it
        has the room; until then it stays here, and its slots and blocks stay taken."""
        for seq in self.places.ready():
            self.memory.park(seq)
            self.places.hand_over(seq, now)
            if seq is seq.gang[0]:
                self.journal.handed_over(seq, now)

    # -- checks -------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless the books balance."""
        self.memory.check(self.places.live.values(), self.places.all_live)

    def __repr__(self) -> str:
        counters = ", ".join(
            f"{tenant} {counter:.0f}"
            for _, of_class in sorted(self.counters.items())
            for tenant, counter in sorted(of_class.as_dict().items())
        )
        return (
            f"<Scheduler {self.policy.name} [waiting {len(self.queues)} | "
            f"running {len(self.running)} | blocks {self.pool.num_held}/{len(self.pool.blocks)} | "
            f"{counters}]>"
        )
