"""engine/wait_estimator.py: how long waiting requests will wait."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.fair_queue import FairQueue
from chairlift.engine.request import FinishReason, Request
from chairlift.engine.wait_estimator import MovingMean, SlotHolder, Speed, estimate_waits
from support.fake_model import fake_request
from support.scheduler_sim import Cost


def test_a_mean_is_a_mean_and_then_forgets() -> None:
    """Fault: the first value counts for ever, or the last one alone."""
    mean = MovingMean(4)
    assert mean.value == 0.0
    for value in (2.0, 4.0, 6.0, 8.0):
        mean.add(value)
    assert mean.value == 5.0
    mean.add(9.0)
    assert mean.value == 6.0
    for _ in range(50):
        mean.add(1.0)
    assert mean.value == pytest.approx(1.0, abs=1e-5)
    counted = MovingMean(10, prior=10.0)
    counted.add(20.0)
    assert counted.value == 15.0


# -- speed ------------------------------------------------------------------------------------------------------------


def speed(num_slots: int = 2) -> Speed:
    return Speed(
        Cost(base_s=0.01, per_row_s=0.005, per_kv_token_s=0.0, per_context_token_s=0.0, per_logit_row_s=0.0),
        num_slots,
        100,
    )


def test_before_any_answer_the_predictor_stands_in() -> None:
    """Fault: a server that has just started says one second, whatever the model."""
    fresh = speed()
    assert fresh.token_s == pytest.approx(0.02)
    assert fresh.prompt_token_s == pytest.approx(0.51 / 100)
    request = fake_request("a", range(101), max_tokens=10)
    assert fresh.remaining_s(request) == pytest.approx(100 * 0.0051 + 10 * 0.02, rel=0.02)
    endless = fake_request("b", range(101), max_tokens=4000)
    assert fresh.remaining_s(endless) == pytest.approx(100 * 0.0051 + 256 * 0.02)


def test_what_was_measured_counts() -> None:
    """Fault: a constant in place of the speed there is; or one that was measured while nobody else was served."""
    measured = speed()
    for _ in range(2000):
        measured.add_gaps([0.5])
    assert measured.token_s == pytest.approx(0.5)
    for _ in range(9000):
        measured.add_gaps([0.001])
    assert measured.token_s == pytest.approx(0.02), "at least a step in which every slot gets its token"
    request = fake_request("a", [1] * 100)
    request.timing.scheduled_s, request.timing.first_token_s = 10.0, 20.0
    measured.add_first_token(request)
    assert measured.prompt_token_s == pytest.approx(0.1)


def ended(num_tokens: int, reason: FinishReason) -> Request:
    request = fake_request("a", [1])
    request.output = [1] * num_tokens
    request.finish_reason = reason
    return request


def test_answers_teach_how_long_answers_are() -> None:
    """Fault: a limit that everybody runs into is taken for the length at which answers end, or one is never learnt."""
    long, short = fake_request("c", [1], max_tokens=4000), fake_request("d", [1], max_tokens=5)
    stopping, cut, mixed = speed(), speed(), speed()
    for _ in range(200):
        stopping.add_finished(ended(30, FinishReason.STOP))
        cut.add_finished(ended(30, FinishReason.LENGTH))
        mixed.add_finished(ended(30, FinishReason.LENGTH))
        mixed.add_finished(ended(30, FinishReason.CANCELLED))
        for learning in (stopping, cut, mixed):
            learning.add_finished(ended(0, FinishReason.CANCELLED))  # never began
    assert stopping.remaining_s(long) == pytest.approx(30 * 0.02, rel=0.01)
    assert mixed.remaining_s(long) == pytest.approx(60 * 0.02, rel=0.1)
    assert cut.remaining_s(long) == pytest.approx(4000 * 0.02, rel=0.02)
    assert [s.remaining_s(short) for s in (stopping, cut)] == pytest.approx([4.6 * 0.02, 5 * 0.02], rel=0.01)


def test_what_is_done_is_not_to_do() -> None:
    """Fault: a request at its end is thought to hold its slot as long as one at its beginning."""
    request = fake_request("a", range(101), max_tokens=10)
    request.output = [1] * 7
    request.num_computed = 107
    assert speed().remaining_s(request) == pytest.approx(3 * 0.02, rel=0.02)
    request.num_computed = 0  # preempted: all of it is to be computed again
    assert speed().remaining_s(request) == pytest.approx(107 * 0.0051 + 3 * 0.02, rel=0.02)


# -- waits ------------------------------------------------------------------------------------------------------------


def test_waits_by_hand() -> None:
    """Fault: everybody is told the same, or the first in line the wait of the last."""
    line: FairQueue[float] = FairQueue()
    for seconds in (5.0, 1.0, 1.0, 1.0):
        line.add("", seconds)
    members = [SlotHolder("", 3.0), SlotHolder("", 4.0)]
    found = estimate_waits(line, members, service_s=lambda seconds: seconds, free_slots=lambda num: 2 - num)
    assert [wait_s for _, wait_s in found] == [3.0, 4.0, 5.0, 6.0]


def test_free_slots_are_no_wait() -> None:
    """Fault: somebody who starts at once is told to wait."""
    line: FairQueue[str] = FairQueue()
    for name in "abc":
        line.add("", name)
    found = estimate_waits(line, [SlotHolder("", 9.0)], service_s=lambda _: 2.0, free_slots=lambda num: 3 - num)
    assert found == [("a", 0.0), ("b", 0.0), ("c", 2.0)]


def test_a_batch_that_nobody_joins() -> None:
    """Fault: a forecast for the policy that is not the one in force."""
    line: FairQueue[str] = FairQueue()
    for name in "abc":
        line.add("", name)
    members = [SlotHolder("", 1.0), SlotHolder("", 9.0)]
    found = estimate_waits(line, members, service_s=lambda _: 2.0, free_slots=lambda num: 0 if num else 2)
    assert found == [("a", 9.0), ("b", 9.0), ("c", 11.0)]


def test_a_limit_of_one_key_is_foreseen() -> None:
    """Fault: a position that others pass, because their keys have fewer running."""
    line: FairQueue[str] = FairQueue(max_running_per_key=1)
    for key, name in (("a", "a1"), ("a", "a2"), ("b", "b1"), ("c", "c1")):
        line.add(key, name)
    found = estimate_waits(line, [SlotHolder("a", 10.0)], service_s=lambda _: 4.0, free_slots=lambda num: 2 - num)
    assert found == [("b1", 0.0), ("c1", 4.0), ("a1", 10.0), ("a2", 14.0)]


def test_a_long_line_is_told_its_pace() -> None:
    """Fault: a client waits for the arithmetic of a line of ten thousand."""
    line: FairQueue[int] = FairQueue()
    for i in range(10_000):
        line.add("", i)
    found = estimate_waits(line, [SlotHolder("", 1.0)], service_s=lambda _: 1.0, free_slots=lambda num: 1 - num)
    assert [i for i, _ in found] == list(range(10_000))
    assert found[400] == (400, 401.0)
    assert found[9_999][1] == pytest.approx(10_000, rel=0.01)


@given(
    slots=st.integers(1, 5),
    most=st.one_of(st.none(), st.integers(1, 2)),
    running=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), max_size=5),
    waiting=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), min_size=1, max_size=12),
)
@settings(max_examples=200, deadline=None)
def test_waits_are_what_a_clock_would_see(
    slots: int, most: int | None, running: list[tuple[str, int]], waiting: list[tuple[str, int]]
) -> None:
    """Fault: the arithmetic of ends and starts differs from letting the seconds pass one by one."""
    line: FairQueue[tuple[int, str, int]] = FairQueue(most)
    for i, (key, seconds) in enumerate(waiting):
        line.add(key, (i, key, seconds))
    clock_line = line.copy()
    left = [*running]
    seen: list[tuple[int, float]] = []
    now = 0
    while clock_line:
        counts = Counter(key for key, _ in left)
        first = clock_line.next(counts) if len(left) < slots else None
        if first is None:
            now += 1
            left = [(key, seconds - 1) for key, seconds in left if seconds > 1]
        else:
            _, item = first
            assert item is not None
            clock_line.pop(item[1])
            left.append((item[1], item[2]))
            seen.append((item[0], now))
    members = [SlotHolder(key, seconds) for key, seconds in running]
    found = estimate_waits(line, members, service_s=lambda item: item[2], free_slots=lambda num: slots - num)
    assert [(i, at) for (i, _, _), at in found] == seen
