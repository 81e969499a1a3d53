"""How often the KV pool was too small, and the warning of it: an operator should know, and not drown in it."""

from __future__ import annotations

import logging

from chairlift.engine.request import Request

log = logging.getLogger(__name__)

_WARN_EVERY_S = 1.0


class Preemptions:
    """Counts preemptions, and warns of them at most once a second."""

    def __init__(self) -> None:
        self.num = 0
        self._num_told = 0
        self._told_s = float("-inf")
        self._last_id = ""

    def add(self, request: Request) -> None:
        """One request lost its blocks."""
        self.num += 1
        self._last_id = request.id

    def warn(self, now_s: float) -> None:
        """Tells the log of those that it does not know of yet, unless it was told just now."""
        if self.num == self._num_told or now_s - self._told_s < _WARN_EVERY_S:
            return
        log.warning(
            "the KV pool is full: %d more preempted, the last of them request %s; they resume when others have ended "
            "(--kv-memory enlarges the pool, a smaller --max-num-seqs lets more of them wait first)",
            self.num - self._num_told,
            self._last_id,
        )
        self._num_told, self._told_s = self.num, now_s
