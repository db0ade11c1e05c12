"""How many tokens a request will generate, judged by what its tenant's last ones did."""

from bisect import bisect_right, insort
from collections import OrderedDict, deque

MAX_TENANTS = 1024
MAX_LENGTHS = 64  # remembered of one tenant
NEVER_STOPPED = 2**62  # a generation that its limit ended would have been longer


class OutputLengths:
    """By tenant, the lengths of the generations that ended last."""

    def __init__(self) -> None:
        self._recent: OrderedDict[str, tuple[deque[int], list[int]]] = OrderedDict()

    def observe(self, tenant: str, num_tokens: int, *, stopped: bool) -> None:
        """A generation ended: by itself, or because it had as many tokens as it may."""
        if tenant not in self._recent:
            self._recent[tenant] = (deque(), [])
            if len(self._recent) > MAX_TENANTS:
                self._recent.popitem(last=False)
        self._recent.move_to_end(tenant)
        newest_last, ordered = self._recent[tenant]
        length = num_tokens if stopped else NEVER_STOPPED
        newest_last.append(length)
        insort(ordered, length)
        if len(newest_last) > MAX_LENGTHS:
            ordered.remove(newest_last.popleft())

    def expected(self, tenant: str, num_tokens: int, max_tokens: int) -> int:
        """The length at the end of a generation that has `num_tokens` now: the median of those
        that went beyond that; `max_tokens` where none did."""
        _, ordered = self._recent.get(tenant, ((), []))
        longer = ordered[bisect_right(ordered, num_tokens) :]
        median = longer[len(longer) // 2] if longer else max_tokens
        return min(median, max_tokens)
