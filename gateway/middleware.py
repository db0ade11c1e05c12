"""Pure ASGI middleware: request id and time, the last catch of errors, the body limit."""

import asyncio
import logging
import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import BodyTimeoutError, BodyTooLargeError, SlowReaderError, answer
from gateway.metrics import HttpMetrics

logger = logging.getLogger("headrace.gateway")


class RequestContextMiddleware:
    """Gives each request its id and counts it; turns what nobody caught into a 500.

    The id is made here: a client's own x-request-id is never a key of anything.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                elapsed_ms = round((time.perf_counter() - started) * 1000)
                headers["openai-processing-ms"] = str(elapsed_ms)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except SlowReaderError:
            logger.warning("%s: stream cut, its reader stalled", request_id)
            # Closing would wait for the reader to take what is buffered, perhaps for ever.
            if (cut := scope["state"].get("cut")) is not None:
                cut()
        except Exception as error:
            logger.exception("%s: unhandled error", request_id)
            if status:
                raise
            said = answer(error)
            response = JSONResponse(said.body, said.status, dict(said.headers))
            await response(scope, receive, send_with_headers)
        finally:
            self.metrics.observe(scope, status, time.perf_counter() - started)


class BodyLimitMiddleware:
    """Counts the body while it arrives and stops reading at the limit, or when it is too slow."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_seconds: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout_seconds = timeout_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        declared = int(length) if length.isdecimal() else 0
        num_bytes = 0
        complete = False
        deadline = asyncio.get_running_loop().time() + self.timeout_seconds

        async def limited_receive() -> Message:
            nonlocal num_bytes, complete
            if complete:  # from here on, receive only waits for the client to leave
                return await receive()
            if declared > self.max_bytes:
                raise BodyTooLargeError(self._message())
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise BodyTimeoutError(
                    f"The body did not arrive within {self.timeout_seconds:g} seconds."
                ) from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise BodyTooLargeError(self._message())
            complete = not message.get("more_body", False)
            return message

        await self.app(scope, limited_receive, send)

    def _message(self) -> str:
        return f"The body is larger than {self.max_bytes} bytes, the most this server reads."
