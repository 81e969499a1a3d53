"""Whatever happens in whatever order: the books balance, everyone finishes, and every text is the one it has alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.engine.request import FinishReason, Request
from chairlift.engine.scheduler import SchedulerConfig
from chairlift.engine.step import Step
from chairlift.errors import EngineError
from support.scheduler_sim import LIMITS, Sim, alone, letters, make_request

ENDED_EARLY = (FinishReason.CANCELLED, FinishReason.ERROR)


@st.composite
def tight_limits(draw: st.DrawFn) -> SchedulerConfig:
    """Few slots, few tokens a step, and every kind of budget."""
    return replace(
        LIMITS,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.sampled_from([6, 16, 40, 500])),
        max_gap_s=draw(st.sampled_from([None, 0.001, 0.02, 0.1])),
        prefix_caching=draw(st.booleans()),
        batching=draw(st.sampled_from(["continuous", "continuous", "static", "serial"])),
        max_running_per_key=draw(st.sampled_from([None, None, 1, 2])),
    )


@st.composite
def some_request(draw: st.DrawFn, name: str, max_tokens_in_all: int) -> Request:
    """A request with a prefix, whole or in part, that others may have too."""
    shared = letters(draw(st.integers(0, 1)), draw(st.integers(0, max_tokens_in_all // 2)))
    own = letters(draw(st.integers(2, 99)), draw(st.integers(1, 20)))
    request = make_request(
        name,
        (*shared, *own)[: max_tokens_in_all - 1],
        salt=draw(st.sampled_from(["", "", "salt"])),
        max_tokens=draw(st.integers(1, 70)),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
    )
    request.key_name = draw(st.sampled_from(["", "", "alice", "bob"]))
    return request


@dataclass
class Play:
    """One run of random events, with what happened to whom."""

    sim: Sim
    requests: list[Request] = field(default_factory=list)

    def act(self, data: st.DataObject) -> None:
        """One event: somebody comes or goes, or a step runs, or fails, with somebody leaving meanwhile."""
        kind = data.draw(st.sampled_from(["add", "add", "cancel", "fail", "leave", *["step"] * 12]))
        if kind == "add":
            name = f"r{len(self.requests) // 2}#{len(self.requests) % 2}"
            self.requests.append(data.draw(some_request(name, self.sim.scheduler.max_tokens_per_request)))
            self.sim.add(self.requests[-1])
        elif kind == "cancel":
            self.cancel_one(data)
        else:
            self.turn(data, fails=kind == "fail", leaves=kind == "leave")

    def turn(self, data: st.DataObject, *, fails: bool, leaves: bool) -> None:
        """One step."""
        step = self.sim.schedule()
        if leaves:
            self.cancel_one(data)
        if step is None:
            return
        if fails:
            self.fail(data, step)
        else:
            self.sim.commit(step)

    def fail(self, data: st.DataObject, step: Step) -> None:
        """The step fails, and some of its requests are blamed; some others run alone before they run together again."""
        blamed = [p.request for p in step.chunks if data.draw(st.integers(0, 3)) == 0]
        self.sim.deliver(self.sim.scheduler.abort(step, end=blamed, error=EngineError("injected")))
        self.sim.scheduler.check()
        for request in [p.request for p in step.chunks if p.request not in blamed and data.draw(st.booleans())]:
            alone_step = self.sim.scheduler.schedule(request)
            assert alone_step is not None
            assert [piece.request for piece in alone_step.chunks] == [request]
            self.sim.commit(alone_step)

    def cancel_one(self, data: st.DataObject) -> None:
        """Somebody leaves, perhaps for the second time."""
        if self.requests:
            self.sim.cancel(data.draw(st.sampled_from(self.requests)))

    def end(self) -> None:
        """Runs to the end and checks what every client got."""
        self.sim.run()
        assert sorted(r.id for r in self.sim.finals) == sorted(r.id for r in self.requests)
        assert (self.sim.pool.num_held, self.sim.scheduler.num_running) == (0, 0)
        for request in self.requests:
            expected = alone(request, len(request.output))
            assert tuple(request.output) == expected
            assert bytes(expected).decode().startswith(self.sim.texts[request])
            if request.finish_reason not in ENDED_EARLY:
                assert self.sim.texts[request] == bytes(expected).decode()
                room = self.sim.scheduler.max_tokens_per_request - request.num_prompt
                assert len(request.output) == min(request.params.max_tokens or 0, room)
                self.check_usage(request)

    def check_usage(self, request: Request) -> None:
        """What a finished request reports about its prompt."""
        assert request.num_cached is not None
        assert 0 <= request.num_cached < request.num_prompt
        assert request.num_cached % self.sim.block_size == 0
        if request.params.prompt_logprobs is not None:
            assert [e and e.token for e in request.prompt_logprobs] == [None, *request.prompt[1:]]
            assert request.num_cached == 0


@given(limits=tight_limits(), num_blocks=st.integers(4, 14), block_size=st.sampled_from([4, 16]), data=st.data())
@settings(max_examples=120, deadline=None)
def test_any_sequence_of_events_ends_well(
    limits: SchedulerConfig, num_blocks: int, block_size: int, data: st.DataObject
) -> None:
    """Guards against leaks, standstills and changed answers under full pools, cancels and failed steps, in any mix."""
    play = Play(Sim(limits, num_blocks=num_blocks, block_size=block_size))
    for _ in range(data.draw(st.integers(5, 40))):
        play.act(data)
    play.end()


@given(limits=tight_limits(), num_blocks=st.integers(4, 14), data=st.data())
@settings(max_examples=80, deadline=None)
def test_preemptions_are_bounded_and_never_hit_the_oldest(
    limits: SchedulerConfig, num_blocks: int, data: st.DataObject
) -> None:
    """Guards against requests that are preempted again and again while newer ones get on (livelock).

    A request comes back only when it fits with a block to spare for each that runs, all of them older. So each further
    preemption needs a block that it, or one of those, has grown into meanwhile: no more in all than their outputs take.
    """
    sim = Sim(limits, num_blocks=num_blocks)
    limit = sim.scheduler.max_tokens_per_request
    requests = [data.draw(some_request(f"r{i}#0", limit)) for i in range(data.draw(st.integers(2, 8)))]
    sim.add(*requests)
    by_age: list[Request] = []
    while (step := sim.schedule()) is not None:
        by_age += [r for r in sim.scheduler.admitted if r not in by_age]
        oldest = next(r for r in by_age if not r.is_finished)
        assert oldest not in step.preempted
        sim.commit(step)
    for i, request in enumerate(by_age):
        assert request.num_preemptions <= sum(1 + len(r.output) // 16 for r in by_age[: i + 1])
