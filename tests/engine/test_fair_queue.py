"""engine/fair_queue.py: keys take turns, and no key waits for ever."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.fair_queue import FairQueue
from chairlift.engine.policies import Batching
from chairlift.engine.request import Request
from support.scheduler_sim import LIMITS, Sim, letters, make_request

KEYS = ("alice", "bob", "carol", "dave")
BATCHINGS: tuple[Batching, ...] = ("continuous", "static", "serial")
NOBODY: dict[str, int] = {}


def line_of(*items: str, max_running_per_key: int | None = None) -> FairQueue[str]:
    """Items like "a1", each of the key that its first letter is."""
    made: FairQueue[str] = FairQueue(max_running_per_key)
    for item in items:
        made.add(item[0], item)
    return made


def take_all(line: FairQueue[str]) -> list[str]:
    """Everybody in the order of turns, as if nobody who was taken ran any more."""
    taken = []
    while (first := line.next(NOBODY)) is not None:
        assert line.pop(first[0]) == first[1]
        taken.append(first[1])
    return taken


def test_keys_take_turns() -> None:
    """Fault: whoever sends the most is served the most."""
    line = line_of("a1", "a2", "a3", "b1", "c1", "c2")
    assert list(line) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert take_all(line) == ["a1", "b1", "c1", "a2", "c2", "a3"]
    assert len(line) == 0


def test_a_key_that_comes_late_is_behind_one_of_each_other() -> None:
    """Fault: a newcomer passes those who wait, or goes behind all that one key has sent."""
    line = line_of("a1", "a2", "a3", "b1")
    line.pop("a")
    line.add("c", "c1")
    assert list(line) == ["b1", "a2", "c1", "a3"]


def test_who_comes_back_has_no_second_turn() -> None:
    """Fault: a key whose line was empty for a moment jumps ahead of others, again and again."""
    line = line_of("a1", "b1", "b2")
    line.pop("a")
    line.add("a", "a2")
    assert list(line) == ["b1", "a2", "b2"]


def test_a_key_at_its_limit_is_passed_over_and_keeps_its_turn() -> None:
    """Fault: a limit that blocks the whole line, or that costs its key the turn."""
    line = line_of("a1", "a2", "b1", "b2", max_running_per_key=1)
    assert line.next({"a": 1}) == ("b", "b1")
    line.pop("b")
    assert line.next({"a": 1, "b": 1}) is None
    assert line.next({"b": 1}) == ("a", "a1")
    assert line.next(NOBODY) == ("a", "a1")


def test_how_many_could_start_at_once() -> None:
    """Fault: newcomers are let in beyond --max-queue, for slots that their key may not have."""
    line = line_of("a1", "a2", "a3", "b1", max_running_per_key=2)
    assert line.num_ready(NOBODY) == 3
    assert line.num_ready({"a": 1, "b": 2}) == 1
    assert line.num_ready({"a": 5}, ["b", "b", "c"]) == 3
    assert line_of("a1", "a2", "b1").num_ready({"a": 7}, ["c"]) == 4


def test_a_copy_is_a_line_of_its_own() -> None:
    """Fault: a look at the line changes it."""
    line = line_of("a1", "a2", "b1")
    other = line.copy()
    other.pop("a")
    other.add("b", None)
    assert (list(line), len(line)) == (["a1", "b1", "a2"], 3)
    assert (list(other), len(other)) == (["b1", "a2", None], 3)


@given(st.lists(st.integers(0, 9)))
def test_one_key_alone_is_first_in_first_out(numbers: list[int]) -> None:
    """Fault: turns of keys disturb the order within one."""
    items = [f"a{i}{number}" for i, number in enumerate(numbers)]
    assert list(line_of(*items)) == items
    assert take_all(line_of(*items)) == items


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_key_sees_another_go_first_twice(data: st.DataObject) -> None:
    """Fault: a key starves, or its own line gets out of order, under any coming, going and leaving."""
    line: FairQueue[int] = FairQueue()
    model: dict[str, deque[int]] = {key: deque() for key in KEYS}
    passed: dict[str, Counter[str]] = {}  # by key with somebody in line: whose turns it saw since its own
    for number in range(data.draw(st.integers(1, 40))):
        kind, key = data.draw(st.sampled_from(["add", "add", "take", "leave"])), data.draw(st.sampled_from(KEYS))
        if kind == "add":
            if not model[key]:
                passed[key] = Counter()
            line.add(key, number)
            model[key].append(number)
        elif kind == "leave" and model[key]:
            item = data.draw(st.sampled_from(list(model[key])))
            line.remove(key, item)
            line.remove(key, item)
            model[key].remove(item)
        elif kind == "take" and (first := line.next(NOBODY)) is not None:
            taken, item = first
            assert line.pop(taken) == item == model[taken].popleft()
            passed[taken] = Counter()
            for other in KEYS:
                if other != taken and model[other]:
                    passed[other][taken] += 1
                    assert passed[other][taken] == 1
        assert sorted(line) == sorted(item for items in model.values() for item in items)
        assert len(line) == sum(map(len, model.values()))


def started(sim: Sim, seen: list[Request]) -> None:
    """Notes who has begun since."""
    seen += [request for request in sim.scheduler.admitted if request not in seen]


@given(
    keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=16),
    slots=st.integers(1, 4),
    most=st.one_of(st.none(), st.integers(1, 3)),
    batching=st.sampled_from(BATCHINGS),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_the_scheduler_keeps_to_turns_and_limits(
    keys: list[str], slots: int, most: int | None, batching: Batching, data: st.DataObject
) -> None:
    """Fault: a key runs more than it may, or a limit leaves a slot empty that somebody could have, or stops it all."""
    limits = replace(LIMITS, max_num_seqs=slots, max_running_per_key=most, batching=batching)
    sim, requests = Sim(limits), []
    for i, key in enumerate(keys):
        request = make_request(f"r{i}", letters(i, 5), max_tokens=data.draw(st.integers(1, 6)))
        request.key_name = key
        requests.append(request)
        sim.add(request)
    order: list[Request] = []
    while sim.scheduler.has_work:
        step = sim.schedule()
        running = Counter(request.key_name for request in sim.scheduler.admitted)
        started(sim, order)
        assert most is None or max(running.values()) <= most
        if batching == "continuous" and running.total() < slots:
            assert sim.scheduler.waiting.next(running) is None, "a slot is empty and somebody could have it"
        assert step is not None
        sim.commit(step)
    assert set(order) == set(requests)
    for key in KEYS:
        own = [request for request in requests if request.key_name == key]
        assert [request for request in order if request.key_name == key] == own
    if most is None:
        expected: FairQueue[Request] = FairQueue()
        for request in requests:
            expected.add(request.key_name, request)
        assert order == list(expected)


def test_a_limit_holds_within_one_step() -> None:
    """Fault: those that start together are not counted against each other."""
    sim = Sim(replace(LIMITS, max_num_seqs=4, max_running_per_key=2))
    requests = [make_request(f"r{i}", letters(i, 5)) for i in range(4)]
    for request, key in zip(requests, ("alice", "alice", "alice", "bob"), strict=True):
        request.key_name = key
    sim.add(*requests)
    sim.schedule()
    assert sim.scheduler.admitted == [requests[0], requests[3], requests[1]]
    assert (sim.scheduler.num_waiting, sim.scheduler.memory_blocked) == (1, False)


def test_who_resumes_comes_before_anybody_in_line() -> None:
    """Fault: the youngest of a busy key is preempted, and then waits for the turns of others."""
    sim = Sim(replace(LIMITS, max_num_seqs=2, max_running_per_key=2), num_blocks=8)
    first, second, third = (make_request(f"r{i}", letters(i, 40), max_tokens=60) for i in range(3))
    third.key_name = "bob"
    sim.add(first, second)
    sim.step()
    sim.add(third)
    sim.run_until(lambda: second.num_preemptions > 0)
    assert (sim.scheduler.num_preempted, list(sim.scheduler.waiting)) == (1, [third])
    sim.run_until(lambda: second in sim.scheduler.admitted and bool(second.block_table))
    assert third.num_cached is None
    sim.run()
    assert sim.finals == [first, second, third]
