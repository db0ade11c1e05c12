"""A connection that cannot be held open for nothing: bounds that uvicorn's own does not have.

Between a request's head and the end of its response the application has the clock in hand; what
lies before and after that is bounded here.
"""

import asyncio
import socket
import struct

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """Closes where no complete head arrives in the idle time, where a head is too long, and where
    nobody reads what is left of a response. `cut` in the scope's state aborts the connection."""

    _deadline: asyncio.TimerHandle | None = None  # None while a request is being served
    _is_in_head = True  # until the head that is expected next is complete
    _num_head_bytes = 0
    _num_heads = 0  # completed on this connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        # Data that completes a head brings its body, even the whole of it: what counts is data
        # in which no head comes to its end.
        num_heads = self._num_heads
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._num_heads == num_heads:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.cut()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        self._is_in_head = False
        self._num_heads += 1
        self._num_head_bytes = 0
        self.scope["state"]["cut"] = self.cut
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else a pipelined request is being served
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def cut(self) -> None:
        """End the connection now, whatever is unsent: the system drops its buffer too."""
        option = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.get_extra_info("socket").setsockopt(*option)
        self.transport.abort()

    def _await_head(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self, num_unsent: int | None = None) -> None:
        """Close once the rest of a response is read; abort when none of it was in an idle time.

        num_unsent   bytes that were left when this was called before
        """
        num_left = self.transport.get_write_buffer_size()
        if num_left == num_unsent:
            self.cut()
            return
        self.transport.close()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._close, num_left)
