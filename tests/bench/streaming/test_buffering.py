"""Whether a stream was buffered on its way: proxies with known buffers, on streams with known times."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.bench.client.dialect import AnswerParser
from chairlift.bench.client.sample import Sample
from chairlift.bench.client.target import Api
from chairlift.bench.client.wire import SseParser
from chairlift.bench.streaming.buffering import Pattern, diagnose, round_kb
from support.scripted_server import Script, buffered, delayed, delta, ending, flushed, moments, spaced


def received(script: Script) -> Sample:
    """What a client has of a script, without the connection."""
    answer, parser = AnswerParser(Api.CHAT, 0.0), SseParser()
    for at_s, data in moments(script):
        for message in parser.feed(data):
            if message.data is not None and message.data != b"[DONE]":
                answer.chunk(json.loads(message.data), at_s, message.num_bytes)
    return Sample(0, 0.0, 0.0, moments(script)[-1][0], True, tuple(answer.events))


def even(num: int = 400) -> list[float]:
    return [0.1, *[0.02] * (num - 1)]


def uneven(num: int = 400, seed: int = 1) -> list[float]:
    """As a server whose steps differ: twice as slow in its second half, and never even."""
    rng = random.Random(seed)
    return [0.1, *((0.01 if i < num // 2 else 0.03) * rng.uniform(0.5, 1.5) for i in range(num - 1))]


STAMPS = pytest.mark.parametrize("stamps_from_s", [None, 0.0, -3600.0], ids=["unstamped", "stamped", "skewed-clock"])


@STAMPS
def test_a_stream_that_nobody_buffers_is_clean(stamps_from_s: float | None) -> None:
    """A model that is slow, or uneven, blamed on the proxy."""
    for gaps in (even(), uneven()):
        found = diagnose([received(spaced(gaps, stamps_from_s=stamps_from_s))])
        assert (found.pattern, found.is_buffered, found.chunks_per_burst) == (Pattern.CLEAN, False, 1.0)
        assert (found.held_s is None) == (stamps_from_s is None)
        assert found.held_s is None or found.held_s < 1e-9


@STAMPS
def test_a_buffer_of_16_kb_is_recognised(stamps_from_s: float | None) -> None:
    """The most common fault of all: a proxy's buffer, seen as a slow or jerky model."""
    for gaps in (even(600), uneven(600)):
        found = diagnose([received(buffered(spaced(gaps, stamps_from_s=stamps_from_s), 16384))])
        assert found.pattern is Pattern.BUFFER
        assert found.num_bytes == pytest.approx(16384, rel=0.02)
        assert found.is_buffered


def test_what_was_held_is_told_to_the_digit() -> None:
    """ "Something buffers" without how long anybody waits for it."""
    script = spaced(even(600), stamps_from_s=0.0)
    first_burst = next(i for i, (_, size) in enumerate(_running(script)) if size >= 16384)
    found = diagnose([received(buffered(script, 16384))])
    assert found.held_s == pytest.approx(moments(script)[first_burst][0] - 0.1, rel=0.02)


def _running(script: Script) -> list[tuple[float, int]]:
    total, found = 0, []
    for at_s, data in moments(script):
        total += len(data)
        found.append((at_s, total))
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(1500, 9000), st.integers(0, 9))
def test_any_buffer_is_measured_to_a_piece(num_bytes: int, seed: int) -> None:
    """A size that is right for 16 KB only."""
    found = diagnose([received(buffered(spaced(uneven(600, seed)), num_bytes))])
    assert found.pattern is Pattern.BUFFER
    assert found.num_bytes is not None
    assert abs(found.num_bytes - num_bytes) < 150


@STAMPS
def test_a_flush_at_fixed_times_is_told_from_a_buffer(stamps_from_s: float | None) -> None:
    """Advice about buffers to somebody whose proxy flushes once a second."""
    found = diagnose([received(flushed(spaced(uneven(600), stamps_from_s=stamps_from_s), 1.0))])
    assert found.pattern is Pattern.INTERVAL
    assert found.interval_s == pytest.approx(1.0)


def test_what_looks_alike_is_not_guessed() -> None:
    """At an even pace, 10,000 bytes and 1.9 seconds are the same; a tool that names one of them invents it."""
    assert diagnose([received(buffered(spaced(even(600)), 10_000))]).pattern is Pattern.EITHER


def test_streams_with_smaller_pieces_settle_it() -> None:
    """Pieces without stamps are smaller: the same bytes then take longer, the same time then holds fewer bytes."""
    scripts = [spaced(even(600), stamps_from_s=0.0), spaced(even(600))]
    assert diagnose([received(buffered(script, 10_000)) for script in scripts]).pattern is Pattern.BUFFER
    assert diagnose([received(flushed(script, 1.3)) for script in scripts]).pattern is Pattern.INTERVAL


@STAMPS
def test_all_at_the_end(stamps_from_s: float | None) -> None:
    """A proxy that waits for the whole answer: with one burst there is no gap to be seen."""
    found = diagnose([received(buffered(spaced(even(100), stamps_from_s=stamps_from_s), 2**20))])
    assert (found.pattern, found.is_buffered) == (Pattern.WHOLE, True)


def test_all_at_once_and_soon_says_nothing() -> None:
    """A server that is faster than the eye called buffered."""
    at_once = b"".join(delta(content="x") for _ in range(99))
    assert diagnose([received([(0.05, at_once), (0.0, ending(99))])]).pattern is Pattern.UNKNOWN


def test_only_the_beginning_is_held() -> None:
    """A proxy that looks at the first 4 KB before it lets go: the first word is late and the rest is not."""
    script = spaced(even(400), stamps_from_s=0.0)
    held = next(i for i, (_, size) in enumerate(_running(script)) if size >= 4096)
    first = b"".join(data for _, data in script[: held + 1])
    found = diagnose([received([(moments(script)[held][0], first), *script[held + 1 :]])])
    assert found.pattern is Pattern.HEAD
    assert found.num_bytes == pytest.approx(4096, rel=0.06)


def test_a_server_that_sends_in_bursts_is_not_a_proxy_that_buffers() -> None:
    """Stamps that show the server's own bursts, and a proxy that is blamed for them."""
    gaps = [1.0 if i % 20 == 0 else 0.0001 for i in range(200)]
    assert diagnose([received(spaced(gaps, stamps_from_s=0.0))]).pattern is Pattern.SERVER


def test_bursts_that_nobody_can_see_are_no_fault() -> None:
    """A very fast server, whose pieces the operating system hands over four at a time, blamed on a proxy."""
    gaps = [0.1, *[0.002] * 399]
    for stamps_from_s in (None, 0.0):
        fast = spaced(gaps, stamps_from_s=stamps_from_s)
        assert diagnose([received(flushed(fast, 0.02))]).pattern is Pattern.CLEAN
        assert diagnose([received(flushed(fast, 0.2))]).is_buffered
    own = [0.02 if i % 20 == 0 else 0.0001 for i in range(200)]
    assert diagnose([received(spaced(own, stamps_from_s=0.0))]).pattern is Pattern.CLEAN


def test_too_few_pieces_say_nothing() -> None:
    """A verdict from an answer of ten words."""
    assert diagnose([received(spaced(even(10)))]).pattern is Pattern.UNKNOWN
    assert diagnose([]).pattern is Pattern.UNKNOWN


def test_a_fixed_delay_is_not_buffering() -> None:
    """A distant server told to switch off a buffer that it does not have."""
    assert diagnose([received(delayed(spaced(even(), stamps_from_s=0.0), 1.0))]).pattern is Pattern.CLEAN


@pytest.mark.parametrize(("num_bytes", "expected"), [(16384, True), (16900, True), (10_000, False), (4096, True)])
def test_round_sizes(num_bytes: int, expected: bool) -> None:
    """Sizes that buffers have, told from others."""
    assert (round_kb(num_bytes) is not None) is expected
