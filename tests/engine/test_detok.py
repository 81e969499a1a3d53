"""Detokenizer: whatever the cuts, streamed text is the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.detok import Detokenizer

BYTES = [bytes([i]) for i in range(256)]


def pieces_of(detok: Detokenizer, tokens: list[int]) -> list[str]:
    return [*map(detok.push, tokens), detok.flush()]


@given(vocab=st.lists(st.binary(max_size=6), min_size=1, max_size=8), data=st.data())
@settings(max_examples=200, deadline=None)
def test_streamed_text_is_the_whole_text(vocab: list[bytes], data: st.DataObject) -> None:
    """Guards against text that differs from a full decode: split characters, invalid bytes, empty tokens."""
    tokens = data.draw(st.lists(st.integers(0, len(vocab) - 1), max_size=30))
    whole = b"".join(vocab[t] for t in tokens).decode("utf-8", errors="replace")
    assert "".join(pieces_of(Detokenizer(vocab, frozenset()), tokens)) == whole


@given(text=st.text(max_size=20))
@settings(max_examples=200, deadline=None)
def test_only_an_incomplete_character_is_held_back(text: str) -> None:
    """Guards against text that comes late, and against one held-back byte suppressing all that follows."""
    detok = Detokenizer(BYTES, frozenset())
    for char in text:
        *head, last = char.encode("utf-8", errors="replace")
        assert [detok.push(byte) for byte in head] == [""] * len(head)
        assert detok.push(last) == bytes([*head, last]).decode()
    assert detok.flush() == ""


@pytest.mark.parametrize(
    ("raw", "pieces"),
    [
        ("🌍".encode(), ["", "", "", "🌍", ""]),
        ("你好".encode(), ["", "", "你", "", "", "好", ""]),
        (b"\xf0abc", ["", "\ufffda", "b", "c", ""]),
        (b"a\xe4\xbd", ["a", "", "", "\ufffd"]),
        (b"\xff\xfe", ["\ufffd", "\ufffd", ""]),
    ],
)
def test_byte_by_byte(raw: bytes, pieces: list[str]) -> None:
    """Guards against retracted text and against invalid bytes that are never let go."""
    assert pieces_of(Detokenizer(BYTES, frozenset()), list(raw)) == pieces


def test_control_tokens_and_padding_ids_give_no_text() -> None:
    """Guards against control tokens in answers, and against a crash on an id of a padded output head."""
    detok = Detokenizer([b"a", b"<eos>", b"\xc3", b"\xa9"], frozenset({1}))
    assert pieces_of(detok, [0, 1, 2, 1, 3, 4, 10**6]) == ["a", "", "", "", "é", "", "", ""]
