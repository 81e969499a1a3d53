"""The block pool: every block in exactly one place, whatever is done with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.blocks import BlockPool
from chairlift.engine.prefix_cache import Parent, PrefixCache, Root

ROOT: Root = ("", "")


class Chains:
    """A pool with a prefix cache, used below the cache's own rules: blocks are registered by hand."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 16)
        self.cache = PrefixCache(self.pool)
        self.index = self.cache._index

    def register(self, parent: Parent, name: int, block: int) -> int:
        """Registers a block that holds (name,) * block_size, and returns its node."""
        assert self.index.register(parent, (name,) * self.pool.block_size, block)
        self.pool.keep(block)
        node = self.index.node(block)
        assert node is not None
        return node

    def check(self, tables: list[list[int]]) -> None:
        self.pool.check(tables)
        self.cache.check()


def fill(chains: Chains, *names: int, root: Root = ROOT) -> list[int]:
    """A table of new blocks, registered as a chain."""
    parent: Parent = root
    table: list[int] = []
    for name in names:
        table.append(chains.pool.take())
        parent = chains.register(parent, name, table[-1])
    return table


def find(chains: Chains, *names: int) -> list[int]:
    """The registered chain of those names, as far as it is found."""
    parent: Parent | None = ROOT
    table: list[int] = []
    for name in names:
        block = chains.index.find(parent, (name,) * chains.pool.block_size) if parent is not None else None
        if block is None:
            break
        table.append(block)
        parent = chains.index.node(block)
    return table


def test_the_longest_unused_is_evicted_first_and_chains_from_their_end() -> None:
    """Guards against losing the cache of prompt A to prompt B while older blocks exist, and against orphans."""
    chains = Chains(6)
    pool = chains.pool
    old, new = fill(chains, 1, 2, 3), fill(chains, 7, 8, 9)
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (0, 6, 0)
    for left in ([1, 2], [1], []):
        pool.take()
        assert len(find(chains, 1, 2, 3)) == len(left)
        assert len(find(chains, 7, 8, 9)) == 3
        chains.cache.check()


def test_use_makes_young_again() -> None:
    """Guards against first-in-first-out in place of least recently used."""
    chains = Chains(2)
    pool = chains.pool
    a = fill(chains, 1)
    pool.release(a)
    b = fill(chains, 2)
    pool.release(b)
    pool.share(a[0])
    pool.release(a)
    pool.take()
    assert find(chains, 1) == a
    assert find(chains, 2) == []


def test_worthless_blocks_go_before_cached_ones() -> None:
    """Guards against evicting content while blocks without any lie about."""
    chains = Chains(2)
    pool = chains.pool
    cached = fill(chains, 1)
    pool.release(cached)
    assert pool.take() not in cached


def test_a_held_block_is_never_taken() -> None:
    """Guards against writing into a block that somebody reads."""
    chains = Chains(2)
    pool = chains.pool
    table = fill(chains, 1, 2)
    pool.share(table[0])
    pool.release(table)
    assert (pool.num_held, pool.num_available) == (1, 1)
    assert pool.take() == table[1]
    with pytest.raises(IndexError, match="held"):
        pool.take()


def test_a_withdrawn_block_is_not_found() -> None:
    """Guards against hits on blocks that a failed step never filled."""
    chains = Chains(2)
    pool = chains.pool
    table = fill(chains, 1, 2)
    pool.release(table)
    chains.cache.withdraw(table[1])
    assert find(chains, 1, 2) == table[:1]
    chains.cache.withdraw(table[1])
    chains.cache.withdraw(table[0])
    assert find(chains, 1) == []
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.check([])


def test_what_stands_on_a_withdrawn_block_goes_with_it() -> None:
    """Guards against chains without a beginning; whoever holds such a block keeps it."""
    chains = Chains(8)
    pool = chains.pool
    table = fill(chains, 1, 2, 3)
    other = fill(chains, 7)
    node = chains.index.node(table[0])
    assert node is not None
    branch = [table[0], pool.take()]
    pool.share(table[0])
    chains.register(node, 5, branch[1])
    pool.release(table)
    chains.cache.withdraw(table[0])
    assert len(chains.cache) == 1
    assert find(chains, 7) == other
    chains.check([branch, other])
    pool.release(branch)
    chains.check([other])


def test_check_sees_a_leak() -> None:
    """Guards against a check that cannot fail: a block held by nobody's table is a fault."""
    pool = BlockPool(2, 16)
    pool.take()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


@given(seed=st.randoms(use_true_random=False), num_blocks=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_any_sequence_of_operations_keeps_the_books(seed: object, num_blocks: int) -> None:
    """Guards against blocks that are lost, in two places, or evicted before their children."""
    choose: Callable[[int], int] = seed.randrange  # type: ignore[attr-defined]
    chains = Chains(num_blocks)
    pool = chains.pool
    tables: list[list[int]] = []
    for _ in range(40):
        if choose(2) and tables:
            pool.release(tables.pop(choose(len(tables))))
        else:
            names = [choose(2) for _ in range(1 + choose(4))]
            table = find(chains, *names)
            for block in table:
                pool.share(block)
            tables.append(table)
            grow(chains, table, names)
        chains.check(tables)
    for table in tables:
        pool.release(table)
    pool.check([])
    assert pool.num_held == 0


def grow(chains: Chains, table: list[int], names: list[int]) -> None:
    """Takes and registers what a table lacks of its chain, as far as blocks go."""
    while len(table) < len(names) and chains.pool.num_available:
        parent = chains.index.node(table[-1]) if table else ROOT
        table.append(chains.pool.take())
        assert parent is not None
        chains.register(parent, names[len(table) - 1], table[-1])
