"""The queue of waiting requests: one per API key, and the keys take turns.

    turn ->  alice   a1 a2 a3          order: a1 b1 c1 a2 c2 a3
             bob     b1
             carol   c1 c2

Within a key, items leave in order of arrival. After its turn, a key goes behind all others, and so does a key that
comes anew: a waiting key sees at most one item of each other key go before its own. A key that has as many items
running as it may is skipped and keeps its turn. The queue knows nothing of its items.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Waiting items by key. At most `max_running_per_key` of a key may run, if that is set.

    `running`, where a method takes it, is the number of running items of each key.
    """

    def __init__(self, max_running_per_key: int | None = None) -> None:
        self._max_running = max_running_per_key
        self._queues: dict[str, deque[T]] = {}  # in order of turns; none is empty
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[T]:
        """In the order in which items leave as long as no key is skipped."""
        queues = [items.copy() for items in self._queues.values()]
        while queues:
            for items in queues:
                yield items.popleft()
            queues = [items for items in queues if items]

    def copy(self) -> FairQueue[T | None]:
        """Another queue with the same items and turns. None may be added to it, in place of an unknown item."""
        made: FairQueue[T | None] = FairQueue(self._max_running)
        made._queues = {key: deque(items) for key, items in self._queues.items()}
        made._num_items = self._num_items
        return made

    def add(self, key: str, item: T) -> None:
        """Puts an item at the end of its key's queue."""
        self._queues.setdefault(key, deque()).append(item)
        self._num_items += 1

    def next(self, running: Mapping[str, int]) -> tuple[str, T] | None:
        """The key whose turn it is, and its first item; None when the queue is empty or every key is at its limit."""
        for key, items in self._queues.items():
            if self._max_running is None or running.get(key, 0) < self._max_running:
                return key, items[0]
        return None

    def heads(self) -> list[T]:
        """The first item of each key: of its key, it has waited longest."""
        return [items[0] for items in self._queues.values()]

    def pop(self, key: str) -> T:
        """Takes the first item of a key that has one. The key's next turn comes after all others'."""
        items = self._queues.pop(key)
        item = items.popleft()
        if items:
            self._queues[key] = items
        self._num_items -= 1
        return item

    def remove(self, key: str, item: T) -> None:
        """Takes out an item that leaves without its turn; does nothing when it is not in the queue."""
        items = self._queues.get(key, ())
        if item not in items:
            return
        self._queues[key].remove(item)
        self._num_items -= 1
        if not self._queues[key]:
            del self._queues[key]

    def num_ready(self, running: Mapping[str, int], arriving: Sequence[str] = ()) -> int:
        """How many items could leave at once if slots were unlimited, with one more item of each key in `arriving`."""
        waiting = Counter({key: len(items) for key, items in self._queues.items()})
        waiting.update(arriving)
        if self._max_running is None:
            return waiting.total()
        room = ((count, self._max_running - running.get(key, 0)) for key, count in waiting.items())
        return sum(max(0, min(pair)) for pair in room)
