"""Waiting sequences: one FIFO per tenant and priority class, ordered by place."""

from collections import OrderedDict
from collections.abc import Collection, Container, Iterator

from engine.sequence import Sequence

_Queue = OrderedDict[str, Sequence]


class WaitingQueues:
    """Add, remove and look at heads in O(1); a preempted sequence returns to its old place."""

    def __init__(self) -> None:
        # By rank of the class, then by tenant; empty ones are dropped.
        self._queues: dict[int, dict[str, _Queue]] = {}
        self._num_waiting = 0
        self._next_place = 0
        self._new_heads: list[Sequence] = []

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._all():
            yield from queue.values()

    def tenants(self, rank: int) -> Collection[str]:
        """Tenants that have at least one sequence of that class waiting."""
        return self._queues.get(rank, {}).keys()

    def num_waiting(self, rank: int, tenant: str) -> int:
        return len(self._queues.get(rank, {}).get(tenant, ()))

    def firsts(self, limit: int) -> list[Sequence]:
        """At most so many: the first of each queue, then the second of each, and so on."""
        queues = [iter(queue.values()) for queue in self._all()]
        found: list[Sequence] = []
        while queues and len(found) < limit:
            nexts = [(queue, next(queue, None)) for queue in queues]
            queues = [queue for queue, seq in nexts if seq is not None]
            found += [seq for _, seq in nexts if seq is not None]
        return found[:limit]

    def append(self, seq: Sequence) -> None:
        """A new arrival: the next place."""
        seq.place = self._next_place
        self._next_place += 1
        queue = self._queue(seq)
        queue[seq.id] = seq
        self._num_waiting += 1
        if len(queue) == 1:
            self._new_heads.append(seq)

    def restore(self, seq: Sequence) -> None:
        """At the end of its queue, with the place that it has."""
        self._next_place = max(self._next_place, seq.place + 1)
        self._queue(seq)[seq.id] = seq
        self._num_waiting += 1
        self._new_heads.append(seq)

    def put_back(self, seq: Sequence) -> None:
        """A preempted sequence: behind only those of its queue that came before it."""
        queue = self._queue(seq)
        ahead = []
        while queue and (head := next(iter(queue.values()))).place < seq.place:
            ahead.append(queue.pop(head.id))
        for other in (seq, *reversed(ahead)):
            queue[other.id] = other
            queue.move_to_end(other.id, last=False)
        self._num_waiting += 1
        if not ahead:
            self._new_heads.append(seq)

    def remove(self, seq: Sequence) -> None:
        queues = self._queues[seq.rank]
        queue = queues[seq.tenant]
        was_head = next(iter(queue)) == seq.id
        del queue[seq.id]
        if not queue:
            del queues[seq.tenant]
        elif was_head:
            self._new_heads.append(next(iter(queue.values())))
        self._num_waiting -= 1

    def is_head(self, seq: Sequence) -> bool:
        """Whether the sequence is the first of its queue."""
        queue = self._queues.get(seq.rank, {}).get(seq.tenant)
        # By identity: an id is free again when its request has ended.
        return queue is not None and next(iter(queue.values())) is seq

    def take_new_heads(self) -> list[Sequence]:
        """Those that became the first of their queue since the last call; some may have left."""
        heads, self._new_heads = self._new_heads, []
        return heads

    def next_head(self, seq: Sequence, passed: Container[str] = ()) -> Sequence | None:
        """The first in the queue that `seq` is or was in, but for those of the ids `passed`."""
        queue = self._queues[seq.rank].get(seq.tenant) or _Queue()
        return next((one for one in queue.values() if one.id not in passed), None)

    def _queue(self, seq: Sequence) -> "_Queue":
        return self._queues.setdefault(seq.rank, {}).setdefault(seq.tenant, OrderedDict())

    def _all(self) -> Iterator["_Queue"]:
        for queues in self._queues.values():
            yield from queues.values()
