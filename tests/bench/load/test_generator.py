"""The load generator under virtual time, against engines whose answers are known: every figure here is exact."""

from __future__ import annotations

import asyncio

import pytest

from chairlift.bench.client.sample import Failure
from chairlift.bench.load.arrivals import ClosedLoop, OpenLoop
from chairlift.bench.load.generator import LoadGenerator, Phase, RunLimits, Steadiness, Window
from chairlift.bench.load.summary import LoadSummary, summarise
from chairlift.bench.load.workload import Lengths, PlannedRequest, TraceRow, Workload
from support.scripted_server import run_virtual as run
from support.virtual_engine import WORK, VirtualEngine, measure, now

COLD = RunLimits(num_requests=8, warmup=0)
EVERY_100_MS = OpenLoop(10, is_poisson=False)


def summary_of(window: Window) -> LoadSummary:
    return summarise(window)


@pytest.mark.parametrize("limit", ["server", "client"])
def test_a_stalled_server_does_not_stop_the_clock(limit: str) -> None:
    """Coordinated omission: 500 ms of service, one at a time, asked ten times a second. Measured from the moment of
    sending each of eight requests seems to take 500 ms; request i, due at i/10 s, ends at (i + 1)/2 s."""
    engine = VirtualEngine(first_s=0.5, slots=1 if limit == "server" else 8)
    limits = RunLimits(num_requests=8, warmup=0, max_in_flight=256 if limit == "server" else 1)
    window = run(measure(engine, EVERY_100_MS, limits))
    e2e = [attempt.sample.e2e_s for attempt in window.measured]
    assert e2e == pytest.approx([0.5 * (i + 1) - 0.1 * i for i in range(8)])
    summary = summary_of(window)
    assert summary.e2e_s is not None
    assert summary.ttft_s is not None
    assert (summary.e2e_s.mean, summary.e2e_s.max) == pytest.approx((1.9, 3.3))
    assert (summary.ttft_s.mean, summary.ttft_s.max) == pytest.approx((1.9, 3.3))


def test_waiting_in_the_client_is_a_line_of_its_own() -> None:
    """A generator whose own bound is the queue, and whose report blames the server."""
    window = run(measure(VirtualEngine(first_s=0.5), EVERY_100_MS, RunLimits(8, warmup=0, max_in_flight=1)))
    summary = summary_of(window)
    assert summary.num_held == 7
    assert summary.dispatch_s is not None
    assert (summary.dispatch_s.mean, summary.dispatch_s.max) == pytest.approx((1.4, 2.8))
    window = run(measure(VirtualEngine(first_s=0.5, slots=1), EVERY_100_MS, COLD))
    summary = summary_of(window)
    assert summary.dispatch_s is not None
    assert summary.num_held == 0
    assert summary.dispatch_s.max == pytest.approx(0, abs=1e-5)


def test_in_flight_is_bounded_by_its_flag() -> None:
    """A hundred open sockets where ten were allowed."""
    engine = VirtualEngine(first_s=2)
    run(measure(engine, OpenLoop(50), RunLimits(20, warmup=0, max_in_flight=10)))
    assert engine.most_at_once == 10


def test_the_window_begins_without_a_pause() -> None:
    """Draining after warm-up: the first measured requests then meet an empty server."""
    engine = VirtualEngine(first_s=1.0, gap_s=0.1)
    window = run(measure(engine, ClosedLoop(4), RunLimits(12, warmup=8, spread_s=1.4)))
    assert window.warm_up.num_requests == 11, "three are still under way when the eighth ends"
    assert len(window.measured) == 12
    assert window.begin_s == pytest.approx(3.85)
    assert window.end_s == max(attempt.sample.ended_s for attempt in window.measured)
    summary = summary_of(window)
    assert summary.capacity.mean_in_flight == pytest.approx(4.0)
    assert summary.capacity.output_tokens_per_s == pytest.approx(4 * 5 / 1.4)
    assert all(attempt.sample.scheduled_s >= window.begin_s for attempt in window.measured)


def test_load_goes_on_until_the_last_measured_request_has_ended() -> None:
    """A tail of requests that have the server to themselves lowers the mean, and throughput too."""
    window = run(measure(VirtualEngine(first_s=1.0), OpenLoop(5, is_poisson=False), RunLimits(10, warmup=0)))
    assert len(window.measured) == 10
    assert len(window.others) == 4, "those that fell due in the second that the last measured took"
    assert summary_of(window).capacity.mean_in_flight == pytest.approx((14 * 1.0 - 4 * 0.5) / 2.8)


def test_the_first_burst_is_not_in_the_percentiles() -> None:
    """A p99 that tells how all users pressed Return in the same instant (once), not what they meet all day."""
    slow_at_first = VirtualEngine(first_s=1.0, pace=lambda number: 9.0 if number < 5 else 1.0)
    limits = RunLimits(num_requests=40)
    warm = summary_of(run(measure(slow_at_first, ClosedLoop(5, 2.0), limits)))
    cold = summary_of(run(measure(VirtualEngine(first_s=1.0, pace=slow_at_first.pace), ClosedLoop(5, 2.0), COLD)))
    assert warm.e2e_s is not None
    assert cold.e2e_s is not None
    assert (cold.e2e_s.max, warm.e2e_s.max) == pytest.approx((9.0, 1.0))


def test_warming_up_ends_only_when_latency_has_settled() -> None:
    """A fixed number of warm-up requests that is too small for a server whose caches fill slowly."""
    seen = Steadiness(users=2)
    assert seen.width == 3
    for e2e_s in (8, 8, 8, 4, 4, 4):
        assert not seen.is_steady
        seen.ended(0, e2e_s)
    seen.ended(0, 4)
    seen.ended(0, 4)
    assert not seen.is_steady, "the other user has had no answer"
    seen.ended(1, 4)
    assert seen.is_steady


def test_warming_up_has_an_end() -> None:
    """An overloaded server never settles: measuring begins all the same, and says so."""
    window = run(measure(VirtualEngine(first_s=0.5, slots=1), EVERY_100_MS, RunLimits(8)))
    assert not window.warm_up.is_steady
    assert sum(attempt.sample.ended_s <= window.begin_s for attempt in window.others) == 12


def test_every_user_is_heard_before_measuring() -> None:
    """Twenty users of whom three had answers when the window began."""
    seen = Steadiness(users=20)
    for user in range(20):
        assert not seen.is_over
        seen.ended(user, 1.0)
    assert seen.is_steady


def test_users_begin_one_after_another() -> None:
    """Twenty requests in the same instant: a burst that no twenty people make."""
    window = run(measure(VirtualEngine(first_s=1.0), ClosedLoop(4, 3.0, False), RunLimits(4, warmup=0, spread_s=8.0)))
    assert [attempt.sample.scheduled_s for attempt in window.measured] == pytest.approx([0, 2, 4, 4])


def test_littles_law_holds_in_a_closed_loop() -> None:
    """N users are not N requests/s: N / (think + latency) are."""
    window = run(measure(VirtualEngine(first_s=1.0), ClosedLoop(6, 5.0, False), RunLimits(60, warmup=12, spread_s=6.0)))
    little = summary_of(window).little
    assert little is not None
    assert little.expected_requests_per_s == pytest.approx(6 / (5 + 1))
    assert little.ratio == pytest.approx(1.0, abs=0.02)
    window = run(measure(VirtualEngine(first_s=1.0), ClosedLoop(50, 5.0), RunLimits(2000)))
    little = summary_of(window).little
    assert little is not None
    assert little.ratio == pytest.approx(1.0, abs=0.05), "with exponential thinking too"


@pytest.mark.parametrize(("told_s", "expected_s"), [(None, 1.0), (3.0, 3.0), (0.2, 0.5), (9999.0, 60.0)])
def test_who_was_refused_does_not_come_back_at_once(told_s: float | None, expected_s: float) -> None:
    """One user who is refused a thousand times a second is 99 % of the failures, and the load is no longer theirs."""
    engine = VirtualEngine(
        first_s=1.0, fate=lambda number: Failure.HTTP_503 if number == 1 else None, retry_after_s=told_s
    )
    window = run(measure(engine, ClosedLoop(1, 0.5, False), RunLimits(3, warmup=0)))
    due = [attempt.sample.scheduled_s for attempt in window.measured]
    assert due == pytest.approx([0.0, 1.5, 1.5 + expected_s])
    assert summary_of(window).little is None


def test_an_open_loop_has_no_users() -> None:
    """Little's law of a closed loop applied where there is none."""
    assert summary_of(run(measure(VirtualEngine(), OpenLoop(2), COLD))).little is None


def test_failures_are_counted_by_cause_and_not_repeated() -> None:
    """A client that retries makes a refusing server look well; one that drops failures makes it look fast."""
    fates = dict(enumerate([Failure.ERROR_EVENT] * 2 + [Failure.HTTP_503] * 2 + [Failure.CLOSED_EARLY]))
    engine = VirtualEngine(first_s=0.5, fate=lambda number: fates.get(number % 10))
    window = run(measure(engine, OpenLoop(1, is_poisson=False), RunLimits(100, warmup=0)))
    summary = summary_of(window)
    assert summary.failures == {"error event": 20, "http 503": 20, "closed early": 10}
    assert (summary.num_requests, summary.num_ok, summary.num_503) == (100, 50, 20)
    assert len({request.index for request in engine.asked}) == len(engine.asked), "nothing is asked twice"
    assert summary.ttft_s is not None
    assert summary.ttft_s.num == 50, "a first token before an error is no answer"
    assert summary.e2e_with_failures_s is not None
    assert summary.e2e_with_failures_s.p50 == 0.5
    assert summary.e2e_with_failures_s.as_dict()["p95"] is None, "half were never answered"


def test_a_duration_ends_the_window_by_the_clock() -> None:
    """Requests that fall due after the end, or are given up because time is over."""
    engine = VirtualEngine(first_s=3.0)
    limits = RunLimits(num_requests=None, duration_s=10.0, warmup=0)
    window = run(measure(engine, OpenLoop(1, is_poisson=False), limits))
    assert [attempt.sample.scheduled_s for attempt in window.measured] == pytest.approx(range(10))
    assert window.end_s == pytest.approx(12.0), "the last fell due at 9"


def test_a_duration_without_requests_ends() -> None:
    """A loop that waits for the end of a request when none is under way."""
    limits = RunLimits(num_requests=None, duration_s=5.0, warmup=0)
    window = run(measure(VirtualEngine(first_s=0.5), OpenLoop(0.01, is_poisson=False), limits))
    assert len(window.measured) == 1
    assert window.end_s == pytest.approx(5.0)


def test_a_trace_is_played_as_written() -> None:
    """Moments, lengths and texts of a trace; nothing is added to it."""
    rows = (TraceRow(0.5, "one", None, 3), TraceRow(0.5, None, 40, 2), TraceRow(9.0, "two", None, 1))
    work = Workload(Lengths("fixed", 1), Lengths("fixed", 1), trace=rows)
    engine = VirtualEngine(first_s=1.0, gap_s=0.5)
    window = run(measure(engine, OpenLoop(0), RunLimits(), work))
    assert [attempt.sample.scheduled_s for attempt in window.measured] == pytest.approx([0.5, 0.5, 9.0])
    assert [attempt.sample.e2e_s for attempt in window.measured] == pytest.approx([2.0, 1.5, 1.0])
    assert [request.prompt for request in engine.asked][::2] == ["one", "two"]
    assert window.others == ()


def test_users_can_play_a_trace() -> None:
    """Its texts in order, as fast as the users get to them."""
    rows = tuple(TraceRow(float(i), f"text {i}", None, 2) for i in range(5))
    work = Workload(Lengths("fixed", 1), Lengths("fixed", 1), trace=rows)
    engine = VirtualEngine(first_s=1.0)
    window = run(measure(engine, ClosedLoop(2), RunLimits(), work))
    assert [request.prompt for request in engine.asked] == [f"text {i}" for i in range(5)]
    assert window.end_s == pytest.approx(3.0)


@pytest.mark.parametrize("after_s", [0.2, 4.2])
def test_an_interrupted_run_has_what_was_measured(after_s: float) -> None:
    """Ctrl-C after an hour, and nothing to show for it; or requests that were cut counted as failures."""

    async def interrupted() -> Window:
        generator = LoadGenerator(
            WORK, ClosedLoop(3), VirtualEngine(first_s=1.0), now=now, limits=RunLimits(1000, warmup=3)
        )
        task = asyncio.create_task(generator.run())
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return generator.window

    window = run(interrupted())
    assert window.is_interrupted
    assert (len(window.measured), window.num_cut) == ((0, 3) if after_s < 1 else (9, 3))
    assert window.end_s == pytest.approx(after_s)
    summary = summary_of(window)
    assert summary.failures == {}


def test_a_fault_of_the_tool_is_no_failed_request() -> None:
    """A bug in the client reported as the server's failure, or a run that hangs on it."""

    async def broken(request: PlannedRequest, due_s: float) -> object:
        raise ZeroDivisionError

    async def attempt() -> None:
        send: object = broken
        await LoadGenerator(WORK, ClosedLoop(2), send, now=now, limits=COLD).run()  # type: ignore[arg-type]

    with pytest.raises(ZeroDivisionError):
        run(attempt())


def test_progress_tells_phase_and_count() -> None:
    """A bar that stands still for an hour."""
    told: list[tuple[Phase, int, int | None, int]] = []

    async def watched() -> None:
        limits = RunLimits(6, warmup=4)
        await LoadGenerator(
            WORK, ClosedLoop(2), VirtualEngine(), now=now, limits=limits, on_progress=lambda *at: told.append(at)
        ).run()

    run(watched())
    assert told[0] == (Phase.WARM_UP, 0, 4, 1)
    assert (Phase.WINDOW, 6, 6) in [each[:3] for each in told]
    assert told[-1][0] is Phase.TAIL
