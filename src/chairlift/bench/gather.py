"""Is something between gathering the stream? What can be told from when each piece was sent and when it arrived.

    sent      | | | | | | | | | | | | | | |       every piece at its time
    clean     | | | | | | | | | | | | | | |
    buffer              ||||||        ||||||      bursts of equal bytes, whatever the pace
    interval      |||     ||||    ||    |||       bursts at equal times, whatever the bytes
    head               ||||||| | | | | | | |      the first bytes held, then clean
    whole                                  ||||   all at the end

Send stamps need not be on the client's clock: only their differences are used. Without stamps the pieces are taken to
be made at an even pace, which one stream alone on a server is. Pure: no server, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, median, pstdev

from chairlift.bench.sample import TOKENS, Sample

MIN_PIECES = 16
"""Fewer say nothing about bursts."""
GATHERED = 4.0
"""Pieces in the burst of the median piece from which on it is gathering; TCP joins two or three on a busy machine."""
MIN_HELD_S = 0.05
"""Bursts that hold nothing back for longer are no fault: nobody sees it, and operating systems do as much."""
ROUND_KB = (1, 2, 4, 8, 16, 32, 64, 128)
_PACE_PART = 0.25  # of the pace: pieces closer together than that came in one burst
_ALIKE = 1.5  # two spreads within this factor cannot be told apart


class Pattern(StrEnum):
    """How pieces arrive."""

    CLEAN = "clean"
    BUFFER = "buffer"
    INTERVAL = "interval"
    EITHER = "buffer or interval"
    HEAD = "head"
    WHOLE = "whole"
    SERVER = "server"  # they were sent in bursts
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Burst:
    """Pieces that arrived together."""

    at_s: float
    num_pieces: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Gathering:
    """What was found. `num_bytes` and `interval_s` are of a typical burst, `held_s` the longest time that a piece was
    held beyond the quickest, by send stamps (None without)."""

    pattern: Pattern
    num_bytes: float | None = None
    interval_s: float | None = None
    held_s: float | None = None
    pieces_per_burst: float | None = None
    is_stamped: bool = False

    @property
    def is_gathered(self) -> bool:
        """Whether something between holds pieces back."""
        return self.pattern not in (Pattern.CLEAN, Pattern.SERVER, Pattern.UNKNOWN)


@dataclass(frozen=True, slots=True)
class _Piece:
    at_s: float
    sent_at_s: float | None
    num_bytes: int


def _pieces(sample: Sample) -> list[_Piece]:
    """Messages that bear tokens, each with the bytes of others before it; the end, sent in one, is left out."""
    found, num_bytes = [], 0
    for event in sample.events:
        num_bytes += event.num_bytes
        if event.kind in TOKENS and event.num_bytes:
            found.append(_Piece(event.at_s, event.sent_at_s, num_bytes))
            num_bytes = 0
    return found


def bursts(times: Sequence[float], sizes: Sequence[int], pace_s: float) -> list[Burst]:
    """Arrivals in bursts: a gap of more than a part of the pace begins a new one."""
    found: list[Burst] = []
    last_s = float("-inf")
    for at_s, size in zip(times, sizes, strict=True):
        if at_s - last_s > pace_s * _PACE_PART:
            found.append(Burst(at_s, 1, size))
        else:
            last = found[-1]
            found[-1] = Burst(last.at_s, last.num_pieces + 1, last.num_bytes + size)
        last_s = at_s
    return found


def diagnose(samples: Sequence[Sample]) -> Gathering:
    """What the streams of one path have in common."""
    streams = [pieces for pieces in map(_pieces, samples) if len(pieces) >= MIN_PIECES]
    if not streams:
        return Gathering(Pattern.UNKNOWN)
    stamped = [pieces for pieces in streams if all(piece.sent_at_s is not None for piece in pieces)]
    held_s = max((_held_s(pieces) for pieces in stamped), default=None)
    if any(_is_sent_in_bursts(pieces) for pieces in stamped):
        return Gathering(Pattern.SERVER, held_s=held_s, is_stamped=True)
    pace_s = median(_pace_s(pieces) for pieces in stamped or streams)
    starts = [sample.started_s for sample in samples if len(_pieces(sample)) >= MIN_PIECES]
    arrived = [_arrived(pieces, pace_s) for pieces in streams]
    pattern = _pattern(arrived, starts, streams, is_stamped=bool(stamped))
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
    per_burst = median(_pieces_per_burst(each) for each in arrived)
    return Gathering(pattern, num_bytes, interval_s, held_s, per_burst, is_stamped=bool(stamped))


def _pattern(
    arrived: list[list[Burst]], starts: list[float], streams: list[list[_Piece]], *, is_stamped: bool
) -> Pattern:
    """BUFFER stands for either kind of regular bursts here."""
    is_whole = [(len(each) <= 2 and each[-1].num_pieces > each[0].num_pieces) or len(each) == 1 for each in arrived]
    if all(is_whole):
        if is_stamped:
            return Pattern.WHOLE
        # All at once may also be a server that is very fast: then nobody waited for it.
        span_s = max(pieces[-1].at_s - pieces[0].at_s for pieces in streams)
        waited_s = min(pieces[0].at_s - start for pieces, start in zip(streams, starts, strict=True))
        return Pattern.WHOLE if waited_s > 10 * span_s and waited_s > 0.2 else Pattern.UNKNOWN
    if median(_pieces_per_burst(each) for each in arrived) >= GATHERED:
        return Pattern.BUFFER
    if all(each[0].num_pieces >= 2 * GATHERED for each in arrived):
        return Pattern.HEAD
    return Pattern.CLEAN


def _buffer_or_interval(full: list[Burst], gaps: list[float]) -> Pattern:
    """Equal bytes or equal times: whichever varies less. At an even pace both are equal, and round figures decide."""
    sizes = [burst.num_bytes for burst in full]
    if len(gaps) < 2:
        return Pattern.BUFFER if is_round(median(sizes)) else Pattern.EITHER
    grain = 2 / fmean(burst.num_pieces for burst in full)  # both ends of a burst are known to a piece
    of_bytes, of_time = (pstdev(values) / fmean(values) + grain for values in (sizes, gaps))
    if of_bytes * _ALIKE < of_time:
        return Pattern.BUFFER
    if of_time * _ALIKE < of_bytes:
        return Pattern.INTERVAL
    return Pattern.BUFFER if is_round(median(sizes)) else Pattern.EITHER


def is_round(num_bytes: float) -> bool:
    """Whether it is within 6 % of a size that buffers have: bursts end with a whole piece, and carry some framing."""
    return any(abs(num_bytes / (kb * 1024) - 1) < 0.06 for kb in ROUND_KB)


def _pace_s(pieces: list[_Piece]) -> float:
    """Seconds from one piece to the next, as sent where that is known."""
    if all(piece.sent_at_s is not None for piece in pieces):
        times = [piece.sent_at_s for piece in pieces if piece.sent_at_s is not None]
        return (times[-1] - times[0]) / (len(times) - 1)
    return (pieces[-1].at_s - pieces[0].at_s) / (len(pieces) - 1)


def _arrived(pieces: list[_Piece], pace_s: float) -> list[Burst]:
    return bursts([piece.at_s for piece in pieces], [piece.num_bytes for piece in pieces], pace_s)


def _is_sent_in_bursts(pieces: list[_Piece]) -> bool:
    """Whether the server's own stamps come in bursts, far enough apart to be seen."""
    times = [piece.sent_at_s for piece in pieces if piece.sent_at_s is not None]
    found = bursts(times, [piece.num_bytes for piece in pieces], _pace_s(pieces))
    gaps = [b.at_s - a.at_s for a, b in pairwise(found)]
    return _pieces_per_burst(found) >= GATHERED and bool(gaps) and median(gaps) >= MIN_HELD_S


def _held_s(pieces: list[_Piece]) -> float:
    """How much longer the slowest piece was on its way than the quickest."""
    ways = [piece.at_s - piece.sent_at_s for piece in pieces if piece.sent_at_s is not None]
    return max(ways) - min(ways)


def _pieces_per_burst(found: Sequence[Burst]) -> float:
    """Pieces in the burst that the median piece lies in."""
    sizes = sorted(burst.num_pieces for burst in found for _ in range(burst.num_pieces))
    return float(median(sizes))
