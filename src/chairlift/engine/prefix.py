"""Which block holds which tokens after which others: an exact trie over full blocks, kept in one dict.

    root (salt, group) ──(16 tokens)──> node 7 ──(16 tokens)──> node 9        key = (parent, tokens), node -> block
                                        └──────(16 tokens)──> node 12

A hit compares a whole chain of tokens, not a hash of it, so that no two prefixes can be mistaken for each other. Node
ids are never used twice: the children of a forgotten node can never be found under a newer one. Knows blocks only by
number, and nothing of who holds them.
"""

from __future__ import annotations

from itertools import count

Root = tuple[str, str]
"""Where chains start: (salt, group). Chains under different roots share nothing."""
Parent = int | Root
Tokens = tuple[int, ...]


class PrefixIndex:
    """Registered blocks by what they hold. A block is registered at most once, and a key names at most one block."""

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
        """The node that a registered block is; None for one that is not registered."""
        return self._nodes.get(block)

    def find(self, parent: Parent, tokens: Tokens) -> int | None:
        """The block that holds `tokens` right after `parent`."""
        return self._blocks.get((parent, tokens))

    def register(self, parent: Parent, tokens: Tokens, block: int) -> bool:
        """Makes `block` findable; False, and nothing done, when another block already holds the same."""
        key = (parent, tokens)
        if key in self._blocks:
            return False
        assert block not in self._keys, f"block {block} is registered twice"
        self._blocks[key] = block
        self._keys[block] = key
        self._nodes[block] = next(self._next_node)
        return True

    def forget(self, block: int) -> None:
        """Makes `block` unfindable."""
        del self._blocks[self._keys.pop(block)]
        del self._nodes[block]

    def tree(self, block: int) -> list[int]:
        """A registered block and all that stands on it, parents first. Looks at all registered blocks: for rare use."""
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
