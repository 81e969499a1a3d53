"""engine/watchdog.py on a clock that tests move, by itself and in the engine; and the warning that is not repeated."""

from __future__ import annotations

import logging
import threading

import pytest

from chairlift.engine.detok import Detokenizer
from chairlift.engine.engine import Engine
from chairlift.engine.observer import Observer
from chairlift.engine.request import FinishReason, Output
from chairlift.engine.telemetry import PreemptionLog
from chairlift.engine.watchdog import Watchdog, stacks
from support.engine_probe import Gate, is_idle, state_of
from support.fake_model import FakeModel, fake_plan, fake_request, wait_until


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum("no step has ended" in record.getMessage() for record in caplog.records)


def test_each_stall_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: stacks every second for hours; or none for the second stall because the first was told."""
    clock = Clock()
    dog = Watchdog(30.0, clock)
    for num_told in (1, 2):
        clock.now_s += 30.0
        assert not dog.is_over
        assert not dog.tell_once("work", threading.current_thread())
        clock.now_s += 0.1
        assert dog.is_over
        assert dog.tell_once("work", threading.current_thread())
        clock.now_s += 1000.0
        assert not dog.tell_once("work", threading.current_thread())
        assert told(caplog) == num_told
        assert dog.progress() == clock.now_s
        assert not dog.is_over


def test_stacks_begin_with_the_one_that_matters_and_hold_no_values() -> None:
    """Fault: the engine's stack is lost among twenty, or prompts are in the log."""
    begun, over = threading.Event(), threading.Event()

    def wait_with(secret: str) -> None:
        begun.set()
        assert over.wait(20), secret

    thread = threading.Thread(target=wait_with, args=("a prompt",), name="engine-like")
    thread.start()
    assert begun.wait(20)
    text = stacks(thread)
    over.set()
    thread.join()
    assert text.startswith("thread engine-like:\n")
    assert "in wait_with" in text
    assert "thread MainThread:" in text
    assert "a prompt" not in text.split("thread MainThread:")[0]
    assert stacks(thread).startswith("thread MainThread:"), "one that has ended has no stack"


class Stalls(Observer):
    """Counts them."""

    def __init__(self) -> None:
        self.num = 0

    def stalled(self) -> None:
        self.num += 1


def test_a_long_prefill_is_progress_and_a_step_that_hangs_is_not(caplog: pytest.LogCaptureFixture) -> None:
    """Fault (CASES C3, A14): a prompt that takes minutes looks like a stall, or idleness does; a real one does not."""
    clock, gate, stalls = Clock(), Gate(), Stalls()
    plan = fake_plan(watchdog_s=30.0)

    def slow(step: object) -> None:
        gate(step)  # type: ignore[arg-type]
        clock.now_s += 20.0

    model = FakeModel(plan.num_blocks, before_run=slow)
    engine = Engine(plan, model, deliver=lambda _: engine.watch(), observers=[stalls], clock=clock)
    engine.start()
    clock.now_s += 1000.0
    engine.watch()
    request = fake_request("long", [40 + i % 80 for i in range(500)], max_tokens=5)
    engine.submit([request])
    wait_until(lambda: is_idle(engine))
    assert len(model.rows_run) * 20.0 > 10 * plan.watchdog_s
    assert (stalls.num, told(caplog)) == (0, 0)
    gate.close()
    engine.submit([fake_request("stuck", range(40))])
    assert gate.held.wait(20)
    clock.now_s += 31.0
    for _ in range(3):
        engine.watch()
    assert state_of(engine) == "stalled"
    assert (stalls.num, told(caplog)) == (1, 1)
    assert "1 running and 0 waiting" in caplog.text
    gate.open.set()
    wait_until(lambda: is_idle(engine))
    engine.stop()


def test_preemptions_are_warned_of_once_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: a full pool fills the disk with a line per preemption; or some are never told."""
    preemptions = PreemptionLog()
    for tenth in range(31):
        if tenth < 25:
            preemptions.add(fake_request(f"r{tenth}", [1]))
        preemptions.warn(tenth / 10)
    lines = [record.getMessage().split(";")[0] for record in caplog.records if record.levelno == logging.WARNING]
    assert lines == [
        "the KV pool is full: 1 more preempted, the last of them request r0",
        "the KV pool is full: 10 more preempted, the last of them request r10",
        "the KV pool is full: 10 more preempted, the last of them request r20",
        "the KV pool is full: 4 more preempted, the last of them request r24",
    ]


class HungDetokenizer(Detokenizer):
    """Holds the engine thread in a commit for as long as a test wants."""

    def __init__(self) -> None:
        super().__init__([bytes([i]) for i in range(256)], frozenset())
        self.reached, self.go_on = threading.Event(), threading.Event()

    def push(self, token: int) -> str:
        """Text, once the test says so."""
        self.reached.set()
        assert self.go_on.wait(20)
        return super().push(token)


def test_a_commit_that_hangs_stops_no_other_thread_and_is_a_stall() -> None:
    """Fault: a lock that is held while text is made. Submits, refusals and the watchdog itself wait for the hang."""
    clock, stalls, hung = Clock(), Stalls(), HungDetokenizer()
    plan = fake_plan(watchdog_s=30.0, max_queue_wait_s=10.0, max_num_seqs=1)
    outputs: list[Output] = []
    engine = Engine(plan, FakeModel(plan.num_blocks), deliver=outputs.extend, observers=[stalls], clock=clock)
    engine.start()
    request, waiting = fake_request("hung", range(20), max_tokens=2), fake_request("waiting", range(30))
    request.detok = hung
    engine.submit([request])
    assert hung.reached.wait(10)
    engine.submit([waiting])
    assert len(engine.queue().entries) == 1
    clock.now_s += 40.0
    engine.watch()
    assert (state_of(engine), stalls.num) == ("stalled", 1)
    assert [(o.request, o.finish_reason) for o in outputs] == [(waiting, FinishReason.ERROR)]
    hung.go_on.set()
    wait_until(lambda: is_idle(engine))
    assert request.finish_reason is FinishReason.LENGTH
    engine.stop()
