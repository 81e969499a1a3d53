"""/metrics, for Prometheus. Names are vLLM's with our prefix; every rate is a counter or a histogram.

Each server has a registry of its own. As an Observer it is filled on the engine thread. Gauges are read from the
engine's snapshot during a scrape, so they are right also when nothing runs. A scrape changes nothing and never waits.
"""

from __future__ import annotations

import resource
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from chairlift.engine.observer import EngineSnapshot, Observer, StepStats
from chairlift.engine.request import FinishReason, Request
from chairlift.errors import ChairliftError, ConfigError, DoesNotFit, ModelError, QueueWait
from chairlift.plan import Plan
from chairlift.server.log import phase

PREFIX = "chairlift:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Buckets reach minutes: a small processor takes them where an accelerator takes a second.
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
GAP_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
E2E_S = (0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600)
STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)
OVERHEAD_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PHASES = ("preparing", "queued", "prefill", "decode")
STREAM = ("false", "true")

CGROUP = Path("/sys/fs/cgroup")


class Metrics(Observer):
    """All metrics of one server."""

    def __init__(self, plan: Plan) -> None:
        self._registry = CollectorRegistry()
        self._model = plan.model_name
        self._registry.register(_EngineGauges(self, plan))
        self._registry.register(_ProcessCounters(CGROUP))
        ProcessCollector(registry=self._registry)
        self._snapshot: Callable[[], EngineSnapshot] = lambda: _NOTHING
        self._add_latencies()
        self._add_counts()

    def _add_latencies(self) -> None:
        self._ttft = self._by_stream("time_to_first_token_seconds", "Arrival to first sampled token.", TTFT_S)
        self._gap = self._by_stream("inter_token_latency_seconds", "Between two tokens of one request.", GAP_S)
        self._e2e = self._by_stream("e2e_request_latency_seconds", "Arrival to end, of answered requests.", E2E_S)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to the first step.", TTFT_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token.", TTFT_S)
        self._decode = self._histogram("request_decode_time_seconds", "First token to last token.", E2E_S)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds", "(Last - first token) / (n - 1), of answers with n >= 2.", GAP_S
        )
        self._prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output_size = self._histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self._step = self._histogram(
            "step_time_seconds", "One step: arrays, handing out the last one's outputs, kernels.", STEP_S
        )
        self._overhead = self._histogram(
            "step_overhead_seconds", "Of a step with work at hand, all but the kernels.", OVERHEAD_S
        )
        self._rows = self._histogram("iteration_tokens_total", "Tokens computed by one step.", TOKENS)

    def _add_counts(self) -> None:
        self._preemptions = self._counter("num_preemptions", "Requests that lost their blocks for a while.")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens taken in, cached or not; once for n choices.")
        self._generated = self._counter("generation_tokens", "Tokens sampled.")
        answered = [str(FinishReason.STOP), str(FinishReason.LENGTH)]
        self._success = self._counters("request_success", "Answered requests.", "finished_reason", answered)
        self._cancelled = self._counters("requests_cancelled", "Requests whose client left.", "phase", PHASES)
        self._failed = self._counter("requests_failed", "Requests that an error ended.")
        self._failed_steps = self._counter("steps_failed", "Steps that failed; their requests were tried one by one.")
        self._stalls = self._counter("stalls", "Times that there was work and no step ended for too long.")
        self._refused = Counter(
            PREFIX + "requests_refused",
            "Requests refused, by error code; those that had waited for too long are refused too.",
            ["model_name", "reason"],
            registry=self._registry,
        )
        for kind in _refusals():
            self._refused.labels(self._model, kind.code)

    # -- construction: every time series exists before the first request ----------------------------------------------

    def _histogram(self, name: str, help: str, bounds: Sequence[float]) -> _Histogram:
        made = _Histogram([self._model], bounds)
        self._registry.register(_Histograms(name, help, ["model_name"], [made]))
        return made

    def _by_stream(self, name: str, help: str, bounds: Sequence[float]) -> list[_Histogram]:
        """A histogram of unstreamed and one of streamed requests, indexed by `request.stream`."""
        made = [_Histogram([self._model, stream], bounds) for stream in STREAM]
        self._registry.register(_Histograms(name, help, ["model_name", "stream"], made))
        return made

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(PREFIX + name, help, ["model_name"], registry=self._registry).labels(self._model)

    def _counters(self, name: str, help: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        made = Counter(PREFIX + name, help, ["model_name", label], registry=self._registry)
        return {value: made.labels(self._model, value) for value in values}

    # -- for the server -----------------------------------------------------------------------------------------------

    def watch(self, snapshot: Callable[[], EngineSnapshot]) -> None:
        """Sets where the gauges are read from."""
        self._snapshot = snapshot

    def snapshot(self) -> EngineSnapshot:
        """The engine's numbers; all 0 before `watch`."""
        return self._snapshot()

    def refused(self, reason: str) -> None:
        """Counts a request that was refused or could not be answered, by the code of its error."""
        self._refused.labels(self._model, reason).inc()

    def cancelled(self, phase_name: str) -> None:
        """Counts a request whose client left in that phase."""
        self._cancelled[phase_name].inc()

    def exposition(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(_WithoutCreated(self._registry))

    # -- for the engine thread ----------------------------------------------------------------------------------------

    def step_done(self, stats: StepStats) -> None:
        """Observes the step's time and rows."""
        self._step.observe(stats.seconds)
        self._rows.observe(stats.num_rows)
        if stats.overhead_s > 0:
            self._overhead.observe(stats.overhead_s)

    def admitted(self, request: Request) -> None:
        """Observes the queue wait and the size of the prompt."""
        self._queue.observe(request.timing.scheduled_s - request.timing.arrival_s)
        self._prompt_size.observe(request.num_prompt)
        if request.params.choice == 0:
            self._prompt.inc(request.num_prompt)

    def first_token(self, request: Request) -> None:
        """Observes the time to the first token, and counts prefix hits."""
        timing = request.timing
        self._ttft[request.stream].observe(timing.first_token_s - timing.arrival_s)
        self._prefill.observe(timing.first_token_s - timing.scheduled_s)
        self._generated.inc()
        self._count_hits(request)

    def next_tokens(self, gaps: Sequence[tuple[Request, float]]) -> None:
        """Observes the gaps between tokens."""
        self._generated.inc(len(gaps))
        for request, gap_s in gaps:
            self._gap[request.stream].observe(gap_s)

    def preempted(self, request: Request) -> None:
        """Counts the preemption."""
        self._preemptions.inc()

    def step_failed(self) -> None:
        """Counts the failed step."""
        self._failed_steps.inc()

    def stalled(self) -> None:
        """Counts the stall."""
        self._stalls.inc()

    def finished(self, request: Request) -> None:
        """Counts the end by its kind. Latencies are of answered requests only: early ends would flatter them."""
        reason = request.finish_reason
        if phase(request) == "prefill":
            self._count_hits(request)
        if reason is FinishReason.CANCELLED:
            self._cancelled[phase(request)].inc()
        elif isinstance(request.error, QueueWait):
            self.refused(request.error.code)
        elif reason is FinishReason.ERROR:
            self._failed.inc()
        else:
            self._answered(request)

    def _count_hits(self, request: Request) -> None:
        """Called once per request, when its prompt is computed: until then more of its blocks may become hits."""
        self._queries.inc(request.num_prompt)
        self._hits.inc(request.num_cached or 0)

    def _answered(self, request: Request) -> None:
        timing, num_output = request.timing, len(request.output)
        self._success[str(request.finish_reason)].inc()
        self._e2e[request.stream].observe(timing.finished_s - timing.arrival_s)
        self._output_size.observe(num_output)
        if num_output:
            decode_s = timing.last_token_s - timing.first_token_s
            self._decode.observe(decode_s)
            if num_output > 1:
                self._per_token.observe(decode_s / (num_output - 1))


def _refusals(kind: type[ChairliftError] = ChairliftError) -> Iterator[type[ChairliftError]]:
    """The kinds of error that a request can be refused with."""
    if issubclass(kind, ConfigError | ModelError | DoesNotFit):
        return
    yield kind
    for narrower in kind.__subclasses__():
        yield from _refusals(narrower)


_NOTHING = EngineSnapshot(0, 0, 0, 1, 0, 0, None)


class _WithoutCreated(Collector):
    """Leaves out the client library's `_created` samples, which would be one more time series per counter."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _Histogram:
    """Counts the values between its bounds, for one thread. The library's histogram takes three times as long."""

    def __init__(self, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self.labels = labels
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # one more for what lies beyond the last bound
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class _Histograms(Collector):
    """The histograms of one name, one for each value of their labels."""

    def __init__(self, name: str, help: str, labels: Sequence[str], members: Sequence[_Histogram]) -> None:
        self._name, self._help, self._labels, self._members = PREFIX + name, help, labels, members

    def collect(self) -> Iterator[Metric]:
        made = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for member in self._members:
            bounds = [*map(floatToGoString, member.bounds), "+Inf"]
            made.add_metric(member.labels, list(zip(bounds, accumulate(member.counts), strict=True)), member.sum)
        yield made


class _EngineGauges(Collector):
    """The engine's numbers at the time of the scrape, and its sizes."""

    def __init__(self, metrics: Metrics, plan: Plan) -> None:
        self._metrics = metrics
        self._plan = plan

    def collect(self) -> Iterator[Metric]:
        now, plan = self._metrics.snapshot(), self._plan
        yield self._gauge("num_requests_running", "Requests that hold a slot.", now.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for one.", now.num_waiting)
        used = now.num_used_blocks / now.num_blocks
        yield self._gauge("kv_cache_usage_perc", "Part of the KV pool in use by requests; 1 is all of it.", used)
        yield self._gauge("kv_pool_tokens", "Tokens that the KV pool holds.", plan.pool_tokens)
        yield self._gauge("kv_pool_bytes", "Bytes of the KV pool.", plan.pool_bytes)
        yield self._gauge("max_num_seqs", "Slots: requests that run at once.", plan.max_num_seqs)
        yield self._gauge("max_queue", "Requests that may wait.", plan.max_queue)
        yield self._gauge("max_model_len", "Most tokens of one request.", plan.max_model_len)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
        gauge.add_metric([self._plan.model_name], value)
        return gauge


class _ProcessCounters(Collector):
    """What the kernel counts for this process: waits for pages, and pauses by the container's CPU quota."""

    def __init__(self, cgroup: Path) -> None:
        self._cgroup = cgroup

    def collect(self) -> Iterator[Metric]:
        periods, throttled, seconds = throttling(self._cgroup)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        yield _total("process_major_page_faults", "Page faults that waited for a disk.", faults)
        yield _total("cgroup_cpu_periods", "Periods of the CPU quota; 0 without one.", periods)
        yield _total("cgroup_cpu_throttled_periods", "Periods in which the quota ran out.", throttled)
        yield _total("cgroup_cpu_throttled_seconds", "Time that threads stood still for the quota.", seconds)


def _total(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, help, value=value)


def throttling(cgroup: Path) -> tuple[int, int, float]:
    """Periods, throttled periods and throttled seconds of this cgroup (v2, else v1); zeros without a quota."""
    for path in (cgroup / "cpu.stat", cgroup / "cpu" / "cpu.stat", cgroup / "cpu,cpuacct" / "cpu.stat"):
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        stat = {name: int(value) for name, _, value in (line.partition(" ") for line in lines) if value.isdigit()}
        seconds = stat["throttled_usec"] / 1e6 if "throttled_usec" in stat else stat.get("throttled_time", 0) / 1e9
        return stat.get("nr_periods", 0), stat.get("nr_throttled", 0), seconds
    return 0, 0, 0.0
