"""The three ways of batching, seen from outside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chairlift.engine.policies import Batching
from chairlift.engine.request import Request
from support.scheduler_sim import LIMITS, Sim, alone, letters, make_request


def make_sim(batching: Batching, num_slots: int = 2, num_blocks: int = 1024) -> Sim:
    return Sim(replace(LIMITS, batching=batching, max_num_seqs=num_slots), num_blocks=num_blocks)


def make_requests(*max_tokens: int) -> list[Request]:
    return [make_request(f"r{i}", letters(i, 20), max_tokens=n) for i, n in enumerate(max_tokens)]


def members(sim: Sim) -> list[set[str]]:
    """Who was computed in each step."""
    return [{piece.request.id for piece in step.chunks} for step in sim.steps]


def test_continuous_takes_a_free_slot_in_the_next_step() -> None:
    """Guards against a freed slot that stays empty while somebody waits."""
    sim = make_sim("continuous")
    sim.add(*make_requests(2, 5, 2))
    sim.run()
    assert members(sim)[:4] == [{"r0", "r1"}, {"r0", "r1"}, {"r1", "r2"}, {"r1", "r2"}]


def test_static_lets_nobody_join_and_ends_as_one() -> None:
    """Guards against a yardstick that is not what it says: last events come with the slowest member's."""
    sim = make_sim("static")
    first, second, third = make_requests(2, 5, 2)
    sim.add(first, second, third)
    sim.run_until(lambda: first.is_finished)
    assert sim.finals == []
    assert sim.scheduler.num_running == 2
    sim.run_until(lambda: second.is_finished)
    assert set(sim.finals) == {first, second}
    assert third.timing.scheduled_s == 0.0
    sim.run()
    assert members(sim) == [{"r0", "r1"}] * 2 + [{"r1"}] * 3 + [{"r2"}] * 2


def test_static_ends_when_its_last_member_is_cancelled() -> None:
    """Guards against last events that are held for ever because no further step comes."""
    sim = make_sim("static")
    first, second = make_requests(2, 5)
    sim.add(first, second)
    sim.run_until(lambda: first.is_finished)
    sim.cancel(second)
    assert set(sim.finals) == {first, second}
    assert not sim.scheduler.has_work
    assert sim.scheduler.num_running == 0


def test_static_waits_for_preempted_members_too() -> None:
    """Guards against a batch that is called ended while a member waits to come back."""
    sim = make_sim("static", num_slots=4, num_blocks=8)
    requests = make_requests(60, 50, 40, 60)
    sim.add(*requests)
    sim.step()
    batch = [r for r in requests if r.output]
    assert len(batch) > 2
    while not all(r.is_finished for r in batch):
        assert sim.finals == []
        sim.step()
    assert set(sim.finals) == set(batch)
    assert sum(r.num_preemptions for r in batch) > 1


def test_serial_is_one_at_a_time() -> None:
    """Guards against a yardstick that batches."""
    sim = make_sim("serial")
    sim.add(*make_requests(2, 3))
    sim.run()
    assert members(sim) == [{"r0"}] * 2 + [{"r1"}] * 3


@pytest.mark.parametrize("batching", ["continuous", "static", "serial"])
def test_every_policy_survives_a_full_pool(batching: Batching) -> None:
    """Guards against a preempted member that may not come back to its own batch."""
    sim = make_sim(batching, num_slots=4, num_blocks=8)
    requests = make_requests(60, 50, 40, 60, 30)
    sim.add(*requests)
    sim.run()
    for request in requests:
        assert tuple(request.output) == alone(request, request.params.max_tokens or 0)
    assert set(sim.finals) == set(requests)
    assert (sum(r.num_preemptions for r in requests) > 0) == (batching != "serial")
