"""Streams over a network that cuts them anywhere: read alike by a parser of the standard and by OpenAI's package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from chairlift.server.sse import DONE, PING
from support.sse_parser import parsed
from support.stream_cases import NAMES, path_of


def stream_of(name: str) -> bytes:
    """A recorded stream, with a ping before each of its events."""
    events = path_of(name).read_bytes().split(b"\n\n")
    assert events.pop() == b""
    return b"".join(PING + event + b"\n\n" for event in events)


def official(pieces: Iterator[bytes]) -> list[str]:
    """The data of the events that OpenAI's package finds."""
    return [event.data for event in SSEDecoder().iter_bytes(pieces)]


@pytest.mark.parametrize("name", NAMES)
def test_every_cut_reads_alike(name: str) -> None:
    """Fault: an event that a parser sees only when a read happens to end where the event does."""
    raw = stream_of(name)
    expected = parsed(raw)
    assert expected.is_complete
    assert expected.events[-1] == "[DONE]"
    assert expected.comments == ["ping"] * len(expected.events)
    for cut in range(1, len(raw)):
        parser = parsed(raw[:cut], raw[cut:])
        assert (parser.events, parser.comments) == (expected.events, expected.comments)


@pytest.mark.parametrize("name", NAMES)
def test_openai_reads_byte_by_byte_what_the_standard_says(name: str) -> None:
    """Fault: a stream that is right by our own reading only; comments that clients take for events."""
    raw = stream_of(name)
    expected = parsed(raw).events
    assert official(raw[i : i + 1] for i in range(len(raw))) == expected
    assert official(iter([raw])) == expected


LONGEST = max(map(stream_of, NAMES), key=len)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, len(LONGEST) - 1), max_size=12))
def test_openai_reads_any_cuts_alike(cuts: list[int]) -> None:
    """Fault: as above, for several cuts at once, as small packets make them."""
    at = [0, *sorted(set(cuts)), len(LONGEST)]
    assert official(LONGEST[a:b] for a, b in pairwise(at)) == parsed(LONGEST).events


@pytest.mark.parametrize("name", NAMES)
def test_each_event_is_one_line_of_ascii_json(name: str) -> None:
    """Fault: JSON over several lines, raw line ends or foreign bytes, which simple parsers stumble over."""
    raw = path_of(name).read_bytes()
    assert raw.isascii()
    assert b"\r" not in raw
    assert raw.endswith(DONE)
    assert raw.count(b"[DONE]") == 1
    for event in raw.removesuffix(DONE).decode().split("\n\n")[:-1]:
        assert event.startswith("data: {")
        assert isinstance(json.loads(event.removeprefix("data: ")), dict)
