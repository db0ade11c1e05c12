"""The other end of the connection: is it still there?"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive


class Client:
    """Whether the client is still connected, and what to do at once when it leaves."""

    def __init__(self) -> None:
        self.gone = False
        self._on_gone: Callable[[], None] | None = None

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call back when the client leaves; now, if it has left already."""
        self._on_gone = callback
        if self.gone:
            callback()

    def leave(self) -> None:
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()


@asynccontextmanager
async def watch_client(receive: Receive) -> AsyncIterator[Client]:
    """Listen for the client's leaving. The body must have been read: nothing else may follow."""
    client = Client()

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        client.leave()

    watching = asyncio.create_task(watch())
    try:
        yield client
    finally:
        watching.cancel()
        await asyncio.wait({watching})
