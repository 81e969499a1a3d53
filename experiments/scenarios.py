"""The experiments that need more than one command. Each function measures once and returns its tables.

page.py repeats them, merges the tables and writes them into docs/experiments.md.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from chairlift import config
from chairlift.bench.load.summary import stalls
from chairlift.bench.local.server import ObservedRequest
from chairlift.bench.report.report import Cell, Column, Table
from chairlift.bench.report.stats import percentile
from chairlift.errors import ChairliftError
from experiments.server import ExperimentServer, Setup, num_preemptions, started

_NO_LIMIT_MS = "60000"
"""A gap that no step reaches, so that only the number of tokens limits a step."""


# -- chunked prefill --------------------------------------------------------------------------------------------------

_TRADE = [
    Column("long prompt: TTFT", "s"),
    Column("running streams, gap: median", "ms"),
    Column("p95", "ms"),
    Column("longest", "ms"),
]


async def gap(setup: Setup) -> list[Table]:
    """--max-gap-ms: the time of a step while answers are streamed, with steps large enough for the limit to matter."""
    rows: list[list[Cell]] = []
    for limit in ("25", "50", "100", "400"):
        rows.append([limit, *await _beside(setup, "--max-num-batched-tokens", "512", "--max-gap-ms", limit)])
    return [Table("", [Column("--max-gap-ms"), *_TRADE], rows)]


async def chunks(setup: Setup) -> list[Table]:
    """--max-num-batched-tokens without the limit on time. In the last row the prompt is read in one piece."""
    rows: list[list[Cell]] = []
    for limit in (64, 128, 256, 512, 8192):
        flags = ("--max-num-batched-tokens", str(limit), "--max-gap-ms", _NO_LIMIT_MS)
        rows.append([f"{limit}" if limit < 8192 else "8192: not chunked", *await _beside(setup, *flags)])
    return [Table("", [Column("--max-num-batched-tokens", align="left"), *_TRADE], rows)]


async def _beside(setup: Setup, *flags: str) -> list[Cell]:
    """A long prompt is read while three streams are written."""
    async with started(setup, *flags) as server:
        requests = [server.request(setup.tokens(60), setup.tokens(500)) for _ in range(3)]
        requests.append(server.request(setup.tokens(2600), 8, at_s=0.5))
        *streams, long = await server.together(requests)
    return trade(streams, long)


def trade(streams: Sequence[ObservedRequest], long: ObservedRequest) -> list[Cell]:
    """TTFT of the long prompt in s, and median, p95 and longest in ms of the gaps in the streams meanwhile."""
    begin_s, ttft_s = long.sample.scheduled_s, long.sample.first_token_s or 0.0
    gaps = sorted(
        (after - before) * 1e3
        for stream in streams
        for before, after in pairwise(stream.sample.token_times)
        if after > begin_s and before < begin_s + ttft_s
    )
    if not gaps:
        return [ttft_s, None, None, None]
    return [ttft_s, median(gaps), percentile(gaps, 95), gaps[-1]]


# -- caches, threads, memory -----------------------------------------------------------------------------------------


async def prefix(setup: Setup) -> list[Table]:
    """The same long prompt twice, with the prefix cache and without."""
    rows: list[list[Cell]] = []
    for shown, flags in (("on", ()), ("off", ("--no-prefix-caching",))):
        async with started(setup, *flags) as server:
            for turn in ("first", "again"):
                sample = await server.ask(server.request(setup.tokens(6000), setup.tokens(200), name="long"))
                row: list[Cell] = [shown, turn, sample.num_prompt_tokens, sample.num_cached_tokens]
                rows.append([*row, sample.first_token_s, sample.e2e_s])
    columns = [
        Column("prefix caching", align="left"),
        Column("asked", align="left"),
        Column("prompt", "tokens"),
        Column("of these cached", "tokens"),
        Column("TTFT", "s"),
        Column("E2E", "s"),
    ]
    return [Table("", columns, rows)]


async def threads(setup: Setup) -> list[Table]:
    """How much a second core helps with reading a prompt (arithmetic) and writing an answer (reading the weights)."""
    rows: list[list[float]] = []
    for count in ("1", "2"):
        async with started(setup, "--threads", count) as server:
            read = await server.ask(server.request(setup.tokens(2000), 4))
            prefill = (read.num_prompt_tokens or 0) / (read.first_token_s or 1.0)
            one = await _decoding(server, 1, setup.tokens(256))
            rows.append([prefill, one, await _decoding(server, 8, setup.tokens(128))])
    columns = [
        Column("threads", align="left"),
        Column("prefill, a prompt of 2,000", "tokens/s"),
        Column("decode, one stream", "tokens/s"),
        Column("decode, eight streams", "tokens/s together"),
    ]
    ratio = [two / one if one else math.nan for one, two in zip(*rows, strict=True)]
    return [Table("", columns, [["1", *rows[0]], ["2", *rows[1]], ["times, 2 against 1", *ratio]])]


async def _decoding(server: ExperimentServer, num_streams: int, num_tokens: int, prompt_tokens: int = 32) -> float:
    """Tokens per second while all of the streams are written."""
    streams = await server.together([server.request(prompt_tokens, num_tokens) for _ in range(num_streams)])
    begin_s = max(each.sample.token_times[0] for each in streams)
    end_s = min(each.sample.token_times[-1] for each in streams)
    arrived = sum(begin_s < at_s <= end_s for each in streams for at_s in each.sample.token_times)
    return arrived / (end_s - begin_s) if end_s > begin_s else 0.0


async def preemption(setup: Setup) -> list[Table]:
    """Six answers in a pool that holds them all, and in one that does not."""
    bytes_per_token = await _bytes_per_token(setup)
    rows: list[list[Cell]] = []
    for pool in (4096, 1024):
        flags = ("--max-model-len", "1024", "--kv-memory", str(pool * bytes_per_token))
        async with started(setup, *flags) as server:
            requests = [server.request(setup.tokens(100), setup.tokens(400), at_s=i * 0.02) for i in range(6)]
            observed = await server.together(requests)
        unlucky = max(observed, key=lambda each: each.sample.e2e_s)
        times = [each.sample.e2e_s for each in observed]
        row: list[Cell] = [pool, sum(map(num_preemptions, observed)), min(times), median(times)]
        rows.append([*row, unlucky.sample.e2e_s, num_preemptions(unlucky), max(unlucky.sample.itl_s, default=None)])
    columns = [
        Column("pool", "tokens"),
        Column("preemptions"),
        Column("E2E: luckiest", "s"),
        Column("E2E: median", "s"),
        Column("E2E: unluckiest", "s"),
        Column("its preemptions"),
        Column("its longest gap", "s"),
    ]
    return [Table("", columns, rows)]


async def kv(setup: Setup) -> list[Table]:
    """Keys and values in 16 bits and in 8."""
    rows: list[list[Cell]] = []
    for dtype in ("bf16", "int8"):
        flags = ("--kv-cache-dtype", dtype)
        async with started(setup, *flags, "--kv-memory", "256MiB") as server:
            kept = server.card["kv"]
            short = await _decoding(server, 1, setup.tokens(128))
            long = await _decoding(server, 1, setup.tokens(128), setup.tokens(4000))
        row: list[Cell] = [dtype, kept["bytes_per_token"], kept["pool_tokens"], short, long]
        rows.append([*row, await _perplexity(setup, *flags)])
    columns = [
        Column("--kv-cache-dtype", align="left"),
        Column("a token takes", "bytes"),
        Column("256 MiB hold", "tokens"),
        Column("decode after 32 tokens", "tokens/s"),
        Column("decode after 4,000", "tokens/s"),
        Column("perplexity of docs/tour.md"),
    ]
    return [Table("", columns, rows)]


async def _perplexity(setup: Setup, *flags: str) -> str:
    settings = config.load({"model": setup.model})
    words = ["eval", setup.text, "--model", settings.model, "--cache-dir", str(settings.cache_dir), *flags]
    return f"{(await run_chairlift(*words))['perplexity']:.2f}"


async def _bytes_per_token(setup: Setup) -> int:
    async with started(setup) as server:
        return int(server.card["kv"]["bytes_per_token"])


# -- waiting --------------------------------------------------------------------------------------------------------


async def queue(setup: Setup) -> list[Table]:
    """Twice as many requests as the machine can answer, for eight seconds: a queue that takes all, and a short one."""
    rows: list[list[Cell]] = []
    for limit in ("1000", "8"):
        async with started(setup, "--max-queue", limit) as server:
            requests = [server.request(setup.tokens(200), setup.tokens(64), at_s=i * 0.05) for i in range(160)]
            samples = [each.sample for each in await server.together(requests, may_fail=True)]
        answered = [sample for sample in samples if sample.is_ok]
        refused = [sample.e2e_s for sample in samples if not sample.is_ok]
        first = sorted(sample.first_token_s or 0.0 for sample in answered)
        row: list[Cell] = [limit, len(answered), len(refused), median(first), percentile(first, 95), first[-1]]
        rows.append([*row, median(refused) * 1e3 if refused else None])
    columns = [
        Column("--max-queue"),
        Column("answered"),
        Column("refused (503)"),
        Column("TTFT of the answered: median", "s"),
        Column("p95", "s"),
        Column("longest", "s"),
        Column("a refusal takes", "ms"),
    ]
    return [Table("", columns, rows)]


async def slots(setup: Setup) -> list[Table]:
    """Twelve at once on little memory: few slots let some wait, many let all start and stall."""
    bytes_per_token = await _bytes_per_token(setup)
    rows: list[list[Cell]] = []
    for count in ("4", "12"):
        flags = ("--max-num-seqs", count, "--max-model-len", "1024", "--kv-memory", str(1760 * bytes_per_token))
        async with started(setup, *flags) as server:
            requests = [server.request(setup.tokens(100), setup.tokens(300), at_s=i * 0.02) for i in range(12)]
            observed = await server.together(requests)
        first = [each.sample.first_token_s or 0.0 for each in observed]
        gaps = [max(each.sample.itl_s, default=0.0) for each in observed]
        stalled = sum(bool(stalls(each.sample.itl_s)) for each in observed)
        row: list[Cell] = [count, median(first), max(first), median(gaps), max(gaps), stalled]
        rows.append([*row, sum(map(num_preemptions, observed)), max(each.sample.e2e_s for each in observed)])
    columns = [
        Column("--max-num-seqs"),
        Column("TTFT: median", "s"),
        Column("longest", "s"),
        Column("longest gap of a stream: median", "s"),
        Column("worst", "s"),
        Column("streams that stall"),
        Column("preemptions"),
        Column("all done after", "s"),
    ]
    return [Table("", columns, rows)]


async def startup(setup: Setup) -> list[Table]:
    """From the start of the process to the first answer it could give."""
    async with started(setup) as server:
        parts, ready_s = dict(server.card["startup_s"]), server.local.ready_s
    rows: list[list[Cell]] = [[part, seconds] for part, seconds in parts.items()]
    rows.append(["ready, as seen from outside", ready_s])
    return [Table("", [Column("part", align="left"), Column("time", "s")], rows)]


# -- commands ---------------------------------------------------------------------------------------------------------


async def run_chairlift(*words: str) -> dict[str, Any]:
    """Runs `chairlift WORDS`; the JSON of its last line. Raises ChairliftError if it fails."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "chairlift", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=config.environment_without_settings(),
    )
    try:
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ChairliftError(f"chairlift {' '.join(words)} failed with status {process.returncode}")
    value = json.loads(out.decode().rstrip().splitlines()[-1])
    assert isinstance(value, dict)
    return value
