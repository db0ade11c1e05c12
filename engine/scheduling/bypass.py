"""Queue heads that do not fit, or not yet, and how far others may pass them."""

from collections.abc import Callable

from engine.config import SchedulerConfig
from engine.sequence import Sequence


class BlockedHeads:
    """The heads that one step found not to fit, or to gain by waiting.

    Such a head may be passed by a higher class, and in its own by tenants whose counter leads its
    own by at most `max_bypass_lead`, `max_bypasses` times within `max_bypass_seconds`; then what
    is freed is kept for it.
    """

    def __init__(
        self, config: SchedulerConfig, now: float, counter: Callable[[Sequence], float]
    ) -> None:
        self._config = config
        self._now = now
        self._counter = counter
        self._heads: list[Sequence] = []
        self.delayed: dict[str, Sequence] = {}
        self.ranks: set[int] = set()  # of those that did not fit, and of those that they hold

    def add(self, head: Sequence) -> None:
        if head.blocked_since is None:
            head.blocked_since = self._now
        self._heads.append(head)
        self.ranks.add(head.rank)

    def delay(self, head: Sequence) -> None:
        """The head would fit, but gains by waiting a step. It is passed by whoever fits, within
        the same lead in its own class: there a tenant further ahead would gain by its patience."""
        self.delayed[head.id] = head

    def hold(self, other: Sequence) -> bool:
        """Whether one of the heads keeps `other` from passing it."""
        held = any(self._holds(head, other) for head in self._heads) or any(
            self._leads(other, head) for head in self.delayed.values()
        )
        if held:
            self.ranks.add(other.rank)
        return held

    def count_pass(self) -> None:
        for head in self._heads:
            head.num_bypasses += 1

    def _holds(self, head: Sequence, other: Sequence) -> bool:
        config = self._config
        assert head.blocked_since is not None
        return (
            head.num_bypasses >= config.max_bypasses
            or other.rank > head.rank
            or self._now - head.blocked_since > config.max_bypass_seconds
            or self._leads(other, head)
        )

    def _leads(self, other: Sequence, head: Sequence) -> bool:
        """In its class: counters of two classes have nothing to do with each other."""
        lead = self._counter(other) - self._counter(head)
        return other.rank == head.rank and lead > self._config.max_bypass_lead
