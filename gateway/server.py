"""The whole program: from Settings to a server that runs until a signal."""

import socket

import uvloop

from gateway.build import build_gateway
from gateway.http_server import Started, serve
from gateway.settings import Settings


def run(settings: Settings, sock: socket.socket, *, on_started: Started | None = None) -> bool:
    """Build everything from settings and serve on a bound socket. True if it ended with a drain."""

    # Outside the loop: Ctrl-C while the model loads then ends the program without more ado.
    gateway, engine = build_gateway(settings)

    async def main() -> bool:
        engine.start()
        try:
            return await serve(gateway, on_started=on_started, sock=sock)
        finally:
            await engine.stop()
            await gateway.store.close()

    return uvloop.run(main())
