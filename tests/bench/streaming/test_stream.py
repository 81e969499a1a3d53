"""`chairlift bench stream` on mock servers: every figure of its report is known beforehand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from chairlift.bench.client.client import Client, Clock
from chairlift.bench.client.target import ConnectOptions, ServerKind, Target
from chairlift.bench.report.measure import ProgressDisplay
from chairlift.bench.report.report import Report
from chairlift.bench.streaming.stream import StreamCommand, pair_ratios
from support.scripted_server import (
    MockLLM,
    Reply,
    Script,
    buffered,
    delta,
    ending,
    paced,
    refusal,
    run_virtual,
    virtual_clock,
    whole,
)

SERVER = ConnectOptions(timeout_s=60.0)
NUM_TOKENS = 21
Page = Callable[[], str]


def ordinary(n: int, request: dict[str, Any]) -> Reply | Script:
    """First token after 0.5 s, then 20 in 2 s; in one piece after the same 2.5 s."""
    return paced(NUM_TOKENS, 0.5, 0.1) if request["stream"] else whole(NUM_TOKENS, 2.5)


def run(
    mock: MockLLM, num_requests: int = 4, num_tokens: int = NUM_TOKENS, kind: ServerKind = ServerKind.OTHER
) -> tuple[StreamCommand, Report]:
    """The command in virtual time."""

    async def test() -> StreamCommand:
        @asynccontextmanager
        async def connect(url: str, options: ConnectOptions, clock: Clock) -> AsyncIterator[Client]:
            async with mock.client(Target(url, "mock", kind=kind), clock) as client:
                yield client

        made = StreamCommand(
            "http://127.0.0.1", SERVER, num_requests, num_tokens, 32, connect=connect, clock=virtual_clock()
        )
        with ProgressDisplay() as progress:
            await made.work(progress)
        return made

    made = run_virtual(test())
    return made, made.report()


def row(report: Report, table: int, name: str) -> list[Any]:
    """The cells after a row's name."""
    return next(list(cells[1:]) for cells in report.tables[table].rows if cells[0] == name)


def engine_page(counts: Callable[[], int], ttft_s: float = 0.5, tpot_s: float = 0.1) -> Page:
    """A page of an engine that has answered so many requests, all alike."""

    def made() -> str:
        n = counts()
        e2e_s = ttft_s + (NUM_TOKENS - 1) * tpot_s
        figures = {
            "time_to_first_token_seconds": ttft_s,
            "e2e_request_latency_seconds": e2e_s,
            "request_queue_time_seconds": 0.25,
            "request_time_per_output_token_seconds": tpot_s,
        }
        lines = [f"vllm:{name}_count {n}\nvllm:{name}_sum {n * value}" for name, value in figures.items()]
        return "\n".join([*lines, f"vllm:generation_tokens_total {n * NUM_TOKENS}", ""])

    return made


def test_streaming_moves_the_first_value_and_nothing_else() -> None:
    """ "Streaming makes it five times faster": TTFT compared with E2E, and the whole answer never mentioned."""
    made, report = run(MockLLM(ordinary))
    times = [mode.first_output_s for mode in made.modes] + [mode.e2e_s for mode in made.modes]
    assert times == pytest.approx([0.5, 2.5, 2.5, 2.5])
    text = " ".join(report.verdict)
    assert "does not make the model faster: the whole answer takes 2.50 s streamed and 2.50 s not" in text
    assert "streamed takes 1.00 times as long (1.00 to 1.00): the same." in text
    assert "first value by 5.0 times: something to read after 500 ms instead of 2.50 s" in text
    assert "order of magnitude" in text
    assert report.warnings == []


def test_what_is_not_measurable_is_said_in_words() -> None:
    """inference-perf#150: null, or 0, where a TTFT cannot be; and "0.0 s" where a server exports nothing."""
    _, report = run(MockLLM(ordinary))
    assert row(report, 0, "client: first token (TTFT), median")[2] == "not measurable without streaming"
    assert row(report, 0, "engine: queue wait, mean")[1:] == ["not exported", "not exported"]


def test_the_identity_holds_on_both_clocks() -> None:
    """A sum that nobody checks: E2E, TTFT and TPOT from three definitions that do not fit together."""
    mock = MockLLM(ordinary)
    mock.pages["/metrics"] = engine_page(lambda: len(mock.requests))
    _, report = run(mock)
    client, streamed, unstreamed = report.tables[1].rows
    assert list(client[1:5]) == pytest.approx([2.5, 0.5, 20, 100.0])
    assert client[5] == pytest.approx(0.0, abs=1e-6)
    for cells in (streamed, unstreamed):
        assert list(cells[1:5]) == pytest.approx([2.5, 0.5, 20, 100.0])
        assert cells[5] == pytest.approx(0.0, abs=1e-6)
    assert row(report, 0, "engine: queue wait, mean")[1:] == pytest.approx([0.25, 0.25])
    assert report.warnings == []


def test_what_comes_after_the_last_token_is_the_residual() -> None:
    """A server that sits on its usage for a second, hidden in a TPOT of E2E over tokens."""

    def slow_end(n: int, request: dict[str, Any]) -> Script:
        if not request["stream"]:
            return whole(NUM_TOKENS, 2.5)
        *tokens, (_, end) = paced(NUM_TOKENS, 0.5, 0.1)
        return [*tokens, (1.0, end)]

    _, report = run(MockLLM(slow_end))
    assert report.tables[1].rows[0][5] == pytest.approx(1.0)


def test_order_swaps_and_no_prompt_is_asked_twice() -> None:
    """Drift that favours one kind, and a prefix cache that favours the second."""
    mock = MockLLM(ordinary)
    run(mock, num_requests=4)
    counted = mock.requests[2:]
    assert [request["stream"] for request in counted] == [True, False, False, True, True, False, False, True]
    prompts = [request["messages"][0]["content"] for request in counted]
    assert len({prompt.split()[0] + prompt.split()[1] + prompt.split()[2] for prompt in prompts}) == 8
    assert {len(prompt.split()) for prompt in prompts} == {32}


def test_a_machine_that_slows_down_favours_neither() -> None:
    """All of one kind first: a machine that gets slower by a tenth each time then proves whatever came first."""
    speeds = [1 + 0.1 * i for i in range(10)]

    def slowing(n: int, request: dict[str, Any]) -> Script:
        factor = speeds[n]
        return paced(NUM_TOKENS, 0.5 * factor, 0.1 * factor) if request["stream"] else whole(NUM_TOKENS, 2.5 * factor)

    made, _ = run(MockLLM(slowing))
    ratios = pair_ratios(made.streamed, made.whole)
    assert min(ratios) < 1 < max(ratios)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.02)


def test_a_difference_in_every_pair_is_not_called_noise() -> None:
    """A server whose streams really cost a tenth more, told that they do not."""

    def dearer(n: int, request: dict[str, Any]) -> Script:
        return paced(NUM_TOKENS, 0.5, 0.12) if request["stream"] else whole(NUM_TOKENS, 2.5)

    text = " ".join(run(MockLLM(dearer))[1].verdict)
    assert "1.16 times as long (1.16 to 1.16), each time longer" in text


def test_differences_both_ways_are_noise() -> None:
    """A machine with other work on it that proves that streaming helps, or harms."""
    wobble = [1.0, 1.0, 1.5, 1.0, 1.3, 1.0, 1.2, 1.0]

    def noisy(n: int, request: dict[str, Any]) -> Script:
        factor = wobble[n % 8]
        return paced(NUM_TOKENS, 0.5 * factor, 0.1 * factor) if request["stream"] else whole(NUM_TOKENS, 2.5 * factor)

    text = " ".join(run(MockLLM(noisy), num_requests=3)[1].verdict)
    assert "that is noise" in text


def test_the_three_cases_in_which_it_cannot_help() -> None:
    """ "Use streaming" said to somebody whose first token comes last, or whose proxy buffers."""

    def late(n: int, request: dict[str, Any]) -> Script:
        return paced(NUM_TOKENS, 4.0, 0.1) if request["stream"] else whole(NUM_TOKENS, 6.0)

    def in_one_burst(n: int, request: dict[str, Any]) -> Script:
        return buffered(paced(NUM_TOKENS, 0.5, 0.1), 2**20) if request["stream"] else whole(NUM_TOKENS, 2.5)

    usual = run(MockLLM(ordinary))[1].verdict
    assert any("late already: does not apply here" in line and "20 % of the whole" in line for line in usual)
    assert any("reader is a program" in line and "this tool cannot" in line for line in usual)
    assert any("in between buffers: does not apply here" in line for line in usual)
    assert any("late already: applies here" in line for line in run(MockLLM(late))[1].verdict)
    assert any("in between buffers: applies here" in line for line in run(MockLLM(in_one_burst))[1].verdict)


def test_failures_are_left_out_and_counted() -> None:
    """SemiAnalysisAI/InferenceX#357: a server that refuses half of it looks fast."""

    def failing(n: int, request: dict[str, Any]) -> Reply | Script:
        return refusal(503) if n in (3, 4) else ordinary(n, request)

    made, report = run(MockLLM(failing))
    assert row(report, 0, "requests answered")[1:] == ["4 of 4", "2 of 4"]
    assert report.warnings == ["not streamed: 2 of 4 failed (http 503); no figure has them."]
    assert len(pair_ratios(made.streamed, made.whole)) == 2


def test_nothing_answered_is_no_verdict() -> None:
    """Figures of a run in which everything failed, or that ended before it began."""
    report = run(MockLLM(lambda *_: refusal(503)))[1]
    assert report.verdict == ["Nothing to compare: one of the two has no full answer."]
    assert StreamCommand("http://mock", SERVER, 4, 9, 9).report().verdict == report.verdict


def test_other_lengths_than_asked_are_said() -> None:
    """A server that ends early and looks fast."""
    report = run(MockLLM(ordinary), num_tokens=30)[1]
    assert "streamed: 4 answers have other than 30 tokens; this server cannot be told to go on." in report.warnings
    capable = run(MockLLM(ordinary), num_tokens=30, kind=ServerKind.VLLM)[1]
    assert "streamed: 4 answers have other than 30 tokens." in capable.warnings


def test_others_on_the_server_are_noticed() -> None:
    """Somebody else's requests in "the engine's" figures."""
    mock = MockLLM(ordinary)
    mock.pages["/metrics"] = engine_page(lambda: 3 * len(mock.requests))
    assert any("somebody else uses this server" in line for line in run(mock)[1].warnings)


def test_clocks_that_are_orders_of_magnitude_apart_are_said() -> None:
    """ "The engine is fast" and "the client waits" side by side, and nobody asks where the time went."""
    mock = MockLLM(ordinary)
    mock.pages["/metrics"] = engine_page(lambda: len(mock.requests), ttft_s=0.1)
    text = " ".join(run(mock)[1].verdict)
    assert "They do not agree on TTFT: 500 ms at the client, 100 ms in the engine." in text
    assert "They do not agree on E2E" not in text


def test_faster_than_memory_is_flagged() -> None:
    """A server that repeats a cached answer at a speed that no memory has."""
    made, _ = run(MockLLM(ordinary))
    for ceiling, is_flagged in ((7.0, False), (6.0, True), (None, False)):
        made.target = replace(
            made.target, card={"one_stream_ceiling_tokens_per_s": ceiling}
        )  # 21 tokens in 2.5 s are 8.4 a second
        report = made.report()
        assert any("8 tokens/s, where" in line for line in report.warnings) is is_flagged
        assert [row[1:] for row in report.tables[2].rows] == [
            [pytest.approx(10.0), ceiling],
            ["not exported", ceiling],
            ["not exported", ceiling],
        ]


def test_a_buffered_stream_is_not_called_too_fast() -> None:
    """Twenty tokens that arrive together, a TPOT of nothing, and a warning about the memory."""

    def in_one_burst(n: int, request: dict[str, Any]) -> Script:
        return buffered(paced(NUM_TOKENS, 0.5, 0.1), 1500) if request["stream"] else whole(NUM_TOKENS, 2.5)

    made, _ = run(MockLLM(in_one_burst))
    made.target = replace(made.target, card={"one_stream_ceiling_tokens_per_s": 10.0})
    assert made.report().warnings == []


def test_pieces_of_several_tokens_are_said() -> None:
    """Gaps between pieces that are taken for gaps between tokens."""

    def chunked(n: int, request: dict[str, Any]) -> Script:
        if not request["stream"]:
            return whole(NUM_TOKENS, 2.5)
        return [*((0.3, delta(content="abc")) for _ in range(7)), (0.0, ending(NUM_TOKENS))]

    assert any("a piece holds 3.0 tokens" in line for line in run(MockLLM(chunked))[1].warnings)


def test_the_document_has_every_request() -> None:
    """A median without the values that it stands for."""
    data = run(MockLLM(ordinary))[1].document()["data"]
    assert data["streamed"]["first_output_s"] == pytest.approx([0.5] * 4)
    assert data["not streamed"]["e2e_s"] == pytest.approx([2.5] * 4)
    assert data["streamed"]["num_output_tokens"] == [NUM_TOKENS] * 4
