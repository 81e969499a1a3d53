"""When requests come: an open loop of independent people, or a closed loop of users who wait and think. Pure."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from chairlift.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that come whether or not earlier ones were answered, as from many independent people."""

    rate: float  # requests a second; 0: the trace has the moments
    is_poisson: bool = True

    def moments(self, seed: int) -> Iterator[float]:
        """Moments in seconds from the start, without end."""
        rng, at_s = random.Random(f"{seed}/arrivals"), 0.0
        while True:
            yield at_s
            at_s += rng.expovariate(self.rate) if self.is_poisson else 1 / self.rate

    def __str__(self) -> str:
        if not self.rate:
            return "open loop, moments from the trace"
        return f"open loop, {self.rate:g} requests/s, {'Poisson' if self.is_poisson else 'evenly spaced'}"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Users, each of whom asks, waits for the answer, thinks, and asks again."""

    users: int
    think_s: float = 0.0
    is_exponential: bool = True

    def pause(self, rng: random.Random) -> float:
        """Seconds from an answer to the user's next request."""
        if not self.think_s or not self.is_exponential:
            return self.think_s
        return rng.expovariate(1 / self.think_s)

    def __str__(self) -> str:
        if not self.think_s:
            return f"closed loop, {self.users} at once without pauses"
        kind = "exponential, mean" if self.is_exponential else "always"
        return f"closed loop, {self.users} users, think time {kind} {self.think_s:g} s"


Arrivals = OpenLoop | ClosedLoop


def parse_think(text: str) -> tuple[float, bool]:
    """Seconds, and whether they are the mean of an exponential distribution: `5`, as people think, or `fixed:5`."""
    match = re.fullmatch(r"(fixed:)?(\d*\.?\d+)", text.strip())
    if match is None:
        raise ConfigError(f"--think: {text!r} is not a number of seconds", hint="5, or fixed:5")
    return float(match[2]), match[1] is None
