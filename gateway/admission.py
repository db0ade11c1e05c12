"""Admission: reserve, submit, and settle exactly once on every exit."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from engine.client import EngineClient, GenerationRequest
from engine.errors import ConfigError
from engine.sequence import FinishReason, TenantShare
from gateway.choices import Prompt
from gateway.client import Client
from gateway.deadlines import Arrival
from gateway.errors import (
    DeadlineExceededError,
    EngineNotReadyError,
    QueueTimeoutError,
    answer,
)
from gateway.generation import Generation
from gateway.metrics import TenantMetrics
from gateway.waiting import WaitingRequests
from tenants.errors import LimitExceededError, NeverFitsLimitError, StoreUnavailableError
from tenants.ledger import Ledger
from tenants.policy import Principal

logger = logging.getLogger("headrace.gateway")

# How long a finished response waits for its ledger row while the store is slow or away.
SETTLE_PATIENCE_SECONDS = 2.0
MAX_RETRY_SECONDS = 5.0


class Admission:
    """The bridge from a tenant's policy to the engine's shares, and from events to the ledger."""

    def __init__(
        self,
        *,
        engine: EngineClient,
        ledger: Ledger,
        metrics: TenantMetrics,
        now: Callable[[], float],
        refuses_late: bool = False,
    ) -> None:
        self._engine = engine
        self._ledger = ledger
        self._metrics = metrics
        self._now = now
        self._refuses_late = refuses_late  # what is foreseen to begin after its deadline
        self._waiting = WaitingRequests()
        self._live: dict[str, Generation] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def check_ready(self) -> None:
        """Refuse before any work when the engine could not take it. Raises EngineNotReadyError."""
        health = self._engine.health()
        if not health.ready:
            raise EngineNotReadyError(health.reason)

    @asynccontextmanager
    async def admit(
        self,
        principal: Principal,
        request_id: str,
        prompts: Sequence[Prompt],
        client: Client,
        arrival: Arrival,
        *,
        cache_salt: str | None = None,
        use_prefix_cache: bool = True,
    ) -> AsyncIterator[Generation]:
        """A running generation; left in whatever way, it is ended and settled once.

        Raises LimitExceededError, NeverFitsLimitError, DeadlineExceededError,
        StoreUnavailableError or an EngineError.
        """
        requests = _requests(principal, request_id, prompts, cache_salt, use_prefix_cache)
        with self._refusals_counted(principal.tenant), self._waiting.place(principal) as wait:
            self._check_deadline(principal.tenant, arrival)
            reservation = await self._ledger.reserve(
                principal,
                request_id,
                prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
                max_output_tokens=sum(
                    prompt.params.num_sequences * prompt.params.max_tokens for prompt in prompts
                ),
                now=self._now(),
            )
            generation = Generation(
                request_id=request_id,
                tenant=principal.tenant,
                limits=reservation.limits,
                requests=requests,
                engine=self._engine,
                client=client,
                arrival=arrival,
                wait=wait,
            )
            self._live[request_id] = generation
            self._idle.clear()
            try:
                await generation.start()
                if self._refuses_late:
                    await generation.check_in_time()
                yield generation
            except Exception as error:
                if isinstance(error, ConfigError):
                    logger.error("%s: refused by the engine: %s", request_id, error)
                generation.error_code = answer(error).body["error"]["code"]
                raise
            finally:
                await self.finish(generation)

    @contextmanager
    def _refusals_counted(self, tenant: str) -> Iterator[None]:
        try:
            yield
        except (LimitExceededError, NeverFitsLimitError) as error:
            self._metrics.rate_limited(tenant, error.metric)
            self._metrics.request_ended(tenant, "rejected")
            raise
        except QueueTimeoutError:  # settled, and so counted as ended
            self._metrics.rate_limited(tenant, "queue_seconds")
            raise

    def _check_deadline(self, tenant: str, arrival: Arrival) -> None:
        """Before the request holds anything. Raises DeadlineExceededError."""
        try:
            arrival.remaining()
        except DeadlineExceededError:
            self._metrics.deadline_exceeded(tenant)
            self._metrics.request_ended(tenant, "rejected")
            raise

    async def finish(self, generation: Generation) -> None:
        """End the generation and settle it; later calls join the first.

        Waits for the ledger only so long: with the store away, settling goes on in the background
        while the lease is renewed.
        """
        if generation.ending is None:
            generation.ending = asyncio.create_task(self._end(generation))
        # Waiting on a task of its own keeps it alive when the caller is cancelled.
        await asyncio.wait({generation.ending}, timeout=SETTLE_PATIENCE_SECONDS)

    async def tend_leases(self) -> None:
        """Renew what runs here, then settle what gateways left behind that died.

        In this order: after a stall, the own leases may all be over.
        """
        await self.renew_leases()
        await self.release_crashed()

    async def renew_leases(self) -> None:
        """Keep what runs here from being taken for crashed, by any gateway."""
        if self._live:
            for lost in await self._ledger.renew(list(self._live), now=self._now()):
                if lost in self._live:
                    logger.error("%s: its reservation was lost while it ran", lost)

    async def release_crashed(self) -> None:
        """Settle what nobody renewed, but for what runs here."""
        for request_id in await self._ledger.expire(now=self._now(), running=list(self._live)):
            logger.warning("%s: released, its gateway did not renew it", request_id)

    async def close(self, timeout_seconds: float) -> None:
        """Abort what runs and wait until all of it is settled, or the time is over."""
        for generation in list(self._live.values()):
            generation.abort()
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._idle.wait()
        except TimeoutError:
            logger.error("%d requests not settled; their leases will expire", len(self._live))

    async def _end(self, generation: Generation) -> None:
        try:
            await generation.end()
            now = self._now()
            settlement = generation.settlement(now)
            self._metrics.request_ended(generation.tenant, settlement.status)
            if settlement.finish_reason == FinishReason.DEADLINE:
                self._metrics.deadline_exceeded(generation.tenant)
            self._check_estimate(generation)
            delay = 0.1
            while True:
                try:
                    if not await self._ledger.settle(generation.request_id, settlement, now=now):
                        logger.error(
                            "%s: was taken for crashed before it could be settled; its %d tokens "
                            "are in no ledger row",
                            generation.request_id,
                            settlement.tokens_in + settlement.tokens_out,
                        )
                    return
                except StoreUnavailableError:
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, MAX_RETRY_SECONDS)
        except Exception:
            logger.exception("%s: not settled; its lease will expire", generation.request_id)
        finally:
            del self._live[generation.request_id]
            if not self._live:
                self._idle.set()

    def _check_estimate(self, generation: Generation) -> None:
        """Measure how right the forecast was."""
        estimate, first = generation.estimate, generation.finished.get((0, 0))
        if estimate is None or estimate.at_least or first is None:
            return
        if first.timings.first_token is not None:
            actual = first.timings.first_token - first.timings.arrived
            self._metrics.first_token_foreseen(estimate.seconds, actual)


def _requests(
    principal: Principal,
    request_id: str,
    prompts: Sequence[Prompt],
    cache_salt: str | None,
    use_prefix_cache: bool,
) -> list[GenerationRequest]:
    """The engine's view: shares and namespace come from the key, ids from the server."""
    share = TenantShare(
        tenant=principal.tenant,
        weight=principal.weight,
        rank=principal.service_class.rank,
        is_preemptible=principal.service_class.preemptible,
        class_weight=principal.service_class.weight,
        max_wait_seconds=principal.service_class.max_wait_seconds,
        kv_floor_blocks=principal.kv.floor_blocks,
        kv_cap_blocks=principal.kv.cap_blocks,
    )
    # A salt can only narrow: every namespace of a tenant begins with its id, which has no slash.
    namespace = principal.tenant_id if cache_salt is None else f"{principal.tenant_id}/{cache_salt}"
    return [
        GenerationRequest(
            id=f"{request_id}-{index}",
            share=share,
            namespace=namespace,
            prompt_token_ids=prompt.token_ids,
            params=prompt.params,
            use_prefix_cache=use_prefix_cache,
        )
        for index, prompt in enumerate(prompts)
    ]
