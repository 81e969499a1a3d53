"""Text that comes from outside: cut, made printable, decoded in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chairlift.text import clip, one_line, quoted, quoted_list, utf8_decoder


def test_only_a_longer_text_is_cut() -> None:
    """Fault: a text of just the limit loses its end, or a cut one exceeds the limit."""
    assert clip("abcdef", 6) == "abcdef"
    assert clip("abcdefg", 6) == "abc..."


@given(st.text(st.characters(), max_size=300))
def test_one_line_is_one_printable_line(text: str) -> None:
    """Fault: a line end or a control character in a log line; a lone surrogate that cannot be sent."""
    line = one_line(text)
    assert len(line) <= 100
    assert line.isprintable() or not line
    assert line.encode("utf-8").decode() == line


@given(st.binary(max_size=40), st.integers(1, 5))
def test_a_decoder_of_pieces_gives_the_text_of_the_whole(data: bytes, size: int) -> None:
    """Fault: a character that is cut between two pieces becomes U+FFFD."""
    decoder = utf8_decoder()
    pieces = [decoder.decode(data[at : at + size]) for at in range(0, len(data), size)]
    assert "".join(pieces) + decoder.decode(b"", final=True) == data.decode("utf-8", errors="replace")


def test_a_foreign_value_is_quoted_in_one_short_line() -> None:
    """Fault: a message of megabytes, or one that a line break inside a value splits in two."""
    assert quoted("a\nb") == r"'a\nb'"
    assert len(quoted([1] * 10**6)) == 80


def test_a_long_list_says_how_many_more() -> None:
    """Fault: a thousand tensors in one line, or a line break inside a name."""
    assert quoted_list(["a"]) == "'a'"
    assert quoted_list(["a", "b\n", "c"]) == r"'a', 'b\n', 'c'"
    assert quoted_list(list("abcde")) == "'a', 'b', 'c' and 2 more"
