"""Stop strings: found wherever the text is cut, nothing leaked, nothing held back without need."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.stops import StopMatcher

Stops = list[str]

texts = st.text("ab", max_size=24)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: Stops) -> tuple[str, str | None]:
    """The naive twin: character by character, the stop that is complete first, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def longest_unfinished(text: str, stops: Stops) -> int:
    """Length of the longest suffix that is a proper prefix of a stop."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@given(pieces=st.lists(texts, max_size=8), stops=stop_lists)
@settings(max_examples=400, deadline=None)
def test_the_cuts_make_no_difference(pieces: list[str], stops: Stops) -> None:
    """Guards against stops missed or leaked over the border between two pieces."""
    matcher = StopMatcher(stops)
    sent = "".join([*map(matcher.push, pieces), matcher.flush()])
    assert (sent, matcher.matched) == expected("".join(pieces), stops)


@given(pieces=st.lists(texts, max_size=8), stops=stop_lists)
@settings(max_examples=400, deadline=None)
def test_holds_back_no_more_than_it_must(pieces: list[str], stops: Stops) -> None:
    """Guards against needless delay: only what may become a stop waits."""
    matcher = StopMatcher(stops)
    sent = text = ""
    for piece in pieces:
        sent += matcher.push(piece)
        text += piece
        if matcher.matched is not None:
            return
        assert sent == text[: len(text) - longest_unfinished(text, stops)]


@pytest.mark.parametrize(
    ("pieces", "stops", "sent", "matched"),
    [
        (["The quick br", "own f", "ox jumps"], ["own fox"], "The quick br", "own fox"),
        (["aab"], ["ab"], "a", "ab"),
        (["aab"], ["ab", "b"], "a", "ab"),
        (["hi\nUser", ":"], ["\nUser:"], "hi", "\nUser:"),
        (["hi\nUs"], ["\nUser:"], "hi\nUs", None),
        (["hi\nUs", "ual"], ["\nUser:"], "hi\nUsual", None),
        (["aaab"], ["aab"], "a", "aab"),
        (["xabcd"], ["abcd", "bc"], "xa", "bc"),
        (["", "a", "", "b"], ["ab"], "", "ab"),
        (["any"], [], "any", None),
    ],
)
def test_examples(pieces: list[str], stops: Stops, sent: str, matched: str | None) -> None:
    """Guards against the reported forms of the fault: straddling, repeated, overlapping and unfinished stops."""
    matcher = StopMatcher(stops)
    assert "".join([*map(matcher.push, pieces), matcher.flush()]) == sent
    assert matcher.matched == matched


def test_nothing_is_sent_after_a_stop() -> None:
    """Guards against text of the token that completed a stop, or of later ones, being sent."""
    matcher = StopMatcher(["stop"])
    assert matcher.push("a stop b") == "a "
    assert matcher.push("c") == matcher.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    """Guards against a request that ends before its first token."""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
