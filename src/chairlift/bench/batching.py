"""`chairlift bench batching`: the same mixed load under serial, static and continuous batching, on this machine.

    first  ██                                                     one line: somebody is always there already
    long     ████████████████████████████████████████████████████  one answer of 1,200 tokens
    short    ██                                                    four of one line, at the same time
    late           ██      ██      ██                              one line each, while the long one is written

Each policy has a server of its own. Queue and prefill come from the engine's log (its clock, only durations are used),
the other moments from the client: decode ends with the last token that arrived, held is from there to the end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from chairlift.bench.client import Client, Clock, discover
from chairlift.bench.dialect import Ask, Target
from chairlift.bench.live import Live, machine_note
from chairlift.bench.report import Chart, Column, Lane, Report, Series, Span, Table
from chairlift.bench.sample import Sample
from chairlift.bench.servers import LocalServer, Record, serving

POLICIES = ("serial", "static", "continuous")
SIZES = (1, 2, 4, 8)
TOGETHER_S = 0.03
"""After the first: it has been taken, and is not done."""
HELD_S = 0.05
"""A shorter wait between the last token and the end is the network's."""
_STORY = "Tell me a long story about a mountain village, its people and its first chairlift."
_LINES = (
    "Name the capital of France in one line.",
    "What is seven times eight? One line, please.",
    "Give me one word that rhymes with snow.",
    "Say hello in Spanish, in one line.",
    "Which sea lies between Europe and Africa?",
    "Name one metal that is liquid at room temperature.",
    "How many legs has a spider? Answer briefly.",
)


@dataclass(frozen=True, slots=True)
class Part:
    """One request of the load."""

    name: str
    prompt: str
    num_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """What every policy is asked."""

    long_tokens: int = 1200
    short_tokens: int = 24
    num_short: int = 4
    num_late: int = 3
    late_every_s: float = 1.0

    def parts(self) -> list[Part]:
        """In order of arrival. The long one and its company come while the first is served, so that a static batch
        takes them together; it is ahead of them by a hair."""
        parts = [
            Part("first", "Good morning! Who are you?", self.short_tokens, 0.0),
            Part("long", _STORY, self.long_tokens, TOGETHER_S),
        ]
        moments = [TOGETHER_S + 0.02] * self.num_short + [(i + 1) * self.late_every_s for i in range(self.num_late)]
        for i, at_s in enumerate(moments):
            kind = "short" if i < self.num_short else "late"
            place = i + 1 if i < self.num_short else i + 1 - self.num_short
            parts.append(Part(f"{kind} {place}", f"{_LINES[i % len(_LINES)]} ({i})", self.short_tokens, at_s))
        return parts


@dataclass(frozen=True, slots=True)
class Told:
    """A request by its client and, where its log line came, by the engine."""

    part: Part
    sample: Sample
    record: Record | None
    can_be_held: bool  # under this policy

    @property
    def written_s(self) -> float:
        """When its decoding was over. The last token's text may come with the end, and be held with it."""
        times, end_s = self.sample.token_times, self.sample.ended_s
        before = [at_s for at_s in times if at_s < end_s - HELD_S]
        usual_s = median(self.sample.itl_s) if self.sample.itl_s else 0.0
        if self.can_be_held and before and end_s - before[-1] > 4 * usual_s:
            return before[-1]
        return times[-1] if times else end_s

    @property
    def held_s(self) -> float:
        """From the end of its decoding to its end at the client."""
        return self.sample.ended_s - self.written_s if self.can_be_held else 0.0

    def lane(self) -> Lane:
        """Its row of the timeline."""
        sample, times = self.sample, self.sample.token_times
        if not times:
            return Lane(self.part.name, [Span("failed", sample.scheduled_s, sample.ended_s)])
        first, last = times[0], max(times[0], self.written_s)
        begun = min(first, sample.started_s + self.record.queue_s) if self.record else sample.started_s
        spans = [
            Span("queued", sample.scheduled_s, begun),
            Span("prefill", begun, first),
            Span("decode", first, last),
            Span("held", last, last + self.held_s),
        ]
        return Lane(self.part.name, [span for span in spans if span.end_s > span.start_s])


@dataclass
class Run:
    """One policy's answers; `slots` is None for the server's own choice."""

    policy: str
    slots: int | None
    told: list[Told] = field(default_factory=list)

    @property
    def good(self) -> list[Sample]:
        """Those that were answered."""
        return [told.sample for told in self.told if told.sample.is_ok]

    @property
    def ttft_s(self) -> list[float]:
        """At the client, of those that were answered."""
        return [value for sample in self.good if (value := sample.first_token_s) is not None]

    @property
    def short_e2e_s(self) -> list[float]:
        """Of the one-line answers."""
        return [told.sample.e2e_s for told in self.told if told.part.name != "long" and told.sample.is_ok]

    @property
    def long_e2e_s(self) -> float | None:
        """Of the long answer."""
        return next((told.sample.e2e_s for told in self.told if told.part.name == "long" and told.sample.is_ok), None)

    @property
    def queue_s(self) -> list[float]:
        """In the engine."""
        return [told.record.queue_s for told in self.told if told.record]

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "policy": self.policy,
            "slots": self.slots,
            "requests": [
                {
                    "name": told.part.name,
                    "at_s": told.sample.scheduled_s,
                    "failure": told.sample.failure,
                    "ttft_s": told.sample.first_token_s,
                    "e2e_s": told.sample.e2e_s,
                    "queue_s": told.record and told.record.queue_s,
                    "prefill_s": told.record and told.record.prefill_s,
                    "held_s": told.held_s,
                    "output_tokens": told.sample.num_output_tokens,
                }
                for told in self.told
            ],
        }


async def run_load(server: LocalServer, load: Load, run: Run) -> None:
    """Sends the load to a server; what is answered is in `run` at once."""
    async with Client(Target(server.url), clock=Clock()) as scout:
        target = await discover(scout)
    async with Client(target, clock=Clock()) as client:
        await client.ask(_LINES[0], 8)  # the first request pays for what is done once
    parts = load.parts()
    async with Client(target, clock=Clock()) as client, asyncio.TaskGroup() as group:
        for index, part in enumerate(parts):
            group.create_task(_one(client, server, index, part, run))
    run.told.sort(key=lambda told: told.sample.index)


async def _one(client: Client, server: LocalServer, index: int, part: Part, run: Run) -> None:
    await asyncio.sleep(max(0.0, part.at_s - client.clock.now_s()))
    name = f"{run.policy}-{index}"
    ask = Ask(part.prompt, part.num_tokens, request_id=name)
    sample = await client.send(ask, index=index, scheduled_s=part.at_s)
    run.told.append(Told(part, sample, await server.record(name), run.policy == "static"))


_ENOUGH = ("--max-queue", "1000")
"""Nobody is sent away, however slow the policy."""


class Batching:
    """The experiment: `work` measures, `report` says what there is."""

    def __init__(self, model: str | None, load: Load, sizes: Sequence[int], flags: Sequence[str] = ()) -> None:
        self.load = load
        self.runs: list[Run] = []
        self._model = model
        self._flags = tuple(flags)
        self._plan = [(policy, None) for policy in POLICIES] + [("static", size) for size in sizes]

    async def work(self, live: Live) -> None:
        """One server after the other."""
        for done, (policy, slots) in enumerate(self._plan):
            what = policy if slots is None else f"{policy}, batches of {slots}"
            live.say(f"{what}: starting a server")
            live.at(done, len(self._plan), what)
            flags = [
                *self._flags,
                *_ENOUGH,
                "--batching",
                policy,
                *(() if slots is None else ("--max-num-seqs", str(slots))),
            ]
            async with serving(self._model, *flags) as server:
                run = Run(policy, slots)
                self.runs.append(run)
                await run_load(server, self.load, run)

    def report(self) -> Report:
        """What was measured so far."""
        by_policy = [run for run in self.runs if run.slots is None and run.good]
        by_size = [run for run in self.runs if run.slots is not None and run.good]
        failed = sum(len(run.told) - len(run.good) for run in self.runs)
        tables = [_policy_table(by_policy)] if by_policy else []
        tables += [_size_table(by_size)] if by_size else []
        return Report(
            "bench batching",
            f"Serial, static and continuous batching: {_described(self.load)}",
            tables=tables,
            verdict=_verdict({run.policy: run for run in by_policy}),
            warnings=[f"{failed} requests failed; the figures are of the others"] if failed else [],
            notes=[_FEW, machine_note(None)],
            data={"load": asdict(self.load), "runs": [run.as_dict() for run in self.runs]},
            charts=[*(_timeline(run) for run in by_policy), *([_size_chart(by_size)] if by_size else [])],
        )


_FEW = "So few requests have no percentiles worth the name: the tail is the slowest of them."


def _described(load: Load) -> str:
    return (
        f"one answer of {load.long_tokens:,} tokens, {1 + load.num_short} of {load.short_tokens} with it, "
        f"{load.num_late} more of {load.short_tokens} while it is written"
    )


def _policy_table(runs: Sequence[Run]) -> Table:
    columns = [
        Column("policy", align="left"),
        Column("TTFT, median", "s"),
        Column("TTFT, slowest", "s"),
        Column("short answer E2E, median", "s"),
        Column("short answer E2E, slowest", "s"),
        Column("long answer E2E", "s"),
        Column("longest in queue", "s"),
        Column("longest held", "s"),
        Column("output while all ran", "tokens/s"),
    ]
    rows = [
        (
            run.policy,
            _middle(run.ttft_s),
            _most(run.ttft_s),
            _middle(run.short_e2e_s),
            _most(run.short_e2e_s),
            run.long_e2e_s,
            _most(run.queue_s),
            _most(told.held_s for told in run.told),
            _rate(run),
        )
        for run in runs
    ]
    note = "Held: the answer is written, and its end waits for the batch. tokens/s is capacity; nobody feels it."
    return Table("By policy", columns, rows, note)


def _size_table(runs: Sequence[Run]) -> Table:
    columns = [
        Column("batch of at most"),
        Column("TTFT, median", "s"),
        Column("TTFT, slowest", "s"),
        Column("short answer E2E, median", "s"),
        Column("short answer E2E, slowest", "s"),
        Column("longest in queue", "s"),
    ]
    rows = [
        (
            run.slots,
            _middle(run.ttft_s),
            _most(run.ttft_s),
            _middle(run.short_e2e_s),
            _most(run.short_e2e_s),
            _most(run.queue_s),
        )
        for run in runs
    ]
    note = "Who is in the first batch has its first token soon; who is not waits until its slowest member has ended."
    return Table("Static batching by size of the batch", columns, rows, note)


def _verdict(runs: dict[str, Run]) -> list[str]:
    """Plain words, only where both sides were measured."""
    said: list[str] = []
    best = runs.get("continuous")
    if best is None or not best.ttft_s:
        return said
    for policy in ("serial", "static"):
        other = runs.get(policy)
        if other is not None and other.ttft_s:
            said.append(
                f"The slowest first token comes after {_most(other.ttft_s):.2f} s with {policy} and "
                f"{_most(best.ttft_s):.2f} s with continuous batching; the median after {_middle(other.ttft_s):.2f} s "
                f"and {_middle(best.ttft_s):.2f} s."
            )
    alone, shared = runs["serial"].long_e2e_s if "serial" in runs else None, best.long_e2e_s
    if alone and shared:
        said.append(f"The long answer itself takes {alone:.2f} s in its turn (serial), {shared:.2f} s in company.")
    return said


def _timeline(run: Run) -> Chart:
    return Chart(
        "timeline",
        f"{run.policy}: one row a request",
        "time since the first request, s",
        "",
        lanes=[told.lane() for told in run.told],
    )


def _size_chart(runs: Sequence[Run]) -> Chart:
    sizes = [float(run.slots or 0) for run in runs]
    return Chart(
        "lines",
        "Static batching: TTFT over the size of the batch",
        "requests in a batch, at most",
        "TTFT, s",
        series=[
            Series("median", sizes, [_middle(run.ttft_s) for run in runs]),
            Series("slowest", sizes, [_most(run.ttft_s) for run in runs]),
        ],
    )


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else math.nan


def _most(values: Iterable[float]) -> float:
    return max(values, default=math.nan)


def _rate(run: Run) -> float:
    tokens = sum(sample.num_output_tokens or 0 for sample in run.good)
    return tokens / max(sample.ended_s for sample in run.good)
