"""How long the queue is and where in it each request stands: for GET /v1/queue and for the comments of waiting streams.

Expected waits are the engine's estimates from measured speed, and no promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from chairlift.engine.admission import QueueEntry
from chairlift.engine.engine import Engine
from chairlift.engine.request import Request
from chairlift.plan import Plan
from chairlift.server.responses import Queue, Waiting

_FRESH_S = 0.25
"""How long one view of the queue serves all streams. Each stream asks once a second; a view passes over the queue."""
_SOON_S = 1.0
"""A request that the next step will start is told its position only if it has waited for this long."""


class QueueStatus:
    """The queue of one engine. Lives on the event loop, whose time `clock` gives in seconds."""

    def __init__(self, engine: Engine, plan: Plan, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._plan = plan
        self._clock = clock
        self._looked_s = float("-inf")
        self._entries: dict[Request, QueueEntry] = {}

    def view(self, key_name: str) -> Queue:
        """The body of GET /v1/queue for the holder of that API key."""
        view = self._engine.queue(key_name)
        return {
            "object": "queue",
            "max_queue": self._plan.max_queue,
            "max_queue_wait_s": self._plan.max_queue_wait_s,
            "max_num_seqs": self._plan.max_num_seqs,
            "num_waiting": len(view.entries),
            "num_running": view.num_running,
            "num_preempted": view.num_preempted,
            "expected_wait_s": round(view.expected_wait_s, 1),
            "waiting": [_waiting(entry, key_name) for entry in view.entries],
        }

    def comment(self, requests: Sequence[Request]) -> bytes | None:
        """The SSE comment that tells a stream the first position among its requests; empty if it is not worth telling.

        None once one of the requests has started or finished.
        """
        if any(request.timing.scheduled_s or request.is_finished for request in requests):
            return None
        is_new = not any(request in self._entries for request in requests)
        if is_new or self._clock() - self._looked_s > _FRESH_S:
            self._entries = {entry.request: entry for entry in self._engine.queue().entries}
            self._looked_s = self._clock()
        entries = [self._entries[request] for request in requests if request in self._entries]
        if not entries:
            return b""
        first = min(entries, key=lambda entry: entry.position)
        if first.expected_wait_s == 0.0 and first.waited_s < _SOON_S:
            return b""
        return b": queued position=%d expected_wait_s=%d\n\n" % (first.position, ceil(first.expected_wait_s))


def _waiting(entry: QueueEntry, key_name: str) -> Waiting:
    is_own = entry.request.key_name == key_name
    return {
        "position": entry.position,
        "waited_s": round(entry.waited_s, 1),
        "expected_wait_s": round(entry.expected_wait_s, 1),
        "id": entry.request.group if is_own else None,
    }
