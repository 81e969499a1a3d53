"""Whole runs over HTTP against servers with known answers, in virtual time: what the load commands find, and tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chairlift.bench.client.client import BenchError
from chairlift.bench.client.sample import Failure
from chairlift.bench.client.target import ServerKind, Target
from chairlift.bench.load import compare, single, steps
from chairlift.bench.load.arrivals import Arrivals, ClosedLoop, OpenLoop
from chairlift.bench.load.doubts import Doubt, grouped
from chairlift.bench.load.generator import RunLimits
from chairlift.bench.load.goodput import Slo
from chairlift.bench.load.options import RunSpec
from chairlift.bench.load.run import LoadResult, LoadRun
from chairlift.bench.load.summary import Capacity
from chairlift.bench.load.workload import Lengths, Workload
from chairlift.bench.report.measure import ProgressDisplay
from chairlift.bench.report.report import Report, line
from chairlift.errors import ConfigError
from support.scripted_server import (
    ROLE,
    MockLLM,
    Reply,
    Script,
    delta,
    ending,
    paced,
    refusal,
    run_virtual,
    sse,
    usage,
    whole,
)

OVERHEAD = 30
PER_WORD = 5
"""Tokens of the mock's template, and of each word: as a byte-level vocabulary counts."""
TARGET = Target("http://mock", "mock", kind=ServerKind.CHAIRLIFT)
WORK = Workload(Lengths("fixed", 200), Lengths("fixed", 5), salt="s")

Answering = Callable[[int, dict[str, Any]], Reply | Script]


def count(request: dict[str, Any]) -> int:
    """Prompt tokens, as the mock's tokenizer has them."""
    return OVERHEAD + PER_WORD * len(request["messages"][0]["content"].split())


def pace(first_s: float, gap_s: float) -> Answering:
    """A server that answers as asked, at that pace."""
    return lambda _, request: paced(request["max_tokens"], first_s, gap_s, num_prompt=count(request))


def mixed(*replies: Reply) -> Answering:
    """Answers at once; of ten requests for five tokens the first fail in these ways."""
    seen: list[int] = []

    def answer(_: int, request: dict[str, Any]) -> Reply | Script:
        if request["max_tokens"] == 1:
            return paced(1, 0.1, 0.1, num_prompt=count(request))
        seen.append(1)
        at = (len(seen) - 1) % 10
        return replies[at] if at < len(replies) else paced(5, 0.1, 0.1, num_prompt=count(request))

    return answer


EVERY_SECOND = OpenLoop(1, is_poisson=False)


def spec_of(arrivals: Arrivals = EVERY_SECOND, **limits: Any) -> RunSpec:
    return RunSpec(WORK, arrivals, RunLimits(**{"num_requests": 30, "warmup": 0, **limits}))


async def attempt(answer: Answering, asked: RunSpec, card: dict[str, Any] | None = None, **pages: Any) -> LoadRun:
    mock = MockLLM(answer, {f"/{name}": page for name, page in pages.items()})
    async with mock.client(TARGET) as client:
        client.target = replace(client.target, card=card or {})
        run = LoadRun(client, asked, ProgressDisplay())
        await run.run()
    return run


def result_of(
    answer: Answering, asked: RunSpec | None = None, card: dict[str, Any] | None = None, **more: Any
) -> LoadResult:
    result = run_virtual(attempt(answer, asked or spec_of(), card, **more)).result
    assert result is not None
    return result


def names(result: LoadResult) -> set[str]:
    return {doubt.name for doubt in result.doubts}


# -- lengths and caches -----------------------------------------------------------------------------------------------


def test_prompts_have_the_length_that_the_server_counts() -> None:
    """Lengths by a tokenizer that is not the server's: "200 tokens" that are 1,030."""
    result = result_of(pace(0.2, 0.1))
    achieved = result.summary.prompt_tokens
    assert achieved is not None
    assert (achieved.p50, achieved.max) == (200, 200)
    assert result.spec.workload.calibration.tokens_per_word == PER_WORD
    assert names(result) == set()


def test_a_run_against_a_warm_cache_is_flagged() -> None:
    """Hits that no one asked for: here in the usage. The template's own share is not flagged."""

    def cached(num_cached: int) -> Answering:
        def answer(_: int, request: dict[str, Any]) -> Script:
            num = request["max_tokens"]
            body = [(0.1, delta(content=" x")) for _ in range(num)]
            return [(0.0, ROLE), *body, (0.0, ending(num, count(request), num_cached))]

        return answer

    assert "warm cache" in names(result_of(cached(160)))
    assert "warm cache" not in names(result_of(cached(16)))


def test_hits_are_read_from_metrics_where_usage_is_silent() -> None:
    """A server that counts hits elsewhere is taken for one without a cache."""
    hits = iter([1000, 9000])  # when the window begins, and after it

    def metrics() -> str:
        found = next(hits)
        return f"vllm:prefix_cache_hits_total {found}\nvllm:prefix_cache_queries_total {2 * found}\n"

    result = result_of(pace(0.2, 0.1), metrics=metrics)
    assert result.summary.cache_hit_rate == 0.5
    assert "warm cache" in names(result)


def test_every_run_has_words_of_its_own() -> None:
    """The second round of a comparison meets the cache that the first has filled."""
    first = spec_of()
    assert first.fresh().workload.salt != first.fresh().workload.salt
    assert first.fresh().workload.seed == first.workload.seed
    kept = replace(first, is_cache_wanted=True)
    assert kept.fresh() == kept


# -- failures and impossible figures ----------------------------------------------------------------------------------

ERROR_EVENT = Reply([(0.1, ROLE), (0.1, delta(content="a")), (0.0, sse({"error": {"message": "out of memory"}}))])
EARLY = Reply([(0.1, ROLE), (0.1, delta(content="a"))], is_cut=True)


def test_failures_of_every_kind_are_counted_and_none_is_tried_again() -> None:
    """20 % error events, 20 % 503, 10 % early closes: half of the answers are missing, and the rest look splendid."""
    answer = mixed(ERROR_EVENT, ERROR_EVENT, refusal(503), refusal(503), EARLY)
    result = result_of(answer, spec_of(num_requests=100))
    summary = result.summary
    assert summary.failures == {str(Failure.ERROR_EVENT): 20, str(Failure.HTTP_503): 20, str(Failure.CLOSED_EARLY): 10}
    assert (summary.num_ok, summary.num_requests, summary.num_503) == (50, 100, 20)
    report = told(result)
    assert any(warning.startswith("failures: 50 of 100") for warning in report.warnings)
    felt = report.tables[0]
    assert "50 answered of 100" in felt.title
    row = next(row for row in felt.rows if row[0] == "E2E, a failure as never")
    assert row[1] == 100
    assert row[3:] == [pytest.approx(0.5, abs=1e-3), "never", "never", "never"]
    assert any("no percentile above speaks of them" in sentence for sentence in report.verdict)


def test_answers_that_end_early_are_flagged() -> None:
    """A server that stops at its end-of-text token, whatever was asked."""
    result = result_of(lambda _, request: paced(min(3, request["max_tokens"]), 0.2, 0.1, num_prompt=count(request)))
    assert result.summary.num_short_answers == 30
    assert "ended early" in names(result)


def test_a_stream_faster_than_memory_is_flagged() -> None:
    """100 tokens/s where the weights can be read 10 times a second: a cache, a lie or a buffering proxy."""
    assert "faster than memory" in names(result_of(pace(0.2, 0.01), card={"one_stream_ceiling_tokens_per_s": 10.0}))
    fine = result_of(pace(0.2, 0.1), card={"one_stream_ceiling_tokens_per_s": 20.0})
    assert "faster than memory" not in names(fine)
    ceiling = next(row for row in told(fine).tables[1].rows if str(row[0]).startswith("one stream's"))
    assert list(ceiling[1:3]) == [pytest.approx(10.0, rel=1e-3), 20.0]


def test_without_streaming_nothing_is_said_of_first_tokens() -> None:
    """A TTFT that is the E2E by another name."""

    def answer(_: int, request: dict[str, Any]) -> Reply | Script:
        if request["stream"]:
            return paced(request["max_tokens"], 0.2, 0.1, num_prompt=count(request))
        return Reply(whole(5, 0.6, num_prompt=count(request)), content_type="application/json")

    result = result_of(answer, replace(spec_of(), is_streamed=False))
    summary = result.summary
    assert (summary.num_ok, summary.ttft_s, summary.itl_s) == (30, None, None)
    assert summary.e2e_s is not None
    assert summary.e2e_s.max == pytest.approx(0.6, abs=1e-4)
    assert "not measurable without streaming" in told(result).tables[0].note


def test_several_tokens_in_a_piece_are_counted_by_usage() -> None:
    """Four tokens a chunk: a quarter of the tokens/s, and an ITL four times as long as any token took."""

    def answer(_: int, request: dict[str, Any]) -> Script:
        num = request["max_tokens"]
        pieces = [(0.4, delta(content=" a b c d")) for _ in range(max(1, num // 4))]
        return [(0.0, ROLE), *pieces, (0.0, ending(num, count(request)))]

    work = replace(WORK, output=Lengths("fixed", 40))
    asked = RunSpec(work, ClosedLoop(1), RunLimits(num_requests=20, warmup=2))
    result = result_of(answer, asked)
    assert result.summary.capacity.output_tokens_per_s == pytest.approx(10.0, rel=0.01)
    assert result.summary.tpot_s is not None
    assert result.summary.tpot_s.p50 == pytest.approx(3.6 / 39, rel=1e-3)
    assert "several tokens a piece" in names(result)


def test_a_server_that_refuses_from_the_start_is_an_error() -> None:
    """A table of dashes for a wrong --model."""
    with pytest.raises(BenchError, match="http 404"):
        result_of(lambda *_: refusal(404, "no such model"))


def test_users_do_not_begin_at_once() -> None:
    """The burst of a start that no day has: users begin over the time that one answer and one pause take."""
    result = result_of(pace(0.6, 0.1), spec_of(ClosedLoop(4, 3.0, False), num_requests=8))
    begun = sorted(attempt.sample.scheduled_s for attempt in result.window.measured)[:4]
    assert [after - begun[0] for after in begun] == pytest.approx([0.0, 1.0, 2.0, 3.0], abs=1e-3)


# -- what is told -----------------------------------------------------------------------------------------------------


def told(result: LoadResult) -> Report:
    return single.report(result, "http://mock")


def test_the_report_of_a_load_has_its_context() -> None:
    """Figures without how they were got: kind of load, lengths, seed, warm-up rule, number of values."""
    asked = replace(spec_of(num_requests=20, warmup=None), slo=Slo.parse("ttft=1"))
    report = told(result_of(pace(0.2, 0.1), asked))
    text = line(report)
    for said in ("evenly spaced", "seed 0", "Warm-up: ", "within 25%", "goodput: ttft <= 1 s", "nearest rank"):
        assert said in text
    document = json.loads(text)
    assert document["data"]["ttft_s"]["num"] == 20
    assert document["data"]["goodput"]["share"] == 1.0
    assert [chart.kind for chart in report.charts] == ["cdf", "cdf", "timeline"]
    ttft = next(row for row in report.tables[0].rows if row[0] == "TTFT")
    assert ttft[1] == 20
    assert ttft[5] == "= max"


def test_nothing_measured_is_said() -> None:
    """A traceback when Ctrl-C comes before the first request."""
    assert "nothing was measured" in single.report(None, "http://mock").title
    assert "nothing was measured" in steps.report([], "http://mock").title
    assert "nothing was measured" in compare.report([], ["http://a", "http://b"]).title
    assert "nothing was measured" in compare.report([[None, None]], ["http://a", "http://b"]).title


def test_the_knee_is_where_more_users_bring_no_more() -> None:
    """A knee that is always the last step, or one that a single noisy step makes."""
    users = [1, 2, 5, 10, 20]
    assert steps.knee(users, [60, 95, 160, 200, 205]) == 10
    assert steps.knee(users, [60, 95, 160, 200, 230]) is None
    assert steps.knee(users, [60, 61, 160, 170, 165]) == 5
    assert steps.knee(users, [60, 60, 60, 60, 60]) == 1
    assert steps.knee([1], [60]) is None


@pytest.mark.parametrize("text", ["", "1,1", "5,2", "0,1", "1;2", "1,99999"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    """A sweep that goes down, or in place."""
    with pytest.raises(ConfigError, match="--users"):
        steps.parse_users(text)


def test_steps_tell_what_changes_with_more_people() -> None:
    """Columns of another step, or a knee in one table and not in the other."""
    results = [result_of(pace(0.5, 0.1), spec_of(ClosedLoop(users), num_requests=20, warmup=4)) for users in (1, 2, 4)]
    report = steps.report(results, "http://mock")
    felt, got = report.tables
    assert [row[0] for row in felt.rows] == [row[0] for row in got.rows] == [1, 2, 4]
    assert [row[1] for row in got.rows] == pytest.approx([5 / 0.9, 10 / 0.9, 20 / 0.9], rel=0.06)
    assert "No knee up to 4 users" in " ".join(report.verdict)
    assert report.data["knee_users"] is None
    flat = steps.report([results[0], results[0]], "http://mock")
    assert flat.data["knee_users"] == 1
    assert [row[-1] for table in flat.tables for row in table.rows] == ["<- knee"] * 4


def test_a_step_that_was_interrupted_makes_no_knee() -> None:
    """Ctrl-C, and no tokens/s for the last step: "the knee is at 2 users"."""
    results = [result_of(pace(0.5, 0.1), spec_of(ClosedLoop(users), num_requests=20, warmup=4)) for users in (1, 2, 4)]
    cut = replace(results[2], window=replace(results[2].window, is_interrupted=True))
    cut = replace(cut, summary=replace(cut.summary, capacity=Capacity()))
    report = steps.report([*results[:2], cut], "http://mock")
    assert report.data["knee_users"] is None
    assert "No knee up to 2 users" in " ".join(report.verdict)
    assert len(report.tables[0].rows) == 3
    assert steps.report([cut], "http://mock").verdict == []


# -- comparisons ------------------------------------------------------------------------------------------------------


def test_a_server_that_takes_twice_as_long_has_a_ratio_of_two() -> None:
    """Ratios upside down, or of figures of different rounds."""
    fast = result_of(pace(0.5, 0.1), spec_of(ClosedLoop(1), num_requests=20, warmup=2))
    slow = result_of(pace(1.0, 0.2), spec_of(ClosedLoop(1), num_requests=20, warmup=2))
    report = compare.report([[fast, slow]] * 3, ["http://a", "http://b"])
    ratios = report.data["ratios"]["B/A"]
    assert ratios["TTFT p50, s"]["rounds"] == pytest.approx([2.0] * 3, rel=1e-3)
    assert ratios["E2E p50, s"]["median"] == pytest.approx(2.0, rel=1e-3)
    assert ratios["output, tokens/s"]["median"] == pytest.approx(0.5, rel=1e-2)
    assert all(ratio["is_told_apart"] for ratio in ratios.values())
    (sentence,) = report.verdict
    assert sentence.startswith("B against A: worse in TTFT p50")
    assert "better" not in sentence


def test_a_server_is_not_better_than_itself() -> None:
    """A difference out of noise: two rounds that agree by chance, or three that scatter more than they differ."""
    assert compare.Ratio((0.5, 0.5, 0.5)).is_told_apart
    assert not compare.Ratio((0.5, 0.5)).is_told_apart, "one in two, for equal servers"
    assert not compare.Ratio((0.9, 0.95, 1.05)).is_told_apart
    assert not compare.Ratio((0.80, 0.90, 0.99)).is_told_apart, "agree, and scatter"
    assert compare.Ratio((1.30, 1.35, 1.40)).is_told_apart
    same = result_of(pace(0.5, 0.1))
    report = compare.report([[same, same]] * 3, ["http://a", "http://b"])
    assert "better" not in report.verdict[0]
    assert "worse" not in report.verdict[0]


def test_each_server_is_first_in_turn() -> None:
    """Whoever is always measured last meets the warmest machine."""
    assert [compare.order(3, turn) for turn in range(4)] == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]


def test_a_round_that_was_interrupted_is_left_out_of_ratios() -> None:
    """A missing half of a round paired with the other half of the next."""
    one = result_of(pace(0.5, 0.1))
    report = compare.report([[one, one], [None, one]], ["http://a", "http://b"])
    assert len(report.data["ratios"]["B/A"]["E2E p50, s"]["rounds"]) == 1


def test_a_server_that_counts_nothing_is_estimated() -> None:
    """No usage at all: lengths unknown, tokens by pieces, and both said."""

    def answer(_: int, request: dict[str, Any]) -> Script:
        pieces = [(0.1, delta(content=" a")) for _ in range(request["max_tokens"])]
        return [(0.0, ROLE), *pieces, (0.0, delta("length") + b"data: [DONE]\n\n")]

    result = result_of(answer)
    assert {"tokens estimated", "lengths unknown"} <= names(result)
    assert result.summary.capacity.output_tokens_per_s == pytest.approx(5.0, rel=0.1)


def test_usage_alone_is_no_token() -> None:
    """A usage chunk counted as output."""

    def answer(_: int, request: dict[str, Any]) -> Script:
        return [
            (0.0, ROLE),
            (0.5, delta(content=" a")),
            (2.0, usage(1, count(request))),
            (0.0, ending(1, count(request))),
        ]

    work = replace(WORK, output=Lengths("fixed", 1))
    result = result_of(answer, RunSpec(work, OpenLoop(1, is_poisson=False), RunLimits(num_requests=20, warmup=0)))
    assert result.summary.itl_s is None
    assert result.summary.ttft_s is not None
    assert result.summary.ttft_s.max == pytest.approx(0.5, abs=1e-3)


def test_a_doubt_of_many_runs_is_said_once() -> None:
    """A screen of the same warning for every step, and the one that matters among them."""
    few = Doubt("few samples", "8 answers")
    assert grouped([("1", few), ("2", few), ("2", Doubt("cut", "3 requests"))], "users") == [
        "few samples (users 1, 2): 8 answers",
        "cut (users 2): 3 requests",
    ]


def test_ceilings_know_slots_and_rates() -> None:
    """A ceiling for streams that wait for a slot; requests/s without what was asked for beside them."""
    card = {"one_stream_ceiling_tokens_per_s": 50.0, "limits": {"max_num_seqs": 4}}
    result = result_of(pace(9.5, 0.1), spec_of(num_requests=40), card)
    rows = {str(row[0]): row for row in told(result).tables[1].rows}
    assert result.summary.capacity.mean_in_flight > 5
    assert rows["output tokens/s"][2] == 200.0
    assert rows["answers/s"][2:] == [1, "asked for"]
    slow = result_of(pace(60.0, 0.1), spec_of(num_requests=20))
    assert any("more than it can do" in sentence for sentence in told(slow).verdict)
    assert not any("more than it can do" in sentence for sentence in told(result_of(pace(0.2, 0.1))).verdict)


def test_arrivals_that_came_slowly_by_chance_are_no_overload() -> None:
    """One Poisson run in nine called more than the server can do, at any speed: 20 requests took 30 s to fall due."""
    asked = replace(spec_of(OpenLoop(1), num_requests=20), workload=replace(WORK, seed=28))
    result = result_of(pace(0.2, 0.1), asked)
    assert result.summary.capacity.requests_per_s < 0.7
    assert not any("more than it can do" in sentence for sentence in told(result).verdict)


def test_the_engines_figures_are_of_the_window_alone() -> None:
    """A queue wait that includes what was let in to wait out the end. Readings: T0, T1."""
    told_s = iter([10.0, 40.0, 1000.0])
    num = iter([10, 40, 41])

    def metrics() -> str:
        name = "vllm:request_queue_time_seconds"
        return f"# TYPE {name} histogram\n{name}_sum {next(told_s)}\n{name}_count {next(num)}\n"

    result = result_of(pace(0.2, 0.1), metrics=metrics)
    assert result.queue_s == pytest.approx(1.0)
