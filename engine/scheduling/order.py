"""Sequences in policy order, without looking at all of them at each step."""

import heapq
from collections.abc import Callable, Iterable

from engine.scheduling.policies import Key
from engine.sequence import Sequence

Entry = tuple[Key, int, int, Sequence]
"""(policy key, place, index, sequence): no two sequences compare equal before the last."""


class PolicyHeap:
    """A lazy heap: entries carry the key that they had when pushed.

    Keys only grow, since virtual counters do and places are fixed. So an entry whose key is out of
    date has one that is too small: it surfaces early, and is pushed again with its own. What
    surfaces with its own key is the least of all. Entries of sequences that no longer belong here
    are dropped when they surface.
    """

    def __init__(
        self, entry: Callable[[Sequence], Entry], belongs: Callable[[Sequence], bool]
    ) -> None:
        self._entry = entry
        self._belongs = belongs
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            heapq.heappush(self._heap, self._entry(seq))

    def peek(self) -> Entry | None:
        """The least entry, or None."""
        heap = self._heap
        while heap:
            seq = heap[0][-1]
            if not self._belongs(seq):
                heapq.heappop(heap)
                continue
            entry = self._entry(seq)
            if entry[0] == heap[0][0]:
                return entry
            heapq.heapreplace(heap, entry)
        return None

    def pop(self) -> Sequence:
        """The sequence of the entry that `peek` has just returned."""
        return heapq.heappop(self._heap)[-1]
