"""Sequences in policy order, without looking at all of them at each step."""

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.plan import ScheduledChunk
from engine.scheduling.bypass import BlockedHeads
from engine.scheduling.policies import Key
from engine.sequence import Sequence

MAX_PASSED_HEADS = 16  # of a class, looked at in vain in one step

Entry = tuple[Key, int, int, Sequence]
"""(policy key, place, index, sequence): no two sequences compare equal before the last."""


class ClassHeaps:
    """A PolicyHeap for each class, by rank."""

    def __init__(
        self, entry: Callable[[Sequence], Entry], belongs: Callable[[Sequence], bool]
    ) -> None:
        self._heaps: defaultdict[int, PolicyHeap] = defaultdict(lambda: PolicyHeap(entry, belongs))

    @property
    def ranks(self) -> set[int]:
        """Of classes in which anything is left."""
        return {rank for rank, heap in self._heaps.items() if heap.peek() is not None}

    def firsts(self) -> list[Sequence]:
        """The least of each class."""
        entries = [heap.peek() for heap in self._heaps.values()]
        return [entry[-1] for entry in entries if entry is not None]

    def push(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            self._heaps[seq.rank].push([seq])

    def peek(self, rank: int) -> Entry | None:
        """The least entry of the class, or None."""
        return self._heaps[rank].peek()

    def pop(self, rank: int) -> Sequence:
        """The sequence of the entry that `peek` has just returned."""
        return self._heaps[rank].pop()


class PolicyHeap:
    """A lazy heap: entries carry the key that they had when pushed.

    Keys only grow, since virtual counters do and places are fixed. So an entry whose key is out of
    date has one that is too small: it surfaces early, and is pushed again with its own. What
    surfaces with its own key is the least of all. Entries of sequences that no longer belong here
    are dropped when they surface. A sequence has one entry, however often it is pushed: a head
    that loses its place to a preempted sequence, and gets it back, is pushed again.
    """

    def __init__(
        self, entry: Callable[[Sequence], Entry], belongs: Callable[[Sequence], bool]
    ) -> None:
        self._entry = entry
        self._belongs = belongs
        self._heap: list[Entry] = []
        self._members: set[Sequence] = set()

    def push(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            if seq not in self._members:
                self._members.add(seq)
                heapq.heappush(self._heap, self._entry(seq))

    def peek(self) -> Entry | None:
        """The least entry, or None."""
        heap = self._heap
        while heap:
            seq = heap[0][-1]
            if not self._belongs(seq):
                self.pop()
                continue
            entry = self._entry(seq)
            if entry[0] == heap[0][0]:
                return entry
            heapq.heapreplace(heap, entry)
        return None

    def pop(self) -> Sequence:
        """The sequence of the entry that `peek` has just returned."""
        seq = heapq.heappop(self._heap)[-1]
        self._members.remove(seq)
        return seq


def pop_least(rank: int, heads: ClassHeaps | None, others: ClassHeaps) -> Sequence | None:
    """The least by policy of a class's queue heads, if those are to be looked at, and others."""
    head = heads.peek(rank) if heads is not None else None
    other = others.peek(rank)
    if other is not None and (head is None or other < head):
        return others.pop(rank)
    return heads.pop(rank) if heads is not None and head is not None else None


@dataclass(slots=True)
class PromptStep:
    """What one step's part for prompts has come to so far."""

    budget: int  # tokens left
    can_admit: bool
    blocked: BlockedHeads
    others: ClassHeaps  # running prompts, and what stands behind a delayed head
    chunks: list[ScheduledChunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    passed: list[Sequence] = field(default_factory=list)  # heads that were looked at in vain
    too_late: list[Sequence] = field(default_factory=list)  # heads that nobody would wait for

    num_vain_before: int = 0  # looks, when the class's turn began

    @property
    def admit(self) -> bool:
        """Whether another head may be looked at: a full pool must not cost a look at all, and one
        class's heads must not hide another's."""
        return self.can_admit and self._num_vain - self.num_vain_before < MAX_PASSED_HEADS

    @property
    def _num_vain(self) -> int:
        return len(self.passed) + len(self.too_late) - len(self.blocked.delayed)

    def ranks(self, heads: ClassHeaps) -> set[int]:
        """Of classes that want anything that the step has not looked at yet."""
        return heads.ranks | self.others.ranks

    def begin(self, rank: int, heads: ClassHeaps) -> bool:
        """A class's turn begins. Whether classes before it want no more of this step; after a
        preemption one does."""
        self.num_vain_before = self._num_vain
        wanting = self.ranks(heads) | self.blocked.ranks
        return self.can_admit and self.budget > 0 and min(wanting, default=rank) >= rank
