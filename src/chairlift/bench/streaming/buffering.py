"""Detects buffering: whether something between server and client holds chunks of a stream back.

    sent      | | | | | | | | | | | | | | |       every chunk at its time
    clean     | | | | | | | | | | | | | | |
    buffer              ||||||        ||||||      bursts of equal bytes, whatever the pace
    interval      |||     ||||    ||    |||       bursts at equal times, whatever the bytes
    head               ||||||| | | | | | | |      the first bytes held, then clean
    whole                                  ||||   all at the end

Only differences of send stamps are used, so they need not be on the client's clock. Without stamps the server is taken
to send at an even pace, as it does while it serves one stream alone. Pure: no server, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median, pstdev

from chairlift.bench.client.sample import TOKENS, Event, Sample

MIN_CHUNKS = 16
"""Fewer chunks say nothing about bursts."""
MIN_CHUNKS_PER_BURST = 4.0
"""A stream is buffered if its median chunk came in so large a burst. TCP joins two or three on a busy machine."""
MIN_HELD_S = 0.05
"""Bursts that hold nothing back for longer are no fault: no reader sees them, and operating systems do as much."""
ROUND_KB = (1, 2, 4, 8, 16, 32, 64, 128)
_PACE_PART = 0.25  # chunks closer together than this part of the pace came in one burst
_ALIKE = 1.5  # two deviations within this factor cannot be told apart


class Pattern(StrEnum):
    """How the chunks arrive."""

    CLEAN = "clean"
    BUFFER = "buffer"
    INTERVAL = "interval"
    EITHER = "buffer or interval"
    HEAD = "head"
    WHOLE = "whole"
    SERVER = "server"  # the server itself sends in bursts
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Burst:
    """Chunks that arrived together."""

    at_s: float
    num_chunks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Buffering:
    """What was found. `num_bytes` and `interval_s` are those of a typical burst.

    `held_s` is how much longer the slowest chunk took than the quickest, by send stamps; None without stamps.
    """

    pattern: Pattern
    num_bytes: float | None = None
    interval_s: float | None = None
    held_s: float | None = None
    chunks_per_burst: float | None = None
    is_stamped: bool = False

    @property
    def is_buffered(self) -> bool:
        """Whether something on the way holds chunks back."""
        return self.pattern not in (Pattern.CLEAN, Pattern.SERVER, Pattern.UNKNOWN)


def _chunks(sample: Sample) -> list[Event]:
    """The events that bear tokens, each with the bytes of other events before it. What follows the last is left out."""
    found, num_bytes = [], 0
    for event in sample.events:
        num_bytes += event.num_bytes
        if event.kind in TOKENS and event.num_bytes:
            found.append(replace(event, num_bytes=num_bytes))
            num_bytes = 0
    return found


def _bursts(times: Sequence[float], chunks: Sequence[Event], pace_s: float) -> list[Burst]:
    """Groups chunks into bursts by these times. A gap of more than _PACE_PART of the pace begins a new one."""
    found: list[Burst] = []
    last_s = float("-inf")
    for at_s, chunk in zip(times, chunks, strict=True):
        if at_s - last_s > pace_s * _PACE_PART:
            found.append(Burst(at_s, 1, chunk.num_bytes))
        else:
            last = found[-1]
            found[-1] = Burst(last.at_s, last.num_chunks + 1, last.num_bytes + chunk.num_bytes)
        last_s = at_s
    return found


def diagnose(samples: Sequence[Sample]) -> Buffering:
    """What the streams of one address have in common."""
    pairs = [(sample.started_s, chunks) for sample in samples if len(chunks := _chunks(sample)) >= MIN_CHUNKS]
    if not pairs:
        return Buffering(Pattern.UNKNOWN)
    streams = [chunks for _, chunks in pairs]
    stamped = [chunks for chunks in streams if len(_stamps(chunks)) == len(chunks)]
    held_s = max((_held_s(chunks) for chunks in stamped), default=None)
    if any(_is_sent_in_bursts(chunks) for chunks in stamped):
        return Buffering(Pattern.SERVER, held_s=held_s, is_stamped=True)
    pace_s = median(_pace_s(chunks) for chunks in stamped or streams)
    arrived = [_bursts([chunk.at_s for chunk in chunks], chunks, pace_s) for chunks in streams]
    pattern = _pattern(arrived, pairs, is_stamped=bool(stamped))
    full = [burst for each in arrived for burst in each[:-1]] or [burst for each in arrived for burst in each]
    gaps = [b.at_s - a.at_s for each in arrived for a, b in pairwise(each[:-1])]
    interval_s = median(gaps) if gaps else None
    seen_s = held_s if stamped else interval_s
    if seen_s is not None and seen_s < MIN_HELD_S:
        pattern = Pattern.CLEAN
    if pattern is Pattern.BUFFER:
        pattern = _buffer_or_interval(full, gaps)
    num_bytes: float | None = median(burst.num_bytes for burst in full)
    if pattern is Pattern.HEAD:
        num_bytes = median(each[0].num_bytes for each in arrived)
    per_burst = median(_chunks_per_burst(each) for each in arrived)
    return Buffering(pattern, num_bytes, interval_s, held_s, per_burst, is_stamped=bool(stamped))


def _pattern(arrived: list[list[Burst]], pairs: list[tuple[float, list[Event]]], *, is_stamped: bool) -> Pattern:
    """The pattern, where BUFFER stands for both kinds of regular bursts."""
    is_whole = [(len(each) <= 2 and each[-1].num_chunks > each[0].num_chunks) or len(each) == 1 for each in arrived]
    if all(is_whole):
        if is_stamped:
            return Pattern.WHOLE
        # A very fast server sends all at once too, but then the client did not wait for it.
        span_s = max(chunks[-1].at_s - chunks[0].at_s for _, chunks in pairs)
        waited_s = min(chunks[0].at_s - started_s for started_s, chunks in pairs)
        return Pattern.WHOLE if waited_s > 10 * span_s and waited_s > 0.2 else Pattern.UNKNOWN
    if median(_chunks_per_burst(each) for each in arrived) >= MIN_CHUNKS_PER_BURST:
        return Pattern.BUFFER
    if all(each[0].num_chunks >= 2 * MIN_CHUNKS_PER_BURST for each in arrived):
        return Pattern.HEAD
    return Pattern.CLEAN


def _buffer_or_interval(full: list[Burst], gaps: list[float]) -> Pattern:
    """BUFFER if the bytes of bursts vary less than their times, else INTERVAL. At an even pace a round size decides."""
    sizes = [burst.num_bytes for burst in full]
    if len(gaps) < 2:
        return Pattern.BUFFER if round_kb(median(sizes)) else Pattern.EITHER
    grain = 2 / fmean(burst.num_chunks for burst in full)  # each end of a burst is known to one chunk
    of_bytes, of_time = (pstdev(values) / fmean(values) + grain for values in (sizes, gaps))
    if of_bytes * _ALIKE < of_time:
        return Pattern.BUFFER
    if of_time * _ALIKE < of_bytes:
        return Pattern.INTERVAL
    return Pattern.BUFFER if round_kb(median(sizes)) else Pattern.EITHER


def round_kb(num_bytes: float) -> int | None:
    """A usual size of buffers, in KB, within 6 % of this one; None if there is none. Bursts end with a whole chunk."""
    return next((kb for kb in ROUND_KB if abs(num_bytes / (kb * 1024) - 1) < 0.06), None)


def _stamps(chunks: list[Event]) -> list[float]:
    return [chunk.sent_at_s for chunk in chunks if chunk.sent_at_s is not None]


def _pace_s(chunks: list[Event]) -> float:
    """Mean seconds from one chunk to the next: as sent if that is known, else as received."""
    times = _stamps(chunks)
    if len(times) < len(chunks):
        times = [chunk.at_s for chunk in chunks]
    return (times[-1] - times[0]) / (len(times) - 1)


def _is_sent_in_bursts(chunks: list[Event]) -> bool:
    """Whether the server sent in bursts that are far enough apart to be seen, by its stamps."""
    found = _bursts(_stamps(chunks), chunks, _pace_s(chunks))
    gaps = [b.at_s - a.at_s for a, b in pairwise(found)]
    return _chunks_per_burst(found) >= MIN_CHUNKS_PER_BURST and bool(gaps) and median(gaps) >= MIN_HELD_S


def _held_s(chunks: list[Event]) -> float:
    """How much longer the slowest chunk was on its way than the quickest."""
    ways = [chunk.at_s - chunk.sent_at_s for chunk in chunks if chunk.sent_at_s is not None]
    return max(ways) - min(ways)


def _chunks_per_burst(found: Sequence[Burst]) -> float:
    """Chunks in the burst that the median chunk is in."""
    sizes = sorted(burst.num_chunks for burst in found for _ in range(burst.num_chunks))
    return float(median(sizes))
