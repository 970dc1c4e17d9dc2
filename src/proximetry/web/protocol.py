"""The HTTP protocol of the server: limits that hold before a request reaches the application."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SECONDS = 30.0
"""Time to send the headers of a request, and to read a response."""
HEAD_BYTES, HEADERS, PIPELINED = 64_000, 100, 8
"""Limits per connection: bytes that are no body, headers of a request, requests that wait."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which itself limits neither bytes nor time.

    A connection may send HEAD_BYTES of URLs, headers, chunk sizes and trailers before a response
    is complete. Bodies do not count: `guard.Guard` limits them, and uvicorn reads them no faster
    than the application does.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._unanswered = 0  # bytes
        self._timer = self.loop.call_later(SECONDS, self._time_out)

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived; disconnect a client that sends too much."""
        self._unanswered += len(data)
        super().data_received(data)
        if self._unanswered > HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Begin a request, unless too many wait for their response."""
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many pipelined requests")  # which uvicorn answers with 400
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header or a trailer, unless there are too many."""
        if len(self.headers) >= HEADERS:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body; one of a pipelined request still counts."""
        if not self.pipeline:
            self._unanswered -= len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Start the count and the clock again."""
        super().on_response_complete()
        if not self.pipeline:
            self._unanswered = 0
        self._timer.cancel()
        self._timer = self.loop.call_later(SECONDS, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _time_out(self) -> None:
        """Disconnect a client that sends no request, or that does not read the response."""
        working = self.cycle is not None and not self.cycle.response_complete
        if self.transport.get_write_buffer_size() or not working:
            self.transport.abort()
