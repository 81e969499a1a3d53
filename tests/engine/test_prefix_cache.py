"""Prefix sharing as requests see it: hits on equal tokens, each block computed once, answers never changed by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chairlift.engine.request import Request
from support.scheduler_sim import LIMITS, Sim, alone, letters, make_request

UNSHARED = replace(LIMITS, prefix_caching=False)


def answer(sim: Sim, request: Request) -> Request:
    """Serves one request to its end and checks its text against the one it must have."""
    sim.add(request)
    sim.run()
    assert tuple(request.output) == alone(request, len(request.output))
    return request


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64, 65])
def test_a_full_hit_leaves_a_token_to_compute(length: int) -> None:
    """Guards against a prompt that is all cache: nothing would be left to sample from (a changed first token)."""
    sim = Sim()
    prompt = letters(1, length)
    cold = answer(sim, make_request("cold", prompt, max_tokens=3))
    warm = answer(sim, make_request("warm", prompt, max_tokens=3))
    assert warm.output == cold.output
    assert cold.num_cached == 0
    assert warm.num_cached == (length - 1) // 16 * 16


def test_a_b_a_keeps_a() -> None:
    """Guards against a cache that only works with the last prompt."""
    sim = Sim()
    a, b = letters(1, 100), letters(2, 100)
    assert answer(sim, make_request("1", a, max_tokens=2)).num_cached == 0
    assert answer(sim, make_request("2", b, max_tokens=2)).num_cached == 0
    assert answer(sim, make_request("3", a, max_tokens=2)).num_cached == 96


def test_the_second_turn_of_a_chat_reuses_the_answer() -> None:
    """Guards against recomputing generated tokens: all but a part of a block of the first turn is a hit."""
    sim = Sim()
    for length in range(40, 60):
        first = answer(sim, make_request("1", letters(length, length), max_tokens=37))
        said = (*first.prompt, *first.output)
        second = answer(sim, make_request("2", (*said, *letters(9, 20)), max_tokens=2))
        assert second.num_cached is not None
        assert second.num_cached >= len(said) - 16


def test_five_equal_prefixes_at_once_are_computed_once() -> None:
    """Guards against a team's common system prompt being computed by each of them."""
    sim = Sim(replace(LIMITS, max_num_batched_tokens=256))
    prefix = letters(1, 1300)
    requests = [make_request(f"r{i}", (*prefix, *letters(i + 2, 30)), max_tokens=1) for i in range(5)]
    sim.add(*requests)
    sim.run()
    for request in requests:
        assert tuple(request.output) == alone(request, 1)
    assert sim.runner.num_rows == 1296 + 5 * (1330 - 1296)
    assert sum(1330 - (r.num_cached or 0) for r in requests) == sim.runner.num_rows


def test_a_later_equal_prompt_joins_while_the_first_is_computed() -> None:
    """Guards against hits that exist only for prompts that have ended."""
    sim = Sim(replace(LIMITS, max_num_batched_tokens=64))
    first, second = (make_request(f"r{i}", letters(1, 640), max_tokens=1) for i in range(2))
    sim.add(first)
    sim.step()
    sim.add(second)
    sim.run()
    assert first.output == second.output
    assert sim.runner.num_rows == 624 + 2 * 16


def test_equal_tokens_after_unequal_ones_are_no_hit() -> None:
    """Guards against hits that compare a block and not what came before it."""
    sim = Sim()
    tail = letters(3, 64)
    answer(sim, make_request("1", (*letters(1, 16), *tail), max_tokens=1))
    assert answer(sim, make_request("2", (*letters(2, 16), *tail), max_tokens=1)).num_cached == 0


def test_salts_share_nothing() -> None:
    """Guards against a key learning from timing what another key asked."""
    sim = Sim()
    prompt = letters(1, 64)
    answer(sim, make_request("1", prompt, salt="anna", max_tokens=1))
    assert answer(sim, make_request("2", prompt, salt="ben", max_tokens=1)).num_cached == 0
    assert answer(sim, make_request("3", prompt, salt="anna", max_tokens=1)).num_cached == 48


def test_without_prefix_caching_only_the_choices_of_one_request_share() -> None:
    """Guards against `n` choices that prefill n times, and against a switch that does not switch."""
    sim = Sim(UNSHARED)
    prompt = letters(1, 100)
    choices = [make_request(f"x#{i}", prompt, group="x", max_tokens=2) for i in range(3)]
    sim.add(*choices)
    sim.run()
    assert [c.num_cached for c in choices] == [0, 96, 96]
    assert answer(sim, make_request("y", prompt, max_tokens=2)).num_cached == 0
    assert answer(sim, make_request("z#0", prompt, group="z", max_tokens=2)).num_cached == 0


def test_a_prompt_that_is_scored_takes_no_hits() -> None:
    """Guards against log-probabilities missing, or stale, where the cache was used."""
    sim = Sim(replace(LIMITS, max_num_batched_tokens=32))
    prompt = letters(1, 100)
    answer(sim, make_request("1", prompt, max_tokens=2))
    scored = answer(sim, make_request("2", prompt, max_tokens=2, prompt_logprobs=0))
    assert scored.num_cached == 0
    assert [e and e.token for e in scored.prompt_logprobs] == [None, *prompt[1:]]
    assert [e and e.logprob for e in scored.prompt_logprobs[1:]] == [-float(p) for p in range(1, 100)]


def test_equal_answers_side_by_side_keep_their_own_blocks() -> None:
    """Guards against a block written by two requests once both generate the same text."""
    sim = Sim()
    twins = [make_request(f"t{i}", letters(1, 20), max_tokens=60) for i in range(3)]
    sim.add(*twins)
    sim.run()
    assert all(tuple(twin.output) == alone(twin, 60) for twin in twins)
    assert answer(sim, make_request("next", (*twins[0].prompt, *twins[0].output, 97), max_tokens=1)).num_cached == 64


def test_replay_does_not_count_as_cached() -> None:
    """Guards against usage that calls a prompt cached because its own blocks survived a preemption."""
    sim = Sim(replace(LIMITS, max_num_batched_tokens=64))
    request = make_request("r", letters(1, 200), max_tokens=3)
    sim.add(request)
    sim.step()
    step = sim.schedule()
    assert step is not None
    sim.deliver(sim.scheduler.abort(step))
    sim.run()
    assert request.num_cached == 0
    assert sim.runner.num_rows < 2 * 200


def test_hits_on_a_step_that_failed_are_taken_back() -> None:
    """Guards against reading blocks that were never filled, and against usage that counts them as cached."""
    sim = Sim(replace(LIMITS, max_num_batched_tokens=64))
    first, second = (make_request(f"r{i}", (*letters(1, 64), *letters(i, 60)), max_tokens=3) for i in range(2))
    sim.add(first, second)
    step = sim.schedule()
    assert step is not None
    assert second.num_cached == 64
    sim.deliver(sim.scheduler.abort(step, end=[first]))
    sim.scheduler.check()
    assert sim.pool.num_cached == 0
    assert second.num_cached == 0
    sim.run()
    assert sim.finals == [first, second]
    assert tuple(second.output) == alone(second, 3)


def test_blocks_of_a_request_with_bad_logits_are_not_shared() -> None:
    """Guards against a NaN that lives on in the cache: the next equal request, and those beside, must succeed."""
    sim = Sim(replace(LIMITS, max_num_batched_tokens=64))
    prompt = letters(1, 100)
    answer(sim, make_request("before", (*prompt, *letters(2, 40)), max_tokens=1))
    bad = make_request("bad", (*prompt, *letters(3, 40)), max_tokens=30)
    beside = [make_request(f"beside{i}", (*prompt, *letters(4 + i, 40)), max_tokens=90) for i in range(2)]
    sim.add(bad, *beside)
    sim.run_until(lambda: len(bad.output) == 20)
    sim.runner.bad.add(bad)
    sim.step()
    assert bad.finish_reason == "error"
    assert sim.pool.num_cached == 0
    after = make_request("after", prompt, max_tokens=2)
    sim.add(after)
    sim.run()
    assert after.num_cached == 0
    assert tuple(after.output) == alone(after, 2)
    assert all(tuple(r.output) == alone(r, 90) for r in beside)
