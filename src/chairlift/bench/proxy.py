"""`chairlift bench proxy`: is something between the server and its reader gathering the stream, or slow to pass it on?

Asks a few streams one after the other, with send stamps where the server gives them, and lets gather.py look at when
the pieces came. With two addresses of one server, straight and through the proxy, the difference is the proxy's.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from chairlift.bench import gather, probe
from chairlift.bench.client import Client, Clock, connect
from chairlift.bench.gather import Gathering, Pattern
from chairlift.bench.live import machine_note
from chairlift.bench.probe import Engine
from chairlift.bench.report import Cell, Chart, Column, Report, Series, Table
from chairlift.bench.sample import Sample
from chairlift.bench.workload import Lengths, Workload

if TYPE_CHECKING:
    from chairlift.bench.live import Live, Shared

Dial = Callable[[str, "Shared", Clock], AbstractAsyncContextManager[Client]]
"""How a server is reached; tests have their own way."""

PROMPT_TOKENS = 16
MIN_DELAY_S = 0.1
"""What a network takes anyway, and the client's own first request, is not called a delay."""

ADVICE = {
    "nginx": "nginx: `proxy_buffering off;` in the location (or the header `X-Accel-Buffering: no` from the server), "
    "`proxy_http_version 1.1;` and `gzip off;` there too.",
    "HAProxy": "HAProxy: `option http-no-delay`, and neither `http-response wait-for-body` nor `compression` for "
    "text/event-stream.",
    "Cloudflare": "Cloudflare: Response Buffering off for the path, `Cache-Control: no-transform` from the server, or "
    "a DNS-only record; quick tunnels (trycloudflare.com) do not stream at all.",
}


def _dial(url: str, shared: Shared, clock: Clock) -> AbstractAsyncContextManager[Client]:
    """As browsers and libraries ask: a proxy that compresses does so only for those who accept it."""
    return connect(url, shared, clock, accepts_gzip=True)


@dataclass
class Path:
    """One address of the server, and what came from it."""

    name: str
    url: str
    samples: list[Sample] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)
    seen: str = ""  # which proxy its headers name

    @property
    def answered(self) -> list[Sample]:
        """Streams that came in full."""
        return [sample for sample in self.samples if sample.is_ok]

    @property
    def gathering(self) -> Gathering:
        """What gather.py makes of them."""
        return gather.diagnose(self.answered)

    @property
    def first_token_s(self) -> float | None:
        """Median time to the first token at the client."""
        times = [sample.first_token_s for sample in self.answered if sample.first_token_s is not None]
        return median(times) if times else None

    @property
    def after_engine_s(self) -> float | None:
        """Client's TTFT less the engine's own, which differ by what lies between; None if the engine does not say."""
        engine = probe.total(self.engines)
        if engine.ttft is None or engine.ttft.num != len(self.answered) or self.first_token_s is None:
            return None
        times = [sample.first_token_s for sample in self.answered if sample.first_token_s is not None]
        return (sum(times) - engine.ttft.sum_s) / len(times)


@dataclass
class ProxyRun:
    """The command: its work, and the report on what there is so far."""

    url: str
    through: str | None
    shared: Shared
    num_requests: int
    num_tokens: int
    dial: Dial = _dial
    clock: Clock = field(default_factory=Clock)
    paths: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.paths = [Path("direct" if self.through else "this address", self.url)]
        if self.through:
            self.paths.append(Path("through", self.through))

    async def work(self, live: Live) -> None:
        """Asks each address in turn, so that drift is shared."""
        total = self.num_requests * len(self.paths)
        work = Workload(Lengths("fixed", PROMPT_TOKENS), Lengths("fixed", self.num_tokens), salt=secrets.token_hex(8))
        async with AsyncExitStack() as stack:
            dials = [self.dial(path.url, self.shared, self.clock) for path in self.paths]
            clients = [await stack.enter_async_context(dial) for dial in dials]
            for i in range(total):
                path, client = self.paths[i % len(self.paths)], clients[i % len(self.paths)]
                live.at(i, total, f"stream {i + 1} of {total}, {path.name}")
                await self._measure(client, path, work.job(i).prompt, i // len(self.paths))

    async def _measure(self, client: Client, path: Path, prompt: str, index: int) -> None:
        """One stream; every third without stamps, whose smaller pieces tell a buffer from a flush at fixed times."""
        if index == 0:
            _, _, headers = await client.get("/v1/models")
            path.seen = _named(headers)
            await client.ask("Hello", 2)  # connections, caches and the model's first step are not the proxy's
        before = await probe.read(client)
        has_stamps = index % 3 != 2
        path.samples.append(await client.ask(prompt, self.num_tokens, has_stamps=has_stamps, index=index))
        path.engines.append(await probe.settled(client, before))

    def report(self) -> Report:
        """Tables, verdict, and what to change."""
        found = [(path, path.gathering) for path in self.paths]
        verdict = [sentence for path, gathering in found for sentence in _verdict(path, gathering)]
        delay = _delay(self.paths)
        if delay is not None:
            verdict.append(delay)
        if len(found) == 2:
            verdict.append(_who(found[0][1], found[1][1]))
        if any(gathering.is_gathered for _, gathering in found) or (delay is not None and "delay ≈" in delay):
            verdict += _advice([path.seen for path, _ in found])
        return Report(
            command="bench proxy",
            title=f"Is something gathering the stream? {' and '.join(path.url for path in self.paths)}",
            tables=[_table(found)] if any(path.samples for path in self.paths) else [],
            verdict=verdict,
            warnings=_warnings(found),
            notes=[machine_note(self.url), *_notes(found)],
            data={path.name: _data(path, gathering) for path, gathering in found},
            charts=_charts(found),
        )


def _named(headers: dict[str, str]) -> str:
    """The proxy that headers name, if any."""
    said = f"{headers.get('server', '')} {headers.get('via', '')}".lower()
    if "cf-ray" in headers or "cloudflare" in said:
        return "Cloudflare"
    return next((name for name in ("nginx", "HAProxy") if name.lower() in said), "")


def size(num_bytes: float) -> str:
    """Bytes as people name buffers: "≈ 16 KB" for what is within 6 % of it."""
    for kb in gather.ROUND_KB:
        if abs(num_bytes / (kb * 1024) - 1) < 0.06:
            return f"{kb} KB"
    return f"{num_bytes / 1024:.1f} KB"


def _verdict(path: Path, found: Gathering) -> list[str]:
    """What this address does, in a sentence."""
    burst = "" if found.num_bytes is None else size(found.num_bytes)
    said = {
        Pattern.CLEAN: "clean: pieces arrive as they are made.",
        Pattern.BUFFER: f"buffer ≈ {burst}: pieces arrive in bursts of equal size.",
        Pattern.INTERVAL: f"flushed every ≈ {found.interval_s or 0:.2g} s: pieces arrive in bursts at equal times.",
        Pattern.EITHER: f"gathered: a buffer ≈ {burst}, or a flush every ≈ {found.interval_s or 0:.2g} s; at an even "
        "pace the two look alike.",
        Pattern.HEAD: f"the first ≈ {burst} are held back, then it streams.",
        Pattern.WHOLE: f"the whole answer comes at its end: a buffer of {burst} or more, or a reader of whole answers.",
        Pattern.SERVER: "pieces are sent in bursts: that is the server itself (or a busy machine), not the way here.",
        Pattern.UNKNOWN: "not known: too few pieces, or all at once so soon that nobody waited.",
    }[found.pattern]
    lines = [f"{path.name}: {said}"]
    if found.is_gathered and found.held_s is not None:
        lines.append(f"{path.name}: the text that waited longest was held for {found.held_s:.2g} s.")
    return lines


def _delay(paths: Sequence[Path]) -> str | None:
    """How much later everything comes, beside the pattern; None where nothing tells."""
    if len(paths) == 2:
        ways = [_way_s(path) for path in paths]
        if ways[0] is not None and ways[1] is not None:
            delay_s = ways[1] - ways[0]
            if delay_s < MIN_DELAY_S and paths[1].gathering.is_gathered:
                return None  # what it gathers is late enough
            return _delay_said(delay_s, "after the direct address")
        firsts = [path.first_token_s for path in paths]
        if firsts[0] is not None and firsts[1] is not None:
            return _delay_said(firsts[1] - firsts[0], "after the direct address, by the first token")
        return None
    if paths[0].gathering.is_gathered:
        return None  # what is gathered is late as well: that is no second fault
    after_s = paths[0].after_engine_s
    return None if after_s is None else _delay_said(after_s, "after the engine, whose clock is its own")


def _way_s(path: Path) -> float | None:
    """The quickest piece's time from send stamp to arrival: an unknown offset, the same for all addresses, is in it."""
    ways = [
        event.at_s - event.sent_at_s
        for sample in path.answered
        for event in sample.token_events
        if event.sent_at_s is not None
    ]
    return min(ways, default=None)


def _delay_said(delay_s: float, where: str) -> str:
    if delay_s < MIN_DELAY_S:
        return f"no delay of its own: {max(delay_s, 0) * 1e3:.0f} ms {where}."
    return f"delay ≈ {delay_s:.1f} s {where}."


def _who(direct: Gathering, through: Gathering) -> str:
    """Whose fault it is, of two addresses."""
    if direct.is_gathered:
        return "The direct address is gathered as well: look between here and the server first."
    if Pattern.UNKNOWN in (direct.pattern, through.pattern):
        return "Where it is gathered, if it is, cannot be told: one address brought too little."
    if through.is_gathered:
        return "What gathers lies between the two addresses."
    return "Neither address is gathered."


def _advice(seen: Sequence[str]) -> list[str]:
    """What to change: the proxies that were seen, else all that are known."""
    named = [name for name in ADVICE if name in seen]
    return [f"To change: {ADVICE[name]}" for name in named or ADVICE]


def _warnings(found: Sequence[tuple[Path, Gathering]]) -> list[str]:
    lines = []
    for path, _ in found:
        failed = [sample for sample in path.samples if not sample.is_ok]
        if failed:
            causes = ", ".join(sorted({f"{sample.failure}: {sample.failure_detail}" for sample in failed}))
            lines.append(f"{path.name}: {len(failed)} of {len(path.samples)} streams failed ({causes}).")
    return lines


def _notes(found: Sequence[tuple[Path, Gathering]]) -> list[str]:
    lines = []
    if any(not gathering.is_stamped and gathering.pattern is not Pattern.UNKNOWN for _, gathering in found):
        lines.append(
            "No send stamps: by arrival alone, a server that sends in bursts looks like a proxy that gathers. "
            "Compare with an address closer to the server (--through)."
        )
    if len(found) == 1 and found[0][0].after_engine_s is None:
        lines.append(
            "Whether everything is late by the same time cannot be told from here: the engine's TTFT is not exported, "
            "or others used the server. A second address (--through) shows it."
        )
    for path, _ in found:
        encodings = sorted({sample.content_encoding for sample in path.answered if sample.content_encoding})
        if encodings:
            lines.append(
                f"{path.name}: the stream comes compressed ({', '.join(encodings)}), and compressing gathers; "
                "sizes are of what came out."
            )
    seen = sorted({path.seen for path, _ in found if path.seen})
    if seen:
        lines.append(f"Response headers name: {', '.join(seen)}.")
    return lines


def _table(found: Sequence[tuple[Path, Gathering]]) -> Table:
    columns = [
        Column("address", align="left"),
        Column("pattern", align="left"),
        Column("pieces a burst"),
        Column("burst", "bytes"),
        Column("between bursts", "s"),
        Column("longest held", "s"),
        Column("first token", "s"),
        Column("after the engine", "s"),
    ]
    rows: list[list[Cell]] = [
        [
            path.name,
            str(each.pattern),
            each.pieces_per_burst,
            each.num_bytes if each.is_gathered else None,
            each.interval_s if each.is_gathered else None,
            each.held_s,
            path.first_token_s,
            "not exported" if path.after_engine_s is None else path.after_engine_s,
        ]
        for path, each in found
    ]
    return Table("How the stream arrives", columns, rows, "Medians over the streams; held: beyond the quickest piece.")


def _data(path: Path, found: Gathering) -> dict[str, Any]:
    return {
        "url": path.url,
        "pattern": str(found.pattern),
        "burst_bytes": found.num_bytes if found.is_gathered else None,
        "interval_s": found.interval_s if found.is_gathered else None,
        "held_s": found.held_s,
        "pieces_per_burst": found.pieces_per_burst,
        "is_stamped": found.is_stamped,
        "first_token_s": path.first_token_s,
        "after_engine_s": path.after_engine_s,
        "failures": [sample.failure for sample in path.samples if not sample.is_ok],
        "num_output_tokens": [sample.num_output_tokens for sample in path.samples],
    }


def _charts(found: Sequence[tuple[Path, Gathering]]) -> list[Chart]:
    """Bytes over time of the last stream of each address: a staircase where something gathers."""
    series = []
    for path, _ in found:
        if path.answered and path.answered[-1].token_events:
            sample, total, x, y = path.answered[-1], 0, [0.0], [0.0]
            for event in sample.token_events:
                total += event.num_bytes
                x.append(event.at_s - sample.started_s)
                y.append(total / 1024)
            series.append(Series(path.name, x, y))
    return [Chart("lines", "What had arrived", "since the request, s", "KB", series)] if series else []
