"""One load run as a value, and the options of the commands that put load on a server."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from chairlift.bench.load.arrivals import Arrivals, ClosedLoop, OpenLoop, parse_think
from chairlift.bench.load.generator import RunLimits
from chairlift.bench.load.goodput import Slo
from chairlift.bench.load.workload import Lengths, SharedPrefix, Workload, read_trace
from chairlift.bench.options import option
from chairlift.errors import ConfigError

LEAST_REQUESTS = 20
MAX_IN_FLIGHT = 256
PROMPT_TOKENS = "200"
OUTPUT_TOKENS = "100"
_LENGTH = "200, uniform:100-300, lognormal:200,0.5 (median, sigma) or exponential:200 (mean); by the server's count."

_LOAD, _WORK, _MEASURING = "Load", "Work", "Measuring"
"""Panels of the help."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One run: what is asked for, when, how much is measured, and which objectives it is held against."""

    workload: Workload
    arrivals: Arrivals
    limits: RunLimits
    slo: Slo | None = None
    is_streamed: bool = True
    is_cache_wanted: bool = False  # A warm prefix cache is what the run measures

    def fresh(self) -> RunSpec:
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

    users: int | None = option(
        "Closed loop: so many users, each of whom asks, reads, thinks, asks again; after a failure not before "
        "Retry-After or a second.",
        panel=_LOAD, min=1,
    )  # fmt: skip
    rate: float | None = option(
        "Open loop: so many requests a second, Poisson; latency from the moment that was due.", panel=_LOAD, min=0.001
    )
    even: bool = option("With --rate: evenly spaced.", "--even", default=False, panel=_LOAD)
    concurrency: int | None = option("So many requests at once, without pauses.", panel=_LOAD, min=1)
    trace: Path | None = option(
        "JSONL with at_s, prompt or prompt_tokens, output_tokens. Prompts stand behind 8 words of salt (--salt '' for "
        "none); with --users or --concurrency moments are not used.",
        panel=_LOAD, metavar="FILE",
    )  # fmt: skip

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

    prompt_tokens: str | None = option(
        f"Length of prompts: {_LENGTH}", panel=_WORK, metavar="N", show_default=PROMPT_TOKENS
    )
    output_tokens: str | None = option(
        "Length of answers, in the same words.", panel=_WORK, metavar="N", show_default=OUTPUT_TOKENS
    )
    shared_prefix: str | None = option(
        "Of SHARE of the prompts the first TOKENS are the same: 0.8:500.", panel=_WORK, metavar="SHARE:TOKENS"
    )
    think: str = option(
        "Seconds that a user thinks: 5 (exponential, mean 5) or fixed:5.", default="0", panel=_WORK, metavar="S"
    )
    salt: str | None = option(
        "Decides the words of prompts; the same salt and --seed again measure a warm prefix cache.",
        panel=_WORK, show_default="fresh, so that no cache helps",
    )  # fmt: skip
    seed: int | None = option("Decides lengths and moments.", panel=_WORK, min=0, show_default="drawn, and told")
    no_stream: bool = option(
        "Ask for whole answers: TTFT and ITL cannot be measured then.", "--no-stream", default=False, panel=_WORK
    )
    requests: int | None = option(
        "Requests that are measured.", panel=_MEASURING, min=1, show_default="4 a user, at least 20"
    )
    duration: float | None = option(
        "Measure what falls due in so many seconds instead.", panel=_MEASURING, min=0.1, metavar="S"
    )
    warmup: int | None = option(
        "Answers before measuring begins.", panel=_MEASURING, min=0, show_default="until steady"
    )
    max_in_flight: int | None = option(
        "Most requests under way; more wait in the client, and it says so.",
        panel=_MEASURING, min=1, show_default="256, or one a user",
    )  # fmt: skip
    slo: str | None = option(
        "Objectives for goodput, s: ttft=1,itl=0.2; of ttft, visible, itl (a request's own p95), tpot, e2e.",
        panel=_MEASURING, metavar="LIMITS",
    )  # fmt: skip

    def spec(self, arrivals: ArrivalOptions) -> RunSpec:
        """The run that was asked for. Raises ConfigError for options that cannot be honoured together."""
        return self._spec(arrivals.arrivals(parse_think(self.think)), arrivals.trace)

    def steps(self, users: Sequence[int]) -> list[RunSpec]:
        """The same work for each number of users. Raises ConfigError."""
        same = replace(self, seed=secrets.randbits(32) if self.seed is None else self.seed)
        return [same._spec(ClosedLoop(count, *parse_think(self.think))) for count in users]

    def _spec(self, arrivals: Arrivals, trace: Path | None = None) -> RunSpec:
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
        return RunSpec(workload, arrivals, limits, slo, not self.no_stream, self.salt is not None)

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
