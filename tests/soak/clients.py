"""The clients of a soak: each does one thing after the other, drawn at random, and knows what must come of it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from soak.cases import (
    GARBAGE,
    HUGE_BYTES,
    MALFORMED,
    TEXT,
    Case,
    Malformed,
    answer_of,
    huge_prompt,
    parse_stream,
    secret_case,
    text_of,
)
from support.raw_http import Reply, Wire, exchange, request_bytes

KEYS = ("first-key-of-the-soak", "second-key-of-the-soak", "third-key-of-the-soak")
INTENDED = frozenset({"queue_full", "unavailable"})
"""Codes of a 503 that says "later"; any other 5xx is lost."""
TURN_S = 120
"""Nothing that a client does may take longer."""


@dataclass
class Tally:
    """What was tried, and what went wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    refusal_ms: list[float] = field(default_factory=list)
    secrets: dict[str, Any] = field(default_factory=dict)
    """By secret: the answer to its request, None while there is none."""
    texts: list[str] = field(default_factory=list)
    """Of every other answer."""

    def lose(self, what: str) -> None:
        self.lost.append(what)
        print(f"LOST {what}", file=sys.stderr, flush=True)

    def check(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.lose(what)


class Refused(Exception):
    """The server said "later", as it may."""


class Asking:
    """How a client asks, and what it expects."""

    def __init__(self, port: int, tally: Tally) -> None:
        self.port = port
        self.tally = tally

    def post(self, case: Case, key: str = KEYS[0], **changes: Any) -> bytes:
        return request_bytes("POST", case.path, case.request(**changes), {"authorization": f"Bearer {key}"})

    async def answer(self, case: Case, key: str, *, is_streamed: bool, is_slow: bool = False, **changes: Any) -> Any:
        """The answer to a case. Raises Refused for an intended 503, ValueError for anything else but a 200."""
        start = time.perf_counter()
        slow: dict[str, Any] = {"buffer_bytes": 2048, "pause_s": 0.005} if is_slow else {}
        reply = await exchange(self.port, self.post(case, key, stream=is_streamed, **changes), **slow)
        if reply.status == 503:
            self._take_refusal(reply, start)
        if reply.status != 200:
            raise ValueError(f"status {reply.status}: {reply.body[:300]!r}")
        return answer_of(case, parse_stream(reply.body) if is_streamed else [reply.json])

    def _take_refusal(self, reply: Reply, start: float) -> None:
        code = reply.json["error"]["code"]
        if code not in INTENDED or not 1 <= int(reply.headers["retry-after"]) <= 60:
            raise ValueError(f"a 503 that is not intended: {reply.headers} {reply.body[:300]!r}")
        self.tally.refusal_ms.append(1000 * (time.perf_counter() - start))
        raise Refused

    async def refuse(self, bad: Malformed, key: str) -> None:
        """A wrong request gets its 4xx, or is not even read while the queue is full. Raises Refused then."""
        start = time.perf_counter()
        headers = {"authorization": f"Bearer {key}", **dict(bad.headers)}
        try:
            reply = await exchange(self.port, request_bytes(bad.method, bad.path, bad.body, headers))
        except (ConnectionError, EOFError):
            # A server that refuses a body before it has read it may close before we have written it.
            if bad.status != 413 and len(bad.body) < HUGE_BYTES // 2:
                raise
            return
        if reply.status == 503:
            self._take_refusal(reply, start)
        self.tally.check(bad.is_right(reply), f"{bad.body[:200]!r} got {reply.status} {reply.body[:200]!r}")


class Storm(Asking):
    """The clients. Each does one thing after the other, drawn at random, until the time is over."""

    def __init__(self, port: int, tally: Tally, expected: Sequence[tuple[Case, Any]]) -> None:
        super().__init__(port, tally)
        self._expected = expected
        self._too_long = Malformed(400, Case(TEXT, {"prompt": huge_prompt(), "max_tokens": 1}).request(), TEXT)
        self._kinds: dict[str, tuple[int, Callable[[random.Random, str], Awaitable[None]]]] = {
            "whole": (20, self._whole),
            "streamed": (20, self._streamed),
            "slow": (3, self._slow),
            "left": (16, self._leave),
            "upload cut": (6, self._cut_upload),
            "malformed": (14, self._malformed),
            "garbage": (2, self._garbage),
            "huge": (1, self._huge),
            "secret": (24, self._secret),
        }

    async def run(self, seconds: float, num_clients: int, seed: int) -> None:
        end_s = time.monotonic() + seconds
        await asyncio.gather(*(self._client(random.Random(f"{seed}-{i}"), i, end_s) for i in range(num_clients)))

    async def _client(self, choose: random.Random, number: int, end_s: float) -> None:
        names = list(self._kinds)
        weights = [weight for weight, _ in self._kinds.values()]
        while time.monotonic() < end_s:
            (name,) = choose.choices(names, weights)
            self.tally.counts[name] += 1
            try:
                async with asyncio.timeout(TURN_S):
                    await self._kinds[name][1](choose, KEYS[number % len(KEYS)])
            except Refused:
                self.tally.counts["refused"] += 1
                await asyncio.sleep(choose.uniform(0.1, 1.0))  # less than it was told: the queue shall stay full
            except Exception as error:
                self.tally.lose(f"{name}: {type(error).__name__}: {error}")

    async def _whole(self, choose: random.Random, key: str) -> None:
        await self._compare(*choose.choice(self._expected), key, is_streamed=False)

    async def _streamed(self, choose: random.Random, key: str) -> None:
        await self._compare(*choose.choice(self._expected), key, is_streamed=True)

    async def _slow(self, choose: random.Random, key: str) -> None:
        await self._compare(*self._expected[-1], key, is_streamed=True, is_slow=True)

    async def _compare(self, case: Case, expected: Any, key: str, **how: Any) -> None:
        answer = await self.answer(case, key, **how)
        self.tally.counts["compared"] += 1
        self.tally.texts.append(text_of(answer))
        self.tally.check(answer == expected, f"{case.request()!r} said {answer!r}, alone {expected!r}")

    async def _leave(self, choose: random.Random, key: str) -> None:
        case = choose.choice(self._expected)[0]
        wire = await Wire.connect(self.port)
        await wire.send(self.post(case, key, stream=choose.random() < 0.6))
        await asyncio.sleep(choose.choice((0.0, 0.001, choose.expovariate(4.0), choose.expovariate(1.0))))
        choose.choice((wire.close, wire.reset))()

    async def _cut_upload(self, choose: random.Random, key: str) -> None:
        request = self.post(choose.choice(self._expected)[0], key)
        wire = await Wire.connect(self.port)
        await wire.send(request[: choose.randrange(len(request))])
        await asyncio.sleep(choose.choice((0.0, 0.05, 0.5)))
        choose.choice((wire.close, wire.reset))()

    async def _malformed(self, choose: random.Random, key: str) -> None:
        await self.refuse(choose.choice(MALFORMED), key)

    async def _garbage(self, choose: random.Random, _: str) -> None:
        with contextlib.suppress(ConnectionError, EOFError, asyncio.IncompleteReadError):
            async with asyncio.timeout(2):
                await exchange(self.port, choose.choice(GARBAGE))

    async def _huge(self, choose: random.Random, key: str) -> None:
        await self.refuse_huge(key)

    async def refuse_huge(self, key: str = KEYS[0]) -> None:
        """A prompt of 20 MB is refused for its length."""
        await self.refuse(self._too_long, key)

    async def _secret(self, choose: random.Random, key: str) -> None:
        secret = f"{choose.getrandbits(40):010x}"
        self.tally.secrets[secret] = None
        self.tally.secrets[secret] = await self.answer(secret_case(secret), key, is_streamed=choose.random() < 0.5)
