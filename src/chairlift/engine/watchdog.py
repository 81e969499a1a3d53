"""Notices that there is work and no step ends, and logs once what every thread is doing.

Owns the time of the last progress. Every step that ends is progress, so a long prompt never looks like a stall, and
neither does a wait for work.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable

log = logging.getLogger(__name__)


class Watchdog:
    """Any thread may ask. The engine thread reports progress, and so does a submit that ends a wait for work."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._progress_s = clock()
        self._told_s: float | None = None  # the progress before the stall that was logged last

    def progress(self) -> float:
        """Notes that a step ended, or that work arrives after there was none. Returns the time."""
        self._progress_s = self._clock()
        return self._progress_s

    @property
    def age_s(self) -> float:
        """Seconds since the last progress."""
        return self._clock() - self._progress_s

    @property
    def is_over(self) -> bool:
        """Whether the last progress is longer ago than the limit."""
        return self.age_s > self._limit_s

    def tell_once(self, work: str, first: threading.Thread) -> bool:
        """In a stall, logs the stacks of all threads, `first` first, and returns True. Once for each stall."""
        progress_s = self._progress_s
        age_s = self._clock() - progress_s
        if age_s <= self._limit_s or progress_s == self._told_s:
            return False
        self._told_s = progress_s
        log.error("stalled: no step has ended for %.1f s, with %s; all threads:\n%s", age_s, work, stacks(first))
        return True


def stacks(first: threading.Thread) -> str:
    """Where each thread is now, as tracebacks: places in the code, no values."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not first)
    return "\n".join(
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threads
        if thread.ident in frames
    )
