"""Forecasts for the requests that ask, one run at a time, beside an engine's thread."""

import asyncio
import logging
import time
from collections.abc import Callable

from engine.client import FirstTokenEstimate
from engine.events import Event
from engine.forecast import Forecast, Outlook, run_forward

logger = logging.getLogger(__name__)

Work = Callable[[], list[Event]]
"""What an engine's thread does between two steps."""

# After each run, a pause so many times as long: forecasts take no more of a core than a tenth.
PAUSE = 9


class Forecaster:
    """One run answers all that were in the engine when it captured its state; who comes later
    waits for the next. Lives on the event loop, but for the capture.

    capture    of the engine's state; called in its thread
    post       hands work to that thread
    call_soon  hands a call back to the event loop
    """

    def __init__(
        self,
        *,
        capture: Callable[[], Outlook | None],
        post: Callable[[Work], None],
        call_soon: Callable[..., None],
    ) -> None:
        self._capture = capture
        self._post = post
        self._call_soon = call_soon
        self._asked: dict[str, tuple[float, asyncio.Future[FirstTokenEstimate | None]]] = {}
        self._known: frozenset[str] = frozenset()  # to the run that is on
        self._is_busy = False
        self._run: asyncio.Task[None] | None = None

    def ask(self, request_id: str, submitted: float) -> list[Work]:
        """Foresee a request. What is returned must reach the engine's thread right behind the
        request itself, before the step that may give it its first token."""
        loop = asyncio.get_running_loop()
        self._asked[request_id] = (submitted, loop.create_future())
        if self._is_busy:
            return []
        self._is_busy = True
        return [self._begin()]

    async def answer(self, request_id: str) -> FirstTokenEstimate | None:
        """What was foreseen; None at once for a request that did not ask or has ended."""
        asked = self._asked.get(request_id)
        return await asyncio.shield(asked[1]) if asked is not None else None

    def forget(self, request_id: str) -> None:
        """The request has ended; whoever still waits for its forecast gets None."""
        _, answer = self._asked.pop(request_id, (0.0, None))
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _begin(self) -> Work:
        self._known = frozenset(self._asked)

        def work() -> list[Event]:
            started = time.monotonic()
            outlook = None
            try:
                outlook = self._capture()
            except Exception:  # the engine goes on without a forecast
                logger.exception("the engine's state could not be captured")
            self._call_soon(self._captured, outlook, time.monotonic() - started)
            return []

        return work

    def _captured(self, outlook: Outlook | None, took: float) -> None:
        self._run = asyncio.create_task(self._foresee(outlook, took))

    async def _foresee(self, outlook: Outlook | None, took: float) -> None:
        started = time.monotonic()
        forecast = None
        if outlook is not None:
            try:
                forecast = await asyncio.to_thread(run_forward, outlook)
            except Exception:  # and so do requests
                logger.exception("a forecast failed")
        took += time.monotonic() - started
        for request_id in self._known & self._asked.keys():
            at, answer = self._asked[request_id]
            if not answer.done():
                now = at if outlook is None else outlook.now
                answer.set_result(_estimate(forecast, request_id, waited=now - at))
        await asyncio.sleep(PAUSE * took)
        if all(answer.done() for _, answer in self._asked.values()):
            self._is_busy = False
        else:
            self._post(self._begin())


def _estimate(
    forecast: Forecast | None, request_id: str, *, waited: float
) -> FirstTokenEstimate | None:
    """`waited`: seconds from the request's submission to the capture."""
    if forecast is None or request_id in forecast.started:
        return None
    if request_id in forecast.first_tokens:
        return FirstTokenEstimate(waited + forecast.first_tokens[request_id])
    # Its deadline ends it before, it was awaited in vain, or its part of the queue was cut off.
    seconds = forecast.expired.get(request_id, forecast.horizon)
    return FirstTokenEstimate(waited + seconds, at_least=True)
