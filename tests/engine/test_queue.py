"""The queue of a running engine: its limit, what it says of waits, when it gives up. A virtual clock, real threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from chairlift.engine.engine import Engine
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.errors import QueueFull, QueueWait
from chairlift.kernels.ops import StepArrays
from support.engine_probe import is_idle
from support.fake_model import FakeModel, alone, fake_plan, fake_request, wait_until

STEP_S = 0.1


class Rig:
    """An engine whose every step takes a tenth of a second of its clock, and stops where a test wants it to."""

    def __init__(self, **plan: Any) -> None:
        self.now_s = 0.0
        self.held = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.hold_at: Callable[[], bool] | None = None
        self.outputs: list[Output] = []
        resolved = fake_plan(**plan)
        model = FakeModel(resolved.num_blocks, before_run=self._before_step)
        self.engine = Engine(resolved, model, deliver=self.outputs.extend, clock=lambda: self.now_s)

    def _before_step(self, _: StepArrays) -> None:
        if self.hold_at is not None and self.hold_at():
            self.hold_at = None
            self.go_on.clear()
        if not self.go_on.is_set():
            self.held.set()
            assert self.go_on.wait(20)
        self.now_s += STEP_S

    def hold(self, when: Callable[[], bool] = lambda: True) -> None:
        """Stops before the first step at which `when` holds."""
        self.held.clear()
        self.hold_at = when

    def wait_held(self) -> None:
        assert self.held.wait(20)

    def end_of(self, request: Request) -> Output | None:
        return next((o for o in list(self.outputs) if o.request is request and o.finish_reason), None)

    def finish(self, *requests: Request) -> None:
        wait_until(lambda: all(self.end_of(request) is not None for request in requests))

    def text(self, request: Request) -> str:
        return "".join(output.text for output in self.outputs if output.request is request)


@contextmanager
def rig(**plan: Any) -> Iterator[Rig]:
    made = Rig(**plan)
    made.engine.warm_up()
    made.engine.start()
    try:
        yield made
    finally:
        made.hold_at = None
        made.go_on.set()
        made.engine.stop()


def named(id: str, key_name: str = "", num_prompt: int = 20, **params: Any) -> Request:
    request = fake_request(id, [(7 * ord(id[-1]) + i) % 200 for i in range(num_prompt)], **params)
    request.key_name = key_name
    return request


def refusal(engine: Engine, *requests: Request) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        engine.submit(requests)
    return caught.value


# -- the limit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_queue", [0, 1, 4])
@pytest.mark.parametrize("is_running", [False, True])
def test_the_limit_is_exact(max_queue: int, is_running: bool) -> None:
    """Fault (CASES A15, A16): one more or one fewer waits than was said, before or after the first step began."""
    with rig(max_num_seqs=2, max_queue=max_queue) as r:
        r.hold()
        taken = [named(f"r{i}") for i in range(2)]
        for request in taken:
            r.engine.submit([request])
            if is_running and request is taken[0]:
                r.wait_held()
        for i in range(max_queue):
            taken.append(named(f"w{i}"))
            r.engine.submit([taken[-1]])
        r.wait_held()
        error = refusal(r.engine, named("x"))
        assert (error.num_waiting, error.num_running) == (max_queue, 2)
        with pytest.raises(QueueFull):
            r.engine.require_room("")
        r.go_on.set()
        r.finish(*taken)
        assert all(request.finish_reason is FinishReason.LENGTH for request in taken)


def test_a_place_that_a_leaver_frees_is_free() -> None:
    """Fault: cancelled requests go on counting."""
    with rig(max_num_seqs=1, max_queue=1) as r:
        r.hold()
        first, gone, next_one = named("a"), named("b"), named("c")
        r.engine.submit([first])
        r.wait_held()
        r.engine.submit([gone])
        refusal(r.engine, next_one)
        r.engine.cancel([gone])
        r.hold()
        r.go_on.set()
        r.wait_held()
        assert r.end_of(gone) is not None
        r.engine.submit([next_one])
        r.go_on.set()
        r.finish(first, next_one)


def test_slots_that_a_key_may_not_have_are_not_counted_for_it() -> None:
    """Fault: with a limit per key, --max-queue lets in one more for every slot that stays empty."""
    with rig(max_num_seqs=4, max_queue=2, max_running_per_key=1) as r:
        r.hold()
        taken = [named(f"a{i}", "alice") for i in range(3)]
        for request in taken:
            r.engine.submit([request])
        r.wait_held()
        assert refusal(r.engine, named("x", "alice")).num_waiting == 2
        other = named("b", "bob")
        r.engine.submit([other])
        r.go_on.set()
        r.finish(*taken, other)


def test_preempted_requests_take_nobodys_place_in_line() -> None:
    """Fault: a full memory shortens the queue, since those that come back are counted as waiting."""
    with rig(num_blocks=8, max_model_len=128, max_num_seqs=2, max_queue=1) as r:
        old, young = named("a", num_prompt=40, max_tokens=60), named("b", num_prompt=40, max_tokens=60)
        r.hold(lambda: young.num_preemptions > 0)
        r.engine.submit([old, young])
        r.wait_held()
        waiting = named("c")
        r.engine.submit([waiting])
        error = refusal(r.engine, named("x"))
        assert (error.num_waiting, error.num_running) == (1, 2)
        view = r.engine.queue()
        assert (view.num_running, view.num_preempted, len(view.entries)) == (1, 1, 1)
        assert r.engine.snapshot().num_waiting == 2
        r.go_on.set()
        r.finish(old, young, waiting)


def test_a_slot_without_memory_is_no_slot() -> None:
    """Fault: with a full pool, --max-queue lets in one more for every slot that nobody can have; no wait is told."""
    with rig(num_blocks=8, max_model_len=128, max_num_seqs=4, max_queue=1) as r:
        big, waiting = named("a", num_prompt=100, max_tokens=20), named("b", num_prompt=40)
        r.hold(lambda: len(big.output) == 2)
        r.engine.submit([big, waiting])
        r.wait_held()
        error = refusal(r.engine, named("x"))
        assert (error.num_waiting, error.num_running) == (1, 1)
        assert r.engine.queue().entries[0].expected_wait_s > STEP_S
        r.go_on.set()
        r.finish(big, waiting)


# -- what it says -----------------------------------------------------------------------------------------------------


def test_the_expected_wait_is_what_it_comes_to() -> None:
    """Fault: Retry-After is a constant, or a mean that knows nothing of who is ahead."""
    with rig(max_num_seqs=1, max_queue=2) as r:
        first, second, third = (named(f"r{i}", max_tokens=50) for i in range(3))
        r.hold(lambda: len(first.output) == 20)
        for request in (first, second, third):
            r.engine.submit([request])
        r.wait_held()
        error = refusal(r.engine, named("x", max_tokens=50))
        assert error.expected_wait_s == pytest.approx((30 + 50 + 50) * STEP_S, rel=0.15)
        assert error.retry_after_s in (12, 13, 14)
        places = r.engine.queue().entries
        assert [(p.request, p.position) for p in places] == [(second, 1), (third, 2)]
        expected_s = [p.expected_wait_s + r.now_s for p in places]
        assert [p.waited_s for p in places] == [r.now_s - p.request.timing.arrival_s for p in places]
        r.go_on.set()
        r.finish(first, second, third)
        assert [second.timing.scheduled_s, third.timing.scheduled_s] == pytest.approx(expected_s, rel=0.15)


def test_the_prior_is_the_measured_warm_up() -> None:
    """Fault: before the first answer, a slow model promises what a fast one would keep."""
    with rig(max_num_seqs=1, max_queue=0) as r:
        r.hold()
        r.engine.submit([named("a", max_tokens=100)])
        r.wait_held()
        error = refusal(r.engine, named("x"))
        assert 5 < error.expected_wait_s < 20, "a hundred steps of a tenth of a second"


@pytest.mark.parametrize(("max_tokens", "retry_after_s"), [(1, 1), (400, 60)])
def test_retry_after_is_within_a_minute(max_tokens: int, retry_after_s: int) -> None:
    """Fault: Retry-After 0, which clients take for at once, or an hour, which they take for never."""
    with rig(max_num_seqs=1, max_queue=3) as r:
        r.hold()
        for i in range(4):
            r.engine.submit([named(f"r{i}", max_tokens=max_tokens)])
        r.wait_held()
        assert refusal(r.engine, named("x")).retry_after_s == retry_after_s


def test_positions_are_the_order_of_turns() -> None:
    """Fault: a position in order of arrival, in a line that is taken by key."""
    with rig(max_num_seqs=1) as r:
        r.hold()
        requests = [named(f"{key[0]}{i}", key, max_tokens=5) for key in ("alice", "bob") for i in range(3)]
        for request in requests:
            r.engine.submit([request])
        r.wait_held()
        view = r.engine.queue("carol")
        assert [place.request.id for place in view.entries] == ["b0", "a1", "b1", "a2", "b2"]
        assert [place.position for place in view.entries] == [1, 2, 3, 4, 5]
        assert view.expected_wait_s == view.entries[2].expected_wait_s, "a newcomer's key is behind one of each"
        r.go_on.set()
        r.finish(*requests)
        began = sorted(requests, key=lambda request: request.timing.scheduled_s)
        assert [request.id for request in began] == ["a0", "b0", "a1", "b1", "a2", "b2"]


# -- giving up --------------------------------------------------------------------------------------------------------


def gave_up(r: Rig, request: Request) -> QueueWait:
    end = r.end_of(request)
    assert end is not None
    assert end.finish_reason is FinishReason.ERROR
    assert isinstance(end.error, QueueWait)
    return end.error


def test_who_waits_for_too_long_is_told_also_during_a_long_step() -> None:
    """Fault: a step of a minute keeps everybody waiting who was to be told after five seconds."""
    with rig(max_num_seqs=1, max_queue_wait_s=5.0) as r:
        running, waiting, later = named("a", max_tokens=30), named("b"), named("c")
        r.hold()
        r.engine.submit([running])
        r.wait_held()
        r.engine.submit([waiting])
        r.now_s += 4.0
        r.engine.submit([later])
        r.engine.watch()
        assert r.end_of(waiting) is None
        r.now_s += 1.5
        r.engine.watch()
        error = gave_up(r, waiting)
        assert (error.num_waiting, error.num_running) == (1, 1)
        assert error.expected_wait_s > 0
        assert "5.5 s" in str(error)
        assert r.end_of(later) is None
        assert [place.request for place in r.engine.queue().entries] == [later]
        r.now_s -= 1.5
        r.go_on.set()
        r.finish(running, later)
        assert [r.text(q) for q in (running, later)] == [
            bytes(alone(q.prompt, q.params.max_tokens or 0)).decode() for q in (running, later)
        ]
        assert sum(o.request is waiting for o in r.outputs) == 1


def test_the_engine_itself_gives_up_between_steps() -> None:
    """Fault: only the watcher gives up; or a slot that came too late is given all the same."""
    with rig(max_num_seqs=1, max_queue_wait_s=5.0) as r:
        running, waiting = named("a", max_tokens=1), named("b")
        r.hold()
        r.engine.submit([running])
        r.wait_held()
        r.engine.submit([waiting])
        r.now_s += 5.5
        r.go_on.set()
        r.finish(running, waiting)
        gave_up(r, waiting)
        assert waiting.timing.scheduled_s == 0.0
        wait_until(lambda: is_idle(r.engine))


def test_idle_time_is_no_waiting() -> None:
    """Fault: the first request after a quiet night is given up at once."""
    with rig(max_num_seqs=1, max_queue_wait_s=5.0) as r:
        r.now_s += 80_000
        request = named("a", max_tokens=3)
        r.engine.submit([request])
        r.finish(request)
        assert request.finish_reason is FinishReason.LENGTH


def test_preempted_requests_are_never_given_up() -> None:
    """Fault: half an answer is thrown away because its reader has waited for the rest."""
    with rig(num_blocks=8, max_model_len=128, max_num_seqs=2, max_queue_wait_s=0.5) as r:
        old, young = named("a", num_prompt=40, max_tokens=60), named("b", num_prompt=40, max_tokens=60)
        r.engine.submit([old, young])
        r.finish(old, young)
        assert young.num_preemptions > 0
        for request in (old, young):
            assert request.finish_reason is FinishReason.LENGTH
            assert r.text(request) == bytes(alone(request.prompt, 60)).decode()


def test_a_line_that_is_late_as_a_whole() -> None:
    """Fault: only the first of each key is given up, the rest one by one with every step."""
    with rig(max_num_seqs=1, max_queue_wait_s=5.0) as r:
        r.hold()
        running = named("a", "alice")
        late = [named(f"w{i}", key) for key in ("alice", "bob") for i in range(4)]
        r.engine.submit([running])
        r.wait_held()
        r.engine.submit(late)
        r.now_s += 6
        r.engine.watch()
        assert {o.request for o in r.outputs} == set(late)
        assert len(r.outputs) == len(late)
        assert r.engine.snapshot().num_waiting == 0
