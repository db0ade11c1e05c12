"""The whole program: from Settings to a server that runs until a signal."""

import uvloop

from gateway.build import open_gateway
from gateway.http_server import Started, listen, serve
from gateway.settings import Settings


def run(settings: Settings, *, on_started: Started | None = None) -> bool:
    """Build everything from settings and serve. True if it ended with a drain."""

    async def main() -> bool:
        sock = listen(settings.host, settings.port)  # a taken port fails before the model loads
        async with open_gateway(settings) as gateway:
            return await serve(gateway, on_started=on_started, sock=sock)

    return uvloop.run(main())
