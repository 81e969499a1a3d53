"""The time and memory that a template may spend: one `RenderBudget` for each compilation and each rendering.

A unit is one character (at most 4 bytes); an element of a list or dict is 32 units. A value is weighed before it is
made, so a value that the budget refuses is never allocated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

ELEMENT = 32
"""Units of one element of a container."""

MAX_VALUE = 16 << 20
"""Units of one value, and of the output."""

_MAX_TOTAL = 64 << 20
# CPU time of the rendering thread: a server whose cores are busy refuses no more than an idle one.
_SECONDS = 0.5
_TICKS_BETWEEN_LOOKS = 32
_UNITS_PER_TICK = 1024

CONTAINERS: tuple[type, ...] = (
    *(list, tuple, dict, set, frozenset),
    *(type({}.keys()), type({}.values()), type({}.items())),
)
"""Types of containers that a template can hold, views of a dict included."""


class TooMuch(SecurityError):
    """A template asked for more time or memory than any chat needs."""


class RenderBudget:
    """The rest of one compilation's or rendering's budget. One thread uses it; that thread's CPU time is measured."""

    def __init__(self) -> None:
        self._deadline_s = time.thread_time() + _SECONDS
        self._ticks = 0
        self._next_look = 0
        self._units = _MAX_TOTAL
        # Values are immutable here, so a size stays true; the value is kept so that its id is not given to another.
        self._sizes: dict[int, tuple[object, int]] = {}

    def tick(self, units: int = 0) -> None:
        """Counts a piece of work on values of `units`."""
        self._ticks += 1 + units // _UNITS_PER_TICK
        if self._ticks >= self._next_look:
            self._next_look = self._ticks + _TICKS_BETWEEN_LOOKS
            if time.thread_time() > self._deadline_s:
                raise TooMuch("it ran for too long")

    def make(self, units: int) -> None:
        """Takes room for a new value."""
        self.tick(units)
        self._units -= units
        if units > MAX_VALUE or self._units < 0:
            raise TooMuch("it builds too much text")

    def made(self, value: Any) -> None:
        """Takes room for a value that is there already."""
        if isinstance(value, str | list | tuple | dict):
            self.make(len(value) * (1 if isinstance(value, str) else ELEMENT))

    def weigh(self, value: Any) -> int:
        """The unfolded size of `value` in units: each string and element counts as often as it is reached."""
        units = ELEMENT if isinstance(value, Namespace) else self._size(value)
        self.tick(units)
        if units > MAX_VALUE:
            raise TooMuch("it works on too large a value")
        return units

    def _size(self, value: Any) -> int:
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Namespace):
            # A namespace can change, so the size of a container that holds one would not stay true.
            raise SecurityError("a namespace can be neither printed nor part of a value")
        if not isinstance(value, CONTAINERS):
            return ELEMENT
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        self.tick()
        items: Any = value.items() if isinstance(value, dict) else value
        units = sum(ELEMENT + self._size(item) for item in items)
        self._sizes[id(value)] = (value, units)
        return units


_current: ContextVar[RenderBudget] = ContextVar("template_budget")


def current() -> RenderBudget:
    """The budget of the compilation or rendering that runs in this thread."""
    return _current.get()


@contextmanager
def fresh_budget() -> Iterator[None]:
    """Gives the block a budget of its own."""
    token = _current.set(RenderBudget())
    try:
        yield
    finally:
        _current.reset(token)


def text_units(value: object) -> int:
    """About the length of `str(value)`, known without making it; only escapes can exceed it."""
    return len(value) if isinstance(value, str) else 4 * current().weigh([value])
