"""The engine's own figures: what /metrics gained between two readings, for Chairlift, vLLM and llama-server.

A figure that a server does not export is None, never 0. These are the engine's clock and the engine's idea of where a
request begins and ends: they are compared with the client's by order of magnitude only.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from chairlift.bench.client import Client

TTFT = "time_to_first_token_seconds"
E2E = "e2e_request_latency_seconds"
QUEUE = "request_queue_time_seconds"
TPOT = "request_time_per_output_token_seconds"
_PATIENCE = 20  # readings, 50 ms apart
PREFIXES = ("chairlift:", "vllm:", "llamacpp:")

_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_prompt_tokens": ("prompt_tokens_total",),
    "num_output_tokens": ("generation_tokens_total", "tokens_predicted_total"),
    "num_prefix_hits": ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
    "num_prefix_queries": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
    "num_preemptions": ("num_preemptions_total",),
    "prefill_s": ("request_prefill_time_seconds_sum", "prompt_seconds_total"),
    "decode_s": ("request_decode_time_seconds_sum", "tokens_predicted_seconds_total"),
}


@dataclass(frozen=True, slots=True)
class Mean:
    """A sum of seconds over so many requests; `buckets` has (bound in s, requests within it), bounds ascending."""

    num: int
    sum_s: float
    buckets: tuple[tuple[float, float], ...] = ()

    @property
    def mean_s(self) -> float | None:
        """Their mean; None of none."""
        return self.sum_s / self.num if self.num else None

    def bound_s(self, percent: float) -> float | None:
        """The bucket's bound that so many percent do not exceed, infinite beyond the last; None of none, or untold."""
        needed = math.ceil(percent * self.num / 100)
        return next((bound for bound, num in self.buckets if num >= needed), None) if self.num else None


@dataclass(frozen=True, slots=True)
class Reading:
    """All samples of one server at one moment, summed over labels, by name without prefix; empty: not exported."""

    values: Mapping[str, float]
    queue_buckets: Mapping[float, float] = field(default_factory=dict)
    """Requests that waited no longer than so many seconds."""

    def value(self, *names: str) -> float | None:
        """The first of the names that is exported."""
        return next((self.values[name] for name in names if name in self.values), None)


@dataclass(frozen=True, slots=True)
class Engine:
    """What happened between two readings; None where it is not exported. `prefill_s` and `decode_s` are sums."""

    ttft: Mean | None = None
    e2e: Mean | None = None
    queue: Mean | None = None
    tpot: Mean | None = None
    num_prompt_tokens: float | None = None
    num_output_tokens: float | None = None
    num_prefix_hits: float | None = None
    num_prefix_queries: float | None = None
    num_preemptions: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    was_restarted: bool = False

    @property
    def hit_rate(self) -> float | None:
        """Part of the prompt tokens looked up that the prefix cache had."""
        if self.num_prefix_hits is None or not self.num_prefix_queries:
            return None
        return self.num_prefix_hits / self.num_prefix_queries


async def read(client: Client) -> Reading:
    """What /metrics says now; empty where there is none."""
    status, body, _ = await client.get("/metrics")
    return parse(body.decode(errors="replace")) if status == 200 else Reading({})


def parse(text: str) -> Reading:
    """The text format, as far as it is of one of the three servers."""
    values: dict[str, float] = {}
    buckets: dict[float, float] = {}
    for name, bound_s, value in _samples(text):
        known = next((each for each in PREFIXES if name.startswith(each)), None)
        short = name.removeprefix(known or "")
        if known is not None and bound_s is None:
            values[short] = values.get(short, 0.0) + value
        elif known is not None and bound_s is not None and short == f"{QUEUE}_bucket":
            buckets[bound_s] = buckets.get(bound_s, 0.0) + value
    return Reading(values, buckets)


def _samples(text: str) -> Iterator[tuple[str, float | None, float]]:
    """Names, bounds of buckets, and values. A page that is no metrics gives what came before its fault."""
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                bound = sample.labels["le"] if sample.name.endswith("_bucket") else None
                yield sample.name, None if bound is None else float(bound), sample.value
    except (ValueError, KeyError):
        return


def between(before: Reading, after: Reading) -> Engine:
    """What happened meanwhile; nothing of it is known when a counter went back, since the server was restarted."""
    gained = {name: value - before.values.get(name, 0.0) for name, value in after.values.items()}
    if any(gained[name] < 0 for name in gained if name.endswith(("_total", "_count"))):
        return Engine(was_restarted=True)
    waits = {bound: num - before.queue_buckets.get(bound, 0.0) for bound, num in after.queue_buckets.items()}
    change = Reading(gained, waits)
    sums: dict[str, Any] = {field: change.value(*names) for field, names in _NAMES.items()}
    return Engine(
        ttft=_mean(change, TTFT),
        e2e=_mean(change, E2E),
        queue=_mean(change, QUEUE, change.queue_buckets),
        tpot=_mean(change, TPOT),
        **sums,
    )


def _mean(change: Reading, name: str, buckets: Mapping[float, float] | None = None) -> Mean | None:
    num, sum_s = change.value(f"{name}_count"), change.value(f"{name}_sum")
    return None if num is None or sum_s is None else Mean(round(num), sum_s, tuple(sorted((buckets or {}).items())))


def total(engines: list[Engine]) -> Engine:
    """Several stretches as one; a figure that one of them lacks is lacking."""
    means = ("ttft", "e2e", "queue", "tpot")
    values: dict[str, Any] = {field: _sum_means([getattr(each, field) for each in engines]) for field in means}
    values |= {field: _sum([getattr(each, field) for each in engines]) for field in _NAMES}
    return Engine(**values, was_restarted=any(each.was_restarted for each in engines))


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _sum_means(means: list[Mean | None]) -> Mean | None:
    known = [mean for mean in means if mean is not None]
    if not known or len(known) < len(means):
        return None
    buckets: dict[float, float] = {}
    for bound, num in (each for mean in known for each in mean.buckets):
        buckets[bound] = buckets.get(bound, 0.0) + num
    return Mean(sum(mean.num for mean in known), sum(mean.sum_s for mean in known), tuple(sorted(buckets.items())))


async def settled(client: Client, before: Reading, num_requests: int = 1) -> Engine:
    """What happened since, once the engine has counted so many requests: it may do so just after their last byte."""
    for _ in range(_PATIENCE):
        after = await read(client)
        engine = between(before, after)
        if engine.e2e is None or engine.e2e.num >= num_requests:
            break
        await asyncio.sleep(0.05)
    return engine
