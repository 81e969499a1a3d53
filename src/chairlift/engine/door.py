"""The door: who may join the line, how long those in it will wait, and who has waited too long.

    waiting   in line, and never started; `max_queue` bounds how many there are beside those that a free slot takes next
    running   has a slot, or has lost its blocks and comes back before anybody in line starts

Knows no clock and no threads: the engine says what time it is, and lets nobody change the line meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.engine.ending import finish
from chairlift.engine.forecast import Member, Speed, waits
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.engine.scheduler import Scheduler
from chairlift.errors import QueueFull, QueueWait
from chairlift.plan import Plan


@dataclass(frozen=True, slots=True)
class Place:
    """One request in line."""

    request: Request
    position: int  # 1 starts next
    waited_s: float
    expected_wait_s: float  # from now on; 0.0 when a free slot will take it in the next step


@dataclass(frozen=True, slots=True)
class QueueView:
    """The line as it stands."""

    num_running: int  # with a slot
    num_preempted: int  # have lost their blocks for a while, and come back before anybody in line starts
    expected_wait_s: float  # of one more request
    places: tuple[Place, ...]  # in the order in which they are expected to start


class Door:
    """Asks the scheduler what there is; changes nothing but by `give_up`."""

    def __init__(self, plan: Plan, scheduler: Scheduler, speed: Speed) -> None:
        self._plan = plan
        self._scheduler = scheduler
        self._speed = speed

    def require_room(self, keys: Sequence[str]) -> None:
        """QueueFull when there is none for one more request of each of these keys (a key may be named again)."""
        line = self._scheduler.line
        running = Counter(request.key_name for request in self._scheduler.members)
        num_free = self._scheduler.num_seats(len(self._scheduler.members))
        num_taken_next = min(num_free, line.num_ready(running, keys))
        num_waiting = len(line) - min(num_free, line.num_ready(running))
        if len(line) + len(keys) - num_taken_next > self._plan.max_queue:
            raise QueueFull(
                "the queue is full",
                num_waiting=num_waiting,
                num_running=running.total() + len(line) - num_waiting,
                expected_wait_s=self._forecast(keys[0])[1],
            )

    def view(self, key: str, now_s: float) -> QueueView:
        """The line, and what one more request of that key would have to expect."""
        found, newcomer_s = self._forecast(key)
        places = (
            Place(request, i, now_s - request.timing.arrival_s, wait_s)
            for i, (request, wait_s) in enumerate(found, start=1)
        )
        num_running = self._scheduler.num_running
        return QueueView(num_running, self._scheduler.num_preempted, newcomer_s, tuple(places))

    def give_up(self, now_s: float) -> list[Output]:
        """Ends all that have been in line for longer than `max_queue_wait_s`; those that have run before never are."""
        limit_s = self._plan.max_queue_wait_s
        if limit_s is None:
            return []
        line = self._scheduler.line
        if not any(now_s - first.timing.arrival_s > limit_s for _, first in line.firsts()):
            return []
        late = [request for request in line if now_s - request.timing.arrival_s > limit_s]
        # Before anybody is taken out: should the forecast fail, nobody is lost.
        expected_s = {key: self._forecast(key, late)[1] for key in {request.key_name for request in late}}
        for request in late:
            line.remove(request.key_name, request)
        return [finish(r, FinishReason.ERROR, self._too_late(r, now_s, expected_s[r.key_name])) for r in late]

    def _too_late(self, request: Request, now_s: float, expected_wait_s: float) -> QueueWait:
        return QueueWait(
            f"gave up after {now_s - request.timing.arrival_s:.1f} s in the queue",
            num_waiting=len(self._scheduler.line),
            num_running=len(self._scheduler.members),
            expected_wait_s=expected_wait_s,
        )

    def _forecast(self, key: str, without: Sequence[Request] = ()) -> tuple[list[tuple[Request, float]], float]:
        """The line in order with each one's wait, and the wait of one more request of `key`."""
        line = self._scheduler.line.copy()
        for request in without:
            line.remove(request.key_name, request)
        line.add(key, None)
        members = [Member(r.key_name, self._speed.left_s(r)) for r in self._scheduler.members]
        found = waits(line, members, service_s=self._service_s, seats=self._scheduler.num_seats)
        newcomer_s = next(wait_s for request, wait_s in found if request is None)
        return [(request, wait_s) for request, wait_s in found if request is not None], newcomer_s

    def _service_s(self, request: Request | None) -> float:
        return 0.0 if request is None else self._speed.left_s(request)
