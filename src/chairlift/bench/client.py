"""The measuring client: one request in, one Sample out. It never retries, never follows, and never queues on its own.

aiohttp rather than httpx: see docs/log.md for the processor time of each per event; a client that is slower than its
server measures itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from chairlift.bench.dialect import Answer, Api, Ask, Prompt, ServerKind, Target, error_text
from chairlift.bench.sample import Failure, Sample
from chairlift.bench.wire import BadStream, LineParser, Parser, SseParser
from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from chairlift.bench.live import Shared

__all__ = ["Api", "BenchError", "Client", "Clock", "Prompt", "ServerKind", "Target", "connect", "discover"]

CONNECT_S = 10.0
MAX_BODY_BYTES = 2**24


@dataclass(frozen=True)
class Clock:
    """Seconds since the run's start, and where wall clocks stood then. Tests pass clocks of their own."""

    now: Callable[[], float] = time.perf_counter
    wall: Callable[[], float] = time.time
    start_s: float = field(init=False)
    wall_start_s: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_s", self.now())
        object.__setattr__(self, "wall_start_s", self.wall())

    def now_s(self) -> float:
        """Seconds since the start."""
        return self.now() - self.start_s


class BenchError(ChairliftError):
    """A server that cannot be measured at all."""

    code = "bench_error"


class Client:
    """Asks one target. `async with`; as many requests at once as are asked for, each on a new connection, whose opening
    is in its times.

    `timeout_s` bounds one whole request. `accepts_gzip` asks as browsers and most libraries do; without it nothing is
    compressed on the way. `connector` replaces TCP in tests.
    """

    def __init__(
        self,
        target: Target,
        *,
        clock: Clock | None = None,
        timeout_s: float = 600.0,
        trust_env: bool = False,
        accepts_gzip: bool = False,
        connector: aiohttp.BaseConnector | None = None,
    ) -> None:
        self.target = target
        self.card: dict[str, Any] = {}
        """What Chairlift says of itself in /v1/models, once `discover` has asked; empty for others."""
        self.clock = clock or Clock()
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        self._trust_env = trust_env
        self._encodings = "gzip, deflate" if accepts_gzip else "identity"
        self._connector = connector
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        # limit=0: a pool with a limit would be a queue that nobody sees. force_close: llama-server closes after a
        # stream without a word, and a request on that connection would fail.
        connector = self._connector or aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            trust_env=self._trust_env,
            headers={"accept-encoding": self._encodings, "user-agent": "chairlift-bench"} | self.target.headers,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def ceiling(self) -> float | None:
        """Tokens/s that the server's memory allows one stream: bandwidth / bytes a token reads; None where not told."""
        told = self.card.get("one_stream_ceiling_tokens_per_s")
        return float(told) if isinstance(told, int | float) and told > 0 else None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The open session, for what is no request for an answer: models, metrics, health."""
        assert self._session is not None, "use `async with`"
        return self._session

    async def ask(
        self,
        prompt: Prompt,
        max_tokens: int,
        *,
        is_streamed: bool = True,
        is_exact: bool = True,
        has_stamps: bool = False,
        index: int = 0,
        scheduled_s: float | None = None,
    ) -> Sample:
        """One request; whatever happens is in the Sample. `scheduled_s` is when it was due: now, if None.

        `is_exact` asks for exactly `max_tokens` where the server can be told so; `has_stamps` for send stamps.
        """
        ask = Ask(prompt, max_tokens, is_streamed, is_exact, has_stamps)
        return await self.send(ask, index=index, scheduled_s=scheduled_s)

    async def send(self, ask: Ask, *, index: int = 0, scheduled_s: float | None = None) -> Sample:
        """As `ask`, with all of the request in one value."""
        payload = json.dumps(ask.body(self.target)).encode()  # before the clock: making it is not the server's time
        started_s = self.clock.now_s()
        due_s = started_s if scheduled_s is None else scheduled_s
        answer = Answer(self.target.api, self.clock.wall_start_s)
        blank = Sample(index, due_s, started_s, started_s, ask.is_streamed)
        ended_s: float | None = None
        try:
            ended_s, outcome = await self._exchange(payload, ask, answer)
        except (TimeoutError, aiohttp.ClientError, OSError, BadStream) as error:
            outcome = _outcome(error, ask)
        return _filled(blank, answer, self.clock.now_s() if ended_s is None else ended_s, outcome)

    async def _exchange(self, payload: bytes, ask: Ask, answer: Answer) -> tuple[float | None, _Outcome]:
        url = self.target.base + self.target.api.path
        headers = {"content-type": "application/json"} | ({"x-request-id": ask.request_id} if ask.request_id else {})
        async with self.session.post(url, data=payload, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                return None, await _refusal(response)
            answer.content_encoding = response.headers.get("content-encoding", "")
            if ask.is_streamed:
                return await self._read_stream(response, answer)
            return await self._read_whole(response, answer)

    async def _read_stream(self, response: aiohttp.ClientResponse, answer: Answer) -> tuple[float | None, _Outcome]:
        """Reads to the end of the connection's answer; it is over for its reader at `[DONE]`, where there is one."""
        parser: Parser = LineParser() if self.target.api is Api.OLLAMA else SseParser()
        done_s = None
        async for data in response.content.iter_any():
            at_s = self.clock.now_s()
            for message in parser.feed(data):
                if done_s is not None:
                    break
                if message.data is None:
                    answer.ping(at_s, message.num_bytes)
                elif message.data == b"[DONE]":
                    done_s = at_s
                    answer.done(at_s, message.num_bytes)
                elif message.is_error:
                    answer.failed(message.data, at_s, message.num_bytes)
                else:
                    answer.chunk(_parsed(message.data), at_s, message.num_bytes)
        if answer.error is not None:
            return done_s, _Outcome(Failure.ERROR_EVENT, answer.error)
        if answer.is_complete:
            return done_s, _Outcome()
        if not answer.events:
            return None, _Outcome(Failure.BAD_STREAM, f"no events in {response.content_type}")
        return None, _Outcome(Failure.CLOSED_EARLY, f"after {len(answer.events)} events, without an end")

    async def _read_whole(self, response: aiohttp.ClientResponse, answer: Answer) -> tuple[float | None, _Outcome]:
        body = await _body(response)
        ended_s = self.clock.now_s()
        answer.whole(_parsed(body))
        if answer.error is not None:
            return ended_s, _Outcome(Failure.ERROR_EVENT, answer.error)
        if not answer.is_complete:
            return ended_s, _Outcome(Failure.BAD_ANSWER, "no finish_reason")
        return ended_s, _Outcome()

    async def get(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers (names in lower case) of a GET. Raises BenchError when nobody answers."""
        try:
            async with self.session.get(self.target.base + path, allow_redirects=False) as response:
                headers = {name.lower(): value for name, value in response.headers.items()}
                return response.status, await _body(response), headers
        except (TimeoutError, aiohttp.ClientError, OSError, BadStream) as error:
            what = error_text(str(error) or type(error).__name__)
            raise BenchError(f"{self.target.base} does not answer: {what}") from None


async def _body(response: aiohttp.ClientResponse) -> bytes:
    """All of it. Raises BadStream beyond MAX_BODY_BYTES, which `response.read` would let in."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > MAX_BODY_BYTES:
            raise BadStream(f"an answer of more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


# -- what went wrong --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Outcome:
    failure: Failure | None = None
    detail: str = ""
    retry_after_s: float | None = None


def _outcome(error: Exception, ask: Ask) -> _Outcome:
    """The cause behind an exception; order matters, since some are of several kinds."""
    detail = error_text(str(error) or type(error).__name__)
    if isinstance(error, BadStream):
        return _Outcome(Failure.BAD_STREAM if ask.is_streamed else Failure.BAD_ANSWER, detail)
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.InvalidURL):
        return _Outcome(Failure.CONNECT, detail)
    if isinstance(error, TimeoutError):
        return _Outcome(Failure.TIMEOUT, detail)
    if isinstance(error, aiohttp.ClientResponseError):
        return _Outcome(Failure.BAD_ANSWER, detail)
    return _Outcome(Failure.CLOSED_EARLY, detail)


async def _refusal(response: aiohttp.ClientResponse) -> _Outcome:
    """A status that is not 200: what the server said, and when to come back."""
    body = await _body(response)
    try:
        value = json.loads(body)
    except ValueError:
        value = body.decode(errors="replace")
    error = value.get("error") if isinstance(value, dict) else None
    said = response.headers.get("retry-after") or (error.get("retry_after_s") if isinstance(error, dict) else None)
    return _Outcome(Failure.of_status(response.status), error_text(value), _retry_after_s(said))


def _retry_after_s(said: Any) -> float | None:
    """Seconds of a Retry-After: a number, or a date."""
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


def _filled(blank: Sample, answer: Answer, ended_s: float, outcome: _Outcome) -> Sample:
    return replace(
        blank,
        ended_s=ended_s,
        events=tuple(answer.events),
        num_prompt_tokens=answer.num_prompt_tokens,
        num_cached_tokens=answer.num_cached_tokens,
        num_output_tokens=answer.num_output_tokens,
        finish_reason=answer.finish_reason,
        failure=outcome.failure,
        failure_detail=outcome.detail,
        retry_after_s=outcome.retry_after_s,
        text=answer.text,
        content_encoding=answer.content_encoding,
    )


# -- who is there -----------------------------------------------------------------------------------------------------

_OWNERS = {
    "chairlift": ServerKind.CHAIRLIFT,
    "vllm": ServerKind.VLLM,
    "llamacpp": ServerKind.LLAMA_SERVER,
    "library": ServerKind.OLLAMA,
}


@asynccontextmanager
async def connect(
    url: str, shared: Shared, clock: Clock | None = None, *, accepts_gzip: bool = False
) -> AsyncIterator[Client]:
    """A client by the options of the command line, its server known. Raises BenchError as `discover` does."""
    if not url.startswith(("http://", "https://")):
        raise BenchError(f"{url} is no address of a server", hint=f"http://{url} for example")
    api = Api(f"openai-{shared.api}") if shared.api in ("chat", "completions") else Api.CHAT
    target = Target(url, shared.model or "", Api.OLLAMA if shared.api == "ollama" else api, shared.api_key)
    async with Client(target, clock=clock, timeout_s=shared.timeout_s, accepts_gzip=accepts_gzip) as client:
        await discover(client)
        model = client.card.get("model")
        if shared.api == "auto" and isinstance(model, dict) and model.get("chat_template") is False:
            client.target = replace(client.target, api=Api.COMPLETIONS)
        yield client


async def discover(client: Client) -> Target:
    """Completes the client's target: its kind by what its endpoints say, and the first model listed if none was named.

    Raises BenchError when nobody answers, or when there is no model.
    """
    target = client.target
    status, body, _ = await client.get("/v1/models")
    if status in (401, 403):
        raise BenchError(f"{target.base} wants a key (status {status})", hint="give it with --api-key")
    models = _models(body) if status == 200 else []
    kind = next((_OWNERS[each["owned_by"]] for each in models if each["owned_by"] in _OWNERS), ServerKind.OTHER)
    if kind is ServerKind.OTHER:
        kind = await _other_kind(client)
    model = target.model or next((each["id"] for each in models), "")
    if not model:
        raise BenchError(f"{target.base}/v1/models lists no model (status {status})", hint="name one with --model")
    client.target = replace(target, kind=kind, model=model)
    client.card = next((each["card"] for each in models if each["id"] == model), {})
    return client.target


async def _other_kind(client: Client) -> ServerKind:
    """Ollama names the owners of models after people: it is known by its version."""
    status, body, _ = await client.get("/api/version")
    try:
        is_ollama = status == 200 and "version" in json.loads(body)
    except (ValueError, TypeError):
        is_ollama = False
    return ServerKind.OLLAMA if is_ollama else ServerKind.OTHER


def _models(body: bytes) -> list[dict[str, Any]]:
    """Each model of /v1/models: `id`, `owned_by`, and Chairlift's facts as `card`."""
    try:
        return [_model(each) for each in json.loads(body)["data"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _model(said: dict[str, Any]) -> dict[str, Any]:
    card = said.get("chairlift")
    return {
        "id": str(said["id"]),
        "owned_by": str(said.get("owned_by")),
        "card": card if isinstance(card, dict) else {},
    }
