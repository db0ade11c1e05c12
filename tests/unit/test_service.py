"""The engine in its thread: submit, stream, abort, drain, failure. Real threads, no tensors."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.client import GenerationRequest
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import (
    ConfigError,
    DuplicateRequestError,
    EngineStoppedError,
    GrammarError,
    NeverFitsError,
)
from engine.events import Event, SequenceFinished, StepFinished, TokensGenerated
from engine.plan import StepOutput, StepPlan
from engine.sequence import Grammar, SamplingParams, TenantShare
from engine.service import AsyncEngine


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
        return StepOutput({s.id: 100 + s.num_output_tokens for c in plan.chunks for s in c.draws})


class AnyToken:
    """A constraint that allows everything and ends after three tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def accept(self, token_id: int) -> bool:
        self.num_tokens += 1
        return token_id < 1000

    @property
    def is_finished(self) -> bool:
        return self.num_tokens == 3

    def fork(self) -> "AnyToken":
        return AnyToken()


class GatedGrammars:
    """Compiles when `gate` is set; "bad" is no grammar."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def compile(self, grammar: Grammar) -> AnyToken:
        self.entered.set()
        assert self.gate.wait(timeout=20)
        if grammar.source == "bad":
            raise GrammarError("no grammar")
        return AnyToken()


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
        self.grammars = GatedGrammars()
        self.engine = AsyncEngine(
            self.core, observers=[self.observed.extend], grammars=self.grammars
        )

    async def submit(  # type: ignore[no-untyped-def]
        self, request_id: str, output: int = 5, prompt: int = 6, **params: object
    ):
        return await self.engine.submit(
            GenerationRequest(
                id=request_id,
                share=TenantShare(tenant="acme"),
                namespace="acme",
                prompt_token_ids=tuple(range(prompt)),
                params=SamplingParams(max_tokens=output, **params),  # type: ignore[arg-type]
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

        def broken(plan: StepPlan, tokens: dict[str, int], now: float) -> None:
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


async def test_a_request_for_several_sequences_has_an_end_for_each() -> None:
    async with running() as harness:
        events = [event async for event in await harness.submit("a", n=2)]
        ends = [event for event in events if isinstance(event, SequenceFinished)]
        assert sorted(end.index for end in ends) == [0, 1]
        assert events[-1] is ends[-1]
        await harness.until(harness.is_empty)


async def test_a_loop_that_fails_ends_every_sequence_of_a_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as harness:
        harness.runner.gate.clear()
        stream = await harness.submit("a", output=50, n=2)

        def broken() -> list[Event]:
            raise RuntimeError("a bug")

        monkeypatch.setattr(harness.core, "step", broken)
        harness.runner.gate.set()
        ends = [event async for event in stream if isinstance(event, SequenceFinished)]
    assert sorted((end.index, end.reason) for end in ends) == [(0, "error"), (1, "error")]
    assert sum(end.usage.prompt_tokens for end in ends) == 6
    assert "a bug" in caplog.text


async def test_a_grammar_ends_its_sequence_and_a_bad_one_is_refused() -> None:
    async with running() as harness:
        grammar = Grammar("regex", "good")
        events = [event async for event in await harness.submit("a", grammar=grammar)]
        assert end_of(events).reason == "stop"
        assert end_of(events).usage.output_tokens == 3
        with pytest.raises(GrammarError):
            await harness.submit("b", grammar=Grammar("regex", "bad"))
        assert harness.is_empty()


@pytest.mark.parametrize("end", ["drain", "stop"])
async def test_an_engine_that_ends_while_a_grammar_is_compiled_takes_nothing(end: str) -> None:
    async with running() as harness:
        harness.grammars.gate.clear()
        late = asyncio.create_task(harness.submit("a", grammar=Grammar("regex", "good")))
        await harness.until(harness.grammars.entered.is_set)
        if end == "drain":
            assert await harness.engine.drain(1.0)
        else:
            await harness.engine.stop()
        harness.grammars.gate.set()
        with pytest.raises(EngineStoppedError):
            await asyncio.wait_for(late, 10)
        assert not harness.core.has_work


async def test_two_of_one_id_while_a_grammar_is_compiled_are_one_too_many() -> None:
    async with running() as harness:
        harness.grammars.gate.clear()
        grammar = Grammar("regex", "good")
        both = [asyncio.create_task(harness.submit("a", grammar=grammar)) for _ in range(2)]
        await harness.until(harness.grammars.entered.is_set)
        harness.grammars.gate.set()
        outcomes = await asyncio.gather(*both, return_exceptions=True)
        assert sum(isinstance(one, DuplicateRequestError) for one in outcomes) == 1
        (stream,) = [one for one in outcomes if not isinstance(one, BaseException)]
        assert end_of([event async for event in stream]).reason == "stop"


async def test_reset_answers_and_a_caller_that_leaves_does_no_harm() -> None:
    async with running() as harness:
        [event async for event in await harness.submit("a", output=1, prompt=9)]
        harness.runner.gate.clear()
        stream = await harness.submit("b", prompt=3)
        await harness.until(lambda: len(harness.core.scheduler.running) == 1)
        leaving = asyncio.create_task(harness.engine.reset_prefix_cache())
        staying = asyncio.create_task(harness.engine.reset_prefix_cache("acme"))
        await asyncio.sleep(0.01)
        leaving.cancel()
        harness.runner.gate.set()
        assert await asyncio.wait_for(staying, 10) == 0  # the first one ran all the same
        assert end_of([event async for event in stream]).reason == "length"
        assert harness.engine.health().alive


async def test_the_policy_is_switched_between_two_steps_and_nothing_is_lost() -> None:
    async with running() as harness:
        assert harness.engine.snapshot().policy == "wfq"
        harness.runner.gate.clear()
        stream = await harness.submit("a", prompt=3)
        await harness.until(lambda: len(harness.core.scheduler.running) == 1)
        switching = asyncio.create_task(harness.engine.switch_policy("vtc"))
        await asyncio.sleep(0.01)
        assert not switching.done()  # a step is under way
        harness.runner.gate.set()
        await asyncio.wait_for(switching, 10)
        await harness.until(lambda: harness.engine.snapshot().policy == "vtc")
        assert end_of([event async for event in stream]).reason == "length"


async def test_an_unknown_policy_is_refused_and_the_old_one_stays() -> None:
    async with running() as harness:
        with pytest.raises(ConfigError, match="drf, drr, fcfs, priority, vtc, wfq"):
            await harness.engine.switch_policy("best")
        assert end_of([event async for event in await harness.submit("a")]).reason == "length"
        assert harness.engine.snapshot().policy == "wfq"
        await harness.engine.stop()
        with pytest.raises(EngineStoppedError):
            await harness.engine.switch_policy("vtc")
