"""Whatever breaks ends those concerned and nobody else: faults injected into the engine over the fake model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chairlift.engine import finish
from chairlift.engine import scheduler as scheduling
from chairlift.engine.engine import Engine
from chairlift.engine.fault_isolation import MAX_ROUNDS_WITHOUT_CULPRIT
from chairlift.engine.observer import Observer, Observers
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.errors import EngineError
from chairlift.kernels.ops import LogitResult, StepArrays
from chairlift.plan import Plan
from support.engine_probe import is_idle, state_of
from support.fake_model import alone, fake_plan, fake_request, wait_until
from support.fault_injection import AT, ERRORS, NAN, BrokenObserver, FaultyModel, campaign, faulty_request, leftovers


class Bench:
    """An engine over a model that can be told to fail, and everything that it delivered."""

    def __init__(self, *observers: Observer, plan: Plan | None = None, model: FaultyModel | None = None) -> None:
        self.plan = plan or fake_plan()
        self.model = model or FaultyModel(self.plan.num_blocks)
        self.outputs: list[Output] = []
        self.deliver: Callable[[list[Output]], None] = self.outputs.extend
        self.failed_steps = FailedSteps()
        self.engine = Engine(
            self.plan,
            self.model,
            deliver=lambda outputs: self.deliver(outputs),
            observers=[self.failed_steps, *observers],
        )

    def run(self, *requests: Request) -> None:
        """Submits all at once, and waits for their ends."""
        self.engine.submit(requests)
        if state_of(self.engine) == "loading":
            self.engine.start()
        wait_until(lambda: all(any(o.request is r and o.finish_reason for o in list(self.outputs)) for r in requests))

    def text(self, request: Request) -> str:
        return "".join(o.text for o in self.outputs if o.request is request)

    def assert_well(self, *requests: Request) -> None:
        """They had the answer they have alone, from one last event each."""
        for request in requests:
            assert request.params.max_tokens is not None
            assert (request.finish_reason, request.error) == (FinishReason.LENGTH, None)
            assert self.text(request) == bytes(alone(request.prompt, request.params.max_tokens)).decode()
            assert sum(o.request is request and o.finish_reason is not None for o in self.outputs) == 1

    def assert_failed(self, request: Request, num_tokens: int, text: str) -> None:
        """It ended with an error that says `text`, after the first tokens of its answer, and once."""
        (last,) = [o for o in self.outputs if o.request is request and o.finish_reason is not None]
        assert (last.finish_reason, request.finish_reason) == (FinishReason.ERROR, FinishReason.ERROR)
        assert isinstance(last.error, EngineError)
        assert text in str(last.error)
        assert self.text(request) == bytes(alone(request.prompt, num_tokens)).decode()

    def end(self) -> None:
        wait_until(lambda: is_idle(self.engine) or state_of(self.engine) == "dead")
        self.engine.stop()


class FailedSteps(Observer):
    """Counts them."""

    def __init__(self) -> None:
        self.num = 0

    def step_failed(self) -> None:
        self.num += 1


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.end()
    assert leftovers(made.engine) == []


def neighbours(num: int = 3) -> list[Request]:
    """Requests of different lengths, two of them with the same beginning."""
    return [fake_request(f"n{i}", [*range(40, 60 + i), *range(90 + i, 97)], max_tokens=12 + i) for i in range(num)]


# -- everything at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_a_campaign_of_faults_loses_nothing(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Fault: a mix of errors takes a neighbour with it, changes its text, leaks a block or keeps a client waiting."""
    caplog.set_level(logging.CRITICAL)
    report = campaign(seed, 120)
    assert report.lost == []
    assert min(report.kinds.values()) > 0
    assert report.failed_steps > sum(report.kinds[kind] for kind in ("kernel", "batch"))
    assert report.preemptions > 0


def test_a_campaign_sees_what_is_lost(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a search that finds nothing because it looks at nothing."""
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr("chairlift.engine.prefix_cache.PrefixCache.withdraw", lambda cache, block: None)
    assert any("other text" in loss for seed in range(1, 7) for loss in campaign(seed, 60, patience_s=5).lost)


# -- the step ---------------------------------------------------------------------------------------------------------


def test_a_passing_error_costs_nobody_anything(bench: Bench) -> None:
    """Fault: one hiccup of the machine ends every answer that was in the step."""
    requests = neighbours()
    bench.model.fail_next = 1
    bench.run(*requests)
    bench.assert_well(*requests)
    assert bench.failed_steps.num == 1
    assert [r.num_preemptions for r in requests] == [0, 0, 0]


def test_alone_too_a_passing_error_is_nothing(bench: Bench) -> None:
    """Fault: the only request of a step is blamed at once."""
    request = fake_request("a", range(40))
    bench.model.fail_next = 1
    bench.run(request)
    bench.assert_well(request)
    assert bench.failed_steps.num == 1


@pytest.mark.parametrize("at", [0, 1, 9])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_request_that_breaks_its_steps_ends_alone(
    bench: Bench, at: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a kernel error, or want of memory, ends the neighbours; or the culprit fails step after step for ever."""
    monkeypatch.setattr("support.fault_injection.ERRORS", [error])
    culprit = faulty_request("kernel", "bad", range(40, 80), at)
    others = neighbours()
    bench.run(others[0], culprit, *others[1:])
    bench.assert_well(*others)
    bench.assert_failed(culprit, at, f"it failed again by itself: {type(error).__name__}: injected")
    assert bench.failed_steps.num == 2
    monkeypatch.setattr("support.fault_injection.KERNEL", -1)  # mended
    again = fake_request("again", culprit.prompt)
    bench.run(again)
    bench.assert_well(again)


@pytest.mark.parametrize("kind", ["batch", "detok", "stops", "nan"])
def test_what_is_wrong_with_a_request_ends_it_alone(bench: Bench, kind: str) -> None:
    """Fault: a bug in batch building, decoding or stop handling, or a NaN, ends more than the request it concerns."""
    culprit = faulty_request(kind, "bad", range(40, 80), 5)
    others = neighbours()
    bench.run(culprit, *others)
    bench.assert_well(*others)
    text = {"batch": "RuntimeError: injected", "nan": "not finite"}.get(kind, "its text failed: RuntimeError: injected")
    bench.assert_failed(culprit, 5, text)
    again = fake_request("again", [*culprit.prompt[:40], 100])
    bench.run(again)
    bench.assert_well(again)


def test_a_nan_anywhere_in_a_scored_prompt_ends_it(bench: Bench) -> None:
    """Fault: NaN log-probabilities of a prompt's middle are handed out, and break the JSON that holds them."""
    prompt = [*range(40, 100), NAN, AT, *range(40, 120)]
    scored = fake_request("scored", prompt, prompt_logprobs=0)
    beside = fake_request("beside", range(50, 90))
    bench.run(scored, beside)
    bench.assert_well(beside)
    bench.assert_failed(scored, 0, "not finite")


class Crowd(FaultyModel):
    """Fails whenever there are two in a step."""

    def run(self, step: StepArrays) -> LogitResult:
        if len(step.seq_starts) > 2:
            self.fail_next = 1
        return super().run(step)


def test_what_fails_only_together_ends_together_in_the_end() -> None:
    """Fault: a step that nobody breaks alone is tried for ever, one token a round."""
    bench = Bench(model=Crowd(64))
    requests = neighbours()
    bench.run(*requests)
    for request in requests:
        bench.assert_failed(request, MAX_ROUNDS_WITHOUT_CULPRIT, "no single request to blame")
    assert bench.failed_steps.num == MAX_ROUNDS_WITHOUT_CULPRIT + 1
    one = fake_request("one", range(40))
    bench.run(one)
    bench.assert_well(one)
    bench.end()
    assert leftovers(bench.engine) == []


def test_a_trial_is_over_once_the_failed_step_is_repeated(bench: Bench) -> None:
    """Fault: after one hiccup everybody waits until the longest prompt has been computed alone, to its end."""
    long, beside = fake_request("long", range(40, 240), max_tokens=2), fake_request("b", range(60), max_tokens=20)
    num_members: list[int] = []

    def fail_fourth(step: StepArrays) -> None:
        num_members.append(len(step.seq_starts) - 1)
        bench.model.fail_next = int(len(num_members) == 4)

    bench.model.before_step = fail_fourth
    bench.run(beside, long)
    bench.assert_well(beside, long)
    assert num_members[3:7] == [2, 1, 1, 2]


# -- our own bugs -----------------------------------------------------------------------------------------------------


def fails(times: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises the first few times."""
    left = [times]

    def made(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("our bug")
        return function(*args, **kwargs)

    return made


def test_a_commit_that_fails_ends_its_step_and_the_engine_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a bug between two requests of a commit kills the server, or leaves one of them without an end."""
    monkeypatch.setattr(scheduling, "append_token", fails(1, finish.append_token))
    requests = neighbours()
    bench.run(*requests)
    for request in requests:
        bench.assert_failed(request, 0, "could not be taken in: RuntimeError: our bug")
    again = neighbours()
    bench.run(*again)
    bench.assert_well(*again)


def test_those_that_a_failed_commit_had_ended_already_hear_of_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the last event of a request is lost with the commit that made it; its client waits for ever."""

    def accept_but_one(request: Request, *rest: Any) -> Output | None:
        if request.id == "b" and len(request.output) == 3:
            raise RuntimeError("our bug")
        return finish.append_token(request, *rest)

    monkeypatch.setattr(scheduling, "append_token", accept_but_one)
    ended, broken = fake_request("a", range(40), max_tokens=4), fake_request("b", range(40, 50))
    bench.run(ended, broken)
    bench.assert_failed(broken, 3, "our bug")
    bench.assert_failed(ended, 3, "our bug")


def test_a_schedule_that_fails_ends_what_runs_and_the_engine_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a bug in the scheduler kills the server though its books agree."""
    real = scheduling.Scheduler._share

    def share(scheduler: Any, prompts: list[Request], *rest: Any) -> Any:
        pieces = real(scheduler, prompts, *rest)
        if any(request.id == "bad" for request in prompts):
            raise RuntimeError("our bug")
        return pieces

    monkeypatch.setattr(scheduling.Scheduler, "_share", share)
    running = fake_request("bad", range(40))
    bench.run(running)
    bench.assert_failed(running, 0, "scheduling failed: RuntimeError: our bug")
    again = fake_request("again", range(40))
    bench.run(again)
    bench.assert_well(again)


@pytest.mark.parametrize("broken", ["schedule", "end_all", "check"])
def test_an_engine_that_cannot_go_on_dies_and_says_so(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: the thread dies and clients wait for ever; or requests are still taken, and wait for ever too."""
    bench = Bench(plan=fake_plan(max_num_seqs=2))
    scheduler = bench.engine._scheduler
    monkeypatch.setattr(scheduler, "_share", fails(99 if broken != "check" else 1, scheduler._share))
    if broken != "schedule":
        monkeypatch.setattr(scheduler, broken, fails(99, getattr(scheduler, broken)))
    requests = neighbours(5)
    bench.run(*requests)
    for request in requests:
        bench.assert_failed(request, 0, "our bug")
    wait_until(lambda: state_of(bench.engine) == "dead")
    with pytest.raises(EngineError, match="died"):
        bench.engine.submit([fake_request("late", range(5))])
    assert "the engine thread died" in caplog.text
    bench.engine.stop()


def test_a_forecast_that_fails_harms_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Fault: a bug in foretelling waits loses those that it was about, or ends everybody."""
    bench = Bench(plan=fake_plan(max_num_seqs=1, max_queue_wait_s=0.0))
    monkeypatch.setattr("chairlift.engine.admission.estimate_waits", fails(99, lambda: None))
    requests = neighbours(4)
    bench.run(*requests)
    bench.assert_well(*requests)
    bench.end()
    assert caplog.text.count("that have waited too long failed") == 1


# -- observers and readers --------------------------------------------------------------------------------------------


def test_a_broken_observer_is_said_once_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: a bug in a metric ends answers, floods the log, or keeps the other observers from being told."""
    model = FaultyModel(64)
    broken = BrokenObserver(model)
    bench = Bench(broken, model=model)
    requests = neighbours()
    model.fail_next = 1
    bench.run(*requests)
    bench.assert_well(*requests)
    bench.end()
    assert broken.num_events > 30
    assert caplog.text.count("BrokenObserver") == 1
    assert bench.failed_steps.num == 1


def test_every_event_reaches_every_observer() -> None:
    """Fault: an event that Observers forgets to pass on."""
    names = [name for name in vars(Observer) if not name.startswith("_")]
    told: list[str] = []
    errors: list[Exception] = []

    class Deaf(Observer):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("broken")

    class Ears(Observer):
        def __getattribute__(self, name: str) -> Any:
            return lambda *_: told.append(name)

    observers = Observers(Deaf(), Ears(), on_error=lambda _, error: errors.append(error))
    for name in names:
        getattr(observers, name)(*[None] * (getattr(Observer, name).__code__.co_argcount - 1))
    assert told == names
    assert len(errors) == 1


def test_what_a_step_brought_comes_before_the_end_that_a_broken_schedule_makes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: an end that overtakes text which was held until the kernels run."""
    make_step, num_steps = bench.engine._scheduler.make_step, 0

    def breaks_once(*args: Any) -> Any:
        nonlocal num_steps
        num_steps += request in bench.engine._scheduler.requests
        if num_steps == 4:
            raise RuntimeError("broken books")
        return make_step(*args)

    monkeypatch.setattr(bench.engine._scheduler, "make_step", breaks_once)
    request = fake_request("a", range(20))
    bench.run(request)
    outputs = [o for o in bench.outputs if o.request is request]
    assert [o.num_tokens for o in outputs] == [1, 2, 3, 3]
    assert [o.finish_reason for o in outputs] == [None, None, None, FinishReason.ERROR]
