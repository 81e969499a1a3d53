"""What is asked: lengths, texts, arrivals. The same for the same seed, and no text like another run's."""

from __future__ import annotations

import json
import os
import random
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.bench.load.arrivals import ClosedLoop, OpenLoop, parse_think
from chairlift.bench.load.workload import (
    WORDS,
    Lengths,
    SharedPrefix,
    TokenCalibration,
    TraceRow,
    Workload,
    read_trace,
)
from chairlift.errors import ConfigError

FIXED = Workload(Lengths.parse("200"), Lengths.parse("100"), seed=1, salt="a")
KINDS = ["200", "uniform:100-300", "lognormal:200,0.5", "exponential:200"]


@pytest.mark.parametrize("text", KINDS)
def test_lengths_are_what_they_say(text: str) -> None:
    """A distribution with another mean than its flag, or lengths below one."""
    lengths, rng = Lengths.parse(text), random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert str(lengths) == text
    assert min(drawn) >= 1
    assert fmean(drawn) == pytest.approx(lengths.mean, rel=0.06)
    if text.startswith("uniform"):
        assert (min(drawn), max(drawn)) == (100, 300)
    if text.startswith("lognormal"):
        assert median(drawn) == pytest.approx(200, rel=0.05)


@pytest.mark.parametrize(
    "text",
    ["", "0", "-5", "abc", "uniform:300-100", "uniform:5", "lognormal:200", "lognormal:200,9", "1e3", "99999999"],
)
def test_lengths_that_are_none_are_refused(text: str) -> None:
    """A misspelt distribution that becomes a default."""
    with pytest.raises(ConfigError, match="--prompt"):
        Lengths.parse(text, "--prompt-tokens")


@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.integers(0, 500))
def test_a_request_depends_on_its_number_alone(seed: int, kind: str, index: int) -> None:
    """Work that changes with the order in which users come to it: no two runs then measure the same."""
    work = Workload(Lengths.parse(kind), Lengths.parse(kind), seed=seed, salt="s")
    assert work.request(index) == work.request(index)
    other = Workload(work.prompt, work.output, seed=seed, salt="t")
    ours, theirs = work.request(index), other.request(index)
    assert (ours.prompt_tokens, ours.output_tokens) == (theirs.prompt_tokens, theirs.output_tokens)


@given(st.integers(20, 3000), st.floats(0.5, 6), st.floats(0, 60))
def test_prompts_have_the_wanted_length_by_the_servers_count(wanted: int, per_word: float, overhead: float) -> None:
    """A length in words, or by somebody else's tokenizer: off by a factor of four for a byte-level vocabulary."""
    calibration = TokenCalibration.fit((10, round(10 * per_word + overhead)), (1010, round(1010 * per_word + overhead)))
    work = Workload(Lengths("fixed", wanted), Lengths("fixed", 1), calibration=calibration)
    num_words = len(work.request(0).prompt.split())
    achieved = num_words * per_word + overhead
    assert abs(achieved - max(wanted, overhead + per_word)) <= per_word / 2 + 0.01 * num_words + 2


def test_a_server_that_counts_nothing_gets_a_word_for_a_token() -> None:
    """A division by zero, or prompts of no length, for want of usage."""
    for short, long in (((10, None), (110, 90)), ((10, 40), (110, None)), ((10, 40), (110, 40)), ((10, 50), (10, 60))):
        assert TokenCalibration.fit(short, long) == TokenCalibration()
    assert not TokenCalibration().is_measured
    assert len(FIXED.request(0).prompt.split()) == 200


def test_no_prompt_begins_like_another() -> None:
    """A prefix cache that finds the first half of every prompt, of this run or of the last one."""
    runs = [Workload(FIXED.prompt, FIXED.output, seed=1, salt=salt) for salt in ("a", "b")]
    begins = {" ".join(work.request(index).prompt.split()[:4]) for work in runs for index in range(500)}
    assert len(begins) == 1000


def test_words_are_of_one_size() -> None:
    """Lengths that scatter since one word has one letter and the next has twelve."""
    assert {len(word) for word in WORDS} == {4}
    assert len(set(WORDS)) == len(WORDS) > 128


def test_a_shared_prefix_has_its_share_and_length() -> None:
    """A system prompt that every request has, when half were asked for; or a prompt that grows by it."""
    work = Workload(Lengths.parse("300"), Lengths.parse("10"), salt="s", prefix=SharedPrefix.parse("0.5:200"))
    prompts = [work.request(index).prompt.split() for index in range(400)]
    begin = " ".join(work.text("prefix", 200).split())
    shared = [prompt for prompt in prompts if " ".join(prompt[:200]) == begin]
    assert len(shared) / len(prompts) == pytest.approx(0.5, abs=0.1)
    assert {len(prompt) for prompt in prompts} == {300}
    assert len({" ".join(prompt[200:]) for prompt in shared}) == len(shared)
    assert work.shared_share == pytest.approx(1 / 3)
    assert SharedPrefix.parse(".25:7") == SharedPrefix(0.25, 7)


@pytest.mark.parametrize("text", ["", "0.5", "1.5:10", "0.5:0", "half:10", "-0.1:10"])
def test_a_prefix_that_is_none_is_refused(text: str) -> None:
    """A share above one, or a prefix of nothing."""
    with pytest.raises(ConfigError):
        SharedPrefix.parse(text)


# -- arrivals ---------------------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_their_rate_and_spread() -> None:
    """Evenly spaced requests called Poisson: no bursts, no queue, no tail."""
    moments = list(islice(OpenLoop(5).moments(3), 5000))
    gaps = [after - before for before, after in pairwise(moments)]
    assert fmean(gaps) == pytest.approx(1 / 5, rel=0.05)
    assert fmean([gap**2 for gap in gaps]) == pytest.approx(2 / 25, rel=0.1), "exponential: E[x^2] = 2 / rate^2"
    assert moments == list(islice(OpenLoop(5).moments(3), 5000))
    assert moments != list(islice(OpenLoop(5).moments(4), 5000))


def test_even_arrivals_are_even() -> None:
    """A schedule that drifts."""
    assert list(islice(OpenLoop(10, is_poisson=False).moments(0), 5)) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_users_think_as_long_as_they_are_told() -> None:
    """Thinking that is always the mean: users march in step and never meet."""
    rng = random.Random(0)
    exponential = [ClosedLoop(1, 4.0).pause(rng) for _ in range(4000)]
    assert fmean(exponential) == pytest.approx(4, rel=0.06)
    assert len(set(exponential)) == 4000
    assert {ClosedLoop(1, 4.0, False).pause(rng) for _ in range(5)} == {4.0}
    assert ClosedLoop(1).pause(rng) == 0.0
    assert parse_think("5") == (5.0, True)
    assert parse_think("fixed:.5") == (0.5, False)
    for wrong in ("", "-1", "exp", "fixed:"):
        with pytest.raises(ConfigError, match="--think"):
            parse_think(wrong)


def test_every_kind_of_load_says_what_it_is() -> None:
    """ "100 users" taken for 100 requests a second."""
    assert str(OpenLoop(2)) == "open loop, 2 requests/s, Poisson"
    assert str(OpenLoop(2, is_poisson=False)) == "open loop, 2 requests/s, evenly spaced"
    assert str(OpenLoop(0)) == "open loop, moments from the trace"
    assert str(ClosedLoop(5)) == "closed loop, 5 at once without pauses"
    assert str(ClosedLoop(5, 3)) == "closed loop, 5 users, think time exponential, mean 3 s"
    assert str(ClosedLoop(5, 3, False)) == "closed loop, 5 users, think time always 3 s"


# -- traces -----------------------------------------------------------------------------------------------------------


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    """Requests that are late because a later one stood above them."""
    file = tmp_path / "trace.jsonl"
    lines = [
        {"at_s": 2, "prompt": "hello", "output_tokens": 3},
        {"at_s": 1.5, "prompt_tokens": 40, "output_tokens": 2, "extra": 1},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_trace(file) == (TraceRow(1.5, None, 40, 2), TraceRow(2.0, "hello", None, 3))


@pytest.mark.parametrize(
    "line",
    [
        "", "nonsense", "[]", "{}", "5", "null",
        '{"at_s": 1, "output_tokens": 1}', '{"at_s": -1, "prompt": "x", "output_tokens": 1}',
        '{"at_s": 1, "prompt": 3, "output_tokens": 1}', '{"at_s": 1, "prompt": "x", "output_tokens": 0}',
        '{"at_s": NaN, "prompt": "x", "output_tokens": 1}', '{"at_s": 1, "prompt_tokens": 0, "output_tokens": 1}',
    ],
)  # fmt: skip
def test_a_trace_that_is_none_is_refused(line: str, tmp_path: Path) -> None:
    """A line that is skipped in silence, or a traceback."""
    file = tmp_path / "trace.jsonl"
    file.write_text(line + os.linesep)
    with pytest.raises(ConfigError, match="trace"):
        read_trace(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "none.jsonl")


def test_a_traces_own_prompt_begins_with_the_runs_salt() -> None:
    """A trace played twice: the second time its prompts are in the cache. Within a run they may share what they do."""
    rows = tuple(TraceRow(0.0, f"You are kind. {i}", None, 1) for i in range(2))
    first, second = (Workload(FIXED.prompt, FIXED.output, salt=salt, trace=rows) for salt in ("a", "b"))
    salts = [work.request(i).prompt.split("\n")[0] for work in (first, second) for i in range(2)]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert first.request(0).prompt.split("\n")[1] == "You are kind. 0"
    bare = Workload(FIXED.prompt, FIXED.output, salt="", trace=rows)
    assert bare.request(1).prompt == "You are kind. 1"
    with pytest.raises(IndexError):
        bare.request(2)
