"""Waiting sequences: one FIFO per tenant and priority class, ordered by place."""

from collections import Counter, OrderedDict
from collections.abc import Iterator

from engine.sequence import Sequence

QueueKey = tuple[int, str]
"""(rank of the priority class, tenant)"""


class WaitingQueues:
    """Add, remove and look at heads in O(1); a preempted sequence returns to its old place."""

    def __init__(self) -> None:
        self._queues: dict[QueueKey, OrderedDict[str, Sequence]] = {}
        self._by_tenant: Counter[str] = Counter()
        self._next_place = 0

    def __len__(self) -> int:
        return self._by_tenant.total()

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue.values()

    @property
    def tenants(self) -> list[str]:
        """Tenants that have at least one sequence waiting."""
        return list(self._by_tenant)

    def has(self, tenant: str) -> bool:
        return tenant in self._by_tenant

    @property
    def num_by_tenant(self) -> dict[str, int]:
        return dict(self._by_tenant)

    def append(self, seq: Sequence) -> None:
        """A new arrival: the next place."""
        seq.place = self._next_place
        self._next_place += 1
        self._queue(seq)[seq.id] = seq
        self._by_tenant[seq.tenant] += 1

    def put_back(self, seq: Sequence) -> None:
        """A preempted sequence: behind only those of its queue that came before it."""
        queue = self._queue(seq)
        ahead = []
        while queue and (head := next(iter(queue.values()))).place < seq.place:
            ahead.append(queue.pop(head.id))
        for other in (seq, *reversed(ahead)):
            queue[other.id] = other
            queue.move_to_end(other.id, last=False)
        self._by_tenant[seq.tenant] += 1

    def remove(self, seq: Sequence) -> None:
        key = (seq.share.rank, seq.tenant)
        del self._queues[key][seq.id]
        if not self._queues[key]:
            del self._queues[key]
        self._by_tenant[seq.tenant] -= 1
        if not self._by_tenant[seq.tenant]:
            del self._by_tenant[seq.tenant]

    def heads(self) -> list[Sequence]:
        """The first sequence of each queue, in no particular order."""
        return [next(iter(queue.values())) for queue in self._queues.values()]

    def next_head(self, seq: Sequence) -> Sequence | None:
        """The head of the queue that `seq` was in, if any is left."""
        queue = self._queues.get((seq.share.rank, seq.tenant))
        return next(iter(queue.values())) if queue else None

    def _queue(self, seq: Sequence) -> OrderedDict[str, Sequence]:
        return self._queues.setdefault((seq.share.rank, seq.tenant), OrderedDict())
