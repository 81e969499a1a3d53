"""One load run as a value, and the options of the commands that put load on a server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from chairlift.bench.load.arrivals import Arrivals, ClosedLoop, OpenLoop, parse_think
from chairlift.bench.load.generator import RunLimits
from chairlift.bench.load.goodput import Slo
from chairlift.bench.load.workload import Lengths, SharedPrefix, Workload, read_trace
from chairlift.errors import ConfigError

LEAST_REQUESTS = 20
MAX_IN_FLIGHT = 256
PROMPT_TOKENS = "200"
OUTPUT_TOKENS = "100"
_LENGTH = "200, uniform:100-300, lognormal:200,0.5 (median, sigma) or exponential:200 (mean); by the server's count."

_work = partial(typer.Option, rich_help_panel="Work")
_measuring = partial(typer.Option, rich_help_panel="Measuring")
_load = partial(typer.Option, rich_help_panel="Load")


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """One run: what is asked for, when, how much is measured, and which objectives it is held against."""

    workload: Workload
    arrivals: Arrivals
    limits: RunLimits
    slo: Slo | None = None
    is_streamed: bool = True
    is_cache_wanted: bool = False
    """A warm prefix cache is what the run measures."""

    def fresh(self) -> LoadSpec:
        """The same work in words that no server has seen, unless the run measures a warm cache."""
        if self.is_cache_wanted:
            return self
        return replace(self, workload=replace(self.workload, salt=secrets.token_hex(8)))

    @property
    def max_in_flight(self) -> int:
        """The most requests that can be in flight: one a user, or the limit of the generator."""
        return self.arrivals.users if isinstance(self.arrivals, ClosedLoop) else self.limits.max_in_flight


@dataclass(frozen=True, slots=True)
class ArrivalOptions:
    """The options that say when requests come."""

    users: Annotated[
        int | None,
        _load(
            min=1,
            help="Closed loop: so many users, each of whom asks, reads, thinks, asks again; after a failure not before "
            "Retry-After or a second.",
        ),
    ] = None
    rate: Annotated[
        float | None,
        _load(min=0.001, help="Open loop: so many requests a second, Poisson; latency from the moment that was due."),
    ] = None
    even: Annotated[bool, _load("--even", help="With --rate: evenly spaced.")] = False
    concurrency: Annotated[int | None, _load(min=1, help="So many requests at once, without pauses.")] = None
    trace: Annotated[
        Path | None,
        _load(
            metavar="FILE",
            help="JSONL with at_s, prompt or prompt_tokens, output_tokens. Prompts stand behind 8 words of salt "
            "(--salt '' for none); with --users or --concurrency moments are not used.",
        ),
    ] = None

    def arrivals(self, thinking: tuple[float, bool]) -> Arrivals:
        """The kind of load that was asked for; one user without pauses by default. Raises ConfigError for two kinds."""
        kinds = {"--users": self.users, "--rate": self.rate, "--concurrency": self.concurrency}
        given = [name for name, value in kinds.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} are different kinds of load", hint="give one of them")
        if thinking[0] and self.users is None:
            raise ConfigError("--think is the time that --users think", hint="give --users N")
        if self.even and self.rate is None:
            raise ConfigError("--even is how requests of a --rate are spaced", hint="give --rate R")
        if self.rate is not None:
            return OpenLoop(self.rate, not self.even)
        if self.trace is not None and not given:
            return OpenLoop(0.0)
        return ClosedLoop(self.users or self.concurrency or 1, *thinking)


@dataclass(frozen=True, slots=True)
class WorkOptions:
    """The options that say what is asked for and how much is measured."""

    prompt_tokens: Annotated[
        str | None, _work(metavar="N", show_default=PROMPT_TOKENS, help=f"Length of prompts: {_LENGTH}")
    ] = None
    output_tokens: Annotated[
        str | None, _work(metavar="N", show_default=OUTPUT_TOKENS, help="Length of answers, in the same words.")
    ] = None
    shared_prefix: Annotated[
        str | None,
        _work(metavar="SHARE:TOKENS", help="Of SHARE of the prompts the first TOKENS are the same: 0.8:500."),
    ] = None
    think: Annotated[
        str, _work(metavar="S", help="Seconds that a user thinks: 5 (exponential, mean 5) or fixed:5.")
    ] = "0"
    salt: Annotated[
        str | None,
        _work(
            show_default="fresh, so that no cache helps",
            help="Decides the words of prompts; the same salt and --seed again measure a warm prefix cache.",
        ),
    ] = None
    seed: Annotated[int | None, _work(min=0, show_default="drawn, and told", help="Decides lengths and moments.")] = (
        None
    )
    no_stream: Annotated[
        bool, _work("--no-stream", help="Ask for whole answers: TTFT and ITL cannot be measured then.")
    ] = False
    requests: Annotated[
        int | None,
        _measuring(min=1, show_default="4 a user, at least 20", help="Requests that are measured."),
    ] = None
    duration: Annotated[
        float | None, _measuring(min=0.1, metavar="S", help="Measure what falls due in so many seconds instead.")
    ] = None
    warmup: Annotated[
        int | None, _measuring(min=0, show_default="until steady", help="Answers before measuring begins.")
    ] = None
    max_in_flight: Annotated[
        int | None,
        _measuring(
            min=1,
            show_default="256, or one a user",
            help="Most requests under way; more wait in the client, and it says so.",
        ),
    ] = None
    slo: Annotated[
        str | None,
        _measuring(
            metavar="LIMITS",
            help="Objectives for goodput, s: ttft=1,itl=0.2; of ttft, visible, itl (a request's own p95), tpot, e2e.",
        ),
    ] = None

    def spec(self, arrivals: ArrivalOptions) -> LoadSpec:
        """The run that was asked for. Raises ConfigError for options that cannot be honoured together."""
        return self._spec(arrivals.arrivals(parse_think(self.think)), arrivals.trace)

    def steps(self, users: Sequence[int]) -> list[LoadSpec]:
        """The same work for each number of users. Raises ConfigError."""
        same = replace(self, seed=secrets.randbits(32) if self.seed is None else self.seed)
        return [same._spec(ClosedLoop(count, *parse_think(self.think))) for count in users]

    def _spec(self, arrivals: Arrivals, trace: Path | None = None) -> LoadSpec:
        users = arrivals.users if isinstance(arrivals, ClosedLoop) else 0
        self._check(users, has_trace=trace is not None)
        prompt = PROMPT_TOKENS if self.prompt_tokens is None else self.prompt_tokens
        output = OUTPUT_TOKENS if self.output_tokens is None else self.output_tokens
        workload = Workload(
            prompt=Lengths.parse(prompt, "--prompt-tokens"),
            output=Lengths.parse(output, "--output-tokens"),
            seed=secrets.randbits(32) if self.seed is None else self.seed,
            salt=secrets.token_hex(8) if self.salt is None else self.salt,
            prefix=None if self.shared_prefix is None else SharedPrefix.parse(self.shared_prefix),
            trace=() if trace is None else read_trace(trace),
        )
        requests = self.requests or max(LEAST_REQUESTS, 4 * users)
        limits = RunLimits(
            num_requests=None if self.duration is not None else requests,
            duration_s=self.duration,
            warmup=self.warmup,
            max_in_flight=self.max_in_flight or max(MAX_IN_FLIGHT, users),
        )
        slo = None if self.slo is None else Slo.parse(self.slo)
        return LoadSpec(workload, arrivals, limits, slo, not self.no_stream, self.salt is not None)

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
