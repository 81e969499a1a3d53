"""Scheduling: admission, and what a full pool costs whom. All on a virtual clock; how steps are shared: test_gap.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from chairlift.engine.budget import StepBudget
from chairlift.engine.request import FinishReason, Request
from chairlift.errors import ContextLengthExceeded, EngineError, RequestError
from support.scheduler_sim import LIMITS, Sim, alone, letters, make_request, run_alone

# -- admission --------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_at_once_and_blocks_nobody() -> None:
    """Guards against a request that waits for ever, with all that come after it."""
    sim = Sim(num_blocks=64)
    with pytest.raises(ContextLengthExceeded) as refusal:
        sim.add(make_request("p", letters(1, 2000)))
    assert (refusal.value.num_prompt_tokens, refusal.value.limit) == (2000, 1024)
    with pytest.raises(ContextLengthExceeded, match="the context length is 4096"):
        Sim().add(make_request("p", letters(1, 4096)))
    with pytest.raises(RequestError, match="no tokens"):
        sim.add(make_request("p", ()))
    short = make_request("s", letters(1, 10), max_tokens=2)
    sim.add(short)
    sim.run()
    assert short.finish_reason is FinishReason.LENGTH


def test_a_prompt_that_fills_the_pool_is_served() -> None:
    """Guards against an off-by-one at the limit: a prompt of pool - 1 tokens gets its one token."""
    sim = Sim(num_blocks=8)
    prompts = [make_request(f"p{i}", letters(i, 127)) for i in range(2)]
    sim.add(*prompts)
    sim.run()
    assert [(tuple(p.output), p.finish_reason) for p in prompts] == [(alone(p, 1), "length") for p in prompts]


def test_admission_keeps_a_block_for_every_running_request() -> None:
    """Guards against letting in what will be preempted at once: the second waits until the first has ended."""
    sim = Sim(num_blocks=8)
    first, second = make_request("a", letters(1, 64), max_tokens=30), make_request("b", letters(2, 64), max_tokens=3)
    sim.add(first, second)
    sim.step()
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting, sim.scheduler.memory_blocked) == (1, 1, True)
    sim.run()
    assert second.num_preemptions == 0
    assert not sim.scheduler.memory_blocked


# -- a full pool ------------------------------------------------------------------------------------------------------


def test_four_long_answers_share_a_pool_for_two() -> None:
    """Guards against answers aborted, or changed, by a KV shortage that is nobody's fault."""
    sim = Sim(num_blocks=64)
    requests = [make_request(f"r{i}", letters(i, 30), max_tokens=400) for i in range(4)]
    sim.add(*requests)
    sim.run()
    for request in requests:
        assert (tuple(request.output), request.finish_reason) == (alone(request, 400), FinishReason.LENGTH)
        assert request.num_cached == 0
    assert sum(r.num_preemptions for r in requests) > 0
    assert sum(len(s.preempted) for s in sim.steps) == sum(r.num_preemptions for r in requests)
    assert requests[0].num_preemptions == 0
    assert sim.pool.num_held == 0


@pytest.mark.parametrize("at", [1, 15, 16, 17, 40])
def test_an_interrupted_answer_is_the_undisturbed_one(at: int) -> None:
    """Guards against text doubled, lost or sampled anew after a replay: text, usage, logprobs and stops are equal."""

    def fresh() -> Request:
        return make_request("r", letters(3, 21), max_tokens=60, stop=("zz", "qxyz"), logprobs=0, min_tokens=2)

    undisturbed = fresh()
    text, reason = run_alone(undisturbed)
    sim = Sim(replace(LIMITS, max_num_batched_tokens=16))
    request = fresh()
    sim.add(request)
    for num_tokens in (at, at + 1):
        sim.run_until(lambda n=num_tokens: len(request.output) >= n)  # type: ignore[misc]
        step = sim.schedule()
        assert step is not None
        sim.deliver(sim.scheduler.abort(step))
        sim.scheduler.check()
    sim.run()
    assert (sim.texts[request], request.finish_reason) == (text, reason)
    assert (request.output, request.logprobs) == (undisturbed.output, undisturbed.logprobs)
    assert (request.num_cached, request.num_preemptions) == (0, 0)


def test_the_preempted_come_back_before_those_that_wait() -> None:
    """Guards against a preempted answer that hangs while newer requests are served."""
    sim = Sim(num_blocks=12)
    old, young, late = (make_request(f"r{i}", letters(i, 60), max_tokens=100) for i in range(3))
    sim.add(old, young)
    sim.run_until(lambda: young.num_preemptions > 0)
    sim.add(late)
    sim.run_until(lambda: bool(late.output))
    assert young.is_finished or young.block_table
    sim.run()
    assert sim.finals == [old, young, late]


def test_decodes_may_outgrow_what_was_kept_for_them() -> None:
    """Guards against a long prompt that takes blocks which are no longer there, since decodes have grown meanwhile."""
    num_preempted = 0
    for num_blocks in range(56, 66):
        sim = Sim(replace(LIMITS, max_num_batched_tokens=38), num_blocks=num_blocks)
        streams = [make_request(f"s{i}", letters(i, 14), max_tokens=50 + i) for i in range(4)]
        prompt = make_request("p", letters(9, 800), max_tokens=3)
        sim.add(*streams, prompt)
        sim.run()
        assert tuple(prompt.output) == alone(prompt, 3)
        num_preempted += prompt.num_preemptions
    assert num_preempted > 0


def test_of_several_preempted_the_oldest_comes_back_first() -> None:
    """Guards against an order that turns with every preemption, so that somebody is always last."""
    sim = Sim(num_blocks=12)
    requests = [make_request(f"r{i}", letters(i, 40), max_tokens=130) for i in range(3)]
    sim.add(*requests)
    sim.run_until(lambda: all(r.num_preemptions for r in requests[1:]))
    sim.run()
    assert sim.finals == requests


# -- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "phase",
    [
        lambda sim, r: None,  # waiting
        lambda sim, r: sim.step(),  # in its prompt
        lambda sim, r: sim.run_until(lambda: len(r.output) == 3),
        lambda sim, r: sim.run_until(lambda: r.num_preemptions > 0),
    ],
    ids=["waiting", "prompt", "decode", "preempted"],
)
def test_cancelled_in_any_phase_everything_comes_back(phase: Callable[[Sim, Request], object]) -> None:
    """Guards against blocks and slots lost with a client, and against a neighbour's text changed by it."""
    sim = Sim(replace(LIMITS, max_num_batched_tokens=48), num_blocks=12)
    neighbour, victim = (make_request(f"r{i}", letters(i, 60), max_tokens=80) for i in range(2))
    sim.add(neighbour, victim)
    phase(sim, victim)
    sim.cancel(victim)
    assert victim.finish_reason is FinishReason.CANCELLED
    assert not victim.block_table
    assert sim.scheduler.end(victim, FinishReason.CANCELLED) == []
    sim.run()
    assert tuple(neighbour.output) == alone(neighbour, 80)
    assert sim.pool.num_held == 0
    assert set(sim.finals) == {neighbour, victim}


def test_cancelled_in_flight_it_keeps_its_blocks_until_the_step_is_over() -> None:
    """Guards against a block that is given away while a running step still writes it."""
    sim = Sim()
    request = make_request("r", letters(1, 60), max_tokens=5)
    sim.add(request)
    step = sim.schedule()
    assert step is not None
    sim.cancel(request)
    assert sim.finals == [request]
    assert sim.pool.num_held == 4
    sim.commit(step)
    assert request.output == []
    assert sim.pool.num_held == 0
    assert not sim.scheduler.has_work


def test_bad_logits_end_their_own_request_only() -> None:
    """Guards against one request's NaN ending everybody's answer."""
    sim = Sim()
    good, bad = (make_request(f"r{i}", letters(i, 30), max_tokens=20) for i in range(2))
    sim.add(good, bad)
    sim.run_until(lambda: len(bad.output) == 4)
    sim.runner.bad.add(bad)
    sim.run()
    assert (bad.finish_reason, len(bad.output)) == (FinishReason.ERROR, 4)
    assert isinstance(bad.error, EngineError)
    assert tuple(good.output) == alone(good, 20)
    assert sim.pool.num_held == 0


def test_a_failed_step_ends_whom_it_concerns_and_nobody_else() -> None:
    """Guards against a fault that takes neighbours with it, leaks, or is reported without its cause."""
    sim = Sim()
    good, bad = (make_request(f"r{i}", letters(i, 30), max_tokens=20) for i in range(2))
    sim.add(good, bad)
    sim.run_until(lambda: len(bad.output) == 4)
    step = sim.schedule()
    assert step is not None
    error = EngineError("broken")
    outputs = sim.scheduler.abort(step, end=[bad], error=error)
    assert [(o.request, o.finish_reason, o.error, o.num_tokens) for o in outputs] == [(bad, "error", error, 4)]
    sim.scheduler.check()
    sim.run()
    assert tuple(good.output) == alone(good, 20)


def test_one_may_run_alone_while_the_others_keep_their_seats() -> None:
    """Guards against a suspect that is tried together with others, or never, since they hold all memory."""
    sim = Sim(replace(LIMITS, max_num_seqs=2), num_blocks=8)
    first, second, third = (make_request(f"r{i}", letters(i, 30), max_tokens=90) for i in range(3))
    sim.add(first, second)
    sim.run_until(lambda: bool(second.output))
    sim.add(third)
    step = sim.schedule()
    assert step is not None
    sim.deliver(sim.scheduler.abort(step))
    assert (sim.scheduler.num_running, sim.pool.num_held) == (2, 0)
    while len(first.block_table) < 8:
        step = sim.scheduler.schedule(first)
        assert step is not None
        assert [piece.request for piece in step.chunks] == [first]
        sim.commit(step)
    assert sim.pool.num_available == 0
    step = sim.scheduler.schedule(second)
    assert step is not None
    assert [piece.request for piece in step.chunks] == [second]
    sim.commit(step)
    assert not first.block_table, "the other one has made room"
    assert (sim.scheduler.num_running, sim.scheduler.num_waiting) == (2, 1)
    sim.run()
    assert sim.finals == [first, second, third]
    for request in sim.finals:
        assert tuple(request.output) == alone(request, 90)


def test_recover_ends_what_runs_and_keeps_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against blocks that a schedule took, or let others find, before it failed."""
    sim = Sim(replace(LIMITS, max_num_seqs=1))
    running, waiting = (make_request(f"r{i}", (*letters(1, 64), 97 + i), max_tokens=5) for i in range(2))
    sim.add(running, waiting)

    def fail(_: object, budget: StepBudget) -> None:
        sim.scheduler._give(running, 60, budget)
        raise RuntimeError("our bug")

    with monkeypatch.context() as patched:
        patched.setattr(sim.scheduler, "_share", fail)
        with pytest.raises(RuntimeError, match="our bug"):
            sim.scheduler.schedule()
    assert (sim.pool.num_held, len(sim.scheduler._cache)) == (4, 3)
    error = EngineError("broken")
    assert [(o.request, o.error) for o in sim.scheduler.recover(error)] == [(running, error)]
    sim.scheduler.check()
    assert (sim.pool.num_held, sim.pool.num_cached) == (0, 0)
    sim.run()
    assert tuple(waiting.output) == alone(waiting, 5)


def test_end_all_leaves_nothing_behind() -> None:
    """Guards against clients that wait for ever on an engine that died in the middle of a step."""
    sim = Sim(num_blocks=12)
    requests = [make_request(f"r{i}", letters(i, 60), max_tokens=80) for i in range(4)]
    sim.add(*requests)
    sim.run_until(lambda: requests[1].num_preemptions > 0)
    assert sim.schedule() is not None
    sim.deliver(sim.scheduler.end_all(FinishReason.ERROR, EngineError("dead")))
    sim.scheduler.check()
    assert set(sim.finals) == set(requests)
    assert not sim.scheduler.has_work
    assert sim.pool.num_held == 0


def test_a_freed_slot_is_used_in_the_next_step() -> None:
    """Guards against a slot, or blocks, that stand idle for a step."""
    sim = Sim(replace(LIMITS, max_num_seqs=1), num_blocks=8)
    first, second = (make_request(f"r{i}", letters(i, 100), max_tokens=2) for i in range(2))
    sim.add(first, second)
    sim.run()
    assert [s.chunks[0].request for s in sim.steps] == [first, first, second, second]


def test_two_steps_at_once_are_refused() -> None:
    """Guards against an engine loop that forgets a step: its tokens would be computed twice."""
    sim = Sim()
    sim.add(make_request("r", letters(1, 10)))
    sim.schedule()
    with pytest.raises(RuntimeError, match="neither committed nor aborted"):
        sim.scheduler.schedule()
