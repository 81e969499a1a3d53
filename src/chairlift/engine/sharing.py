"""Which blocks a request shares with others instead of computing them, and which of its own others may find.

    request   | block | block | blo.      a hit: a block that holds the same tokens after the same prefix
    shares    |  7    |  12   |           found in the pool's index, also when this very step is going to fill it

Owns what the step in flight has promised: a block can be found from when it is scheduled, and no more once the step has
failed. Changes a request's table and counters; slots and queues are the scheduler's.
"""

from __future__ import annotations

from array import array

from chairlift.engine.blocks import BlockPool
from chairlift.engine.prefix import Parent, Root
from chairlift.engine.request import Request


class Sharing:
    """`settle()` or `undo()` after each step."""

    def __init__(self, pool: BlockPool, *, prefix_caching: bool) -> None:
        self._pool = pool
        self._prefix_caching = prefix_caching
        self._registered: dict[int, None] = {}  # blocks that the step in flight fills, in order
        self._early_hits: list[Request] = []  # one entry per counted hit on one of those

    def hits(self, request: Request) -> list[int]:
        """The blocks that a request can share from a block's edge, where it stands; at least one token is left."""
        if not _takes_hits(request):
            return []
        size = self._pool.block_size
        start = request.num_computed
        parent = self._parent(request, start // size)
        hits: list[int] = []
        while parent is not None and start + size < request.num_tokens:
            block = self._pool.prefix.find(parent, request.tokens_between(start, start + size))
            if block is None:
                break
            hits.append(block)
            parent = self._pool.prefix.node(block)
            start += size
        return hits

    def take_hits(self, request: Request, *, is_saving: bool) -> None:
        """Shares what can be shared instead of computing it; a block taken for the same place goes back.

        Hits are reported as `num_cached` where they save what was never computed before.
        """
        size = self._pool.block_size
        if request.num_computed % size:
            return
        hits = self.hits(request)
        if not hits:
            return
        index = request.num_computed // size
        self._pool.release(request.block_table[index:])
        request.block_table[index:] = array("i", hits)
        for block in hits:
            self._pool.share(block)
        request.num_computed += len(hits) * size
        if is_saving:
            request.num_cached = (request.num_cached or 0) + len(hits) * size
            self._early_hits += [request] * sum(block in self._registered for block in hits)

    def register(self, request: Request, index: int) -> None:
        """Lets others find the block at `index`, whose tokens are all known, before it is computed."""
        size = self._pool.block_size
        parent = self._parent(request, index)
        if parent is None:
            return
        tokens = request.tokens_between(index * size, (index + 1) * size)
        block = request.block_table[index]
        if self._pool.prefix.register(parent, tokens, block):
            self._registered[block] = None

    def withdraw(self, request: Request) -> None:
        """Lets nobody find the blocks of a request that went wrong: whatever made its logits NaN may lie in them."""
        for block in request.block_table:
            self._pool.withdraw(block)

    def has_promised(self, request: Request) -> bool:
        """Whether it holds a block that the step in flight was to fill."""
        return not self._registered.keys().isdisjoint(request.block_table)

    def settle(self) -> None:
        """The step is over, and what it was to fill is filled."""
        self._registered.clear()
        self._early_hits.clear()

    def undo(self) -> None:
        """The step has failed, and whoever held a block of it has given it back: nobody finds them any more."""
        for request in self._early_hits:
            request.num_cached = (request.num_cached or 0) - self._pool.block_size
        for block in self._registered:
            self._pool.withdraw(block)
        self.settle()

    def _parent(self, request: Request, index: int) -> Parent | None:
        """What the block at `index` of its table follows; None when that cannot be found by others either."""
        if index > 0:
            return self._pool.prefix.node(request.block_table[index - 1])
        return self._root(request)

    def _root(self, request: Request) -> Root:
        """Where its prefixes start; without prefix caching only the choices of one request ("X#0", "X#1") share."""
        group = "" if self._prefix_caching else request.id.rpartition("#")[0] or request.id
        return (request.salt, group)


def _takes_hits(request: Request) -> bool:
    """Whether cached blocks are of use: a prompt that is still being scored needs every row computed."""
    return request.params.prompt_logprobs is None or len(request.prompt_logprobs) == request.num_prompt
