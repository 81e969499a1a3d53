"""Bytes that are no request, on a real socket: refused in the one shape of errors, and within bounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chairlift.server.protocol import MAX_HEAD_BYTES
from support.async_tests import run
from support.raw_http import Reply, Wire, request_bytes
from support.talking_server import talking


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with talking() as url:
        yield int(url.rpartition(":")[2])


def exchanged(port: int, *pieces: bytes) -> Reply:
    """Sends these and reads one response, after which the connection must be over."""

    async def test() -> Reply:
        wire = await Wire.connect(port)
        try:
            for piece in pieces:
                await wire.send(piece)
            reply = await wire.reply()
            assert await wire._reader.read() == b""
            return reply
        finally:
            wire.close()

    return run(test())


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS, where none is spoken
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /live HTTP/9.9\r\n\r\n",
        b"GET /live HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused_in_shape(port: int, sent: bytes) -> None:
    """Fault: plain text that no client can read, or two readings of one request by a proxy and by us."""
    reply = exchanged(port, sent)
    assert (reply.status, reply.headers["content-type"]) == (400, "application/json")
    assert reply.json["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("start", [b"GET /", b"GET /live HTTP/1.1\r\nx: ", b"GET /live HTTP/1.1\r\n" + b"a: b\r\n" * 9])
def test_a_head_without_end_is_not_collected(port: int, start: bytes) -> None:
    """Fault: a request line or a header that never ends fills the memory."""
    # The last byte sent is the one too many: what comes after it would meet a closed connection.
    reply = exchanged(port, start, *[b"a" * 1024] * (MAX_HEAD_BYTES // 1024 - 1), b"a" * (1025 - len(start)))
    assert (reply.status, reply.json["error"]["code"]) == (431, "headers_too_large")


def test_the_bound_is_for_heads_only(port: int) -> None:
    """Fault: a large body, or many requests on one connection, count as one head."""

    async def test() -> None:
        wire = await Wire.connect(port)
        request = request_bytes("POST", "/v1/completions", b'{"prompt": "Hi", "user": "' + b"u" * 15_000 + b'"}')
        for _ in range(8):
            await wire.send(request)
            assert (await wire.reply()).status == 200
        await wire.send(request_bytes("GET", "/live", headers={"x": "y" * (MAX_HEAD_BYTES - 1000)}))
        assert (await wire.reply()).status == 200
        wire.close()

    run(test())
