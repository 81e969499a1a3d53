"""Server-sent events: how a stream looks on the wire, and the one coroutine that writes it.

start  ->  opening  ->  chunks ...  ->  usage, if asked for  ->  [DONE]
              \\-> ": queued position=3 expected_wait_s=12" once a second while it waits in line
              \\-> ": ping" while there is nothing to say
               \\-> on failure: {"error": {...}}  ->  [DONE]           exactly one end on every path

Where the client asks for it, each event says when it was sent: a proxy that gathers events can then be told from a slow
model.
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
from chairlift.server.answer import Answer
from chairlift.server.dispatch import Delta, Listener
from chairlift.server.http_errors import ClientGone, Interrupted, encode, error_body

log = logging.getLogger(__name__)

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather events otherwise
]
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Pace:
    """How patient a stream is, in seconds."""

    queue_s: float = 1.0  # between two words to one that waits in line
    ping_s: float = 15.0  # below the idle limits of common proxies (nginx 60, HAProxy 50)
    stall_s: float = 60.0  # a reader that takes nothing for so long is gone


def raise_failure(deltas: list[Delta]) -> None:
    """Raises what a choice ended with, when it was not an end that a client should take for an answer."""
    for delta in deltas:
        if delta.error is not None:
            raise delta.error
        if delta.finish_reason is FinishReason.CANCELLED:
            raise Interrupted("the server ended this request")


class _Writer:
    """Sends pieces of one stream, and pings when it has sent nothing for a while."""

    def __init__(self, send: Send, pace: Pace, place: Callable[[], bytes | None], *, is_stamped: bool) -> None:
        self._send = send
        self._pace = pace
        self._place = place
        self._is_stamped = is_stamped
        self._last_s = 0.0

    async def start(self) -> None:
        """Sends status and headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._last_s = asyncio.get_running_loop().time()

    def event(self, value: dict[str, Any], made_s: float | None = None) -> bytes:
        """One event, to be written at once. `made_s` is when its newest token left the engine, if it has one."""
        if self._is_stamped:
            made_s = None if made_s is None else round(made_s, 6)
            value = {**value, "timestamps": {"sent_s": round(time.time(), 6), "token_s": made_s}}
        return b"data: " + encode(value) + b"\n\n"

    async def write(self, payload: bytes, *, more: bool = True) -> None:
        """Sends one piece, if there is anything in it. Raises ClientGone when the reader takes nothing for too long."""
        if not payload and more:
            return
        try:
            async with asyncio.timeout(self._pace.stall_s):
                await self._send({"type": "http.response.body", "body": payload, "more_body": more})
        except TimeoutError:
            raise ClientGone from None
        self._last_s = asyncio.get_running_loop().time()

    async def news(self, listener: Listener) -> list[Delta]:
        """What the engine made next; meanwhile, the place in line, and pings from the first step on."""
        while True:
            place = self._place()
            if place is None:
                until_s = self._last_s + self._pace.ping_s
            else:
                await self.write(place)
                until_s = asyncio.get_running_loop().time() + self._pace.queue_s
            try:
                # In no variable: it knows its task, and the task of a client that left knows this frame. The two would
                # keep each other and the whole request, until somebody looks for cycles.
                async with asyncio.timeout_at(until_s):
                    return await listener.take()
            except TimeoutError:
                await self.write(PING if place is None else b"")


async def stream(answer: Answer, listener: Listener, send: Send, pace: Pace, place: Callable[[], bytes | None]) -> None:
    """Writes one answer as it comes. Raises ClientGone when nobody reads it; other failures are told in the stream.

    `place` is the comment for one that waits in line (it may be empty), and None once it does not.
    """
    writer = _Writer(send, pace, place, is_stamped=answer.job.include_timestamps)
    await writer.start()
    try:
        await writer.write(b"".join(map(writer.event, answer.opening())))
        while not listener.is_done:
            deltas = await writer.news(listener)
            chunks = [writer.event(chunk, delta.made_s) for delta in deltas for chunk in answer.chunks(delta)]
            await writer.write(b"".join(chunks))
            raise_failure(deltas)
        usage = writer.event(answer.usage_chunk()) if answer.job.include_usage else b""
        await writer.write(usage + DONE, more=False)
    except ClientGone:
        raise
    except Exception as error:
        if not isinstance(error, ChairliftError):
            log.exception("request %s: its stream failed", answer.job.id)
        await writer.write(writer.event(error_body(error)) + DONE, more=False)


async def collect(answer: Answer, listener: Listener) -> dict[str, object]:
    """The whole answer, once every choice has ended. Raises what any of them failed with."""
    whole = [Delta(i) for i in range(len(answer.choices))]
    while not listener.is_done:
        deltas = await listener.take()
        raise_failure(deltas)
        for delta in deltas:
            whole[delta.index].add(delta)
    return answer.whole(whole)
