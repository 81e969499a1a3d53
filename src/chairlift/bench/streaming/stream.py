"""`chairlift bench stream`: does streaming make it faster? The same work streamed and not, in turns.

    E2E = TTFT + (N - 1) x TPOT + what comes after the last token

Pairs swap their order each time (streamed first, then last), so that a machine that slows down during the run favours
neither. Every prompt is new to the server's prefix cache.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from chairlift.bench.client import engine_metrics
from chairlift.bench.client.client import Clock
from chairlift.bench.client.connect import connect
from chairlift.bench.client.engine_metrics import EngineMetrics, Histogram
from chairlift.bench.client.target import ConnectOptions, GenerationRequest, Target
from chairlift.bench.load.doubts import CEILING_SLACK
from chairlift.bench.load.workload import Lengths, Workload
from chairlift.bench.report.measure import ProgressDisplay, machine_note
from chairlift.bench.report.report import Cell, Chart, Report, Series, Table, columns
from chairlift.bench.streaming import buffering
from chairlift.bench.streaming.request_group import Connect, RequestGroup

NOT_EXPORTED = "not exported"
NOT_MEASURABLE = "not measurable without streaming"
MAGNITUDE = 10**0.5
"""Two figures that differ by more than this factor are of another order of magnitude."""
ALIKE = 0.03
"""Two E2E within this part of each other are the same."""
LATE_S = 3.0
LATE_PART = 0.5
"""A first token is late after so many seconds, or after such a part of the whole."""


@dataclass
class StreamingMode(RequestGroup):
    """All requests that are streamed, or all that are not."""

    is_streamed: bool = True

    @property
    def engine(self) -> EngineMetrics:
        """The engine's figures of the answered requests together."""
        pairs = zip(self.samples, self.engines, strict=True)
        return engine_metrics.combined([engine for sample, engine in pairs if sample.is_ok])

    @property
    def e2e_s(self) -> float | None:
        """Median E2E at the client."""
        return self.median(lambda sample: sample.e2e_s)

    @property
    def first_output_s(self) -> float | None:
        """Median time until there is something to read: the first visible text, or the whole answer."""
        return self.median(lambda sample: sample.first_visible_s) if self.is_streamed else self.e2e_s


@dataclass
class StreamCommand:
    """The command: its work, and the report on the requests so far."""

    url: str
    server: ConnectOptions
    num_requests: int
    num_tokens: int
    num_prompt_tokens: int
    connect: Connect = connect
    clock: Clock = field(default_factory=Clock)
    target: Target = field(init=False)
    streamed: StreamingMode = field(default_factory=lambda: StreamingMode("streamed"))
    whole: StreamingMode = field(default_factory=lambda: StreamingMode("not streamed", is_streamed=False))

    def __post_init__(self) -> None:
        self.target = Target(self.url)

    async def work(self, progress: ProgressDisplay) -> None:
        """Asks in pairs whose order swaps, after one request of each kind that does not count."""
        prompts, output = Lengths("fixed", self.num_prompt_tokens), Lengths("fixed", self.num_tokens)
        work = Workload(prompts, output, salt=secrets.token_hex(8))
        async with self.connect(self.url, self.server, self.clock) as client:
            self.target = client.target
            for mode in self.modes:
                await client.ask(GenerationRequest("Hello", 2, mode.is_streamed))
            for i in range(2 * self.num_requests):
                is_swapped = i // 2 % 2 == 1
                mode = self.streamed if (i % 2 == 0) != is_swapped else self.whole
                progress.at(i, 2 * self.num_requests, f"request {i + 1} of {2 * self.num_requests}, {mode.name}")
                prompt = work.request(i).prompt
                await mode.ask(client, GenerationRequest(prompt, self.num_tokens, mode.is_streamed), i)

    @property
    def modes(self) -> tuple[StreamingMode, StreamingMode]:
        """Streamed, and not."""
        return self.streamed, self.whole

    def report(self) -> Report:
        """Times, the identity and the speed, and what they mean."""
        return Report(
            command="bench stream",
            title=f"Streamed or not: {self.num_requests} x {self.num_tokens} tokens, {self.target.model or 'a model'} "
            f"at {self.target.base}, one request at a time",
            tables=[_times(self.modes), _identity(self.modes), _speed(self.modes, self.target.one_stream_ceiling)]
            if self.streamed.samples or self.whole.samples
            else [],
            verdict=_verdict(self.streamed, self.whole),
            warnings=_warnings(self.modes, self.num_tokens, self.target) + _too_fast(self.modes, self.target),
            notes=[machine_note(self.url), f"Server: {self.target.kind}, asked over {self.target.api}."],
            data={"server": str(self.target.kind), **{mode.name: _data(mode) for mode in self.modes}},
            charts=_charts(self.streamed, self.whole),
        )


def _times(modes: Sequence[StreamingMode]) -> Table:
    medians = [mode.median(lambda s: s.num_output_tokens) for mode in modes]
    lengths = [int(value) if value is not None and value == int(value) else value for value in medians]
    rows: list[list[Cell]] = [
        ["requests answered", "", *(f"{len(mode.answered)} of {len(mode.samples)}" for mode in modes)],
        ["tokens by usage, median", "", *lengths],
        ["client: first output, median", "s", *(mode.first_output_s for mode in modes)],
        ["client: first token (TTFT), median", "s", modes[0].first_token_s, NOT_MEASURABLE],
        ["client: E2E, median", "s", *(mode.e2e_s for mode in modes)],
        ["client: E2E, least to most", "s", *(_range([s.e2e_s for s in mode.answered]) for mode in modes)],
        ["engine: TTFT, mean", "s", *(_shown(mode.engine.ttft) for mode in modes)],
        ["engine: E2E, mean", "s", *(_shown(mode.engine.e2e) for mode in modes)],
        ["engine: queue wait, mean", "s", *(_shown(mode.engine.queue) for mode in modes)],
        ["engine: prefill, mean", "s", *(_per_request(mode, mode.engine.prefill_s) for mode in modes)],
        ["engine: decode, mean", "s", *(_per_request(mode, mode.engine.decode_s) for mode in modes)],
    ]
    note = (
        "The engine's figures are differences of /metrics. Its clock and the client's begin and end at other moments: "
        "compare them by order of magnitude only."
    )
    return Table("Times", columns("<figure", "<unit", *(mode.name for mode in modes)), rows, note)


def _shown(mean: Histogram | None) -> Cell:
    return NOT_EXPORTED if mean is None else mean.mean_s


def _per_request(mode: StreamingMode, sum_s: float | None) -> Cell:
    return NOT_EXPORTED if sum_s is None or not mode.answered else sum_s / len(mode.answered)


def _range(values: Sequence[float]) -> Cell:
    return f"{min(values):.3g} to {max(values):.3g}" if values else None


Identity = tuple[float, float, float, float]
"""E2E, TTFT, N - 1 and TPOT in seconds: E2E = TTFT + (N - 1) x TPOT + residual."""


def _client_identity(mode: StreamingMode) -> Identity | None:
    """Means at the client over the streams that have every term; None if none has."""
    terms = [
        (sample.e2e_s, sample.first_token_s, sample.num_output_tokens - 1, sample.tpot_s)
        for sample in mode.answered
        if sample.first_token_s is not None and sample.num_output_tokens is not None and sample.tpot_s is not None
    ]
    if not terms:
        return None
    # (N - 1) x TPOT is summed before it is divided: with lengths that differ, the product of means is another number.
    e2e_s, ttft_s, steps = (fmean(column) for column in list(zip(*terms, strict=True))[:3])
    return e2e_s, ttft_s, steps, fmean(steps * tpot_s for _, _, steps, tpot_s in terms) / steps


def _engine_identity(mode: StreamingMode) -> Identity | None:
    """Means of the engine's own histograms; None if one is not exported."""
    engine = mode.engine
    if not (engine.e2e and engine.ttft and engine.tpot) or engine.num_output_tokens is None:
        return None
    e2e_s, ttft_s, tpot_s = engine.e2e.mean_s, engine.ttft.mean_s, engine.tpot.mean_s
    if e2e_s is None or ttft_s is None or tpot_s is None:
        return None
    return e2e_s, ttft_s, engine.num_output_tokens / engine.e2e.num - 1, tpot_s


def _identities(*modes: StreamingMode) -> dict[str, Identity | None]:
    """By clock. A client sees the terms only if it streams."""
    found = {f"client, {mode.name}": _client_identity(mode) for mode in modes if mode.is_streamed}
    return found | {f"engine, {mode.name}": _engine_identity(mode) for mode in modes}


def _residual_s(identity: Identity) -> float:
    """Seconds that the two terms leave unexplained."""
    e2e_s, ttft_s, steps, tpot_s = identity
    return e2e_s - ttft_s - steps * tpot_s


def _identity(modes: Sequence[StreamingMode]) -> Table:
    heads = columns("<clock", "E2E|s", "TTFT|s", "N - 1", "TPOT|ms", "residual|s", "residual|% of E2E")
    rows: list[list[Cell]] = []
    for name, each in _identities(*modes).items():
        if each is None:
            rows.append([name, *[NOT_EXPORTED if name.startswith("engine") else None] * 6])
        else:
            e2e_s, ttft_s, steps, tpot_s = each
            left_s = _residual_s(each)
            rows.append([name, e2e_s, ttft_s, steps, tpot_s * 1e3, left_s, 100 * left_s / e2e_s if e2e_s else None])
    note = "Means. What is left at the client is the time from the last token to the end of the stream."
    return Table("E2E = TTFT + (N - 1) x TPOT + residual", heads, rows, note)


def _speed(modes: Sequence[StreamingMode], ceiling: float | None) -> Table:
    named = [(f"client, {modes[0].name}", client_rate(modes[0]))]
    named += [(f"engine, {mode.name}", engine_rate(mode)) for mode in modes]
    rows: list[list[Cell]] = [[name, NOT_EXPORTED if rate is None else rate, ceiling] for name, rate in named]
    note = "1 / TPOT. Ceiling: memory bandwidth / bytes read for a token"
    note += "." if ceiling is not None else "; this server does not tell its own."
    return Table(
        "Speed after the first token", columns("<clock", "one stream|tokens/s", "ceiling|tokens/s"), rows, note
    )


def client_rate(mode: StreamingMode) -> float | None:
    """Median tokens/s of a stream after its first token; None if not known."""
    tpot_s = mode.median(lambda sample: sample.tpot_s)
    return 1 / tpot_s if tpot_s else None


def engine_rate(mode: StreamingMode) -> float | None:
    """Tokens/s by the engine's mean TPOT; None if not exported."""
    tpot = mode.engine.tpot
    return 1 / tpot.mean_s if tpot is not None and tpot.mean_s else None


def _verdict(streamed: StreamingMode, whole: StreamingMode) -> list[str]:
    if not streamed.answered or not whole.answered:
        return ["Nothing to compare: one of the two has no full answer."]
    e2e_s, whole_s, first_s = streamed.e2e_s, whole.e2e_s, streamed.first_output_s
    assert e2e_s is not None
    assert whole_s is not None
    lines = [
        "Streaming does not make the model faster: the whole answer takes "
        f"{_seconds(e2e_s)} streamed and {_seconds(whole_s)} not. {_compared(pair_ratios(streamed, whole))}"
    ]
    if first_s is None:
        return [*lines, "The streams brought nothing visible: reasoning only, or empty answers."]
    factor = whole_s / first_s
    lines.append(
        f"It moves the moment of first value by {factor:.{1 if factor < 10 else 0}f} times: something to read after "
        f"{_seconds(first_s)} instead of {_seconds(whole_s)}."
    )
    lines.append(
        "The client's and the engine's figures come from two clocks that begin and end at other moments: they agree by "
        "order of magnitude, and no more should be read into them."
    )
    return [*lines, *_far_apart(streamed), *_where_it_cannot_help(streamed, first_s, e2e_s)]


def _far_apart(streamed: StreamingMode) -> list[str]:
    """Says where the clocks differ by an order of magnitude: that time is spent between client and engine."""
    pairs = [
        ("TTFT", streamed.first_token_s, streamed.engine.ttft),
        ("E2E", streamed.e2e_s, streamed.engine.e2e),
    ]
    return [
        f"They do not agree on {name}: {_seconds(client_s)} at the client, {_seconds(engine.mean_s)} in the engine. "
        "That time is spent between the two: network, proxy, or the server's own HTTP."
        for name, client_s, engine in pairs
        if client_s is not None and engine is not None and engine.mean_s and client_s > MAGNITUDE * engine.mean_s
    ]


def _compared(ratios: Sequence[float]) -> str:
    """What the pairs say of E2E. A difference that goes both ways is noise."""
    if not ratios:
        return "No pair was answered on both sides."
    low, middle, high = min(ratios), median(ratios), max(ratios)
    said = f"Pair by pair streamed takes {middle:.2f} times as long ({low:.2f} to {high:.2f})"
    if len(ratios) >= 3 and (low > 1 + ALIKE or high < 1 - ALIKE):
        order = "longer: so much does sending it in pieces cost here" if low > 1 else "shorter: not the model's doing"
        return f"{said}, each time {order}."
    if abs(middle - 1) > ALIKE:
        return f"{said}: both ways, so that is noise."
    return f"{said}: the same."


def _where_it_cannot_help(streamed: StreamingMode, first_s: float, e2e_s: float) -> list[str]:
    """The three cases in which streaming does not help, and whether each applies here."""
    is_late = first_s >= LATE_S or first_s >= LATE_PART * e2e_s
    found = buffering.diagnose(streamed.answered)
    if found.is_buffered:
        between = (
            f"applies here: pieces arrive in bursts ({found.pattern}); `chairlift bench proxy` says what and where"
        )
    elif found.pattern is buffering.Pattern.UNKNOWN:
        between = "not known here: too few pieces; `chairlift bench proxy` looks closer"
    else:
        between = "does not apply here: pieces arrive one by one"
    share = f"the first output comes after {_seconds(first_s)}, {100 * first_s / e2e_s:.0f} % of the whole"
    return [
        f"Streaming cannot help where the first token is late already: "
        f"{'applies' if is_late else 'does not apply'} here, {share}.",
        "Nor where the reader is a program that needs all of it (JSON, a tool's arguments, a script): "
        "you know, this tool cannot.",
        f"Nor where something in between buffers: {between}.",
    ]


def pair_ratios(streamed: StreamingMode, whole: StreamingMode) -> list[float]:
    """E2E streamed / not streamed, of the pairs with two answers."""
    pairs = zip(streamed.samples, whole.samples, strict=False)
    return [a.e2e_s / b.e2e_s for a, b in pairs if a.is_ok and b.is_ok and b.e2e_s]


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.2f} s"


def _warnings(modes: Sequence[StreamingMode], num_tokens: int, target: Target) -> list[str]:
    lines = []
    for mode in modes:
        if mode.failed:
            causes = ", ".join(sorted({str(sample.failure) for sample in mode.failed}))
            lines.append(
                f"{mode.name}: {len(mode.failed)} of {len(mode.samples)} failed ({causes}); no figure has them."
            )
        lengths = [sample.num_output_tokens for sample in mode.answered]
        wrong = [length for length in lengths if length is not None and length != num_tokens]
        if wrong:
            why = "" if target.can_fix_length else "; this server cannot be told to go on"
            lines.append(f"{mode.name}: {len(wrong)} answers have other than {num_tokens} tokens{why}.")
        if None in lengths:
            lines.append(f"{mode.name}: the server does not count tokens (usage); lengths are unknown.")
        lines += _about_engine(mode)
    return lines


def _too_fast(modes: Sequence[StreamingMode], target: Target) -> list[str]:
    # At the client by E2E: TPOT means nothing if chunks are buffered, or hold several tokens.
    ceiling = target.one_stream_ceiling
    answered = [sample for mode in modes for sample in mode.answered]
    rates = [sample.num_output_tokens / sample.e2e_s for sample in answered if sample.num_output_tokens]
    fastest = max([*rates, *(rate for rate in map(engine_rate, modes) if rate)], default=0.0)
    if ceiling is None or fastest <= CEILING_SLACK * ceiling:
        return []
    return [
        f"{fastest:.0f} tokens/s, where reading the weights for each token allows {ceiling:.0f}: "
        "drafted or cached tokens, a wrong count, or a wrong ceiling."
    ]


def _about_engine(mode: StreamingMode) -> list[str]:
    lines = []
    engine = mode.engine
    if engine.was_restarted:
        lines.append(f"{mode.name}: the server's counters went back: it was restarted during the run.")
    if engine.e2e is not None and engine.e2e.num != len(mode.answered):
        lines.append(
            f"{mode.name}: the engine ended {engine.e2e.num} requests during {len(mode.answered)} of ours: somebody "
            "else uses this server, and is in its figures."
        )
    per_event = mode.median(lambda sample: sample.tokens_per_event)
    if per_event is not None and per_event > 1.05:
        lines.append(f"{mode.name}: a piece holds {per_event:.1f} tokens; gaps are between pieces.")
    hits, prompts = engine.num_prefix_hits, engine.num_prefix_queries
    if hits and prompts and hits > 0.5 * prompts:
        lines.append(
            f"{mode.name}: the prefix cache had {100 * hits / prompts:.0f} % of the prompts: TTFT is flattered."
        )
    return lines


def _data(mode: StreamingMode) -> dict[str, Any]:
    engine = mode.engine
    return {
        "num_requests": len(mode.samples),
        "num_answered": len(mode.answered),
        "failures": [sample.failure for sample in mode.failed],
        "first_output_s": [s.first_visible_s if mode.is_streamed else s.e2e_s for s in mode.answered],
        "e2e_s": [sample.e2e_s for sample in mode.answered],
        "num_output_tokens": [sample.num_output_tokens for sample in mode.answered],
        "engine_ttft_s": None if engine.ttft is None else engine.ttft.mean_s,
        "engine_e2e_s": None if engine.e2e is None else engine.e2e.mean_s,
        "engine_queue_s": None if engine.queue is None else engine.queue.mean_s,
        "residuals_s": {name: _residual_s(each) for name, each in _identities(mode).items() if each is not None},
    }


def _charts(streamed: StreamingMode, whole: StreamingMode) -> list[Chart]:
    firsts = [sample.first_visible_s for sample in streamed.answered if sample.first_visible_s is not None]
    gaps = [gap for sample in streamed.answered for gap in sample.itl_s]
    moments = [
        Series("streamed: first output", firsts),
        Series("streamed: all of it", [sample.e2e_s for sample in streamed.answered]),
        Series("not streamed: all of it", [sample.e2e_s for sample in whole.answered]),
    ]
    charts = [
        Chart("cdf", "When there is something to read", "time since the request, s", "requests, %", moments, log_x=True)
    ]
    if gaps:
        charts.append(Chart("cdf", "Gaps between pieces", "gap, s", "gaps, %", [Series("streamed", gaps)]))
    return charts
