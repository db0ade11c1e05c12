"""Requests by the instant from which on nobody waits for them."""

import heapq

MAX_AT_ONCE = 256


class Deadlines:
    """Set, drop and find what has passed; what has not passed costs nothing."""

    def __init__(self) -> None:
        self._by_request: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []  # and outdated entries

    def set(self, request_id: str, at: float) -> None:
        self._by_request[request_id] = at
        heapq.heappush(self._heap, (at, request_id))

    def drop(self, request_id: str) -> None:
        """The request has ended; one without a deadline is no error."""
        if self._by_request.pop(request_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._by_request) + 64:
            self._heap = [(at, request) for request, at in self._by_request.items()]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> list[str]:
        """Requests whose deadline has passed, the oldest first; each is returned once, and at
        most so many at once: others wait for the step that comes after."""
        found: list[str] = []
        while self._heap and self._heap[0][0] <= now and len(found) < MAX_AT_ONCE:
            at, request_id = heapq.heappop(self._heap)
            if self._by_request.get(request_id) == at:
                del self._by_request[request_id]
                found.append(request_id)
        return found
