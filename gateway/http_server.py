"""The HTTP server: uvicorn with httptools, with a drain before the end."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from gateway.app import Gateway, create_app
from gateway.protocol import BoundedProtocol
from gateway.settings import Settings

logger = logging.getLogger("headrace.gateway")

# After the drain, responses that are already computed get this long to reach their clients.
FLUSH_SECONDS = 5
FORCED_SECONDS = 0.5  # the same, once a second signal asked to stop
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Started = Callable[[Gateway, str], Awaitable[None]]
"""Called once the server answers, with its base URL."""


class DrainingServer(uvicorn.Server):
    """The first signal drains while the server still answers; the second stops it at once."""

    def __init__(
        self, config: uvicorn.Config, gateway: Gateway, on_started: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._on_started = on_started
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        await self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's own, which would close the listening socket at once."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """What a signal asks for."""
        if self._drain is None:
            self._drain = asyncio.create_task(self._drain_then_exit())
        else:
            logger.warning("stopping at once")
            self.force_exit = True
            self.should_exit = True

    async def _drain_then_exit(self) -> None:
        gateway = self._gateway
        logger.info("draining for at most %g s", gateway.settings.drain_seconds)
        try:
            if not await gateway.engine.drain(gateway.settings.drain_seconds):
                logger.warning("ending what did not finish in time")
                await gateway.admission.close(FLUSH_SECONDS)
        finally:
            self.should_exit = True


def server_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        loop="none",  # the loop runs already
        http=BoundedProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.idle_connection_seconds,
        timeout_graceful_shutdown=FLUSH_SECONDS,
    )


async def serve(
    gateway: Gateway, *, on_started: Started | None = None, sock: socket.socket | None = None
) -> bool:
    """Serve until a signal; True if it ended with a drain, False if it was stopped at once."""
    settings = gateway.settings
    sock = sock or listen(settings.host, settings.port)
    config = server_config(create_app(gateway), settings)

    async def started() -> None:
        if on_started is not None:
            await on_started(gateway, base_url(sock))

    server = DrainingServer(config, gateway, started)
    try:
        await server.serve(sockets=[sock])
    finally:
        await gateway.admission.close(FORCED_SECONDS if server.force_exit else FLUSH_SECONDS)
        if server.force_exit:
            # uvicorn skips it then; the end of the loop would cancel it, with a traceback.
            await asyncio.wait(
                {asyncio.create_task(server.lifespan.shutdown())}, timeout=FORCED_SECONDS
            )
    return not server.force_exit


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises OSError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except OSError:
        sock.close()
        raise
    return sock


def base_url(sock: socket.socket) -> str:
    """Where clients reach a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
