"""The client that measures: one request in, one Sample out. It never retries, follows redirects or queues.

aiohttp rather than httpx: docs/log.md has the processor time of each for one event. A client that is slower than its
server measures itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, Self

import aiohttp

from chairlift.bench.client.dialect import AnswerParser, error_text, json_or_text
from chairlift.bench.client.sample import EventKind, Failure, Sample
from chairlift.bench.client.target import Api, GenerationRequest, Target
from chairlift.bench.client.wire import BadStream, LineParser, SseParser
from chairlift.errors import ChairliftError

CONNECT_S = 10.0
MAX_BODY_BYTES = 2**24


class Clock:
    """Seconds since the start of the run, and the wall clock's time at that moment."""

    def __init__(self, now: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time) -> None:
        self._now = now
        self._start_s, self.wall_start_s = now(), wall()

    def now_s(self) -> float:
        """Seconds since the start of the run."""
        return self._now() - self._start_s


class BenchError(ChairliftError):
    """A server that cannot be measured."""

    code = "bench_error"


class Client:
    """Asks one server; use it with `async with`. Every request has a new connection, and its opening is in its times.

    The number of requests at once has no limit. `timeout_s` bounds one whole request. With `accepts_gzip` a proxy may
    compress the answer, as it does for browsers and most libraries. `connector` replaces TCP in tests.
    """

    def __init__(
        self,
        target: Target,
        *,
        clock: Clock | None = None,
        timeout_s: float = 600.0,
        accepts_gzip: bool = False,
        connector: aiohttp.BaseConnector | None = None,
    ) -> None:
        self.target = target
        self.clock = clock or Clock()
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        self._encodings = "gzip, deflate" if accepts_gzip else "identity"
        self._connector = connector

    async def __aenter__(self) -> Self:
        # limit=0: a limited pool is a queue that no figure shows. force_close: llama-server closes the connection after
        # a stream without saying so, and the next request on it would fail.
        connector = self._connector or aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            headers={"accept-encoding": self._encodings, "user-agent": "chairlift-bench"} | self.target.headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, request: GenerationRequest, *, index: int = 0, scheduled_s: float | None = None) -> Sample:
        """Sends one request. The Sample says what happened, failures included.

        `scheduled_s` is when the request was due on the run's clock; None: now.
        """
        payload = json.dumps(request.body(self.target)).encode()  # before the clock is read: it is not server time
        started_s = self.clock.now_s()
        due_s = started_s if scheduled_s is None else scheduled_s
        answer = AnswerParser(self.target.api, self.clock.wall_start_s)
        blank = Sample(index, due_s, started_s, started_s, request.is_streamed)
        try:
            outcome = await self._exchange(payload, request, answer)
        except (TimeoutError, aiohttp.ClientError, OSError, BadStream) as error:
            outcome = _outcome(error, request)
        return replace(
            blank,
            ended_s=self.clock.now_s() if outcome.ended_s is None else outcome.ended_s,
            events=tuple(answer.events),
            num_prompt_tokens=answer.num_prompt_tokens,
            num_cached_tokens=answer.num_cached_tokens,
            num_output_tokens=answer.num_output_tokens,
            finish_reason=answer.finish_reason,
            failure=outcome.failure,
            failure_detail=outcome.detail,
            retry_after_s=outcome.retry_after_s,
            content_encoding=answer.content_encoding,
        )

    async def _exchange(self, payload: bytes, request: GenerationRequest, answer: AnswerParser) -> _Outcome:
        url = self.target.base + self.target.api.path
        headers = {"content-type": "application/json"}
        if request.request_id:
            headers["x-request-id"] = request.request_id
        async with self._session.post(url, data=payload, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                return await _refusal(response)
            answer.content_encoding = response.headers.get("content-encoding", "")
            if request.is_streamed:
                return await self._read_stream(response, answer)
            return await self._read_whole(response, answer)

    async def _read_stream(self, response: aiohttp.ClientResponse, answer: AnswerParser) -> _Outcome:
        """Reads until the connection ends. The answer ends at `[DONE]`, if the server sends one."""
        parser = LineParser() if self.target.api is Api.OLLAMA else SseParser()
        done_s = None
        async for data in response.content.iter_any():
            at_s = self.clock.now_s()
            for message in parser.feed(data):
                if done_s is not None:
                    break
                if message.data is None:
                    answer.event(EventKind.PING, at_s, message.num_bytes)
                elif message.data == b"[DONE]":
                    done_s = at_s
                    answer.event(EventKind.DONE, at_s, message.num_bytes)
                elif message.is_error:
                    answer.failed(message.data, at_s, message.num_bytes)
                else:
                    answer.chunk(_parsed(message.data), at_s, message.num_bytes)
        if answer.error is not None:
            return _Outcome(Failure.ERROR_EVENT, answer.error, ended_s=done_s)
        if answer.is_complete:
            return _Outcome(ended_s=done_s)
        if not answer.events:
            return _Outcome(Failure.BAD_STREAM, f"no events in {response.content_type}")
        return _Outcome(Failure.CLOSED_EARLY, f"after {len(answer.events)} events, without an end")

    async def _read_whole(self, response: aiohttp.ClientResponse, answer: AnswerParser) -> _Outcome:
        body = await _body(response)
        ended_s = self.clock.now_s()
        answer.whole(_parsed(body))
        if answer.error is not None:
            return _Outcome(Failure.ERROR_EVENT, answer.error, ended_s=ended_s)
        if not answer.is_complete:
            return _Outcome(Failure.BAD_ANSWER, "no finish_reason", ended_s=ended_s)
        return _Outcome(ended_s=ended_s)

    async def get(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers (names in lower case) of a GET. Raises BenchError without an answer."""
        try:
            async with self._session.get(self.target.base + path, allow_redirects=False) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                return response.status, await _body(response), headers
        except (TimeoutError, aiohttp.ClientError, OSError, BadStream) as error:
            what = error_text(str(error) or type(error).__name__)
            raise BenchError(f"{self.target.base} does not answer: {what}") from None


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """The whole body. Raises BadStream beyond MAX_BODY_BYTES; `response.read` has no limit."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise BadStream(f"an answer of more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


@dataclass(frozen=True, slots=True)
class _Outcome:
    failure: Failure | None = None
    detail: str = ""
    retry_after_s: float | None = None
    ended_s: float | None = None  # None: the answer ends when its connection does


def _outcome(error: Exception, request: GenerationRequest) -> _Outcome:
    """The failure behind an exception. The order matters, since some exceptions are of several kinds."""
    detail = error_text(str(error) or type(error).__name__)
    if isinstance(error, BadStream):
        return _Outcome(Failure.BAD_STREAM if request.is_streamed else Failure.BAD_ANSWER, detail)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.InvalidURL):
        return _Outcome(Failure.CONNECT, detail)
    if isinstance(error, TimeoutError):
        return _Outcome(Failure.TIMEOUT, detail)
    if isinstance(error, aiohttp.ClientResponseError):
        return _Outcome(Failure.BAD_ANSWER, detail)
    return _Outcome(Failure.CLOSED_EARLY, detail)


async def _refusal(response: aiohttp.ClientResponse) -> _Outcome:
    """The failure of a status other than 200: the server's message and its Retry-After."""
    value = json_or_text(await _body(response))
    error = value.get("error") if isinstance(value, dict) else None
    said = response.headers.get("retry-after") or (error.get("retry_after_s") if isinstance(error, dict) else None)
    return _Outcome(Failure.of_status(response.status), error_text(value), _retry_after_s(said))


def _retry_after_s(said: Any) -> float | None:
    """Seconds of a Retry-After, which is a number or a date; None for anything else."""
    try:
        return float(said)
    except (TypeError, ValueError):
        pass
    try:
        return max(0.0, parsedate_to_datetime(str(said)).timestamp() - time.time())
    except ValueError:
        return None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise BadStream(f"no JSON: {data[:80]!r}") from None
