"""The whole program: from Settings to a server that runs until a signal."""

import socket

import uvloop

from gateway.build import open_gateway
from gateway.http_server import Started, serve
from gateway.settings import Settings


def run(settings: Settings, sock: socket.socket, *, on_started: Started | None = None) -> bool:
    """Build everything from settings and serve on a bound socket. True if it ended with a drain."""

    async def main() -> bool:
        async with open_gateway(settings) as gateway:
            return await serve(gateway, on_started=on_started, sock=sock)

    return uvloop.run(main())
