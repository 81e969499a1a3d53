"""The block pool: every block in exactly one place, whatever is done with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.blocks import BlockPool
from chairlift.engine.prefix import Parent, Root

ROOT: Root = ("", "")


def fill(pool: BlockPool, *names: int, root: Root = ROOT) -> list[int]:
    """A table of new blocks, registered as a chain of (name,) * block_size."""
    parent: Parent = root
    table: list[int] = []
    for name in names:
        table.append(pool.take())
        assert pool.prefix.register(parent, (name,) * pool.block_size, table[-1])
        node = pool.prefix.node(table[-1])
        assert node is not None
        parent = node
    return table


def find(pool: BlockPool, *names: int) -> list[int]:
    """The registered chain of those names, as far as it is found."""
    parent: Parent | None = ROOT
    table: list[int] = []
    for name in names:
        block = pool.prefix.find(parent, (name,) * pool.block_size) if parent is not None else None
        if block is None:
            break
        table.append(block)
        parent = pool.prefix.node(block)
    return table


def test_the_longest_unused_is_evicted_first_and_chains_from_their_end() -> None:
    """Guards against losing the cache of prompt A to prompt B while older blocks exist, and against orphans."""
    pool = BlockPool(6)
    old, new = fill(pool, 1, 2, 3), fill(pool, 7, 8, 9)
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_cached, pool.num_held) == (0, 6, 0)
    for left in ([1, 2], [1], []):
        pool.take()
        assert len(find(pool, 1, 2, 3)) == len(left)
        assert len(find(pool, 7, 8, 9)) == 3
        pool.prefix.check()


def test_use_makes_young_again() -> None:
    """Guards against first-in-first-out in place of least recently used."""
    pool = BlockPool(2)
    a = fill(pool, 1)
    pool.release(a)
    b = fill(pool, 2)
    pool.release(b)
    pool.share(a[0])
    pool.release(a)
    pool.take()
    assert find(pool, 1) == a
    assert find(pool, 2) == []


def test_worthless_blocks_go_before_cached_ones() -> None:
    """Guards against evicting content while blocks without any lie about."""
    pool = BlockPool(2)
    cached = fill(pool, 1)
    pool.release(cached)
    assert pool.take() not in cached


def test_a_held_block_is_never_taken() -> None:
    """Guards against writing into a block that somebody reads."""
    pool = BlockPool(2)
    table = fill(pool, 1, 2)
    pool.share(table[0])
    pool.release(table)
    assert (pool.num_held, pool.num_available) == (1, 1)
    assert pool.take() == table[1]
    with pytest.raises(IndexError, match="held"):
        pool.take()


def test_a_withdrawn_block_is_not_found() -> None:
    """Guards against hits on blocks that a failed step never filled."""
    pool = BlockPool(2)
    table = fill(pool, 1, 2)
    pool.release(table)
    pool.withdraw(table[1])
    assert find(pool, 1, 2) == table[:1]
    pool.withdraw(table[1])
    pool.withdraw(table[0])
    assert find(pool, 1) == []
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.check([])


def test_what_stands_on_a_withdrawn_block_goes_with_it() -> None:
    """Guards against chains without a beginning; whoever holds such a block keeps it."""
    pool = BlockPool(8)
    table = fill(pool, 1, 2, 3)
    other = fill(pool, 7)
    node = pool.prefix.node(table[0])
    assert node is not None
    branch = [table[0], pool.take()]
    pool.share(table[0])
    pool.prefix.register(node, (5,) * 16, branch[1])
    pool.release(table)
    pool.withdraw(table[0])
    assert len(pool.prefix) == 1
    assert find(pool, 7) == other
    pool.check([branch, other])
    pool.release(branch)
    pool.check([other])


def test_check_sees_a_leak() -> None:
    """Guards against a check that cannot fail: a block held by nobody's table is a fault."""
    pool = BlockPool(2)
    pool.take()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


@given(seed=st.randoms(use_true_random=False), num_blocks=st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_any_sequence_of_operations_keeps_the_books(seed: object, num_blocks: int) -> None:
    """Guards against blocks that are lost, in two places, or evicted before their children."""
    choose: Callable[[int], int] = seed.randrange  # type: ignore[attr-defined]
    pool = BlockPool(num_blocks)
    tables: list[list[int]] = []
    for _ in range(40):
        if choose(2) and tables:
            pool.release(tables.pop(choose(len(tables))))
        else:
            names = [choose(2) for _ in range(1 + choose(4))]
            table = find(pool, *names)
            for block in table:
                pool.share(block)
            tables.append(table)
            grow(pool, table, names)
        pool.check(tables)
    for table in tables:
        pool.release(table)
    pool.check([])
    assert pool.num_held == 0


def grow(pool: BlockPool, table: list[int], names: list[int]) -> None:
    """Takes and registers what a table lacks of its chain, as far as blocks go."""
    while len(table) < len(names) and pool.num_available:
        parent = pool.prefix.node(table[-1]) if table else ROOT
        table.append(pool.take())
        assert parent is not None
        assert pool.prefix.register(parent, (names[len(table) - 1],) * pool.block_size, table[-1])
