"""engine/engine.py: the thread around schedule, run, commit. No weights, no socket; real threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from chairlift.engine.engine import Engine
from chairlift.engine.observer import Observer, StepStats
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.errors import ContextLengthExceeded, Draining, QueueFull
from chairlift.kernels.ops import LogitResult, StepArrays
from chairlift.plan import Plan
from support.engine_probe import Gate, is_idle, state_of
from support.fake_model import FakeModel, alone, fake_plan, fake_request, wait_until


class Service:
    """An engine over the fake model, with everything it delivered."""

    def __init__(self, observer: Observer | None = None, plan: Plan | None = None) -> None:
        self.plan = plan or fake_plan()
        self.gate = Gate()
        self.model = FakeModel(self.plan.num_blocks, before_run=self.gate)
        self.outputs: list[Output] = []
        self.engine = Engine(
            self.plan, self.model, deliver=self.outputs.extend, observers=[observer] if observer else []
        )
        self.engine.warm_up()
        self.engine.start()

    def finish(self, *requests: Request) -> None:
        wait_until(lambda: all(any(o.request is r and o.finish_reason for o in list(self.outputs)) for r in requests))

    def text(self, request: Request) -> str:
        return "".join(o.text for o in self.outputs if o.request is request)


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.gate.open.set()
    made.engine.stop()


def expected(request: Request) -> str:
    assert request.params.max_tokens is not None
    return bytes(alone(request.prompt, request.params.max_tokens)).decode()


def test_many_at_once_get_the_text_they_get_alone(service: Service) -> None:
    """Fault: requests mixed up between inbox, batch and delivery."""
    requests = [fake_request(f"r{i}", range(i, i + 20 + 7 * i), max_tokens=10 + i) for i in range(8)]
    service.engine.submit(requests)
    service.finish(*requests)
    for request in requests:
        assert service.text(request) == expected(request)
        assert request.finish_reason is FinishReason.LENGTH


def test_the_pool_is_empty_again_when_idle(service: Service) -> None:
    """Fault: an exit path leaks blocks."""
    requests = [fake_request(f"r{i}", range(30 + i)) for i in range(6)]
    service.engine.submit(requests)
    service.engine.cancel(requests[:3])
    service.finish(*requests)
    wait_until(lambda: is_idle(service.engine))
    assert service.engine.snapshot().num_used_blocks == 0


def test_cancel_ends_one_request_and_no_other(service: Service) -> None:
    """Fault (CASES A26): one client's disconnect cancels another's answer."""
    service.gate.close()
    running, gone = fake_request("a", range(20), max_tokens=40), fake_request("b", range(50), max_tokens=40)
    service.engine.submit([running, gone])
    assert service.gate.held.wait(10)
    service.engine.cancel([gone])
    service.gate.open.set()
    service.finish(running, gone)
    assert gone.finish_reason is FinishReason.CANCELLED
    assert len(gone.output) <= 1, "cancelled within one step"
    assert service.text(running) == expected(running)


def test_what_a_step_brought_is_out_before_the_next_one_computes(service: Service) -> None:
    """Fault: text that waits for a convenient moment waits for a whole step, or for ever after the last one."""
    num_out: list[int] = []
    service.model.before_run = lambda _: num_out.append(len(service.outputs))
    request = fake_request("a", range(20), max_tokens=5)
    service.engine.submit([request])
    service.finish(request)
    assert num_out == [0, 1, 2, 3, 4]


def test_an_end_from_outside_comes_after_all_text(service: Service) -> None:
    """Fault: the end of a cancelled request overtakes what its last step brought."""
    service.gate.close()
    request = fake_request("a", range(20), max_tokens=40)
    service.engine.submit([request])
    assert service.gate.held.wait(10)
    service.engine.cancel([request])
    service.gate.open.set()
    wait_until(lambda: is_idle(service.engine))
    assert [output.num_tokens for output in service.outputs] == [1, 1]
    assert [output.finish_reason for output in service.outputs] == [None, FinishReason.CANCELLED]


def test_queue_limit_counts_waiting_requests_only() -> None:
    """Fault (CASES A15, A16): a limit that is not applied, or that counts those a free slot will take."""
    service = Service(plan=fake_plan(max_num_seqs=2, max_queue=4))
    service.gate.close()
    taken: list[Request] = []
    refused: list[QueueFull] = []
    for i in range(10):
        request = fake_request(f"r{i}", range(20))
        try:
            service.engine.submit([request])
            taken.append(request)
        except QueueFull as error:
            refused.append(error)
    service.gate.open.set()
    service.finish(*taken)
    service.engine.stop()
    assert (len(taken), len(refused)) == (6, 4)
    assert all(1 <= error.retry_after_s <= 60 for error in refused)


def test_choices_are_taken_together_or_not_at_all() -> None:
    """Fault: half of a request's choices in the queue, the other half refused."""
    service = Service(plan=fake_plan(max_num_seqs=2, max_queue=1))
    with pytest.raises(QueueFull):
        service.engine.submit([fake_request(f"r#{i}", range(20)) for i in range(4)])
    assert is_idle(service.engine)
    service.engine.stop()


def test_what_cannot_fit_is_refused_at_once(service: Service) -> None:
    """Fault (CASES A13, A25): a prompt that can never run waits for ever or kills the server."""
    with pytest.raises(ContextLengthExceeded) as caught:
        service.engine.submit([fake_request("a", range(512))])
    assert (caught.value.num_prompt_tokens, caught.value.limit) == (512, 512)
    fits = fake_request("b", [i % 200 for i in range(511)], max_tokens=5)
    service.engine.submit([fits])
    service.finish(fits)
    assert fits.finish_reason is FinishReason.LENGTH
    assert len(fits.output) == 1


def test_drain_refuses_new_requests_and_finishes_old_ones(service: Service) -> None:
    """Fault: a shutdown that cuts running answers or goes on taking new ones."""
    service.gate.close()
    old = fake_request("a", range(20))
    service.engine.submit([old])
    service.engine.drain()
    with pytest.raises(Draining):
        service.engine.submit([fake_request("b", range(20))])
    service.gate.open.set()
    service.finish(old)
    assert service.text(old) == expected(old)
    assert state_of(service.engine) == "draining"


def test_stop_cancels_what_is_left() -> None:
    """Fault: a stop that leaves clients waiting for ever."""
    service = Service()
    service.gate.close()
    request = fake_request("a", range(20), max_tokens=400)
    service.engine.submit([request])
    assert service.gate.held.wait(10)
    stopper = threading.Thread(target=service.engine.stop)
    stopper.start()
    service.gate.open.set()
    stopper.join(10)
    assert request.finish_reason is FinishReason.CANCELLED
    counts = [output.num_tokens for output in service.outputs]
    assert (counts, service.outputs[-1].finish_reason) == (sorted(counts), FinishReason.CANCELLED)


def test_stalled_when_work_exists_and_no_step_ends() -> None:
    """Fault (CASES A14): no progress, health green; and idleness taken for a stall."""
    now = [0.0]
    plan = fake_plan(watchdog_s=30.0)
    gate = Gate()
    outputs: list[Output] = []
    engine = Engine(plan, FakeModel(plan.num_blocks, before_run=gate), deliver=outputs.extend, clock=lambda: now[0])
    assert state_of(engine) == "loading"
    engine.warm_up()
    engine.start()
    now[0] = 1000.0
    assert state_of(engine) == "ready", "idle is not stalled"
    gate.close()
    engine.submit([fake_request("a", range(20), max_tokens=2)])
    assert gate.held.wait(10)
    now[0] += 29.0
    assert state_of(engine) == "ready"
    now[0] += 2.0
    assert state_of(engine) == "stalled"
    gate.open.set()
    wait_until(lambda: is_idle(engine))
    assert state_of(engine) == "ready"
    engine.stop()


class Recorder(Observer):
    """Counts what the engine tells."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str]] = []

    def admitted(self, request: Request) -> None:
        self.events.append(("admitted", request.id))

    def first_token(self, request: Request) -> None:
        self.events.append(("first", request.id))

    def next_tokens(self, gaps: Sequence[tuple[Request, float]]) -> None:
        for request, gap_s in gaps:
            assert gap_s >= 0
            self.events.append(("next", request.id))

    def finished(self, request: Request) -> None:
        self.events.append(("finished", request.id))

    def preempted(self, request: Request) -> None:
        self.events.append(("preempted", request.id))


def test_a_pool_too_small_for_everyone_preempts_and_nobody_notices() -> None:
    """Fault (CASES A1, A2, A18, C8): shortage ends requests, changes their text, or stamps the first token twice."""
    recorder = Recorder()
    service = Service(recorder, fake_plan(num_blocks=16, max_model_len=256, max_num_seqs=4))
    requests = [fake_request(f"r{i}", range(i, i + 30), max_tokens=100) for i in range(4)]
    service.engine.submit(requests)
    service.finish(*requests)
    service.engine.stop()
    for request in requests:
        assert service.text(request) == expected(request)
        for event, times in (("admitted", 1), ("first", 1), ("next", 99), ("finished", 1)):
            assert recorder.events.count((event, request.id)) == times
    assert service.engine.snapshot().num_preemptions > 0
    assert sum(r.num_preemptions for r in requests) == service.engine.snapshot().num_preemptions


class Stats(Observer):
    """Keeps what is told of each step."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def step_done(self, stats: StepStats) -> None:
        self.steps.append(stats)


class SlowCall(FakeModel):
    """Takes two seconds a step on the test's clock, of which it says that so many were in the kernels."""

    def __init__(self, num_blocks: int, now: list[float], in_kernels_s: float | None) -> None:
        super().__init__(num_blocks)
        self._now, self._in_kernels_s = now, in_kernels_s

    def run(self, step: StepArrays) -> LogitResult:
        result = super().run(step)
        self._now[0] += 2.0
        result.seconds = self._in_kernels_s
        return result


@pytest.mark.parametrize(("in_kernels_s", "overhead_s"), [(1.5, 0.5), (None, 0.0)])
def test_overhead_is_all_that_is_not_in_the_kernels(in_kernels_s: float | None, overhead_s: float) -> None:
    """Fault: arrays that are built, and a wait for the interpreter's lock, are taken for time in the kernels."""
    now, plan, stats, outputs = [100.0], fake_plan(), Stats(), list[Output]()
    model = SlowCall(plan.num_blocks, now, in_kernels_s)
    engine = Engine(plan, model, deliver=outputs.extend, observers=[stats], clock=lambda: now[0])
    engine.start()
    engine.submit([fake_request("a", [5], max_tokens=4)])
    wait_until(lambda: any(output.finish_reason for output in outputs))
    engine.stop()
    assert [(step.seconds, step.overhead_s) for step in stats.steps] == [(2.0, 0.0)] + [(2.0, overhead_s)] * 3
