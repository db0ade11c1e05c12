"""The engine in its thread: submit, stream, abort, drain, failure. Real threads, no tensors."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import DuplicateRequestError, EngineStoppedError, NeverFitsError
from engine.events import Event, SequenceFinished, StepFinished, TokensGenerated
from engine.plan import StepOutput, StepPlan
from engine.sequence import SamplingParams, TenantShare
from engine.service import AsyncEngine, GenerationRequest


class GatedRunner:
    """Token ids count up from 100; while `gate` is cleared a step does not return."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def execute(self, plan: StepPlan) -> StepOutput:
        self.entered.set()
        assert self.gate.wait(timeout=20)
        time.sleep(0.002)  # a hundred tokens take long enough to be interrupted
        return StepOutput({c.seq.id: 100 + c.seq.num_output_tokens for c in plan.chunks if c.draws})


class Harness:
    def __init__(self) -> None:
        config = EngineConfig(
            cache=CacheConfig(num_blocks=32, block_size=4),
            scheduler=SchedulerConfig(max_seqs=2, max_step_tokens=16, max_model_len=128),
            check_invariants=True,
        )
        self.runner = GatedRunner()
        self.core = EngineCore(config, self.runner, clock=time.monotonic)
        self.observed: list[Event] = []
        self.engine = AsyncEngine(self.core, observers=[self.observed.extend])

    async def submit(self, request_id: str, output: int = 5, prompt: int = 6):  # type: ignore[no-untyped-def]
        return await self.engine.submit(
            GenerationRequest(
                id=request_id,
                share=TenantShare(tenant="acme"),
                namespace="acme",
                prompt_token_ids=tuple(range(prompt)),
                params=SamplingParams(max_tokens=output),
            )
        )

    async def until(self, condition) -> None:  # type: ignore[no-untyped-def]
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 -- the state of another thread
                await asyncio.sleep(0.002)

    def is_empty(self) -> bool:
        snapshot = self.engine.snapshot()
        return not (snapshot.num_running or snapshot.num_waiting or snapshot.held_blocks)


@asynccontextmanager
async def running() -> AsyncIterator[Harness]:
    harness = Harness()
    harness.engine.start()
    try:
        yield harness
    finally:
        harness.runner.gate.set()
        await harness.engine.stop()


def end_of(events: list[Event]) -> SequenceFinished:
    (end,) = [e for e in events if isinstance(e, SequenceFinished)]
    assert events[-1] is end
    return end


async def test_a_stream_yields_each_token_then_one_end() -> None:
    async with running() as harness:
        events = [event async for event in await harness.submit("a")]

    tokens = [t for e in events if isinstance(e, TokensGenerated) for t in e.token_ids]
    assert tokens == [100, 101, 102, 103, 104]
    assert end_of(events).reason == "length"
    assert [e for e in harness.observed if isinstance(e, StepFinished)]


async def test_bad_requests_are_refused_and_leave_nothing() -> None:
    async with running() as harness:
        with pytest.raises(NeverFitsError):
            await harness.submit("big", output=1000)
        harness.runner.gate.clear()
        stream = await harness.submit("a")
        with pytest.raises(DuplicateRequestError):
            await harness.submit("a")
        harness.runner.gate.set()
        assert end_of([event async for event in stream]).reason == "length"
        await harness.submit("a")  # a finished id is free again


async def test_an_abort_ends_the_stream_and_frees_all() -> None:
    async with running() as harness:
        stream = await harness.submit("a", output=100)
        events = [await anext(stream) for _ in range(3)]
        harness.engine.abort("a")
        harness.engine.abort("unknown")
        events += [event async for event in stream]
        await harness.until(harness.is_empty)

    assert end_of(events).reason == "abort"


async def test_a_reader_that_leaves_aborts_its_request() -> None:
    async with running() as harness:
        stream = await harness.submit("a", output=100)
        await anext(stream)
        await stream.aclose()
        await harness.until(harness.is_empty)

        assert not harness.engine._streams


async def test_a_caller_cancelled_before_the_answer_leaves_nothing() -> None:
    async with running() as harness:
        harness.runner.gate.clear()
        await harness.submit("busy", output=100)
        await asyncio.to_thread(harness.runner.entered.wait)
        task = asyncio.create_task(harness.submit("late"))
        await asyncio.sleep(0.01)  # the engine is in a step: the inbox is not read
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        harness.engine.abort("busy")
        harness.runner.gate.set()
        await harness.until(harness.is_empty)
        await harness.until(lambda: not harness.engine._streams)


async def test_drain_finishes_what_runs_and_takes_nothing_new() -> None:
    async with running() as harness:
        harness.runner.gate.clear()
        stream = await harness.submit("a")
        draining = asyncio.create_task(harness.engine.drain(10))
        await asyncio.sleep(0)
        assert harness.engine.health().reason == "draining"
        assert (harness.engine.health().alive, harness.engine.health().ready) == (True, False)
        with pytest.raises(EngineStoppedError, match="draining"):
            await harness.submit("b")
        harness.runner.gate.set()

        assert await draining is True
        assert end_of([event async for event in stream]).reason == "length"


async def test_a_drain_that_takes_too_long_says_so() -> None:
    async with running() as harness:
        harness.runner.gate.clear()
        await harness.submit("a")

        assert await harness.engine.drain(0.05) is False


async def test_stop_ends_what_runs_as_aborted_with_what_it_used() -> None:
    async with running() as harness:
        stream = await harness.submit("a", output=100)
        events = [await anext(stream) for _ in range(3)]
        await harness.engine.stop()
        events += [event async for event in stream]

    end = end_of(events)
    assert end.reason == "abort"
    assert end.usage.computed_tokens == 6
    assert end.usage.output_tokens >= 2
    with pytest.raises(EngineStoppedError, match="stopped"):
        await harness.submit("b")


async def test_a_loop_that_fails_ends_every_stream_and_is_not_alive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as harness:
        harness.runner.gate.clear()
        stream = await harness.submit("a")
        await asyncio.to_thread(harness.runner.entered.wait)
        late = asyncio.create_task(harness.submit("late"))
        await asyncio.sleep(0.01)

        def broken(plan: StepPlan, tokens: dict[str, int]) -> None:
            raise ZeroDivisionError("a bug of ours")

        harness.core.scheduler.update = broken  # type: ignore[method-assign]
        harness.runner.gate.set()
        events = [event async for event in stream]
        with pytest.raises(EngineStoppedError, match="failed: ZeroDivisionError"):
            await late
        health = harness.engine.health()

    assert end_of(events).reason == "error"
    assert "failed: ZeroDivisionError" in (end_of(events).error or "")
    assert (health.alive, health.ready) == (False, False)
    assert "the engine's loop failed" in caplog.text


async def test_an_observer_that_fails_loses_no_event() -> None:
    async with running() as harness:

        def fails(events: object) -> None:
            raise ValueError("a broken dashboard")

        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        harness.engine._observers = (fails,)

        assert end_of([e async for e in await harness.submit("a")]).reason == "length"
