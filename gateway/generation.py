"""One admitted request: its sequences in the engine and what comes out of them."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from engine.client import EngineClient, FirstTokenEstimate, GenerationRequest, lost_sequence
from engine.events import (
    SequenceAdmitted,
    SequenceEvent,
    SequenceFinished,
    TokensGenerated,
    Usage,
)
from engine.sequence import FinishReason
from gateway.client import Client
from gateway.deadlines import Arrival, not_begun, not_complete, out_of_reach
from gateway.errors import (
    DEADLINE_EXCEEDED,
    ClientGoneError,
    GatewayError,
    GenerationAbortedError,
    GenerationFailedError,
    QueueTimeoutError,
    answer,
)
from gateway.ratelimits import estimate_headers, limit_headers
from gateway.waiting import Wait
from tenants.errors import LimitStatus
from tenants.ledger import Settlement, Status

logger = logging.getLogger("headrace.gateway")

# An engine that does not answer an abort for so long is taken for dead.
ENGINE_PATIENCE_SECONDS = 60.0
# A forecast that is wanted before work goes on may take so long.
FORECAST_PATIENCE_SECONDS = 0.5
# The worst of several sequences stands for the request.
_WORST_FIRST = (
    *(FinishReason.ERROR, FinishReason.DEADLINE, FinishReason.ABORT),
    *(FinishReason.LENGTH, FinishReason.STOP),
)


@dataclass(slots=True, eq=False)
class Generation:
    """The work of one HTTP request: an engine request for each prompt, with one or several
    sequences. Its owner calls `end` when it leaves."""

    request_id: str
    tenant: str
    limits: tuple[LimitStatus, ...]  # as reserved, for headers
    requests: Sequence[GenerationRequest]
    engine: EngineClient
    client: Client
    arrival: Arrival
    wait: Wait = field(default_factory=Wait)
    # When the first prompt's first token was foreseen, from its submission on.
    estimate: FirstTokenEstimate | None = None
    # By prompt, and sequence of that prompt.
    finished: dict[tuple[int, int], SequenceFinished] = field(default_factory=dict)
    error_code: str | None = None
    ending: "asyncio.Task[None] | None" = None
    _items: "asyncio.Queue[tuple[int, SequenceEvent]]" = field(default_factory=asyncio.Queue)
    _pumps: "list[asyncio.Task[None]]" = field(default_factory=list)
    _submitted: float = 0.0  # seconds after the arrival
    _foreseeing: "asyncio.Task[None] | None" = None

    async def start(self) -> None:
        """Submit every prompt. Raises what the engine raises, or DeadlineExceededError; `end`
        cleans up.

        At once: the engine takes no more than what is there when it begins a step.
        """
        self.client.on_gone(self.abort)
        if self.client.gone:
            raise ClientGoneError
        deadline = self.arrival.remaining()
        self._submitted = self.arrival.elapsed
        requests = [replace(request, deadline_seconds=deadline) for request in self.requests]
        refused = await asyncio.gather(
            *(self._submit(number, request) for number, request in enumerate(requests)),
            return_exceptions=True,  # each of the others then has its pump, which `end` awaits
        )
        for error in refused:
            if error is not None:
                raise error
        self._foreseeing = asyncio.create_task(self._foresee())
        self.wait.limit(self.abort)

    async def check_in_time(self) -> None:
        """Raise DeadlineExceededError if the first token is expected after the deadline, as soon
        as that is known, or silently give up to know it."""
        deadline = self.arrival.max_seconds
        if deadline is None or self._foreseeing is None:
            return
        await asyncio.wait({self._foreseeing}, timeout=FORECAST_PATIENCE_SECONDS)
        if self.wait.is_over or self.estimate is None:
            return  # it has begun, or nobody knows
        if self.expected_seconds >= deadline:
            raise out_of_reach(deadline, self.expected_seconds, at_least=self.estimate.at_least)

    @property
    def expected_seconds(self) -> float:
        """From the request's arrival to its first token, as foreseen."""
        assert self.estimate is not None
        return self._submitted + self.estimate.seconds

    def headers(self) -> dict[str, str]:
        """What the head of the answer says of limits, and of the wait if that was foreseen."""
        found = limit_headers(self.limits)
        if self.estimate is not None and not self.estimate.at_least:
            found |= estimate_headers(self.expected_seconds)
        return found

    async def _foresee(self) -> None:
        self.estimate = await self.engine.estimate_first_token(self.requests[0].id)

    async def events(
        self, silence_seconds: float | None
    ) -> AsyncGenerator[tuple[int, SequenceEvent] | None]:
        """What the engine says, with the prompt it belongs to, until every sequence has ended;
        None after each silence of that length. A wait with a limit is silent, so that its end can
        still be an error with a status of its own.

        Raises QueueTimeoutError, DeadlineExceededError, GenerationFailedError,
        GenerationAbortedError or ClientGoneError.
        """
        try:
            async for item in self._events(silence_seconds):
                yield item
        except GatewayError as error:
            self.error_code = answer(error).body["error"]["code"]
            raise

    async def _events(
        self, silence_seconds: float | None
    ) -> AsyncGenerator[tuple[int, SequenceEvent] | None]:
        num_open = sum(request.params.num_sequences for request in self.requests)
        while num_open:
            is_bounded = self.wait.max_seconds is not None and not self.wait.is_over
            try:
                async with asyncio.timeout(None if is_bounded else silence_seconds):
                    number, event = await self._items.get()
            except TimeoutError:
                yield None
                continue
            if self.wait.is_overdue:
                raise QueueTimeoutError(
                    f"The request waited for {self.wait.max_seconds:g} s, which is as long as "
                    "requests of its class may. Please try again later."
                )
            if isinstance(event, SequenceFinished):
                self._raise_unless_complete(event)
                num_open -= 1
            yield number, event

    def abort(self) -> None:
        """Tell the engine to end everything now."""
        for request in self.requests:
            self.engine.abort(request.id)

    async def end(self) -> None:
        """Stop whatever still runs and wait for the engine's last word on each sequence."""
        if not all(pump.done() for pump in self._pumps):
            self.abort()
        if self._foreseeing is not None:
            self._foreseeing.cancel()
            await asyncio.wait({self._foreseeing})
        if self._pumps:
            _, hanging = await asyncio.wait(self._pumps, timeout=ENGINE_PATIENCE_SECONDS)
            for pump in hanging:
                logger.error("%s: the engine did not answer an abort", self.request_id)
                pump.cancel()
            if hanging:
                await asyncio.wait(hanging)

    @property
    def usage(self) -> Usage:
        """Tokens and block-seconds of all sequences together."""
        used = [event.usage for event in self.finished.values()]
        return Usage(
            prompt_tokens=sum(one.prompt_tokens for one in used),
            cached_tokens=sum(one.cached_tokens for one in used),
            output_tokens=sum(one.output_tokens for one in used),
            computed_tokens=sum(one.computed_tokens for one in used),
            recomputed_tokens=sum(one.recomputed_tokens for one in used),
            kv_block_seconds=sum(one.kv_block_seconds for one in used),
        )

    def settlement(self, now: float) -> Settlement:
        """What the request really used. `now`: the wall clock, to which engine times are moved."""
        ended = list(self.finished.values())
        reason = min((one.reason for one in ended), key=_WORST_FIRST.index, default=None)
        expected = sum(request.params.num_sequences for request in self.requests)
        unsubmitted = expected - len(ended)
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not unsubmitted:
            status = Status.COMPLETED
        elif reason == FinishReason.DEADLINE or self.error_code == DEADLINE_EXCEEDED:
            status, reason = Status.ABORTED, FinishReason.DEADLINE
        elif reason != FinishReason.ERROR and (
            self.client.gone or (reason == FinishReason.ABORT and not unsubmitted)
        ):
            status, reason = Status.ABORTED, FinishReason.ABORT
        else:
            status, reason = Status.FAILED, FinishReason.ERROR
        usage = self.usage
        tokens_in = usage.cached_tokens + usage.computed_tokens
        offset = now - max((one.at for one in ended), default=now)
        return Settlement(
            status=status,
            started=tokens_in + usage.output_tokens > 0,
            finish_reason=reason,
            error_code=self.error_code,
            tokens_in=tokens_in,
            tokens_cached=usage.cached_tokens,
            tokens_out=usage.output_tokens,
            tokens_recomputed=usage.recomputed_tokens,
            kv_block_seconds=usage.kv_block_seconds,
            admitted_at=_earliest([one.timings.admitted for one in ended], offset),
            first_token_at=_earliest([one.timings.first_token for one in ended], offset),
        )

    def _raise_unless_complete(self, event: SequenceFinished) -> None:
        if self.client.gone:
            raise ClientGoneError
        if event.reason == FinishReason.DEADLINE:
            assert self.arrival.max_seconds is not None
            used = self.usage
            num_tokens = used.cached_tokens + used.computed_tokens + used.output_tokens
            if not num_tokens:
                raise not_begun(self.arrival.max_seconds)
            raise not_complete(self.arrival.max_seconds, num_tokens)
        if event.reason == FinishReason.ABORT:
            raise GenerationAbortedError
        if event.reason == FinishReason.ERROR:
            logger.error("%s: the engine failed: %s", self.request_id, event.error)
            raise GenerationFailedError

    async def _submit(self, number: int, request: GenerationRequest) -> None:
        stream = await self.engine.submit(request)
        self._pumps.append(asyncio.create_task(self._pump(number, stream)))
        if self.client.gone:  # it left while this one was on its way
            self.engine.abort(request.id)

    async def _pump(self, number: int, stream: AsyncIterator[SequenceEvent]) -> None:
        num_tokens: Counter[int] = Counter()  # by sequence
        last_at = 0.0
        try:
            async for event in stream:
                last_at = event.at
                if isinstance(event, SequenceAdmitted):
                    self.wait.end()
                elif isinstance(event, TokensGenerated):
                    num_tokens[event.index] += len(event.token_ids)
                elif isinstance(event, SequenceFinished):
                    self.finished[number, event.index] = event
                self._items.put_nowait((number, event))
        except Exception:
            logger.exception("%s: the engine's stream broke", self.request_id)
        finally:
            for index in range(self.requests[number].params.num_sequences):
                if (number, index) not in self.finished:
                    lost = self._lost(number, index, num_tokens, last_at)
                    self.finished[number, index] = lost
                    self._items.put_nowait((number, lost))

    def _lost(
        self, number: int, index: int, num_tokens: Counter[int], at: float
    ) -> SequenceFinished:
        return lost_sequence(
            self.requests[number],
            index,
            num_output_tokens=num_tokens[index],
            at=at,
            error="the engine's stream ended early",
        )


def _earliest(times: list[float | None], offset: float) -> float | None:
    known = [time for time in times if time is not None]
    return min(known) + offset if known else None
