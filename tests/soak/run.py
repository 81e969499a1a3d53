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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from soak.cases import BODY_LIMIT, MALFORMED, Case, answer_of, big_case, make_cases, parse_stream, secret_case, text_of
from soak.clients import KEYS, Asking, Storm, Tally
from support import fault_injection as faults
from support.raw_http import Wire
from support.server_process import Server, serving
from support.tiny_gguf import tiny_model

FLAGS = (
    "--max-model-len", "512", "--max-num-seqs", "6", "--max-queue", "8", "--max-num-batched-tokens", "128",
    "--body-limit-bytes", str(BODY_LIMIT), "--drain-seconds", "60",
    *(word for key in KEYS for word in ("--api-key", key)),
)  # fmt: skip
POOL_TOKENS = 640
"""A fifth of what six full requests need: preemptions must happen."""
WARMING = 6
"""Bodies of 20 MB before the storm: what the first of such leave behind for good is no growth."""
MAX_GROWTH_MIB = 64
"""Memory that may be added after the first half, and kept: two bodies of 20 MB under way, and some. A leak of
such, or of thousands of requests, is more."""
MAX_MORE = 2
"""Descriptors, since connections of our own may still be closing; threads, since workers are made when first needed."""
MAX_SHOWN = 20


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
    command = [sys.executable, str(Path(__file__).with_name("latency_poller.py")), str(port)]
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
