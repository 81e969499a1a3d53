"""The pool of KV blocks: who holds which, which are free, which are kept for their content.

    every block is in exactly one place:

    free      content worthless           taken first
    cached    held by nobody, registered  taken when nothing is free, longest unused first
    held      by one request or several   never taken; when registered, never written again

Owns reference counts and the prefix index, not the block tables (requests have those) and not the memory itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from chairlift.engine.prefix import PrefixIndex


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each; their number never changes."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix = PrefixIndex()
        self._num_refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low numbers first, recently used again soon
        self._cached: OrderedDict[int, None] = OrderedDict()  # longest unused first

    @property
    def num_free(self) -> int:
        """Blocks whose content is worthless."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content may be of use again."""
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

    def take(self) -> int:
        """A block for one request to write; evicts the longest unused when none is free.

        Raises IndexError when all are held.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self.prefix.forget(block)
        else:
            raise IndexError("every block is held")
        self._num_refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more request holds `block`, which is registered."""
        if self._num_refs[block] == 0:
            del self._cached[block]
        self._num_refs[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """One request gives up these blocks, in table order.

        The last goes first, so that of a chain the end is evicted before what it stands on.
        """
        for block in reversed(table):
            self._num_refs[block] -= 1
            if self._num_refs[block] > 0:
                continue
            if block in self.prefix:
                self._cached[block] = None
            else:
                self._free.append(block)

    def withdraw(self, block: int) -> None:
        """Nobody shall find `block`, or what stands on it, any more: its content is not what it was registered for."""
        if block not in self.prefix:
            return
        for lost in reversed(self.prefix.tree(block)):
            self.prefix.forget(lost)
            if lost in self._cached:
                del self._cached[lost]
                self._free.append(lost)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless every block is in one place and `tables` hold what is counted as held."""
        refs = Counter(block for table in tables for block in table)
        held = {block for block, num_refs in enumerate(self._num_refs) if num_refs}
        assert refs == {block: self._num_refs[block] for block in held}, "reference counts differ from the block tables"
        places = sorted([*self._free, *self._cached, *held])
        assert places == list(range(self.num_blocks)), "a block is lost or in two places"
        assert all(block in self.prefix for block in self._cached), "a cached block cannot be found"
        assert not any(block in self.prefix for block in self._free), "a free block can be found"
        self.prefix.check()
