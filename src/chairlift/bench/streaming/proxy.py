"""`chairlift bench proxy`: is something between the server and its reader buffering the stream, or late to pass it on?

Asks for a few streams one after the other, with send stamps if the server gives them, and lets buffering.py look at
when their chunks came. With two addresses of one server, straight and through the proxy, the difference is the proxy's.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from chairlift.bench.client import engine_metrics
from chairlift.bench.client.client import Client, Clock
from chairlift.bench.client.connect import connect
from chairlift.bench.client.target import ConnectOptions, GenerationRequest
from chairlift.bench.load.workload import Lengths, Workload
from chairlift.bench.report.measure import ProgressDisplay, machine_note
from chairlift.bench.report.report import Cell, Chart, Report, Series, Table, columns
from chairlift.bench.streaming import buffering
from chairlift.bench.streaming.buffering import Buffering, Pattern
from chairlift.bench.streaming.request_group import Connect, RequestGroup

PROMPT_TOKENS = 16
MIN_DELAY_S = 0.1
"""Less than this may be the network, or the client's first request."""

ADVICE = {
    "nginx": "nginx: `proxy_buffering off;` in the location (or the header `X-Accel-Buffering: no` from the server), "
    "`proxy_http_version 1.1;` and `gzip off;` there too.",
    "HAProxy": "HAProxy: `option http-no-delay`, and neither `http-response wait-for-body` nor `compression` for "
    "text/event-stream.",
    "Cloudflare": "Cloudflare: Response Buffering off for the path, `Cache-Control: no-transform` from the server, or "
    "a DNS-only record; quick tunnels (trycloudflare.com) do not stream at all.",
}


_connect: Connect = partial(connect, accepts_gzip=True)
"""As browsers and libraries ask. A proxy compresses only for a client that accepts it."""


@dataclass
class Route(RequestGroup):
    """One address of the server, and the streams that came from it."""

    url: str = ""
    proxy: str = ""  # the proxy that its headers name

    @property
    def buffering(self) -> Buffering:
        """The pattern in its streams."""
        return buffering.diagnose(self.answered)

    @property
    def after_engine_s(self) -> float | None:
        """Mean TTFT at the client less that in the engine, spent on the way; None if the engine exports none."""
        engine = engine_metrics.combined(self.engines)
        times = [sample.first_token_s for sample in self.answered if sample.first_token_s is not None]
        if engine.ttft is None or engine.ttft.num != len(self.answered) or not times:
            return None
        return (sum(times) - engine.ttft.sum_s) / len(times)


@dataclass
class ProxyCommand:
    """The command: its work, and the report on the streams so far."""

    url: str
    through: str | None
    server: ConnectOptions
    num_requests: int
    num_tokens: int
    connect: Connect = _connect
    clock: Clock = field(default_factory=Clock)
    routes: list[Route] = field(init=False)

    def __post_init__(self) -> None:
        self.routes = [Route("direct" if self.through else "this address", url=self.url)]
        if self.through:
            self.routes.append(Route("through", url=self.through))

    async def work(self, progress: ProgressDisplay) -> None:
        """Asks each address in turn, so that drift affects both."""
        total = self.num_requests * len(self.routes)
        work = Workload(Lengths("fixed", PROMPT_TOKENS), Lengths("fixed", self.num_tokens), salt=secrets.token_hex(8))
        async with AsyncExitStack() as stack:
            opened = [self.connect(route.url, self.server, self.clock) for route in self.routes]
            clients = [await stack.enter_async_context(each) for each in opened]
            for i in range(total):
                route, client = self.routes[i % len(self.routes)], clients[i % len(self.routes)]
                progress.at(i, total, f"stream {i + 1} of {total}, {route.name}")
                await self._measure(client, route, work.request(i).prompt, i // len(self.routes))

    async def _measure(self, client: Client, route: Route, prompt: str, index: int) -> None:
        """One stream. Every third has no stamps: its chunks are smaller, which tells a buffer from a fixed interval."""
        if index == 0:
            _, _, headers = await client.get("/v1/models")
            route.proxy = _named(headers)
            await client.ask(GenerationRequest("Hello", 2))  # opens connections, and is the model's first step
        has_stamps = index % 3 != 2
        await route.ask(client, GenerationRequest(prompt, self.num_tokens, has_stamps=has_stamps), index)

    def report(self) -> Report:
        """Tables, verdict, and what to change."""
        found = [(route, route.buffering) for route in self.routes]
        verdict = [sentence for route, each in found for sentence in _verdict(route, each)]
        delay = _delay(self.routes)
        if delay is not None:
            verdict.append(delay)
        if len(found) == 2:
            verdict.append(_who(found[0][1], found[1][1]))
        if any(each.is_buffered for _, each in found) or (delay is not None and "delay ≈" in delay):
            verdict += _advice([route.proxy for route, _ in found])
        return Report(
            command="bench proxy",
            title=f"Is something buffering the stream? {' and '.join(route.url for route in self.routes)}",
            tables=[_table(found)] if any(route.samples for route in self.routes) else [],
            verdict=verdict,
            warnings=_warnings(found),
            notes=[machine_note(self.url), *_notes(found)],
            data={route.name: _data(route, each) for route, each in found},
            charts=_charts(found),
        )


def _named(headers: dict[str, str]) -> str:
    """The proxy that headers name, if any."""
    said = f"{headers.get('server', '')} {headers.get('via', '')}".lower()
    if "cf-ray" in headers or "cloudflare" in said:
        return "Cloudflare"
    return next((name for name in ("nginx", "HAProxy") if name.lower() in said), "")


def size(num_bytes: float) -> str:
    """Bytes as people name buffers: "16 KB" for a size near it."""
    kb = buffering.round_kb(num_bytes)
    return f"{num_bytes / 1024:.1f} KB" if kb is None else f"{kb} KB"


def _verdict(route: Route, found: Buffering) -> list[str]:
    """What happens to the streams of an address, in one sentence or two."""
    burst = "" if found.num_bytes is None else size(found.num_bytes)
    said = {
        Pattern.CLEAN: "clean: pieces arrive as they are made.",
        Pattern.BUFFER: f"buffer ≈ {burst}: pieces arrive in bursts of equal size.",
        Pattern.INTERVAL: f"flushed every ≈ {found.interval_s or 0:.2g} s: pieces arrive in bursts at equal times.",
        Pattern.EITHER: f"buffered: a buffer ≈ {burst}, or a flush every ≈ {found.interval_s or 0:.2g} s; at an even "
        "pace the two look alike.",
        Pattern.HEAD: f"the first ≈ {burst} are held back, then it streams.",
        Pattern.WHOLE: f"the whole answer comes at its end: a buffer of {burst} or more, or a reader of whole answers.",
        Pattern.SERVER: "pieces are sent in bursts: that is the server itself (or a busy machine), not the way here.",
        Pattern.UNKNOWN: "not known: too few pieces, or all at once so soon that nobody waited.",
    }[found.pattern]
    lines = [f"{route.name}: {said}"]
    if found.is_buffered and found.held_s is not None:
        lines.append(f"{route.name}: the text that waited longest was held for {found.held_s:.2g} s.")
    return lines


def _delay(routes: Sequence[Route]) -> str | None:
    """How much later everything comes, whatever the pattern; None if that is not known."""
    if len(routes) == 2:
        ways = [_fastest_way_s(route) for route in routes]
        if ways[0] is not None and ways[1] is not None:
            delay_s = ways[1] - ways[0]
            if delay_s < MIN_DELAY_S and routes[1].buffering.is_buffered:
                return None  # buffering makes it late, which is no second fault
            return _delay_said(delay_s, "after the direct address")
        firsts = [route.first_token_s for route in routes]
        if firsts[0] is not None and firsts[1] is not None:
            return _delay_said(firsts[1] - firsts[0], "after the direct address, by the first token")
        return None
    if routes[0].buffering.is_buffered:
        return None  # buffering makes it late, which is no second fault
    after_s = routes[0].after_engine_s
    return None if after_s is None else _delay_said(after_s, "after the engine, whose clock is its own")


def _fastest_way_s(route: Route) -> float | None:
    """Seconds from send stamp to arrival of the fastest chunk, plus an offset of clocks that all addresses share."""
    ways = [
        event.at_s - event.sent_at_s
        for sample in route.answered
        for event in sample.token_events
        if event.sent_at_s is not None
    ]
    return min(ways, default=None)


def _delay_said(delay_s: float, where: str) -> str:
    if delay_s < MIN_DELAY_S:
        return f"no delay of its own: {max(delay_s, 0) * 1e3:.0f} ms {where}."
    return f"delay ≈ {delay_s:.1f} s {where}."


def _who(direct: Buffering, through: Buffering) -> str:
    """Which of two addresses is buffered."""
    if direct.is_buffered:
        return "The direct address is buffered as well: look between here and the server first."
    if Pattern.UNKNOWN in (direct.pattern, through.pattern):
        return "Where it is buffered, if it is, cannot be told: one address brought too little."
    if through.is_buffered:
        return "What buffers it lies between the two addresses."
    return "Neither address is buffered."


def _advice(seen: Sequence[str]) -> list[str]:
    """What to change in the proxies that headers name, or else in all that are known."""
    named = [name for name in ADVICE if name in seen]
    return [f"To change: {ADVICE[name]}" for name in named or ADVICE]


def _warnings(found: Sequence[tuple[Route, Buffering]]) -> list[str]:
    lines = []
    for route, _ in found:
        if route.failed:
            causes = ", ".join(sorted({f"{sample.failure}: {sample.failure_detail}" for sample in route.failed}))
            lines.append(f"{route.name}: {len(route.failed)} of {len(route.samples)} streams failed ({causes}).")
    return lines


def _notes(found: Sequence[tuple[Route, Buffering]]) -> list[str]:
    lines = []
    if any(not each.is_stamped and each.pattern is not Pattern.UNKNOWN for _, each in found):
        lines.append(
            "No send stamps: by arrival alone, a server that sends in bursts looks like a proxy that buffers. "
            "Compare with an address closer to the server (--through)."
        )
    if len(found) == 1 and found[0][0].after_engine_s is None:
        lines.append(
            "Whether everything is late by the same time cannot be told from here: the engine's TTFT is not exported, "
            "or others used the server. A second address (--through) shows it."
        )
    for route, _ in found:
        encodings = sorted({sample.content_encoding for sample in route.answered if sample.content_encoding})
        if encodings:
            lines.append(
                f"{route.name}: the stream comes compressed ({', '.join(encodings)}), and compressing buffers; "
                "sizes are of what came out."
            )
    seen = sorted({route.proxy for route, _ in found if route.proxy})
    if seen:
        lines.append(f"Response headers name: {', '.join(seen)}.")
    return lines


def _table(found: Sequence[tuple[Route, Buffering]]) -> Table:
    heads = columns(
        "<address", "<pattern", "pieces a burst", "burst|bytes", "between bursts|s", "longest held|s", "first token|s",
        "after the engine|s",
    )  # fmt: skip
    shown = ("pattern", "pieces_per_burst", "burst_bytes", "interval_s", "held_s", "first_token_s", "after_engine_s")
    rows: list[list[Cell]] = [
        [route.name, *(data[name] for name in shown)] for route, data in ((r, _data(r, each)) for r, each in found)
    ]
    for row in rows:
        row[-1] = "not exported" if row[-1] is None else row[-1]
    return Table("How the stream arrives", heads, rows, "Medians over the streams; held: beyond the quickest piece.")


def _data(route: Route, found: Buffering) -> dict[str, Any]:
    return {
        "url": route.url,
        "pattern": str(found.pattern),
        "burst_bytes": found.num_bytes if found.is_buffered else None,
        "interval_s": found.interval_s if found.is_buffered else None,
        "held_s": found.held_s,
        "pieces_per_burst": found.chunks_per_burst,
        "is_stamped": found.is_stamped,
        "first_token_s": route.first_token_s,
        "after_engine_s": route.after_engine_s,
        "failures": [sample.failure for sample in route.failed],
        "num_output_tokens": [sample.num_output_tokens for sample in route.samples],
    }


def _charts(found: Sequence[tuple[Route, Buffering]]) -> list[Chart]:
    """Bytes over time of the last stream of each address: a staircase if it is buffered."""
    series = []
    for route, _ in found:
        if route.answered and route.answered[-1].token_events:
            sample, total, x, y = route.answered[-1], 0, [0.0], [0.0]
            for event in sample.token_events:
                total += event.num_bytes
                x.append(event.at_s - sample.started_s)
                y.append(total / 1024)
            series.append(Series(route.name, x, y))
    return [Chart("lines", "What had arrived", "since the request, s", "KB", series)] if series else []
