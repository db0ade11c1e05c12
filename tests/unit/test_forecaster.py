"""Who gets which forecast, and how many runs are made for it."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from engine.client import FirstTokenEstimate
from engine.core import EngineCore
from engine.cost_model import StepTimes
from engine.forecast import Forecast, Outlook, capture
from engine.forecaster import Forecaster, Work
from tests.scripted import ScriptedRunner, add, make_core
from tests.unit.test_forecast import EXACT


class Engine:
    """An engine's thread that works when it is told to, on a clock that stands at now."""

    def __init__(self, **settings: object) -> None:
        self.core: EngineCore
        self.runner: ScriptedRunner
        self.core, self.runner = make_core(max_seqs=1, **settings)  # type: ignore[arg-type]
        self.core.scheduler.step_times.assume(EXACT)
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
        self.inbox += self.forecaster.ask(request_id, time.monotonic())

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


async def test_it_rests_nine_times_as_long_as_capture_and_run_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    rested = asyncio.Event()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        rested.set()

    times = iter([10.0, 10.5, 20.0, 22.0])  # a capture of 0.5 s, a run of 2 s
    engine = Engine()
    engine.submit("a")
    monkeypatch.setattr("engine.forecaster.asyncio.sleep", sleep)
    monkeypatch.setattr("engine.forecaster.run_forward", lambda outlook: Forecast({"a": 1.0}, 1.0))
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("engine.forecaster.time", clock)
    engine.forecaster._capture = lambda: capture(engine.core, 0.0)
    engine.work()
    await rested.wait()

    assert pauses == [9 * 2.5]


@pytest.mark.parametrize("broken", ["_capture", "run"])
async def test_what_fails_is_no_forecast_and_the_next_is_one(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the engine's thread nor later requests notice."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    engine = Engine()
    with monkeypatch.context() as patch:
        if broken == "run":
            patch.setattr("engine.forecaster.run_forward", fail)
        else:
            patch.setattr(engine.forecaster, "_capture", fail)
        engine.submit("a")
        engine.work()
        assert await engine.forecaster.answer("a") is None
    assert "ZeroDivisionError" in caplog.text

    async with asyncio.timeout(10):
        while engine.forecaster._is_busy:  # noqa: ASYNC110 -- its pause has no event
            await asyncio.sleep(0.001)
    engine.submit("b")
    engine.work()
    assert await engine.forecaster.answer("b") is not None


async def test_who_has_begun_is_told_nothing_though_another_queue_was_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engine.forecast.MAX_WAITING", 2)
    engine = Engine()
    add(engine.core, "begun", "vip", 4, 10)
    engine.core.step()
    for number in range(6):
        add(engine.core, f"flood{number}", "flood", 4, 10)
    asked = [*engine.forecaster.ask("begun", time.monotonic())]
    engine.forecaster.ask("flood5", time.monotonic())
    engine.forecaster._known = frozenset({"begun", "flood5"})
    for work in asked:
        work()

    assert await engine.forecaster.answer("begun") is None
    last = await engine.forecaster.answer("flood5")
    assert last is not None
    assert last.at_least


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
    engine.core.scheduler.step_times = StepTimes()
    engine.submit("a")
    engine.work()
    assert await engine.forecaster.answer("a") is None

    async with asyncio.timeout(10):
        while engine.forecaster._is_busy:  # noqa: ASYNC110 -- its pause has no event
            await asyncio.sleep(0.001)
    engine.core.scheduler.step_times.assume(EXACT)
    engine.submit("b")
    engine.work()
    assert isinstance(await engine.forecaster.answer("b"), FirstTokenEstimate)
