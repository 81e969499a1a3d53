"""The line of those that wait for a slot: one line per API key, taken in turn.

    turn ->  alice   a1 a2 a3          taken: a1 b1 c1 a2 c2 a3
             bob     b1
             carol   c1 c2

Within a key the first to come is the first to go. A key whose turn is over, or that comes anew, has its next turn after
all others: while it has somebody in line, it sees at most one of each other key go first. A key with as many running as
it may have is passed over and keeps its turn. Knows what waits only as items.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """Who waits, by key. `running` is how many of each key run; at most `max_running_per_key` may, if that is set."""

    def __init__(self, max_running_per_key: int | None = None) -> None:
        self._max_running = max_running_per_key
        self._lines: dict[str, deque[T]] = {}  # in order of turns; none is empty
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[T]:
        """In the order in which they are taken as long as no key is passed over."""
        lines = [items.copy() for items in self._lines.values()]
        while lines:
            for items in lines:
                yield items.popleft()
            lines = [items for items in lines if items]

    def copy(self) -> Line[T | None]:
        """A line of its own with the same items and turns, to which somebody unknown may be added."""
        made: Line[T | None] = Line(self._max_running)
        made._lines = {key: deque(items) for key, items in self._lines.items()}
        made._num_items = self._num_items
        return made

    def add(self, key: str, item: T) -> None:
        """Puts an item at the end of its key's line."""
        self._lines.setdefault(key, deque()).append(item)
        self._num_items += 1

    def turn(self, running: Mapping[str, int]) -> tuple[str, T] | None:
        """The item to be taken next, and its key; None when nobody may be."""
        for key, items in self._lines.items():
            if self._max_running is None or running.get(key, 0) < self._max_running:
                return key, items[0]
        return None

    def firsts(self) -> list[tuple[str, T]]:
        """Each key with its first item, which has waited longest of its own."""
        return [(key, items[0]) for key, items in self._lines.items()]

    def pop(self, key: str) -> T:
        """Takes the first item of a key that has one; its next turn comes after all others'."""
        items = self._lines.pop(key)
        item = items.popleft()
        if items:
            self._lines[key] = items
        self._num_items -= 1
        return item

    def remove(self, key: str, item: T) -> None:
        """Takes out an item that leaves without its turn; nothing when it is not in line."""
        items = self._lines.get(key, ())
        if item not in items:
            return
        self._lines[key].remove(item)
        self._num_items -= 1
        if not self._lines[key]:
            del self._lines[key]

    def num_ready(self, running: Mapping[str, int], newcomers: Sequence[str] = ()) -> int:
        """How many could be taken at once, newcomers of these keys among them, if there were slots enough."""
        waiting = Counter({key: len(items) for key, items in self._lines.items()})
        waiting.update(newcomers)
        if self._max_running is None:
            return waiting.total()
        room = ((count, self._max_running - running.get(key, 0)) for key, count in waiting.items())
        return sum(max(0, min(pair)) for pair in room)
