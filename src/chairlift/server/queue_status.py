"""What a stream that waits is told: its place in line, looked up for all streams at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

from chairlift.engine.door import Place
from chairlift.engine.engine import Engine
from chairlift.engine.request import Request

_FRESH_S = 0.25
"""How long one look at the line serves: many streams ask once a second, and a look goes through all of it."""
_SOON_S = 1.0
"""A request that a free slot takes in the next step is not worth a word, unless that step is long in coming."""


class Board:
    """Lives on the event loop; `clock` gives its time."""

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._clock = clock
        self._looked_s = float("-inf")
        self._places: dict[Request, Place] = {}

    def comment(self, requests: Sequence[Request]) -> bytes | None:
        """The SSE comment for one client's requests, as long as none of them has begun; None from then on.

        Empty when there is nothing to say yet.
        """
        if any(request.timing.scheduled_s or request.is_finished for request in requests):
            return None
        is_new = not any(request in self._places for request in requests)
        if is_new or self._clock() - self._looked_s > _FRESH_S:
            self._places = {place.request: place for place in self._engine.queue().places}
            self._looked_s = self._clock()
        places = [self._places[request] for request in requests if request in self._places]
        if not places:
            return b""
        first = min(places, key=lambda place: place.position)
        if first.expected_wait_s == 0.0 and first.waited_s < _SOON_S:
            return b""
        return b": queued position=%d expected_wait_s=%d\n\n" % (first.position, ceil(first.expected_wait_s))
