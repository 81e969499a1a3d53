"""The server of an experiment: starts one with given flags, and sends it requests at given moments.

A prompt is plain text of about so many tokens. It is new in each run, so that no prefix cache knows it, unless two
requests have the same name. An answer has exactly the length that was asked for.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from chairlift.bench.client.client import Client
from chairlift.bench.client.connect import discover
from chairlift.bench.client.sample import Sample
from chairlift.bench.client.target import Api, Target
from chairlift.bench.load.workload import Lengths, Workload
from chairlift.bench.local.server import LocalServer, ObservedRequest, TimedRequest, serving
from chairlift.errors import ChairliftError


@dataclass(frozen=True, slots=True)
class Setup:
    """What all experiments of a run share. `scale` shrinks every number of tokens, to try the experiments quickly."""

    model: str | None = None
    scale: float = 1.0
    text: str = "docs/tour.md"  # the text that perplexity is measured on
    say: Callable[[str], None] = field(default=lambda _: None)

    def tokens(self, number: int) -> int:
        """A number of tokens, scaled."""
        return max(4, round(number * self.scale))


class ExperimentServer:
    """A server that is ready, and the client that asks it."""

    def __init__(self, local: LocalServer, target: Target) -> None:
        self.local = local
        self.card: dict[str, Any] = dict(target.card)
        """The facts of the start card."""
        self._target = replace(target, api=Api.COMPLETIONS)
        self._words = Workload(Lengths("fixed", 1), Lengths("fixed", 1), salt=secrets.token_hex(8))
        self._num_made = 0

    def request(self, prompt_tokens: int, num_tokens: int, at_s: float = 0.0, name: str = "") -> TimedRequest:
        """A request with a prompt of its own, or with that of every request of this name."""
        self._num_made += 1
        prompt = self._words.text(name or str(self._num_made), prompt_tokens)
        return TimedRequest(f"bench-{self._num_made}", prompt, num_tokens, at_s)

    async def ask(self, request: TimedRequest) -> Sample:
        """Sends one request now. Raises ChairliftError without a complete answer."""
        (observed,) = await self.together([request])
        return observed.sample

    async def together(self, requests: Sequence[TimedRequest], *, may_fail: bool = False) -> list[ObservedRequest]:
        """Sends each request when it is due; results in the order of the requests.

        Raises ChairliftError if one has no complete answer, unless `may_fail`.
        """
        async with Client(self._target) as client, asyncio.TaskGroup() as group:
            observe = self.local.observe
            tasks = [group.create_task(observe(client, request, request.name)) for request in requests]
        observed = [task.result() for task in tasks]
        for sample in (each.sample for each in observed):
            if not sample.is_ok and not may_fail:
                raise ChairliftError(f"a request failed: {sample.failure} {sample.failure_detail}")
        return observed


@asynccontextmanager
async def started(setup: Setup, *flags: str) -> AsyncIterator[ExperimentServer]:
    """A server with these flags that has answered once."""
    setup.say(f"chairlift serve {' '.join(flags)}".rstrip())
    async with serving(setup.model, *flags) as local:
        async with Client(Target(local.url)) as client:
            server = ExperimentServer(local, await discover(client))
        await server.ask(server.request(8, 4))
        yield server


def num_preemptions(observed: ObservedRequest) -> int:
    """Preemptions of a request, by the engine."""
    return observed.logged.num_preemptions if observed.logged else 0
