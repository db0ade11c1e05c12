"""Where each sequence of a scheduler is: in a queue, running, or handed over to another pool."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from engine.scheduling.queues import WaitingQueues
from engine.scheduling.shares import VirtualCounters
from engine.sequence import Sequence as EngineSequence
from engine.sequence import SequenceStatus


class Places:
    """Queues, the running, their slots, and the tenants' counters, which arrivals lift.

    With `prefill`, sequences come from there to decode here, and go back when their prompt must
    be computed again. A tenant's arrival and leaving count there alone; the counters are one set.
    """

    def __init__(self, prefill: "Places | None" = None) -> None:
        self.counters: defaultdict[int, VirtualCounters] = (  # by rank
            prefill.counters if prefill else defaultdict(VirtualCounters)
        )
        self.queues = WaitingQueues()
        self.running: dict[str, EngineSequence] = {}
        self.live: dict[str, EngineSequence] = {}  # both, and what is bound to a queue head
        self.num_slots = 0  # taken by what runs
        self.num_handed_over = 0  # prompts computed here, not yet fetched by `decode`
        self.decode: Places | None = None
        self._prefill = prefill
        if prefill is not None:
            prefill.decode = self

    @property
    def all_live(self) -> Sequence[EngineSequence]:
        """Of `decode` too, which shares the counters and may hold blocks here."""
        decoding = self.decode.live.values() if self.decode else ()
        return [*self.live.values(), *decoding]

    @property
    def holders(self) -> Collection[EngineSequence]:
        """Those that may hold blocks, here or in the pool from which they come."""
        return self.running.values() if self._prefill is None else self.live.values()

    def counters_of(self, seq: EngineSequence) -> VirtualCounters:
        return self.counters[seq.rank]

    def counter(self, seq: EngineSequence) -> float:
        """The virtual counter of the sequence's tenant in its class."""
        return self.counters_of(seq)[seq.tenant]

    def prune_counters(self) -> None:
        """Forget counters that no longer matter. O(tenants and what runs), not O(what waits)."""
        if self._prefill is not None:
            return  # they are pruned there
        stages = [self] if self.decode is None else [self, self.decode]
        for rank, counters in self.counters.items():
            active = {tenant for one in stages for tenant in one.queues.tenants(rank)}
            for one in stages:
                active.update(seq.tenant for seq in one.running.values() if seq.rank == rank)
            counters.prune(active)

    def is_ready(self, seq: EngineSequence) -> bool:
        """Whether the sequence can decode, and with it those that are bound to it."""
        return all(one.is_decoding and one.id in self.running for one in seq.gang)

    def ready(self) -> list[EngineSequence]:
        """All that can decode."""
        return [seq for seq in self.running.values() if self.is_ready(seq)]

    def measure_groups(self) -> None:
        """Account for what groups held in one step, once: after the fork they are in `decode`."""
        if self.decode is None:
            groups = {seq.group for seq in self.running.values() if seq.group is not None}
            for group in groups:
                if group.is_forked:
                    group.measure()

    # -- in and out ---------------------------------------------------------------------------

    def add(self, seq: EngineSequence) -> None:
        """A new arrival."""
        waiting = self.queues.tenants(seq.rank)
        self.counters_of(seq).arrive(seq.tenant, seq.share.weight, waiting)
        self.live[seq.id] = seq
        self.queues.append(seq)

    def adopt(self, seq: EngineSequence) -> None:
        """One that others had: running if it has blocks, or at its place in its queue."""
        self.live[seq.id] = seq
        if seq.block_table:
            self.run(seq)
        else:
            self.queues.restore(seq)

    def run(self, seq: EngineSequence) -> None:
        """From the queue, out of which it was taken."""
        self.num_slots += seq.num_slots
        self.running[seq.id] = seq
        seq.status = SequenceStatus.RUNNING

    def fork(self, child: EngineSequence) -> None:
        """Beside the first of its group, whose slots until now were its children's."""
        self.running[child.id] = self.live[child.id] = child
        child.status = SequenceStatus.RUNNING

    def stop(self, seq: EngineSequence, now: float) -> None:
        """A running sequence gives up its slot, to wait again."""
        self.remove_running(seq)
        seq.status = SequenceStatus.WAITING
        seq.queued = now

    def remove_running(self, seq: EngineSequence) -> None:
        self.num_slots -= seq.num_slots
        del self.running[seq.id]

    def dequeue(self, seq: EngineSequence) -> None:
        if seq is not seq.gang[0]:
            return  # the first stands in the queue for all
        self.queues.remove(seq)
        if self._prefill is None and not self.queues.num_waiting(seq.rank, seq.tenant):
            self.counters_of(seq).leave(seq.tenant)

    def put_back(self, members: Sequence[EngineSequence]) -> None:
        """To the old place of the first, which stands in the queue for all."""
        first = members[0]
        if self._prefill is None:  # else its tenant has arrived there
            self.counters_of(first).lift(first.tenant, self.queues.tenants(first.rank))
        self.queues.put_back(first)

    def reclassify(self, rank_of: Callable[[EngineSequence], int]) -> None:
        """Give every live sequence another rank, and its place in the queue of that rank. Nothing
        leaves, and sequences of one tenant keep their order."""
        waiting = sorted(self.queues, key=lambda seq: (seq.place, seq.index))
        for seq in waiting:
            self.queues.remove(seq)
        for seq in self.live.values():
            seq.rank = rank_of(seq)
            counters = self.counters_of(seq)
            counters.arrive(seq.tenant, seq.share.weight, self.queues.tenants(seq.rank))
        for seq in waiting:
            self.queues.restore(seq)

    # -- two pools ----------------------------------------------------------------------------

    def put_back_to_compute(self, members: Sequence[EngineSequence]) -> None:
        """Queue sequences whose KV is lost where prompts are computed."""
        target = self._prefill or self
        for seq in members:
            del self.live[seq.id]
            target.live[seq.id] = seq
        target.put_back(members)

    def hand_over(self, seq: EngineSequence, now: float) -> None:
        """A running sequence is to decode in the other pool: it queues there."""
        assert self.decode is not None
        self.stop(seq, now)
        self.num_handed_over += 1
        del self.live[seq.id]
        self.decode.live[seq.id] = seq
        if seq is seq.gang[0]:
            self.decode.put_back([seq])

    def count_fetched(self, seq: EngineSequence) -> None:
        """Its KV leaves the prefill pool, if that is where it is."""
        if self._prefill is not None and seq.parked is not None and seq.parked.source == "prefill":
            self._prefill.num_handed_over -= 1
