"""The engine's own figures: what /metrics gained between two moments, for Chairlift, vLLM and llama-server.

A figure that a server does not export is None, never 0. The engine has its own clock and its own view of where a
request begins and ends, so its figures are compared with the client's by order of magnitude only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from chairlift.bench.client.client import Client
from chairlift.bench.client.sample import Sample
from chairlift.bench.client.target import GenerationRequest

PREFIXES = ("chairlift:", "vllm:", "llamacpp:")
QUEUE = "request_queue_time_seconds"
_HISTOGRAMS = {
    "ttft": "time_to_first_token_seconds",
    "e2e": "e2e_request_latency_seconds",
    "queue": QUEUE,
    "tpot": "request_time_per_output_token_seconds",
}
_COUNTERS = {
    "num_output_tokens": ("generation_tokens_total", "tokens_predicted_total"),
    "num_prefix_hits": ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
    "num_prefix_queries": ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total"),
    "num_preemptions": ("num_preemptions_total",),
    "prefill_s": ("request_prefill_time_seconds_sum", "prompt_seconds_total"),
    "decode_s": ("request_decode_time_seconds_sum", "tokens_predicted_seconds_total"),
}
_MAX_SCRAPES = 20  # 50 ms apart
_Key = TypeVar("_Key", str, float)


@dataclass(frozen=True, slots=True)
class Histogram:
    """A sum of seconds over `num` requests. `buckets` has (bound in s, requests within it), bounds ascending."""

    num: int
    sum_s: float
    buckets: tuple[tuple[float, float], ...] = ()

    @property
    def mean_s(self) -> float | None:
        """Mean seconds; None without requests."""
        return self.sum_s / self.num if self.num else None

    def bound_s(self, percent: float) -> float | None:
        """The bound of a percentile's bucket, infinite beyond the last; None without requests or buckets."""
        needed = math.ceil(percent * self.num / 100)
        return next((bound for bound, num in self.buckets if num >= needed), None) if self.num else None


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """Values of /metrics, summed over labels, by name without prefix; empty if not exported."""

    values: dict[str, float] = field(default_factory=dict)
    queue_buckets: dict[float, float] = field(default_factory=dict)
    """By bound in seconds: the requests that waited no longer."""

    def histogram(self, name: str) -> Histogram | None:
        """A histogram of seconds; None if it is not exported."""
        num, sum_s = self.values.get(f"{name}_count"), self.values.get(f"{name}_sum")
        buckets = tuple(sorted(self.queue_buckets.items())) if name == QUEUE else ()
        return None if num is None or sum_s is None else Histogram(round(num), sum_s, buckets)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What happened between two snapshots; None if not exported. `prefill_s` and `decode_s` are sums."""

    gained: MetricsSnapshot = field(default_factory=MetricsSnapshot)
    ttft: Histogram | None = None
    e2e: Histogram | None = None
    queue: Histogram | None = None
    tpot: Histogram | None = None
    num_output_tokens: float | None = None
    num_prefix_hits: float | None = None
    num_prefix_queries: float | None = None
    num_preemptions: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    was_restarted: bool = False

    @classmethod
    def of(cls, gained: MetricsSnapshot, *, was_restarted: bool = False) -> EngineMetrics:
        """Picks the figures out of what the values gained."""
        figures: dict[str, Any] = {figure: gained.histogram(name) for figure, name in _HISTOGRAMS.items()}
        for figure, names in _COUNTERS.items():
            figures[figure] = next((gained.values[name] for name in names if name in gained.values), None)
        return cls(gained, was_restarted=was_restarted, **figures)

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that the prefix cache had; None if not exported, or without prompts."""
        if self.num_prefix_hits is None or not self.num_prefix_queries:
            return None
        return self.num_prefix_hits / self.num_prefix_queries


async def scrape(client: Client) -> MetricsSnapshot:
    """What /metrics says now; empty if the server has none."""
    status, body, _ = await client.get("/metrics")
    return parse(body.decode(errors="replace")) if status == 200 else MetricsSnapshot()


def parse(text: str) -> MetricsSnapshot:
    """The values of the three servers' metrics in a page of the Prometheus text format.

    A malformed page gives the values before its fault.
    """
    snapshot = MetricsSnapshot({}, {})
    with contextlib.suppress(ValueError, KeyError):
        for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
            prefix = next((each for each in PREFIXES if sample.name.startswith(each)), None)
            name = sample.name.removeprefix(prefix or "")
            if prefix is not None and not name.endswith("_bucket"):
                snapshot.values[name] = snapshot.values.get(name, 0.0) + sample.value
            elif prefix is not None and name == f"{QUEUE}_bucket":
                bound_s = float(sample.labels["le"])
                snapshot.queue_buckets[bound_s] = snapshot.queue_buckets.get(bound_s, 0.0) + sample.value
    return snapshot


def difference(before: MetricsSnapshot, after: MetricsSnapshot) -> EngineMetrics:
    """What happened between two snapshots. If a counter went back the server was restarted, and nothing is known."""
    gained = {name: value - before.values.get(name, 0.0) for name, value in after.values.items()}
    if any(gained[name] < 0 for name in gained if name.endswith(("_total", "_count"))):
        return EngineMetrics(was_restarted=True)
    waits = {bound: num - before.queue_buckets.get(bound, 0.0) for bound, num in after.queue_buckets.items()}
    return EngineMetrics.of(MetricsSnapshot(gained, waits))


def combined(engines: Sequence[EngineMetrics]) -> EngineMetrics:
    """Several periods as one. A figure that one of them lacks is None."""
    values = _summed([each.gained.values for each in engines])
    buckets = _summed([each.gained.queue_buckets for each in engines])
    return EngineMetrics.of(MetricsSnapshot(values, buckets), was_restarted=any(each.was_restarted for each in engines))


def _summed(parts: Sequence[Mapping[_Key, float]]) -> dict[_Key, float]:
    """Sums by key, of the keys that all parts have."""
    keys = [key for key in parts[0] if all(key in part for part in parts)] if parts else []
    return {key: sum(part[key] for part in parts) for key in keys}


async def scrape_until_counted(client: Client, before: MetricsSnapshot, num_requests: int = 1) -> EngineMetrics:
    """What happened since, once the engine has counted so many requests, which may be just after their last byte."""
    for _ in range(_MAX_SCRAPES):
        engine = difference(before, await scrape(client))
        if engine.e2e is None or engine.e2e.num >= num_requests:
            break
        await asyncio.sleep(0.05)
    return engine


async def ask_and_scrape(client: Client, request: GenerationRequest, index: int) -> tuple[Sample, EngineMetrics]:
    """Sends one request; what its client saw, and what the engine counted meanwhile."""
    before = await scrape(client)
    sample = await client.ask(request, index=index)
    return sample, await scrape_until_counted(client, before)
