"""Notices that there is work and no step ends, and writes down once what every thread is doing then.

Owns the time of the last progress. A step that ended is progress, whatever it computed: a long prompt never looks like
a stall, and a wait for work is none.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable

log = logging.getLogger(__name__)


class Watchdog:
    """Any thread may ask; the engine thread, and who brings it its first work, tell."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._progress_s = clock()
        self._told_s: float | None = None  # which progress was the last one before the stall that was told of

    def progress(self) -> float:
        """A step ended, or work begins after there was none. Returns the time."""
        self._progress_s = self._clock()
        return self._progress_s

    @property
    def age_s(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._progress_s

    @property
    def is_over(self) -> bool:
        """Whether the last progress was longer ago than it may be."""
        return self.age_s > self._limit_s

    def tell_once(self, work: str, first: threading.Thread) -> bool:
        """In a stall, logs the stacks of all threads, `first` first, and returns True; once for each stall."""
        progress_s = self._progress_s
        age_s = self._clock() - progress_s
        if age_s <= self._limit_s or progress_s == self._told_s:
            return False
        self._told_s = progress_s
        log.error("stalled: no step has ended for %.1f s, with %s; all threads:\n%s", age_s, work, stacks(first))
        return True


def stacks(first: threading.Thread) -> str:
    """Where each thread is now, as tracebacks show it: places in the code, no values."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not first)
    return "\n".join(
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )
