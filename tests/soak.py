"""A soak: 30 mixed clients against a real server with too little memory for them, then a reckoning.

    alone     every case is asked once on the quiet server: what its answer must be
    storm     long, short, cancelled, malformed, disconnecting, slow, several keys, secrets: all at once
    quiet     nothing may be left: blocks, requests, sockets, memory; the same questions get the same answers
    SIGTERM   with an answer under way: it is finished, and the exit status is 0

Prints one line of JSON: what was tried, and what was lost. Exit status 1 when anything was.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faults
from process import Server, serving
from soak_cases import (
    BODY_LIMIT,
    GARBAGE,
    HUGE_BYTES,
    MALFORMED,
    TEXT,
    Case,
    Malformed,
    answer_of,
    big_case,
    huge_prompt,
    make_cases,
    parse_stream,
    secret_case,
    text_of,
)
from tiny import tiny_model
from wire import Reply, Wire, exchange, request_bytes

KEYS = ("first-key-of-the-soak", "second-key-of-the-soak", "third-key-of-the-soak")
FLAGS = (
    "--max-model-len", "512", "--max-num-seqs", "6", "--max-queue", "8", "--max-num-batched-tokens", "128",
    "--body-limit-bytes", str(BODY_LIMIT), "--drain-seconds", "60",
    *(word for key in KEYS for word in ("--api-key", key)),
)  # fmt: skip
POOL_TOKENS = 640
"""A fifth of what six full requests need: preemptions must happen."""
INTENDED = frozenset({"queue_full", "unavailable"})
"""Codes of a 503 that says "later"; any other 5xx is lost."""
TURN_S = 120
"""Nothing that a client does may take longer."""
WARMING = 6
"""Bodies of 20 MB before the storm: what the allocator keeps of such is no growth."""
MAX_GROWTH_MIB = 64
"""Memory that may be added after the first half, and kept: again what the allocator keeps, by chance, of bodies of
20 MB. A leak of these, or of thousands of requests, is more."""
MAX_MORE = 2
"""Descriptors, since connections of our own may still be closing; threads, since workers are made when first needed."""
MAX_SHOWN = 20


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


# -- the reckoning ----------------------------------------------------------------------------------------------------


async def alone(asking: Asking, cases: Sequence[Case]) -> list[Any]:
    """What each case says on a quiet server and with a cold cache."""
    return [
        await asking.answer(case, KEYS[0], is_streamed=bool(i % 2), cache_salt=f"alone-{i}")
        for i, case in enumerate(cases)
    ]


async def come_to_rest(server: Server, tally: Tally) -> None:
    """Nothing runs, nothing waits, no block is held; and a second later, when the engine has counted them, it lives."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    left: dict[str, float] = {}
    for _ in range(200):
        left = {name: await asyncio.to_thread(server.metric, name) for name in names}
        if not any(left.values()):
            break
        await asyncio.sleep(0.05)
    tally.check(not any(left.values()), f"left behind: {left}")
    await asyncio.sleep(1.5)
    tally.check(server.process.poll() is None, "the server ended")


async def check_secrets(asking: Asking, seconds: float) -> int:
    """No secret in another's answer; each answer is what its request gets alone. The number of those asked again."""
    tally = asking.tally
    for own, text in [("", text) for text in tally.texts] + [(s, text_of(a)) for s, a in tally.secrets.items() if a]:
        found = set(re.findall(r"(?=([0-9a-f]{10}))", text)) & tally.secrets.keys() - {own}
        tally.check(not found, f"the secrets {found} in the answer to {own or 'another request'}: {text!r}")
    end_s, num_repeated = time.monotonic() + seconds, 0
    for secret, answer in tally.secrets.items():
        if answer is None:
            continue
        if time.monotonic() > end_s:
            break
        again = await asking.answer(secret_case(secret), KEYS[0], is_streamed=False, cache_salt=secret)
        tally.check(again == answer, f"the request with {secret} said {answer!r}, alone {again!r}")
        num_repeated += 1
    return num_repeated


class Watch:
    """Samples the process's memory while the storm blows."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._samples: list[int] = []

    async def run(self) -> None:
        while True:
            self._samples.append(self._server.resident_bytes())
            await asyncio.sleep(0.25)

    @property
    def figures(self) -> dict[str, int]:
        """MiB: what was usual in the first and in the second half, the most, and what is left at rest."""
        half = len(self._samples) // 2
        now = self._server.resident_bytes()
        usual = [statistics.median_low(part) for part in (self._samples[:half], self._samples[half:])]
        named = {"first_half": usual[0], "second_half": usual[1], "peak": max(self._samples), "at_rest": now}
        return {name: num_bytes >> 20 for name, num_bytes in named.items()}


@contextmanager
def polling(port: int) -> Iterator[dict[str, list[float]]]:
    """Times /health, /live and /metrics for as long as the block lasts; filled at its end."""
    times: dict[str, list[float]] = {}
    command = [sys.executable, str(Path(__file__).with_name("poller.py")), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield times
        finally:
            output, _ = process.communicate()
        times |= json.loads(output)


def latency(times: Sequence[float]) -> dict[str, float]:
    """Milliseconds: median, 99th percentile, maximum."""
    cuts = statistics.quantiles(times, n=100, method="inclusive")
    return {"p50": round(cuts[49], 1), "p99": round(cuts[98], 1), "max": round(max(times), 1), "count": len(times)}


class Soak:
    """One soak of one server, phase by phase; `report` says how far it came."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options
        self._tally = Tally()
        self._asking = Asking(server.port, self._tally)
        self._figures: dict[str, Any] = {}
        self._cases: list[Case] = []
        self._expected: list[tuple[Case, Any]] = []

    async def run(self) -> None:
        """All phases; a phase that fails is a loss and the last one."""
        for phase in (self._alone, self._storm, self._quiet, self._count, self._drain):
            tell(phase.__name__.strip("_"))
            try:
                await phase()
            except Exception as error:
                self._tally.lose(f"{phase.__name__.strip('_')}: {type(error).__name__}: {error}")
                tell("".join(self._server.lines[-50:]))
                return

    @property
    def report(self) -> dict[str, Any]:
        """What was tried and what was lost."""
        tally, options = self._tally, self._options
        return {
            "soak": "model",
            "model": "tiny" if options.tiny else options.model,
            "seed": options.seed,
            "seconds": options.seconds,
            "clients": options.clients,
            "tried": dict(sorted(tally.counts.items())),
            **self._figures,
            "lost": tally.lost[:MAX_SHOWN],
            "num_lost": len(tally.lost),
        }

    async def _alone(self) -> None:
        choose = random.Random(self._options.seed)
        self._cases = [*make_cases(choose, self._options.cases), big_case(choose)]
        self._expected = list(zip(self._cases, await alone(self._asking, self._cases), strict=True))

    async def _storm(self) -> None:
        server, options = self._server, self._options
        before = (server.num_descriptors(), server.num_threads())
        storm, watch = Storm(server.port, self._tally, self._expected), Watch(server)
        await asyncio.gather(*(storm.refuse_huge() for _ in range(WARMING)))
        with polling(server.port) as times:
            watching = asyncio.create_task(watch.run())
            await storm.run(options.seconds, options.clients, options.seed)
            watching.cancel()
        await come_to_rest(server, self._tally)
        after = (server.num_descriptors(), server.num_threads())
        is_tidy = all(now <= then + MAX_MORE for then, now in zip(before, after, strict=True))
        self._tally.check(is_tidy, f"descriptors and threads: {before} before, {after} after")
        memory = self._figures["resident_mib"] = watch.figures
        is_flat = max(memory["second_half"], memory["at_rest"]) <= memory["first_half"] + MAX_GROWTH_MIB
        self._tally.check(is_flat, f"memory grew: {memory}")
        small = self._figures["endpoint_ms"] = {path: latency(of_path) for path, of_path in times.items()}
        for path, figures in small.items():
            self._tally.check(figures["p99"] <= options.p99_ms, f"{path} took {figures['p99']} ms at p99")

    async def _quiet(self) -> None:
        """The same questions once more, those with secrets too."""
        for bad in MALFORMED:
            await self._asking.refuse(bad, KEYS[0])
        num_repeated = await check_secrets(self._asking, self._options.seconds / 3)
        again = await alone(self._asking, self._cases[:5])
        self._tally.check(again == [a for _, a in self._expected[:5]], "other answers after the storm than before it")
        await come_to_rest(self._server, self._tally)
        said = sum(secret in text_of(answer) for secret, answer in self._tally.secrets.items() if answer)
        asked = len(self._tally.secrets)
        self._figures["secrets"] = {"asked": asked, "said_to_their_owner": said, "asked_again": num_repeated}

    async def _count(self) -> None:
        names = ("num_preemptions", "generation_tokens", "requests_cancelled", "requests_failed", "prefix_cache_hits")
        counts = {name: int(self._server.metric(f"{name}_total")) for name in names}
        self._tally.check(counts["num_preemptions"] > 0, "nothing was preempted: the pool was not tight")
        self._tally.check(counts["requests_failed"] == 0, f"{counts['requests_failed']} requests failed")
        self._figures["counted"] = counts
        if len(self._tally.refusal_ms) > 1:
            self._figures["refusal_ms"] = latency(self._tally.refusal_ms)

    async def _drain(self) -> None:
        """SIGTERM in the middle of an answer."""
        case, expected = self._expected[-1]
        wire = await Wire.connect(self._server.port)
        await wire.send(self._asking.post(case, stream=True))
        await wire.head()
        pieces = wire.pieces()
        body = await anext(pieces)
        status = asyncio.create_task(asyncio.to_thread(self._server.end, 90.0))
        body += b"".join([piece async for piece in pieces])
        wire.close()
        self._tally.check(answer_of(case, parse_stream(body)) == expected, "SIGTERM changed an answer under way")
        self._tally.check(await status == 0, f"exit status {self._server.process.returncode} after SIGTERM")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The report of one soak."""
    with tempfile.TemporaryDirectory() as directory:
        model, kv_bytes = options.model, 23_040
        if options.tiny:
            model, kv_bytes = tiny_model(Path(directory) / "tiny.gguf"), 2 * 2 * 2 * 16 * 2
        with serving(model, "--kv-memory", str(POOL_TOKENS * kv_bytes), *FLAGS) as server:
            soak = Soak(server, options)
            asyncio.run(soak.run())
            return soak.report


def run_faults(options: argparse.Namespace) -> dict[str, Any]:
    """The report of fault campaigns, one after the other, each with a seed of its own."""
    end_s, tried, lost = time.monotonic() + options.seconds, Counter[str](), list[str]()
    for seed in itertools.count(options.seed):
        campaign = faults.campaign(seed=seed)
        lost += [f"seed {seed}: {what}" for what in campaign.lost]
        tried.update(campaign.kinds)
        tried.update(
            campaigns=1,
            steps=campaign.steps,
            failed_steps=campaign.failed_steps,
            preemptions=campaign.preemptions,
        )
        if time.monotonic() > end_s:
            break
    return {
        "soak": "faults",
        "seed": options.seed,
        "seconds": options.seconds,
        "tried": dict(sorted(tried.items())),
        "lost": lost[:MAX_SHOWN],
        "num_lost": len(lost),
    }


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="30 mixed clients on a server with too little memory for them.")
    parser.add_argument("--seconds", type=float, default=120, help="length of the storm (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (%(default)s)")
    parser.add_argument("--clients", type=int, default=30, help="at once (%(default)s)")
    parser.add_argument("--cases", type=int, default=40, help="requests with a known answer (%(default)s)")
    parser.add_argument("--model", default="smollm2", help="what to serve (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="serve a tiny random model")
    parser.add_argument("--faults", action="store_true", help="break things in the engine's own process instead")
    parser.add_argument("--p99-ms", type=float, default=200, help="bound of /health, /live, /metrics (%(default)s)")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options()
    if options.faults:
        logging.getLogger("chairlift").setLevel(
            logging.CRITICAL + 1
        )  # thousands of injected faults, each with its stack
    report = run_faults(options) if options.faults else run(options)
    print(json.dumps(report), flush=True)
    sys.exit(1 if report["num_lost"] else 0)


if __name__ == "__main__":
    main()
