"""One request as its client saw it: what arrived when, and the times that follow from it.

    scheduled        started     role      first token    first visible        last token   ended
        |--dispatch delay--|-------|-----------|---------------|-------- ... --------|---------|
        |<------------ first_token_s --------->|               |                               |
        |<------------------ first_visible_s ----------------->|                               |
        |<------------------------------------- e2e_s ---------------------------------------->|

All times are seconds since the run's start on one monotonic clock. Latencies count from the moment at which the request
was *due*, so that a generator that falls behind does not hide the wait that it caused. Pure: no HTTP, no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class EventKind(StrEnum):
    """What a part of a stream brought."""

    ROLE = "role"  # says who speaks, or holds an empty text: no token yet
    REASONING = "reasoning"  # tokens, but nothing that a reader waits for
    TEXT = "text"
    TOOL = "tool"
    FINISH = "finish"
    USAGE = "usage"
    PING = "ping"  # an SSE comment
    ERROR = "error"
    DONE = "done"


TOKENS = frozenset({EventKind.REASONING, EventKind.TEXT, EventKind.TOOL})
"""Kinds that bear tokens. Only texts that are not empty have them."""

VISIBLE = frozenset({EventKind.TEXT, EventKind.TOOL})
"""Kinds that a reader can use."""


class Failure(StrEnum):
    """Why a request was not answered in full."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    HTTP_401 = "http 401"
    HTTP_404 = "http 404"
    HTTP_429 = "http 429"
    HTTP_503 = "http 503"
    HTTP_3XX = "http 3xx"  # redirects are not followed: the figures would be of somewhere else
    HTTP_4XX = "http 4xx"
    HTTP_5XX = "http 5xx"
    ERROR_EVENT = "error event"  # the server said so, after status 200
    CLOSED_EARLY = "closed early"  # the connection ended before the answer did
    BAD_STREAM = "bad stream"
    BAD_ANSWER = "bad answer"

    @classmethod
    def of_status(cls, status: int) -> Failure:
        """The failure of an HTTP status that is not a success."""
        exact = f"http {status}"
        return cls(exact) if exact in {str(each) for each in cls} else cls(f"http {min(max(status // 100, 3), 5)}xx")


@dataclass(frozen=True, slots=True)
class Event:
    """One part of a stream. `num_bytes` is its size on the wire, SSE framing included.

    `num_tokens` is None unless the server says how many tokens the event holds. `sent_at_s` is the server's send stamp
    moved onto the run's clock by the two machines' wall clocks, so that only its differences mean something.
    """

    at_s: float
    kind: EventKind
    num_tokens: int | None = None
    sent_at_s: float | None = None
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, answered (`failure` is None) or failed. Token counts are the server's own, None if it tells none.

    Without streaming there are no events and no first token, since neither can be measured.
    """

    index: int
    scheduled_s: float
    started_s: float
    ended_s: float
    is_streamed: bool
    events: tuple[Event, ...] = ()
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int | None = None
    finish_reason: str | None = None
    failure: Failure | None = None
    failure_detail: str = ""
    retry_after_s: float | None = None
    content_encoding: str = ""  # The compression of the answer, if any. Sizes are those after decompression.

    @property
    def is_ok(self) -> bool:
        """Whether the answer is complete."""
        return self.failure is None

    @property
    def dispatch_delay_s(self) -> float:
        """How late the client sent it, in seconds."""
        return self.started_s - self.scheduled_s

    @property
    def token_events(self) -> tuple[Event, ...]:
        """Events that bear tokens, in order; empty without streaming."""
        return tuple(event for event in self.events if event.kind in TOKENS)

    @property
    def token_times(self) -> tuple[float, ...]:
        """When each event that bears tokens arrived; empty without streaming."""
        return tuple(event.at_s for event in self.token_events)

    @property
    def first_token_s(self) -> float | None:
        """TTFT: from the due time to the first token of any kind; None without one."""
        times = self.token_times
        return times[0] - self.scheduled_s if times else None

    @property
    def first_visible_s(self) -> float | None:
        """From the due time to the first text or tool call: what a reader feels. None without one."""
        return next((event.at_s - self.scheduled_s for event in self.events if event.kind in VISIBLE), None)

    @property
    def e2e_s(self) -> float:
        """From the due time to the end of the answer, or of the failure."""
        return self.ended_s - self.scheduled_s

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Gaps between events that bear tokens. They are gaps between tokens only if `tokens_per_event` is 1."""
        return tuple(after - before for before, after in pairwise(self.token_times))

    @property
    def tokens_per_event(self) -> float | None:
        """Mean tokens of an event, by the server's usage; None if either is unknown."""
        if self.num_output_tokens is None or not self.token_times:
            return None
        return self.num_output_tokens / len(self.token_times)

    @property
    def tpot_s(self) -> float | None:
        """(last token - first token) / (tokens - 1), tokens by the server's usage; None for under two, or unknown."""
        times = self.token_times
        if self.num_output_tokens is None or self.num_output_tokens < 2 or len(times) < 2:
            return None
        return (times[-1] - times[0]) / (self.num_output_tokens - 1)
