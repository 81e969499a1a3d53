"""Text for messages: never longer than asked, and safe on one line."""

from __future__ import annotations

from chairlift.text import quoted, quoted_list, shorten


def test_a_long_text_is_cut_and_shows_it() -> None:
    """A message of megabytes, or one that is cut without a sign."""
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abc..."
    assert quoted("a\nb") == r"'a\nb'"
    assert len(quoted([1] * 10**6)) == 80


def test_a_long_list_says_how_many_more() -> None:
    """A thousand tensors in one line, or a line break inside a name."""
    assert quoted_list(["a"]) == "'a'"
    assert quoted_list(["a", "b\n", "c"]) == r"'a', 'b\n', 'c'"
    assert quoted_list(list("abcde")) == "'a', 'b', 'c' and 2 more"
