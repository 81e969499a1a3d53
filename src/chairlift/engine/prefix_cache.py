"""The prefix cache: which blocks a request shares with others instead of computing them.

    root (salt, group) ──(16 tokens)──> node 7 ──(16 tokens)──> node 9        key = (parent, tokens), node -> block
                                        └──────(16 tokens)──> node 12

A hit compares a whole chain of tokens, not a hash of it, so that no two prefixes can be mistaken for each other. A
block can be found as soon as a step is scheduled that fills it: equal prompts that arrive together are computed once.
If that step fails, `rollback` takes its blocks out again.

Owns the index of registered blocks and what the step in flight will fill. Reads requests and never changes them.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

from chairlift.engine.blocks import BlockPool
from chairlift.engine.request import Request

Root = tuple[str, str]
"""Where chains start: (salt, group). Chains under different roots share nothing."""
Parent = int | Root
Tokens = tuple[int, ...]


class PrefixIndex:
    """An exact trie over full blocks, kept in one dict.

    A block is registered at most once, and a key names at most one block. Node ids are never used twice: the children
    of a forgotten node can never be found under a newer one.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[Parent, Tokens], int] = {}
        self._keys: dict[int, tuple[Parent, Tokens]] = {}  # by block
        self._nodes: dict[int, int] = {}  # by block
        self._next_node = count()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def node(self, block: int) -> int | None:
        """The node of a registered block; None for a block that is not registered."""
        return self._nodes.get(block)

    def find(self, parent: Parent, tokens: Tokens) -> int | None:
        """The block that holds `tokens` right after `parent`."""
        return self._blocks.get((parent, tokens))

    def register(self, parent: Parent, tokens: Tokens, block: int) -> bool:
        """Makes `block` findable. Does nothing and returns False when another block already holds the same."""
        key = (parent, tokens)
        if key in self._blocks:
            return False
        assert block not in self._keys, f"block {block} is registered twice"
        self._blocks[key] = block
        self._keys[block] = key
        self._nodes[block] = next(self._next_node)
        return True

    def forget(self, block: int) -> None:
        """Makes `block` unfindable. Its children must be forgotten first."""
        del self._blocks[self._keys.pop(block)]
        del self._nodes[block]

    def subtree(self, block: int) -> list[int]:
        """A registered block and its descendants, parents first. Looks at every registered block: for rare use."""
        nodes: set[Parent] = {self._nodes[block]}
        blocks = [block]
        for other, (parent, _) in self._keys.items():  # in order of registration: parents before children
            if parent in nodes:
                nodes.add(self._nodes[other])
                blocks.append(other)
        return blocks

    def check(self) -> None:
        """Raises AssertionError unless the maps agree and every node's parent is registered too."""
        assert self._blocks.keys() == set(self._keys.values()), "keys of the two maps differ"
        assert self._keys.keys() == self._nodes.keys(), "a block has a key but no node, or the reverse"
        nodes = set(self._nodes.values())
        assert len(nodes) == len(self._nodes), "two blocks are the same node"
        for block, key in self._keys.items():
            assert self._blocks[key] == block, f"key of block {block} names another block"
            assert isinstance(key[0], tuple) or key[0] in nodes, f"the parent of block {block} is gone"


class PrefixCache:
    """Lookup, registration, and taking back what a failed step should have filled.

    Call `commit` or `rollback` after each step. `enabled=False` leaves sharing among the choices of one request.
    """

    def __init__(self, pool: BlockPool, *, enabled: bool = True) -> None:
        self._pool = pool
        self._enabled = enabled
        self._index = PrefixIndex()
        self._pending: dict[int, None] = {}  # blocks that the step in flight fills, in order of registration
        self._pending_hits: Counter[Request] = Counter()  # blocks of those that a request counts as cached
        pool.on_evict = self._index.forget

    def __len__(self) -> int:
        return len(self._index)

    def find(self, request: Request) -> list[int]:
        """The cached blocks that hold the request's next tokens. At least one token is left to compute.

        None are found unless the request stands at the edge of a block, and none for a prompt that is still being
        scored, since a score needs every row computed.
        """
        size = self._pool.block_size
        start = request.num_computed
        if start % size or request.needs_every_prompt_row:
            return []
        parent = self._parent(request, start // size)
        hits: list[int] = []
        while parent is not None and start + size < request.num_tokens:
            block = self._index.find(parent, request.tokens_between(start, start + size))
            if block is None:
                break
            hits.append(block)
            parent = self._index.node(block)
            start += size
        return hits

    def count_hits(self, request: Request, hits: list[int]) -> None:
        """Remembers hits that the request counts as cached, in case the step that fills the blocks fails."""
        if self._pending:
            self._pending_hits[request] += sum(block in self._pending for block in hits)

    def register(self, request: Request, index: int) -> None:
        """Makes block `index` of the request's table findable. All its tokens are known; they may be yet to compute."""
        size = self._pool.block_size
        parent = self._parent(request, index)
        if parent is None:
            return
        block = request.block_table[index]
        if self._index.register(parent, request.tokens_between(index * size, (index + 1) * size), block):
            self._pool.keep(block)
            self._pending[block] = None

    def withdraw(self, block: int) -> None:
        """Makes a block and its descendants unfindable, because it does not hold what it was registered for."""
        if block not in self._index:
            return
        for lost in reversed(self._index.subtree(block)):
            self._index.forget(lost)
            self._pool.discard(lost)

    def holds_pending(self, request: Request) -> bool:
        """Whether the request's table has a block that the step in flight was to fill."""
        return not self._pending.keys().isdisjoint(request.block_table)

    def commit(self) -> None:
        """The step succeeded: its blocks are filled."""
        self._pending.clear()
        self._pending_hits.clear()

    def rollback(self) -> Counter[Request]:
        """The step failed: nothing finds its blocks any more. Returns how many of them each request had counted.

        Every request that holds one of the blocks must have released it.
        """
        counted = self._pending_hits
        self._pending_hits = Counter()
        for block in self._pending:
            self.withdraw(block)
        self._pending.clear()
        return counted

    def check(self) -> None:
        """Raises AssertionError unless the index agrees with itself and with what the pool keeps."""
        self._index.check()
        for block in range(self._pool.num_blocks):
            assert self._pool.is_kept(block) == (block in self._index), f"block {block} is kept and cannot be found"

    def _parent(self, request: Request, index: int) -> Parent | None:
        """What comes before block `index` of the request's table; None when that is not registered."""
        if index > 0:
            return self._index.node(request.block_table[index - 1])
        return (request.salt, "" if self._enabled else request.group or request.id)
