"""engine/fault_isolation.py: which request runs alone, which one is blamed, and when all end."""

from __future__ import annotations

from chairlift.engine.fault_isolation import MAX_ROUNDS_WITHOUT_CULPRIT, FaultIsolation
from chairlift.engine.request import FinishReason, Request
from chairlift.engine.step import Chunk, Step
from support.fake_model import fake_request


def make(num: int) -> list[Request]:
    return [fake_request(f"r{i}", range(40, 80)) for i in range(num)]


def step_of(*requests: Request, start: int = 0, stop: int = 40) -> Step:
    return Step(tuple(Chunk(request, start, stop - start) for request in requests), 0.0)


def end(request: Request) -> None:
    request.finish_reason = FinishReason.CANCELLED


def test_each_is_tried_and_only_who_fails_alone_is_blamed() -> None:
    """Fault: the innocent end with the guilty, or two guilty ones hide behind each other."""
    a, b, c = make(3)
    suspects = FaultIsolation()
    assert suspects.next is None
    assert suspects.failed(step_of(a, b, c)) == []
    assert suspects.next is a
    assert suspects.failed(step_of(a)) == [a]
    assert suspects.next is b
    suspects.passed(step_of(b))
    assert suspects.next is c
    assert suspects.failed(step_of(c)) == [c]
    assert suspects.next is None


def test_a_trial_takes_as_many_steps_as_it_needs() -> None:
    """Fault: a suspect is cleared by a part of what it did in the step that failed."""
    (a,) = make(1)
    suspects = FaultIsolation()
    suspects.failed(step_of(a, start=20, stop=30))
    for stop in (16, 29):
        suspects.passed(step_of(a, stop=stop))
        assert suspects.next is a
    suspects.passed(step_of(a, stop=30))
    assert suspects.next is None


def test_who_has_left_is_not_tried() -> None:
    """Fault: the engine waits for a step of somebody who is gone."""
    a, b, c = make(3)
    suspects = FaultIsolation()
    end(a)
    suspects.failed(step_of(a, b, c))
    assert suspects.next is b
    end(b)
    end(c)
    assert suspects.next is None


def test_rounds_without_a_culprit_are_bounded() -> None:
    """Fault: what fails only together is tried for ever."""
    a, b = make(2)
    suspects = FaultIsolation()
    for _ in range(MAX_ROUNDS_WITHOUT_CULPRIT):
        assert suspects.failed(step_of(a, b)) == []
        suspects.passed(step_of(a))
        suspects.passed(step_of(b))
        assert suspects.next is None
    assert suspects.failed(step_of(a, b)) == [a, b]
    assert suspects.failed(step_of(a, b)) == [], "it begins anew"


def test_success_together_or_a_culprit_ends_the_count() -> None:
    """Fault: rare hiccups add up over days until one of them ends everybody."""
    a, b = make(2)
    suspects = FaultIsolation()
    for _ in range(3 * MAX_ROUNDS_WITHOUT_CULPRIT):
        assert suspects.failed(step_of(a)) == []
        suspects.passed(step_of(a))
        suspects.passed(step_of(a))
    for _ in range(3 * MAX_ROUNDS_WITHOUT_CULPRIT):
        assert suspects.failed(step_of(a, b)) == []
        suspects.passed(step_of(a))
        assert suspects.failed(step_of(b)) == [b]
