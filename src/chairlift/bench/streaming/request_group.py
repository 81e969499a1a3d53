"""Requests of one kind, sent one after the other, and what the engine counted during each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from chairlift.bench.client.client import Client, Clock
from chairlift.bench.client.engine_metrics import EngineMetrics, ask_and_scrape
from chairlift.bench.client.sample import Sample
from chairlift.bench.client.target import ConnectOptions, GenerationRequest
from chairlift.bench.report.stats import median_of

Connect = Callable[[str, ConnectOptions, Clock], AbstractAsyncContextManager[Client]]
"""Opens a client; tests have one of their own."""


@dataclass
class RequestGroup:
    """All requests of one kind. `engines` has what the engine counted during each of the samples."""

    name: str
    samples: list[Sample] = field(default_factory=list)
    engines: list[EngineMetrics] = field(default_factory=list)

    async def ask(self, client: Client, request: GenerationRequest, index: int) -> None:
        """Sends one more request."""
        sample, engine = await ask_and_scrape(client, request, index)
        self.samples.append(sample)
        self.engines.append(engine)

    @property
    def answered(self) -> list[Sample]:
        """The samples with a complete answer."""
        return [sample for sample in self.samples if sample.is_ok]

    @property
    def failed(self) -> list[Sample]:
        """The samples without one."""
        return [sample for sample in self.samples if not sample.is_ok]

    def median(self, figure: Callable[[Sample], float | None]) -> float | None:
        """Median of a figure over the answered samples; None if none of them has it."""
        return median_of(map(figure, self.answered))

    @property
    def first_token_s(self) -> float | None:
        """Median TTFT at the client."""
        return self.median(lambda sample: sample.first_token_s)
