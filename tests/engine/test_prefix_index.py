"""The prefix trie: hits on equal chains only."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.prefix_cache import Parent, PrefixIndex, Root

ROOT: Root = ("", "")
A, B = (1,) * 16, (2,) * 16


def test_the_same_tokens_after_another_prefix_are_another_block() -> None:
    """Guards against a hit that compares a block's tokens and not what came before them."""
    index = PrefixIndex()
    assert index.register(ROOT, A, 0)
    node = index.node(0)
    assert node is not None
    assert index.register(node, B, 1)
    assert index.find(ROOT, A) == 0
    assert index.find(node, B) == 1
    assert index.find(ROOT, B) is None
    assert index.find(("salt", ""), A) is None
    index.check()


def test_a_key_stays_with_the_first_block() -> None:
    """Guards against a second copy taking over a key and leaving the first unfindable but cached."""
    index = PrefixIndex()
    assert index.register(ROOT, A, 0)
    assert not index.register(ROOT, A, 1)
    assert 1 not in index
    assert index.find(ROOT, A) == 0


def test_children_of_a_forgotten_block_are_not_found_under_its_successor() -> None:
    """Guards against another conversation's block, found because its parent's number was used again."""
    index = PrefixIndex()
    index.register(ROOT, A, 0)
    index.register(index.node(0) or 0, B, 1)
    index.forget(0)
    index.register(ROOT, B, 0)
    new = index.node(0)
    assert new is not None
    assert index.find(new, B) is None


def test_check_sees_an_orphan() -> None:
    """Guards against a check that cannot fail: a child whose parent was forgotten is a fault."""
    index = PrefixIndex()
    index.register(ROOT, A, 0)
    index.register(index.node(0) or 0, B, 1)
    index.forget(0)
    with pytest.raises(AssertionError, match="parent"):
        index.check()
    index.forget(1)
    index.check()
    assert len(index) == 0


@given(chains=st.lists(st.tuples(st.sampled_from(["", "s"]), st.lists(st.integers(0, 2), max_size=5)), max_size=20))
@settings(max_examples=200, deadline=None)
def test_a_walk_finds_exactly_the_chains_that_were_registered(chains: list[tuple[str, list[int]]]) -> None:
    """Guards against any confusion of chains: the index equals a plain dict keyed by salt and whole prefix."""
    index = PrefixIndex()
    plain: dict[tuple[str, tuple[int, ...]], int] = {}
    for salt, chain in chains:
        parent: Parent = (salt, "")
        for length in range(1, len(chain) + 1):
            tokens = (chain[length - 1],) * 16
            key = (salt, tuple(chain[:length]))
            found = index.find(parent, tokens)
            assert found == plain.get(key)
            if found is None:
                found = plain[key] = len(plain)
                assert index.register(parent, tokens, found)
            node = index.node(found)
            assert node is not None
            parent = node
    index.check()
