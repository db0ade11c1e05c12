"""Who gets which forecast, and how many runs are made for it."""

import asyncio
import time

import pytest

from engine.client import FirstTokenEstimate
from engine.core import EngineCore
from engine.forecast import Outlook, capture
from engine.forecaster import Forecaster, Work
from tests.scripted import ScriptedRunner, add, make_core
from tests.unit.test_forecast import EXACT


class Engine:
    """An engine's thread that works when it is told to, on a clock that stands at now."""

    def __init__(self, **settings: object) -> None:
        self.core: EngineCore
        self.runner: ScriptedRunner
        self.core, self.runner = make_core(max_seqs=1, **settings)  # type: ignore[arg-type]
        self.core.scheduler.step_times._cost = EXACT
        self.inbox: list[Work] = []
        self.num_captures = 0
        self.forecaster = Forecaster(
            capture=self.capture, post=self.inbox.append, call_soon=lambda call, *args: call(*args)
        )

    def capture(self) -> Outlook | None:
        self.num_captures += 1
        return capture(self.core, time.monotonic())

    def submit(self, request_id: str) -> None:
        add(self.core, request_id, "acme", 4, 10)
        self.inbox += self.forecaster.ask(request_id)

    def work(self) -> None:
        inbox, self.inbox[:] = list(self.inbox), []
        for work in inbox:
            work()


async def test_a_request_is_answered_from_its_own_place() -> None:
    engine = Engine()
    engine.submit("a")
    engine.work()

    estimate = await engine.forecaster.answer("a")

    assert estimate is not None
    assert not estimate.at_least
    assert estimate.seconds == pytest.approx(0.0104, abs=0.01)


async def test_who_asks_while_a_run_is_on_is_answered_by_the_next_together() -> None:
    engine = Engine()
    engine.submit("a")
    engine.work()
    engine.submit("b")
    engine.submit("c")
    assert engine.inbox == []  # a run is on: nothing is captured beside it
    answers = [asyncio.create_task(engine.forecaster.answer(one)) for one in "abc"]
    first = await answers[0]
    assert not answers[1].done()

    async with asyncio.timeout(10):
        while not engine.inbox:  # noqa: ASYNC110 -- its pause has no event
            await asyncio.sleep(0.001)
    engine.work()
    second, third = await answers[1], await answers[2]

    assert engine.num_captures == 2
    assert first is not None
    assert second is not None
    assert third is not None
    # One slot: each waits for the ten tokens of those before it.
    assert third.seconds - second.seconds == pytest.approx(0.1013, abs=0.002)
    assert second.seconds > first.seconds + 0.08


async def test_it_rests_after_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    engine = Engine()
    monkeypatch.setattr("engine.forecaster.asyncio.sleep", sleep)
    engine.submit("a")
    started = time.monotonic()
    engine.work()
    await engine.forecaster.answer("a")
    took = time.monotonic() - started
    while not pauses:
        await asyncio.wait_for(asyncio.to_thread(time.sleep, 0.001), 10)

    assert 0 < pauses[0] <= 9 * took


async def test_who_ends_before_its_forecast_gets_none_and_others_theirs() -> None:
    engine = Engine()
    engine.submit("a")
    engine.submit("b")
    waiting = asyncio.create_task(engine.forecaster.answer("a"))
    await asyncio.sleep(0)
    engine.forecaster.forget("a")

    assert await waiting is None
    assert await engine.forecaster.answer("a") is None
    assert await engine.forecaster.answer("unknown") is None


async def test_what_cannot_be_foreseen_is_none_and_not_for_ever() -> None:
    engine = Engine()
    engine.core.scheduler.step_times._cost = None
    engine.submit("a")
    engine.work()
    assert await engine.forecaster.answer("a") is None

    async with asyncio.timeout(10):
        while engine.forecaster._is_busy:  # noqa: ASYNC110 -- its pause has no event
            await asyncio.sleep(0.001)
    engine.core.scheduler.step_times._cost = EXACT
    engine.submit("b")
    engine.work()
    assert isinstance(await engine.forecaster.answer("b"), FirstTokenEstimate)
