"""Admission: which requests may join the queue, how long those in it will wait, and which have waited too long.

    waiting   in the queue, never started; `max_queue` bounds their number beside those that a free slot takes next
    running   has a slot, or was preempted and resumes before any waiting request starts

Knows no clock and no threads: the engine tells it the time, and holds its lock meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.engine.request import Output, Request
from chairlift.engine.scheduler import Scheduler
from chairlift.engine.wait_estimator import SlotHolder, Speed, estimate_waits
from chairlift.errors import QueueFull, QueueWait


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One waiting request."""

    request: Request
    position: int  # 1 starts next
    waited_s: float
    expected_wait_s: float  # from now on; 0.0 when a free slot will take it in the next step


@dataclass(frozen=True, slots=True)
class QueueView:
    """The queue at one moment."""

    num_running: int  # with a slot
    num_preempted: int  # lost their blocks; they resume before any waiting request starts
    expected_wait_s: float  # of one more request
    entries: tuple[QueueEntry, ...]  # in the order in which they are expected to start


class Admission:
    """Decides from what the scheduler holds and from measured speed. Changes nothing except by `expire`."""

    def __init__(self, scheduler: Scheduler, speed: Speed, *, max_queue: int, max_wait_s: float | None) -> None:
        """`max_wait_s` is how long a request may wait before `expire` ends it; None: as long as it takes."""
        self._scheduler = scheduler
        self._speed = speed
        self._max_queue = max_queue
        self._max_wait_s = max_wait_s

    def require_room(self, keys: Sequence[str]) -> None:
        """Raises QueueFull unless the queue has room for one more request of each key in `keys` (keys may repeat)."""
        waiting, admitted = self._scheduler.waiting, self._scheduler.admitted
        running = Counter(request.key_name for request in admitted)
        num_free = self._scheduler.free_slots(len(admitted))
        num_taken_next = min(num_free, waiting.num_ready(running, keys))
        num_waiting = len(waiting) - min(num_free, waiting.num_ready(running))
        if len(waiting) + len(keys) - num_taken_next > self._max_queue:
            raise QueueFull(
                "the queue is full",
                num_waiting=num_waiting,
                num_running=len(admitted) + len(waiting) - num_waiting,
                expected_wait_s=self._estimate(keys[0])[1],
            )

    def view(self, key: str, now_s: float) -> QueueView:
        """The queue, and how long one more request of that key would wait."""
        estimates, next_wait_s = self._estimate(key)
        entries = (
            QueueEntry(request, i, now_s - request.timing.arrival_s, wait_s)
            for i, (request, wait_s) in enumerate(estimates, start=1)
        )
        return QueueView(self._scheduler.num_running, self._scheduler.num_preempted, next_wait_s, tuple(entries))

    def expire(self, now_s: float) -> list[Output]:
        """Ends every waiting request that has waited too long. A preempted request has run, and never expires."""
        limit_s = self._max_wait_s
        if limit_s is None:
            return []
        waiting = self._scheduler.waiting
        if not any(now_s - first.timing.arrival_s > limit_s for first in waiting.heads()):
            return []
        late = [request for request in waiting if now_s - request.timing.arrival_s > limit_s]
        # All estimates come before the first end: should one fail, no request is lost.
        expected_s = {key: self._estimate(key, late)[1] for key in {request.key_name for request in late}}
        num_left = len(waiting) - len(late)
        errors = [self._too_late(request, now_s, num_left, expected_s[request.key_name]) for request in late]
        return [self._scheduler.expire(request, error) for request, error in zip(late, errors, strict=True)]

    def _too_late(self, request: Request, now_s: float, num_waiting: int, expected_wait_s: float) -> QueueWait:
        return QueueWait(
            f"gave up after {now_s - request.timing.arrival_s:.1f} s in the queue",
            num_waiting=num_waiting,
            num_running=len(self._scheduler.admitted),
            expected_wait_s=expected_wait_s,
        )

    def _estimate(self, key: str, without: Sequence[Request] = ()) -> tuple[list[tuple[Request, float]], float]:
        """Each waiting request with its wait, in order of their starts; and the wait of one more request of `key`."""
        queue = self._scheduler.waiting.copy()
        for request in without:
            queue.remove(request.key_name, request)
        queue.add(key, None)
        holders = [SlotHolder(r.key_name, self._speed.remaining_s(r)) for r in self._scheduler.admitted]
        estimates = estimate_waits(queue, holders, service_s=self._service_s, free_slots=self._scheduler.free_slots)
        next_wait_s = next(wait_s for request, wait_s in estimates if request is None)
        return [(request, wait_s) for request, wait_s in estimates if request is not None], next_wait_s

    def _service_s(self, request: Request | None) -> float:
        return 0.0 if request is None else self._speed.remaining_s(request)
