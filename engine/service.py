"""The engine that runs in a thread of the same process.

`AsyncEngine` owns one thread that steps an EngineCore; requests and aborts reach it through an
inbox, events come back to the event loop once per step.
"""

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from engine.client import FirstTokenEstimate, GenerationRequest, lost_sequence
from engine.core import EngineCore
from engine.errors import DuplicateRequestError, EngineStoppedError, GrammarError
from engine.events import (
    Event,
    GroupFinished,
    SequenceEvent,
    SequenceFinished,
    StepFinished,
    TokensGenerated,
)
from engine.forecast import capture
from engine.forecaster import Forecaster, Work
from engine.scheduling.policies import make_policy
from engine.sequence import Constraint, Grammar
from engine.snapshot import EngineHealth, EngineSnapshot, take_snapshot
from engine.waits import Explanation, StepRecord

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class Grammars(Protocol):
    """Compiles grammars; thread-safe. Raises GrammarError."""

    def compile(self, grammar: Grammar) -> Constraint: ...


Observer = Callable[[Sequence[Event]], None]
"""Told of each step's events, on the event loop, outside the engine's thread."""

STOP_SECONDS = 10.0  # how long `stop` waits for the step that runs
SNAPSHOT_SECONDS = 0.05  # least age at which the snapshot is renewed
STALL_SECONDS = 30.0  # a loop with work that has not stepped for so long is not alive


@dataclass(slots=True)
class _Stream:
    """One request on the event loop's side, until its end is delivered."""

    request: GenerationRequest
    accepted: "asyncio.Future[None]"
    events: "asyncio.Queue[SequenceEvent]" = field(default_factory=asyncio.Queue)
    num_output_tokens: Counter[int] = field(default_factory=Counter)  # by sequence
    ended: set[int] = field(default_factory=set)  # sequences


def _resolve(done: "asyncio.Future[Answer]", value: Answer) -> None:
    if not done.done():  # else the caller left
        done.set_result(value)


class AsyncEngine:
    """An EngineClient around one EngineCore in one thread."""

    def __init__(
        self,
        core: EngineCore,
        *,
        observers: Sequence[Observer] = (),
        grammars: Grammars | None = None,
        foresees: bool = True,
    ) -> None:
        """With `foresees`, each request's first token is foreseen, as far as there is time."""
        self._core = core
        self._grammars = grammars
        self._observers = tuple(observers)
        self._streams: dict[str, _Stream] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._inbox: deque[Work] = deque()
        self._wake = threading.Condition()
        self._idle = asyncio.Event()
        self._idle.set()
        self._state = "starting"
        self._last_step: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)
        self._snapshot = take_snapshot(core)
        self._snapshot_due = 0.0
        self._foresees = foresees
        self._forecaster = Forecaster(
            capture=lambda: capture(core, time.monotonic()),
            post=self._post,
            call_soon=self._call_soon,
        )

    # -- the gateway's side: on the event loop ------------------------------------------------

    def start(self) -> None:
        """Start stepping. Call once, on the event loop that will receive the events."""
        self._loop = asyncio.get_running_loop()
        self._state = "ok"
        self._thread.start()

    async def stop(self) -> None:
        """Stop the thread; whatever still runs is aborted."""
        for request_id in list(self._streams):
            self.abort(request_id)
        with self._wake:
            self._state = "stopped" if self._state in ("ok", "draining") else self._state
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, STOP_SECONDS)
            if self._thread.is_alive():
                logger.error("the engine is stuck in a step; it is left behind")

    async def submit(self, request: GenerationRequest) -> AsyncIterator[SequenceEvent]:
        self._check_accepts()
        submitted = time.monotonic()
        constraint = await self._compile(request.params.grammar)
        # Nothing is awaited between these checks and the post.
        self._check_accepts()
        if request.id in self._streams:
            raise DuplicateRequestError(f"request {request.id} is already in the engine")
        stream = _Stream(request, asyncio.get_running_loop().create_future())
        self._streams[request.id] = stream
        self._idle.clear()
        foresee = self._forecaster.ask(request.id, submitted) if self._foresees else []
        self._post(lambda: self._add(stream, constraint, submitted), *foresee)
        try:
            await stream.accepted
        except asyncio.CancelledError:
            self.abort(request.id)
            raise
        return self._events(stream)

    def _check_accepts(self) -> None:
        if self._state != "ok":
            raise EngineStoppedError(f"the engine is {self._state} and accepts no work")

    async def _compile(self, grammar: Grammar | None) -> Constraint | None:
        """In a thread: it may take long, and the event loop serves everybody's streams."""
        if grammar is None:
            return None
        if self._grammars is None:
            raise GrammarError("this engine has no compiler of grammars: ask for free text")
        return await asyncio.to_thread(self._grammars.compile, grammar)

    def abort(self, request_id: str) -> None:
        if request_id in self._streams:
            self._post(lambda: self._core.abort(request_id))

    async def drain(self, timeout_seconds: float) -> bool:
        if self._state == "ok":
            self._state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)
        except TimeoutError:
            return False
        return True

    async def reset_prefix_cache(self, tenant: str | None = None) -> int:
        return await self._ask(lambda: self._core.reset_prefix_cache(tenant))

    async def switch_policy(self, name: str) -> None:
        policy = make_policy(name)
        await self._ask(lambda: self._core.switch_policy(policy))

    async def estimate_first_token(self, request_id: str) -> FirstTokenEstimate | None:
        return await self._forecaster.answer(request_id)

    async def explain(self, request_id: str) -> Explanation | None:
        return await self._ask(lambda: self._core.explain(request_id))

    async def recent_steps(self, limit: int) -> tuple[StepRecord, ...]:
        return await self._ask(lambda: self._core.recent_steps(limit))

    async def _ask(self, question: Callable[[], Answer]) -> Answer:
        """What the engine's thread answers between two steps. Raises EngineStoppedError."""
        self._check_accepts()
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked.add(done)
        done.add_done_callback(self._asked.discard)

        def answer() -> list[Event]:
            self._call_soon(_resolve, done, question())
            return []

        self._post(answer)
        return await done

    def health(self) -> EngineHealth:
        age = None if self._last_step is None else time.monotonic() - self._last_step
        reason = self._state
        if reason in ("ok", "draining") and self._streams and age and age > STALL_SECONDS:
            reason = "stalled"
        return EngineHealth(
            alive=reason in ("ok", "draining"),
            ready=reason == "ok",
            reason=reason,
            seconds_since_step=age,
        )

    def snapshot(self) -> EngineSnapshot:
        return self._snapshot

    async def _events(self, stream: "_Stream") -> AsyncIterator[SequenceEvent]:
        num_open = stream.request.params.num_sequences
        try:
            while num_open:
                event = await stream.events.get()
                num_open -= isinstance(event, SequenceFinished)
                yield event
        finally:
            # Also reached when the reader is cancelled or closes the stream: work nobody reads.
            self.abort(stream.request.id)

    def _deliver(self, events: list[Event], snapshot: EngineSnapshot | None) -> None:
        if snapshot is not None:
            self._snapshot = snapshot
        for event in events:
            if isinstance(event, StepFinished | GroupFinished):
                continue
            if (stream := self._streams.get(event.request_id)) is None:
                continue
            stream.events.put_nowait(event)
            if isinstance(event, TokensGenerated):
                stream.num_output_tokens[event.index] += len(event.token_ids)
            if isinstance(event, SequenceFinished):
                self._end(stream, event)
        for observer in self._observers:
            observer(events)

    def _refuse(self, stream: "_Stream", error: Exception) -> None:
        self._close(stream)
        if not stream.accepted.done():  # else the caller left
            stream.accepted.set_exception(error)

    def _end(self, stream: "_Stream", event: SequenceFinished) -> None:
        stream.ended.add(event.index)
        if len(stream.ended) == stream.request.params.num_sequences:
            self._close(stream)

    def _close(self, stream: "_Stream") -> None:
        del self._streams[stream.request.id]
        self._forecaster.forget(stream.request.id)
        if not self._streams:
            self._idle.set()

    def _end_streams(self) -> None:
        """The loop has ended: nobody may wait for ever."""
        for done in list(self._asked):
            done.set_exception(EngineStoppedError(f"the engine is {self._state}"))
        for stream in list(self._streams.values()):
            if not stream.accepted.done():
                self._refuse(stream, EngineStoppedError(f"the engine is {self._state}"))
                continue
            for index in set(range(stream.request.params.num_sequences)) - stream.ended:
                end = lost_sequence(
                    stream.request,
                    index,
                    num_output_tokens=stream.num_output_tokens[index],
                    at=time.monotonic(),
                    error=f"the engine is {self._state}",
                )
                stream.events.put_nowait(end)
                self._end(stream, end)

    # -- the engine's side: in its thread -----------------------------------------------------

    def _post(self, *works: Work) -> None:
        with self._wake:
            self._inbox += works
            self._wake.notify()

    def _add(
        self, stream: "_Stream", constraint: Constraint | None, submitted: float
    ) -> list[Event]:
        request, deadline = stream.request, stream.request.deadline_seconds
        if deadline is not None:  # compiling, and the step that ran, took their part of it
            deadline -= time.monotonic() - submitted
        try:
            self._core.add(
                request.id,
                request.prompt_token_ids,
                request.params,
                share=request.share,
                namespace=request.namespace,
                use_prefix_cache=request.use_prefix_cache,
                constraint=constraint,
                deadline_seconds=deadline,
            )
        except Exception as error:  # whatever is wrong with one request harms only that one
            self._call_soon(self._refuse, stream, error)
        else:
            self._call_soon(_resolve, stream.accepted, None)
        return []

    def _run(self) -> None:
        self._last_step = time.monotonic()
        try:
            while self._state in ("ok", "draining"):
                self._turn()
            # What `stop` aborted ends as aborted, with what it used.
            self._call_soon(self._deliver, self._read_inbox(), take_snapshot(self._core))
        except Exception as error:
            logger.exception("the engine's loop failed; it serves nothing until a restart")
            self._state = f"failed: {type(error).__name__}: {error}"
        self._call_soon(self._end_streams)

    def _turn(self) -> None:
        with self._wake:
            while not self._inbox and not self._core.has_work and self._state in ("ok", "draining"):
                self._last_step = time.monotonic()
                self._wake.wait(timeout=1.0)
        events = self._read_inbox()
        if self._core.has_work:
            events += self._core.step()
        self._last_step = time.monotonic()
        # It counts tenants and held blocks: not at every step, nor for more than a 20th of the
        # time, but always when work begins or ends.
        snapshot = None
        if self._last_step > self._snapshot_due or not self._core.has_work:
            snapshot = take_snapshot(self._core)
            now = time.monotonic()
            self._snapshot_due = now + max(SNAPSHOT_SECONDS, 20 * (now - self._last_step))
        self._call_soon(self._deliver, events, snapshot)

    def _read_inbox(self) -> list[Event]:
        with self._wake:
            inbox = list(self._inbox)
            self._inbox.clear()
        return [event for work in inbox for event in work()]

    def _call_soon(self, callback: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)
