"""Server-sent events: how a stream looks on the wire, and the one coroutine that writes it.

start  ->  opening  ->  chunks ...  ->  usage, if asked for  ->  [DONE]
              \\-> ": queued position=3 expected_wait_s=12" once a second while the request waits in the queue
              \\-> ": ping" while there is nothing to send
               \\-> on failure: {"error": {...}}  ->  [DONE]           exactly one end on every path

If the client asks for it, each event says when it was sent. That tells a proxy that buffers events from a slow model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Send

from chairlift.engine.request import FinishReason
from chairlift.errors import ChairliftError
from chairlift.server.answer import ChunkT, ResponseBuilder, WholeT
from chairlift.server.dispatch import Delta, OutputCollector
from chairlift.server.http_errors import ClientGone, Interrupted, error_body
from chairlift.server.responses import ChatChunk, ErrorEvent, TextChunk, encode

log = logging.getLogger(__name__)

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events otherwise
]
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Pace:
    """How patient a stream is, in seconds."""

    queue_s: float = 1.0  # between two comments to a request in the queue
    ping_s: float = 15.0  # below the idle limits of common proxies (nginx 60, HAProxy 50)
    stall_s: float = 60.0  # a client that reads nothing for so long counts as gone


def raise_failure(deltas: list[Delta]) -> None:
    """Raises the error of a choice that did not end well; Interrupted for a choice that the server cancelled."""
    for delta in deltas:
        if delta.error is not None:
            raise delta.error
        if delta.finish_reason is FinishReason.CANCELLED:
            raise Interrupted("the server ended this request")


class _Writer:
    """Sends the events of one stream, and comments when it has sent nothing for a while."""

    def __init__(self, send: Send, pace: Pace, comment: Callable[[], bytes | None], *, is_stamped: bool) -> None:
        self._send = send
        self._pace = pace
        self._comment = comment
        self._is_stamped = is_stamped
        self._last_s = 0.0

    async def start(self) -> None:
        """Sends status and headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._last_s = asyncio.get_running_loop().time()

    def event(self, value: ChatChunk | TextChunk | ErrorEvent, made_s: float | None = None) -> bytes:
        """One event, to be written at once. `made_s` is when its newest token left the engine, if it has a token."""
        if self._is_stamped:
            token_s = None if made_s is None else round(made_s, 6)
            value["timestamps"] = {"sent_s": round(time.time(), 6), "token_s": token_s}
        return b"data: " + encode(value) + b"\n\n"

    async def write(self, payload: bytes, *, more: bool = True) -> None:
        """Sends bytes, if there are any. Raises ClientGone when the client does not read them in time."""
        if not payload and more:
            return
        try:
            async with asyncio.timeout(self._pace.stall_s):
                await self._send({"type": "http.response.body", "body": payload, "more_body": more})
        except TimeoutError:
            raise ClientGone from None
        self._last_s = asyncio.get_running_loop().time()

    async def next_deltas(self, collector: OutputCollector) -> list[Delta]:
        """What the engine makes next. Meanwhile sends the position in the queue, and pings once the request runs."""
        while True:
            comment = self._comment()
            if comment is None:
                until_s = self._last_s + self._pace.ping_s
            else:
                await self.write(comment)
                until_s = asyncio.get_running_loop().time() + self._pace.queue_s
            try:
                # No variable holds the timeout: it refers to its task, whose exception refers to this frame when the
                # client leaves. That cycle would keep the whole request until the garbage collector looks.
                async with asyncio.timeout_at(until_s):
                    return await collector.take()
            except TimeoutError:
                await self.write(PING if comment is None else b"")


async def stream(
    builder: ResponseBuilder[WholeT, ChunkT, Any],
    collector: OutputCollector,
    send: Send,
    pace: Pace,
    comment: Callable[[], bytes | None],
) -> None:
    """Writes one answer as it comes. Raises ClientGone when the client is gone; other failures are sent as an event.

    `comment` gives the comment for a request in the queue, which may be empty, and None once the request has started.
    """
    writer = _Writer(send, pace, comment, is_stamped=builder.prepared.include_timestamps)
    await writer.start()
    try:
        await writer.write(b"".join(map(writer.event, builder.opening())))
        while not collector.is_done:
            deltas = await writer.next_deltas(collector)
            chunks = [writer.event(chunk, delta.made_s) for delta in deltas for chunk in builder.chunks(delta)]
            await writer.write(b"".join(chunks))
            raise_failure(deltas)
        usage = writer.event(builder.usage_chunk()) if builder.prepared.include_usage else b""
        await writer.write(usage + DONE, more=False)
    except ClientGone:
        raise
    except Exception as error:
        if not isinstance(error, ChairliftError):
            log.exception("request %s: its stream failed", builder.prepared.id)
        await writer.write(writer.event({"error": error_body(error)["error"]}) + DONE, more=False)


async def collect(builder: ResponseBuilder[WholeT, ChunkT, Any], collector: OutputCollector) -> WholeT:
    """The whole answer, once every choice has ended. Raises the first failure."""
    whole = [Delta(i) for i in range(len(collector.requests))]
    while not collector.is_done:
        deltas = await collector.take()
        raise_failure(deltas)
        for delta in deltas:
            whole[delta.index].add(delta)
    return builder.whole(whole)
