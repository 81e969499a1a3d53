"""The hop from the engine thread to asyncio: once a step for all requests, then to the coroutine that waits for each.

    engine thread   deliver(outputs)  --append-->  inbox   -- call_soon_threadsafe, unless one is on its way -->
    event loop      _spread()         --push-->    OutputCollector of each HTTP request  -- Event -->  its coroutine

Nothing here grows with a slow reader: outputs that were not taken are merged. An OutputCollector
holds at most one Delta for each choice, and a Delta at most the one answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from chairlift.engine.request import FinishReason, Output, Request
from chairlift.engine.sampling_params import TokenLogprob
from chairlift.errors import ChairliftError


@dataclass(slots=True)
class Delta:
    """The new output of one choice since it was last taken."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_tokens: int = 0  # of the whole output so far
    finish_reason: FinishReason | None = None
    error: ChairliftError | None = None
    made_s: float = 0.0  # Unix time at which the newest of it left the engine

    def add(self, output: Output | Delta) -> None:
        """Appends later output."""
        self.text += output.text
        self.logprobs.extend(output.logprobs)
        self.num_tokens = output.num_tokens
        self.finish_reason = output.finish_reason
        self.error = output.error


class OutputCollector:
    """Waits for the outputs of one HTTP request's choices. Lives on the event loop."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self._open = set(range(len(requests)))
        self._news: dict[int, Delta] = {}
        self._event = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended and all output was taken."""
        return not self._open and not self._news

    @property
    def unfinished(self) -> list[Request]:
        """The requests that the engine still works on."""
        return [self.requests[i] for i in sorted(self._open)]

    def push(self, index: int, output: Output, made_s: float) -> None:
        """Merges an output of one choice, made at that Unix time, into what `take` will return."""
        if index not in self._open:
            return
        delta = self._news.setdefault(index, Delta(index))
        delta.add(output)
        delta.made_s = made_s
        if output.finish_reason is not None:
            self._open.discard(index)
        self._event.set()

    async def take(self) -> list[Delta]:
        """All new output, by choice. Waits until there is some."""
        await self._event.wait()
        self._event.clear()
        news, self._news = self._news, {}
        return [news[i] for i in sorted(news)]


class Dispatch:
    """Knows the collector of each request."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        # Each step's outputs and when they were made. Guarded by the lock; all else belongs to the event loop.
        self._inbox: list[tuple[list[Output], float]] = []
        self._waiting: dict[Request, tuple[OutputCollector, int]] = {}

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sets the loop that collectors live on."""
        self._loop = loop

    def deliver(self, outputs: list[Output]) -> None:
        """Takes one step's outputs. Called on the engine thread."""
        with self._lock:
            is_first = not self._inbox
            self._inbox.append((outputs, time.time()))
        if is_first and self._loop is not None:
            # A closed loop means that the process is about to end and has no collectors.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._spread)

    @contextlib.contextmanager
    def collecting(self, requests: Sequence[Request]) -> Iterator[OutputCollector]:
        """A collector that receives the outputs of these requests while the block runs."""
        collector = OutputCollector(requests)
        self._waiting.update((request, (collector, i)) for i, request in enumerate(requests))
        try:
            yield collector
        finally:
            for request in requests:
                del self._waiting[request]

    def fail_all(self, error: ChairliftError) -> None:
        """Ends every collector's wait with an error. The caller must end the engine's requests itself."""
        ends = [Output(request, "", 0, (), FinishReason.ERROR, error) for request in self._waiting]
        self._push(ends, time.time())

    def _spread(self) -> None:
        with self._lock:
            steps, self._inbox = self._inbox, []
        for outputs, made_s in steps:
            self._push(outputs, made_s)

    def _push(self, outputs: Iterable[Output], made_s: float) -> None:
        for output in outputs:
            waiting = self._waiting.get(output.request)
            if waiting is not None:
                collector, index = waiting
                collector.push(index, output, made_s)
