"""HTTP/1.1 below the application: refuses what is not a request like any other error, and bounds a request's head.

uvicorn answers bytes that it cannot parse in plain text, and collects a head (request line and headers) without limit.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from chairlift.errors import RequestError
from chairlift.server.http_errors import HeadTooLarge, InvalidHttp, error_body
from chairlift.server.responses import encode

MAX_HEAD_BYTES = 64 << 10

_REASONS = {400: "Bad Request", 431: "Request Header Fields Too Large"}


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_in_head = True
        self._num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parses received bytes, and refuses a head that is too large."""
        super().data_received(data)
        self._num_head_bytes = self._num_head_bytes + len(data) if self._is_in_head else 0
        if self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(HeadTooLarge(MAX_HEAD_BYTES))

    def on_message_begin(self) -> None:
        """Called by the parser at the first byte of a request."""
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Called by the parser at the end of the head. uvicorn then starts the application."""
        self._is_in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for bytes that are not HTTP."""
        self._refuse(InvalidHttp("what was sent is not an HTTP request"))

    def _refuse(self, error: RequestError) -> None:
        body = encode(error_body(error))
        head = (
            f"HTTP/1.1 {error.http_status} {_REASONS[error.http_status]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
