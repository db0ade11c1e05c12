"""The composition root: from parts to an ASGI application, as data."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route

from engine.client import EngineClient
from engine.config import EngineConfig
from gateway.admission import Admission
from gateway.api.admin import AdminPages
from gateway.api.chat import ChatCompletions
from gateway.api.completions import Completions
from gateway.api.generate import GenerationEndpoint, Services
from gateway.api.health import Health
from gateway.api.metrics import MetricsPage
from gateway.api.models import Models
from gateway.api.requests import Requests
from gateway.auth import Authenticator
from gateway.errors import exception_handlers
from gateway.metrics import Metrics
from gateway.middleware import BodyLimitMiddleware, RequestContextMiddleware
from gateway.served_model import ServedModel
from gateway.settings import Settings
from gateway.tiers import ServiceTiers
from gateway.turns import TenantTurns
from tenants.errors import StoreUnavailableError
from tenants.ledger import Ledger
from tenants.store import Store

logger = logging.getLogger("headrace.gateway")

MAX_TOKENISING = 2
SETTLE_AT_EXIT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """Everything that one gateway process works with."""

    settings: Settings
    model: ServedModel
    engine: EngineClient
    config: EngineConfig
    store: Store
    metrics: Metrics
    auth: Authenticator
    admission: Admission
    now: Callable[[], float]  # epoch seconds


def assemble(
    *,
    settings: Settings,
    model: ServedModel,
    engine: EngineClient,
    config: EngineConfig,
    store: Store,
    ledger: Ledger,
    metrics: Metrics,
    now: Callable[[], float] = time.time,
) -> Gateway:
    """A gateway from given parts: the real ones, or a test's own engine and store."""
    return Gateway(
        settings=settings,
        model=model,
        engine=engine,
        config=config,
        store=store,
        metrics=metrics,
        auth=Authenticator(store, now),
        admission=Admission(
            engine=engine,
            ledger=ledger,
            metrics=metrics.tenants,
            now=now,
            refuses_late=settings.forecasts == "refuse",
        ),
        now=now,
    )


def create_app(gateway: Gateway) -> Starlette:
    """The application. It renews and releases leases while its lifespan runs."""
    settings = gateway.settings

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tending = asyncio.create_task(
            _every(settings.lease_seconds / 3, gateway.admission.tend_leases)
        )
        try:
            yield
        finally:
            await gateway.admission.close(SETTLE_AT_EXIT_SECONDS)
            tending.cancel()
            await asyncio.wait({tending})

    app = Starlette(
        routes=routes(gateway),
        middleware=[
            Middleware(RequestContextMiddleware, metrics=gateway.metrics.http),
            Middleware(
                BodyLimitMiddleware,
                max_bytes=settings.max_body_bytes,
                timeout_seconds=settings.body_timeout_seconds,
            ),
        ],
        exception_handlers=exception_handlers(),
        lifespan=lifespan,
    )
    # A redirect would name whatever host the client wrote.
    app.router.redirect_slashes = False
    return app


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Every path that is served."""
    services = Services(
        settings=gateway.settings,
        model=gateway.model,
        auth=gateway.auth,
        tiers=ServiceTiers(gateway.store, gateway.settings.class_sharing),
        admission=gateway.admission,
        now=gateway.now,
        tokenising=TenantTurns(MAX_TOKENISING),
    )
    models = Models(gateway.model, gateway.auth)
    requests = Requests(gateway.engine, gateway.auth)
    health = Health(gateway.engine)
    metrics = MetricsPage(gateway.metrics, gateway.engine, gateway.settings.operator_token)
    admin = AdminPages(
        gateway.model.name, gateway.config, gateway.engine, gateway.settings.operator_token
    )
    chat = GenerationEndpoint(ChatCompletions(), services)
    completions = GenerationEndpoint(Completions(), services)
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{model:path}", models.retrieve),
        Route("/v1/requests/{id}/explain", requests.explain),
        Route("/healthz", health.live),
        Route("/readyz", health.ready),
        Route("/metrics", metrics.read),
        Route("/admin", admin.status),
        Route("/admin/status.css", admin.style),
        Route("/admin/steps", admin.steps),
        Route("/admin/prefix-cache/reset", admin.reset_prefix_cache, methods=["POST"]),
        Route("/admin/policy", admin.switch_policy, methods=["POST"]),
    ]


async def _every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do the work now and then again and again, whatever happens to the store meanwhile."""
    while True:
        try:
            await work()
        except StoreUnavailableError as error:
            logger.warning("%s, trying again in %g s", error, seconds)
        except Exception:
            logger.exception("background work failed, trying again in %g s", seconds)
        await asyncio.sleep(seconds)
