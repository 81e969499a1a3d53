"""Bytes of streams to messages, however they are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.bench.client.wire import BadStream, LineParser, Message, SseParser


@settings(max_examples=80)
@given(
    st.lists(st.one_of(st.binary(max_size=12), st.none()), max_size=8),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.data(),
)
def test_a_stream_is_the_same_however_it_is_cut(payloads: list[bytes | None], end: bytes, data: st.DataObject) -> None:
    """Half a line at the end of a packet that is taken for a whole one, or \\r and \\n counted as two line ends."""
    wanted = [p if p is None else p.replace(b"\r", b"x").replace(b"\n", b"y") for p in payloads]
    events = [b": ping" + end if p is None else b"data: " + p + end + end for p in [*wanted, b"x"]]
    stream = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    parser = SseParser()
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    messages = [message for piece in [*pieces, b"\n"] for message in parser.feed(piece)]
    assert [message.data for message in messages] == [*wanted, b"x"]
    assert sum(message.num_bytes for message in messages) in (len(stream), len(stream) + 1)


def test_lines_of_an_event_are_joined_and_other_fields_are_not_data() -> None:
    """An event's name, or its second line, taken for a message of its own."""
    (message,) = SseParser().feed(b"event: x\nid: 3\ndata:{\ndata: }\n\n")
    assert message == Message(b"{\n}", 31)


def test_a_message_without_end_is_no_message() -> None:
    """A server that sends one endless line and fills this machine's memory."""
    for parser in (SseParser(), LineParser()):
        assert parser.feed(b"x" * 2**19) == []
        with pytest.raises(BadStream):
            parser.feed(b"x" * (2**19 + 1))
    with pytest.raises(BadStream):
        SseParser().feed((b"data: " + b"x" * 2**10 + b"\n") * 2**10)


def test_lines_of_json_survive_any_cut() -> None:
    """Ollama's own API, whose lines end where packets do not."""
    parser = LineParser()
    assert parser.feed(b'{"a"') == []
    assert parser.feed(b': 1}\n\n{"b') == [Message(b'{"a": 1}', 9)]
