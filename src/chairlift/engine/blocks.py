"""The pool of KV blocks: which are held by requests, which are free, which are kept for their content.

    every block is in exactly one place:

    free      its content is worthless            taken first
    cached    no request holds it, it is kept     taken when nothing is free, least recently used first
    held      by one request or several           never taken; when kept, never written again

Owns reference counts. Knows neither block tables (requests have those), nor what a block holds (the prefix cache), nor
the memory itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each; their number never changes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], None] = lambda _: None
        """Called with a cached block whose content is about to be lost."""
        self._num_refs = [0] * num_blocks
        self._kept: set[int] = set()
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first, recently used again soon
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Blocks whose content is worthless."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds and whose content may be of use again."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free and cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that some request holds; a shared one counts once."""
        return self.num_blocks - self.num_available

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one request take."""
        return -(-num_tokens // self.block_size)

    def is_held(self, block: int) -> bool:
        """Whether some request holds it."""
        return self._num_refs[block] > 0

    def is_kept(self, block: int) -> bool:
        """Whether its content outlives the requests that hold it."""
        return block in self._kept

    def take(self) -> int:
        """A block for one request to write; evicts the least recently used when none is free.

        Raises IndexError when all are held.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._kept.discard(block)
            self.on_evict(block)
        else:
            raise IndexError("every block is held")
        self._num_refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more request holds `block`, which is kept."""
        if self._num_refs[block] == 0:
            del self._cached[block]
        self._num_refs[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """One request gives up these blocks, in table order.

        The last goes first, so that of a chain the end is evicted before its beginning.
        """
        for block in reversed(table):
            self._num_refs[block] -= 1
            if self._num_refs[block] > 0:
                continue
            if block in self._kept:
                self._cached[block] = None
            else:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """The content of a held block is worth keeping once no request holds it."""
        self._kept.add(block)

    def discard(self, block: int) -> None:
        """The content of a kept block is worthless. Requests that hold it go on holding it."""
        self._kept.remove(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless every block is in one place and `tables` hold what is counted as held."""
        refs = Counter(block for table in tables for block in table)
        held = {block for block, num_refs in enumerate(self._num_refs) if num_refs}
        assert refs == {block: self._num_refs[block] for block in held}, "reference counts differ from the block tables"
        places = sorted([*self._free, *self._cached, *held])
        assert places == list(range(self.num_blocks)), "a block is lost or in two places"
        assert self._kept.issuperset(self._cached), "a cached block is not kept"
        assert self._kept.isdisjoint(self._free), "a free block is kept"
