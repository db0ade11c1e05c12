"""Server-sent events, as OpenAI's clients read them.

The head is held until there is something to say, so that an error known before then has a real
status. Every write is whole events; JSON is ASCII, so that no client can split a character, nor
take U+2028 for the end of a line.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from starlette.types import Send

from engine.events import Usage
from gateway.choices import Choice, Output
from gateway.errors import ClientGoneError, GatewayError, SlowReaderError, answer

# A comment that starts with "ping" ends the stream for some clients.
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ResponseShape(Protocol):
    """How one resource writes its chunks and its whole answer."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, if it has one of its own."""
        ...

    def deltas(self, output: Output) -> list[dict[str, Any]]:
        """New text, with the logprobs of its tokens where they are asked for."""
        ...

    def closing(self, index: int, finish_reason: str) -> list[dict[str, Any]]: ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]: ...

    def complete(self, choices: list[Choice], usage: Usage) -> dict[str, Any]: ...


def event(payload: Mapping[str, Any]) -> bytes:
    """One event with one JSON object."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode("ascii") + b"\n\n"


class EventStream:
    """A response body of events. Nothing is sent before the first write; `headers` are asked for
    then."""

    def __init__(
        self, send: Send, headers: Callable[[], Mapping[str, str]], write_timeout_seconds: float
    ) -> None:
        self._send = send
        self._headers = headers
        self._write_timeout_seconds = write_timeout_seconds
        self.started = False

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send whole events, after the head if it has not gone yet. Raises SlowReaderError."""
        try:
            async with asyncio.timeout(self._write_timeout_seconds):
                if not self.started:
                    self.started = True
                    await self._send(
                        {
                            "type": "http.response.start",
                            "status": 200,
                            "headers": [
                                (name.encode("latin-1"), value.encode("latin-1"))
                                for name, value in {**HEADERS, **self._headers()}.items()
                            ],
                        }
                    )
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
                if last:
                    await self._send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            raise SlowReaderError from None


async def stream_outputs(
    stream: EventStream, outputs: AsyncGenerator[Output | None], shape: ResponseShape
) -> bool:
    """Write outputs as chunks; False if the stream was ended by an error or the client left.

    An error before the first byte is raised, so that it gets a real status; a later one becomes
    an event, then [DONE]: silence would read as success.
    """
    opened: set[int] = set()
    try:
        async with aclosing(outputs):
            async for output in outputs:
                data = KEEP_ALIVE if output is None else _chunks(output, shape, opened)
                if data:
                    await stream.write(data)
    except ClientGoneError:
        if not stream.started:
            raise
        return False
    except GatewayError as error:
        if not stream.started or isinstance(error, SlowReaderError):
            raise
        await stream.write(event(answer(error).body) + DONE, last=True)
        return False
    return True


def _chunks(output: Output, shape: ResponseShape, opened: set[int]) -> bytes:
    data = b""
    if output.index not in opened:
        opened.add(output.index)
        opening = shape.opening(output.index)
        data += event(opening) if opening is not None else b""
    if output.text or output.tokens:
        data += b"".join(map(event, shape.deltas(output)))
    if output.finish_reason is not None:
        data += b"".join(map(event, shape.closing(output.index, output.finish_reason)))
    return data
