"""engine/batch.py: a step laid flat."""

from __future__ import annotations

import numpy as np

from chairlift.engine.batch import build
from chairlift.engine.sampling_params import TokenLogprob
from chairlift.engine.step import Chunk, Step
from support.fake_model import fake_request


def test_slots_follow_the_block_table_from_any_start() -> None:
    """Fault: slots counted from the chunk's start, not from position 0, so that a chunk overwrites block 0."""
    request = fake_request("a", range(40))
    request.block_table.extend([7, 2, 5])
    arrays = build(Step((Chunk(request, 14, 20),), 0.0), 16).arrays
    expected = [7 * 16 + 14, 7 * 16 + 15, *range(2 * 16, 3 * 16), 5 * 16, 5 * 16 + 1]
    assert arrays.slots.tolist() == expected
    assert arrays.positions.tolist() == list(range(14, 34))
    assert arrays.block_tables.tolist() == [7, 2, 5]
    assert arrays.logit_rows.tolist() == [], "a chunk that does not reach the end samples nothing"


def test_two_requests_lie_side_by_side() -> None:
    """Fault: logit rows counted within the request instead of within the step."""
    first, second = fake_request("a", range(5)), fake_request("b", range(100, 103))
    first.block_table.append(1)
    second.block_table.append(0)
    second.output.append(9)
    second.num_computed = 3
    batch = build(Step((Chunk(first, 0, 5), Chunk(second, 3, 1)), 0.0), 16)
    arrays = batch.arrays
    assert arrays.tokens.tolist() == [0, 1, 2, 3, 4, 9]
    assert arrays.seq_starts.tolist() == [0, 5, 6]
    assert arrays.table_starts.tolist() == [0, 1, 2]
    assert arrays.logit_rows.tolist() == [4, 5]
    assert arrays.sample["index"].tolist() == [0, 1], "the random number is keyed by the output index"


def test_prompt_logprobs_ask_for_each_next_prompt_token_once() -> None:
    """Fault: a chunk border loses a position, or a replay after preemption reports positions twice."""
    request = fake_request("a", range(10, 20), prompt_logprobs=2)
    request.block_table.append(0)
    first = build(Step((Chunk(request, 0, 6),), 0.0), 16).arrays
    assert first.sample["target"].tolist() == [11, 12, 13, 14, 15, 16]
    request.prompt_logprobs[:] = [None] + [TokenLogprob(t, -1.0) for t in range(11, 17)]
    rest = build(Step((Chunk(request, 6, 4),), 0.0), 16).arrays
    assert rest.sample["target"].tolist() == [17, 18, 19, -1]
    assert rest.logit_rows.tolist() == [0, 1, 2, 3]
    replay = build(Step((Chunk(request, 0, 10),), 0.0), 16).arrays
    assert replay.sample["target"].tolist() == [17, 18, 19, -1]


def test_min_tokens_bans_every_end_until_reached() -> None:
    """Fault: min_tokens bans only the EOS token and the answer ends early by a stop token."""
    params = {"min_tokens": 1, "ignore_eos": False, "stop_token_ids": frozenset({65}), "logit_bias": {3: 1.5}}
    request = fake_request("a", [1], **params)
    request.block_table.append(0)
    step = Step((Chunk(request, 0, 1),), 0.0)
    arrays = build(step, 16).arrays
    bans = dict(zip(arrays.bias_ids.tolist(), arrays.bias_values.tolist(), strict=True))
    assert bans == {3: 1.5, 0: -np.inf, 65: -np.inf}
    request.output.append(7)
    arrays = build(Step((Chunk(request, 1, 1),), 0.0), 16).arrays
    assert arrays.bias_ids.tolist() == [3]


def test_penalties_see_prompt_and_output_with_counts() -> None:
    """Fault: after the first call new tokens are not counted, or prompt tokens count as output."""
    request = fake_request("a", [5, 5, 6], presence_penalty=1.0)
    assert dict(request.seen()) == {5: 0, 6: 0}
    request.output.extend([6, 9])
    assert dict(request.seen()) == {5: 0, 6: 1, 9: 1}
    request.output.append(9)
    assert dict(request.seen()) == {5: 0, 6: 1, 9: 2}


def test_every_knob_arrives_in_its_field_of_the_record() -> None:
    """Fault: the packed record and SAMPLE_DTYPE disagree, and one knob works as another."""
    knobs: dict[str, float] = {"temperature": 0.5, "top_p": 0.75, "min_p": 0.125, "repetition_penalty": 1.5}
    knobs |= {"presence_penalty": -0.25, "frequency_penalty": 2.0, "top_k": 7, "choice": 3, "seed": 2**64 - 2}
    request = fake_request("a", [1, 2], **knobs, logprobs=4)
    request.block_table.append(0)
    request.output.append(9)
    record = build(Step((Chunk(request, 2, 1),), 0.0), 16).arrays.sample[0]
    expected = {**knobs, "num_top": 4, "target": -1, "index": 1, "reserved": 0}
    assert {name: record[name].item() for name in record.dtype.names} == expected
