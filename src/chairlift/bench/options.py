"""The options of the commands that make load, and the run that they ask for. Plain values until a command begins."""

from __future__ import annotations

import functools
import inspect
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from chairlift.bench.load import Limits
from chairlift.bench.stats import Slo
from chairlift.bench.workload import Arrivals, Closed, Lengths, Open, SharedPrefix, Workload, parse_think, read_trace
from chairlift.errors import ConfigError

LEAST_REQUESTS = 20
MAX_IN_FLIGHT = 256
PROMPT_TOKENS = "200"
OUTPUT_TOKENS = "100"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One run: what is asked, when, how often, and what would be good."""

    workload: Workload
    arrivals: Arrivals
    limits: Limits
    slo: Slo | None = None
    is_streamed: bool = True
    is_cache_wanted: bool = False

    def fresh(self) -> Wanted:
        """The same work in words that no server has seen; unless a warm cache is what is measured."""
        if self.is_cache_wanted:
            return self
        return replace(self, workload=replace(self.workload, salt=secrets.token_hex(8)))


@dataclass(frozen=True, slots=True)
class WorkFlags:
    """The options that say what is asked and how much is measured, as they were typed."""

    prompt_tokens: str | None
    output_tokens: str | None
    shared_prefix: str | None
    requests: int | None
    duration: float | None
    warmup: int | None
    max_in_flight: int | None
    slo: str | None
    no_stream: bool
    salt: str | None
    think: str
    seed: int | None

    def wanted(self, arrivals: Arrivals, trace: Path | None = None) -> Wanted:
        """Raises ConfigError for what cannot be honoured."""
        users = arrivals.users if isinstance(arrivals, Closed) else 0
        self._check(users, has_trace=trace is not None)
        workload = Workload(
            prompt=Lengths.parse(_or(self.prompt_tokens, PROMPT_TOKENS), "--prompt-tokens"),
            output=Lengths.parse(_or(self.output_tokens, OUTPUT_TOKENS), "--output-tokens"),
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            salt=secrets.token_hex(8) if self.salt is None else self.salt,
            prefix=None if self.shared_prefix is None else SharedPrefix.parse(self.shared_prefix),
            trace=() if trace is None else read_trace(trace),
        )
        requests = self.requests or max(LEAST_REQUESTS, 4 * users)
        limits = Limits(
            num_requests=None if self.duration is not None else requests,
            duration_s=self.duration,
            warmup=self.warmup,
            max_in_flight=self.max_in_flight or max(MAX_IN_FLIGHT, users),
        )
        slo = None if self.slo is None else Slo.parse(self.slo)
        return Wanted(workload, arrivals, limits, slo, not self.no_stream, self.salt is not None)

    def _check(self, users: int, *, has_trace: bool) -> None:
        if self.requests is not None and self.duration is not None:
            raise ConfigError("--requests and --duration: one of them ends the run")
        if self.max_in_flight is not None and self.max_in_flight < users:
            raise ConfigError(f"--max-in-flight {self.max_in_flight}: {users} users would wait for each other here")
        lengths = (self.prompt_tokens, self.output_tokens, self.shared_prefix)
        if has_trace and any(value is not None for value in (*lengths, self.requests, self.duration, self.warmup)):
            raise ConfigError(
                "--trace is measured as it is",
                hint="without --prompt-tokens, --output-tokens, --shared-prefix, --requests, --duration and --warmup",
            )

    def steps(self, users: Sequence[int]) -> list[Wanted]:
        """The same work for each number of users. Raises ConfigError."""
        same = replace(self, seed=secrets.randbits(32) if self.seed is None else self.seed)
        return [same.wanted(Closed(count, *self.thinking)) for count in users]

    @property
    def thinking(self) -> tuple[float, bool]:
        """Mean seconds, and whether exponential."""
        return parse_think(self.think)


@dataclass(frozen=True, slots=True)
class ArrivalFlags:
    """The options that say when requests come."""

    users: int | None
    rate: float | None
    even: bool
    concurrency: int | None
    trace: Path | None

    def arrivals(self, thinking: tuple[float, bool]) -> Arrivals:
        """One kind of load; one user without pauses when nothing was said. Raises ConfigError for two kinds."""
        given = [
            name
            for name, value in (("--users", self.users), ("--rate", self.rate), ("--concurrency", self.concurrency))
            if value is not None
        ]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are different kinds of load", hint="give one of them")
        if thinking[0] and self.users is None:
            raise ConfigError("--think is the time that --users think", hint="give --users N")
        if self.even and self.rate is None:
            raise ConfigError("--even is how requests of a --rate are spaced", hint="give --rate R")
        if self.rate is not None:
            return Open(self.rate, not self.even)
        if self.trace is not None and not given:
            return Open(0.0)
        return Closed(self.users or self.concurrency or 1, *thinking)


def _or(given: str | None, default: str) -> str:
    return default if given is None else given


def _row(name: str, kind: Any, default: Any, help: str, **more: Any) -> inspect.Parameter:
    flag = more.pop("flag", "--" + name.replace("_", "-"))
    panel = more.pop("panel", "Work")
    option = Annotated[kind, typer.Option(flag, help=help, rich_help_panel=panel, **more)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)


_LENGTH = "200, uniform:100-300, lognormal:200,0.5 (median, sigma) or exponential:200 (mean); by the server's count."
WORK_ROWS = [
    _row("prompt_tokens", str | None, None, f"Length of prompts: {_LENGTH}", metavar="N", show_default=PROMPT_TOKENS),
    _row("output_tokens", str | None, None, "Length of answers, in the same words.", metavar="N",
         show_default=OUTPUT_TOKENS),
    _row(
        "shared_prefix", str | None, None, "Of SHARE of the prompts the first TOKENS are the same: 0.8:500.",
        metavar="SHARE:TOKENS",
    ),
    _row("think", str, "0", "Seconds that a user thinks: 5 (exponential, mean 5) or fixed:5.", metavar="S"),
    _row(
        "salt", str | None, None,
        "Decides the words of prompts; the same salt and --seed again measure a warm prefix cache.",
        show_default="fresh, so that no cache helps",
    ),
    _row("seed", int | None, None, "Decides lengths and moments.", min=0, show_default="drawn, and told"),
    _row("no_stream", bool, False, "Ask for whole answers: TTFT and ITL cannot be measured then."),
    _row(
        "requests", int | None, None, "Requests that are measured.", min=1, panel="Measuring",
        show_default="4 a user, at least 20",
    ),
    _row("duration", float | None, None, "Measure what falls due in so many seconds instead.", min=0.1, metavar="S",
         panel="Measuring"),
    _row("warmup", int | None, None, "Answers before measuring begins.", min=0, panel="Measuring",
         show_default="until steady"),
    _row("max_in_flight", int | None, None, "Most requests under way; more wait in the client, and it says so.", min=1,
         panel="Measuring", show_default="256, or one a user"),
    _row("slo", str | None, None, "Objectives for goodput, s: ttft=1,itl=0.2; of ttft, visible, itl (a request's own "
         "p95), tpot, e2e.", metavar="LIMITS", panel="Measuring"),
]  # fmt: skip
ARRIVAL_ROWS = [
    _row("users", int | None, None, "Closed loop: so many users, each of whom asks, reads, thinks, asks again; after "
         "a failure not before Retry-After or a second.", min=1, panel="Load"),
    _row("rate", float | None, None, "Open loop: so many requests a second, Poisson; latency from the moment "
         "that was due.", min=0.001, panel="Load"),
    _row("even", bool, False, "With --rate: evenly spaced.", panel="Load"),
    _row("concurrency", int | None, None, "So many requests at once, without pauses.", min=1, panel="Load"),
    _row("trace", Path | None, None, "JSONL with at_s, prompt or prompt_tokens, output_tokens. Prompts stand behind 8 "
         "words of salt (--salt '' for none); with --users or --concurrency moments are not used.", metavar="FILE",
         panel="Load"),
]  # fmt: skip


def with_work(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of WorkFlags, as second argument."""
    return _with(command, WorkFlags, WORK_ROWS, after=1)


def with_arrivals(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of ArrivalFlags, as third argument."""
    return _with(command, ArrivalFlags, ARRIVAL_ROWS, after=2)


def _with(
    command: Callable[..., None], make: type, rows: list[inspect.Parameter], *, after: int
) -> Callable[..., None]:
    """The command with `make(options)` as its argument number `after`, counted from 0."""
    names = [field.name for field in fields(make)]

    def run(*first: Any, **given: Any) -> None:
        made = make(**{name: given.pop(name) for name in names})
        command(*first, made, **given)

    functools.update_wrapper(run, command)
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())
    kept = [*parameters[:after], *parameters[after + 1 :]]
    run.__signature__ = inspect.Signature([*kept, *rows])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run
