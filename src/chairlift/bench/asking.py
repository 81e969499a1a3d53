"""What experiments do again and again: start a server with some flags, ask it for so many tokens at such moments.

Prompts are plain text of about so many tokens, new in each run, so that no prefix cache knows them unless it is asked
for the same name twice. Answers have exactly the length that is asked for.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from chairlift.bench.client import Client, Clock, discover
from chairlift.bench.dialect import Api, Ask, Target
from chairlift.bench.sample import Sample
from chairlift.bench.servers import LocalServer, Record, serving
from chairlift.bench.workload import Lengths, Workload
from chairlift.errors import ChairliftError


@dataclass(frozen=True, slots=True)
class Setup:
    """What all experiments of a run share. `scale` shrinks every number of tokens, for a trial of the machinery."""

    model: str | None = None
    scale: float = 1.0
    text: str = "docs/tour.md"  # what perplexity is measured on
    say: Callable[[str], None] = field(default=lambda _: None)

    def tokens(self, number: int) -> int:
        """So many, or a trial's share of it."""
        return max(4, round(number * self.scale))


@dataclass(frozen=True, slots=True)
class Wish:
    """One request: tokens of the prompt and of the answer, when it is due, and what its prompt is drawn from."""

    prompt_tokens: int
    num_tokens: int
    at_s: float = 0.0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """A request as its client saw it and, if its log line came, as the engine did."""

    sample: Sample
    record: Record | None

    @property
    def num_preemptions(self) -> int:
        """By the engine."""
        return self.record.num_preemptions if self.record else 0


class Asker:
    """Sends wishes to one server."""

    def __init__(self, server: LocalServer, target: Target, facts: dict[str, Any]) -> None:
        self.server = server
        self.facts = facts
        """What the start card says."""
        self._target = replace(target, api=Api.COMPLETIONS)
        self._words = Workload(Lengths("fixed", 1), Lengths("fixed", 1), salt=secrets.token_hex(8))
        self._num_asked = 0

    async def ask(self, wish: Wish) -> Told:
        """One request, now. Raises ChairliftError when it is not answered in full."""
        (told,) = await self.together([replace(wish, at_s=0.0)])
        return told

    async def together(self, wishes: Sequence[Wish], *, may_fail: bool = False) -> list[Told]:
        """All of them, each at its moment; in the order of the wishes. `may_fail`: a refusal is a result too."""
        async with Client(self._target, clock=Clock()) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(client, wish)) for wish in wishes]
        told = [task.result() for task in tasks]
        for sample in (each.sample for each in told):
            if not sample.is_ok and not may_fail:
                raise ChairliftError(f"a request failed: {sample.failure} {sample.failure_detail}")
        return told

    async def _one(self, client: Client, wish: Wish) -> Told:
        self._num_asked += 1
        name = f"bench-{self._num_asked}"
        prompt = self._words.text(wish.name or name, wish.prompt_tokens)
        await asyncio.sleep(max(0.0, wish.at_s - client.clock.now_s()))
        ask = Ask(prompt, wish.num_tokens, request_id=name)
        sample = await client.send(ask, scheduled_s=wish.at_s)
        return Told(sample, await self.server.record(name) if sample.is_ok else None)


@asynccontextmanager
async def asking(setup: Setup, *flags: str) -> AsyncIterator[Asker]:
    """A server with these flags that has answered once, and what asks it."""
    setup.say(f"chairlift serve {' '.join(flags)}".rstrip())
    async with serving(setup.model, *flags) as server:
        async with Client(Target(server.url)) as client:
            target = await discover(client)
            _, body, _ = await client.get("/v1/models")
        asker = Asker(server, target, json.loads(body)["data"][0]["chairlift"])
        await asker.ask(Wish(8, 4))
        yield asker
