"""Which priority class is served next, and how much of a step it may take.

Strict by rank, with a floor: while a class waits, it earns credit, a fraction of what classes
before it are served. With a step's budget of credit it is due, and goes first in one step; so it
cannot starve, and delays others by one step's budget at a time. A class whose head has waited
longer than its `max_wait` is due as soon as it owes nothing; what it then takes it has to earn
back: age brings its turn forward, and buys nothing in the long run. What it owes is forgiven once
those before it have all that they want: using what they leave must not cost it its floor later.

Weighted: the class with the least service over weight goes first. A class that returns from idle is
lifted to the least of those that have work, as tenants are.
"""

from collections.abc import Collection, Iterable

from engine.config import SchedulerConfig
from engine.sequence import Sequence


class ClassClock:
    """Service and credit of each class, by rank."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._quantum = config.max_step_tokens * config.charge.prompt
        self._weights: dict[int, float] = {}
        self._served: dict[int, float] = {}  # over weight
        self._credit: dict[int, float] = {}
        self._busy: frozenset[int] = frozenset()

    def copy(self) -> "ClassClock":
        """As it is now; the two then go their own ways."""
        other = ClassClock(self._config)
        other._weights, other._served = self._weights.copy(), self._served.copy()
        other._credit, other._busy = self._credit.copy(), self._busy
        return other

    def set_weight(self, rank: int, weight: float) -> None:
        self._weights[rank] = weight

    def charge(self, rank: int, service: float) -> None:
        """A class was served. Classes behind it that have work earn their part of it."""
        self._served[rank] = self._served.get(rank, 0.0) + service / self._weights.get(rank, 1.0)
        if rank > min(self._busy, default=rank):
            self._credit[rank] = self._credit.get(rank, 0.0) - service
        for other in self._busy:
            if other > rank:
                earned = self._credit.get(other, 0.0) + self._config.class_floor * service
                # No more than what is earned in the step in which it becomes due: after one turn
                # it is not due again.
                self._credit[other] = min(earned, (1 + self._config.class_floor) * self._quantum)

    def compute_again(self, rank: int, service: float) -> None:
        """Work that was lost to a preemption is done again. Nobody is paid for it, but it was the
        class's turn: else one that is displaced each time before it gets further has it for ever.
        """
        self._served[rank] = self._served.get(rank, 0.0) + service / self._weights.get(rank, 1.0)
        if rank > min(self._busy, default=rank):
            self._credit[rank] = self._credit.get(rank, 0.0) - service

    def turns(self, ranks: Collection[int], heads: Iterable[Sequence], now: float) -> list[int]:
        """Classes that have work, in the order in which this step serves them. One that is due
        comes first, and again in its own turn.

        heads  of the classes' queues, which may have waited for longer than they should
        """
        aged = {head.rank for head in heads if _has_aged(head, now)}
        busy = frozenset(ranks)
        if self._config.class_sharing == "weighted":
            before = self._busy & busy
            level = min((self._served.get(rank, 0.0) for rank in before), default=0.0)
            for rank in busy - self._busy:
                self._served[rank] = max(self._served.get(rank, 0.0), level)
            self._busy = busy
            return sorted(busy, key=lambda rank: (self._served.get(rank, 0.0), rank))
        for rank in self._credit.keys() - busy:
            self._credit[rank] = min(self._credit[rank], 0.0)  # who has no work is owed nothing
        self._busy = busy
        due = [rank for rank in busy if rank > min(busy) and self._is_due(rank, rank in aged)]
        return sorted(due)[:1] + sorted(busy)

    def begin(self, rank: int, *, is_spare: bool) -> None:
        """A class's turn. `is_spare`: those before it want no more of this step."""
        if is_spare and self._credit.get(rank, 0.0) < 0.0:
            self._credit[rank] = 0.0

    def _is_due(self, rank: int, is_aged: bool) -> bool:
        credit = self._credit.get(rank, 0.0)
        return credit >= (0.0 if is_aged else self._quantum)


def _has_aged(head: Sequence, now: float) -> bool:
    longest = head.share.max_wait_seconds
    return longest is not None and now - head.queued > longest
