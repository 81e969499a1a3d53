"""The native core against the reference, and against itself bit for bit, at every ISA level of this machine."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError, DoesNotFit, ModelError
from chairlift.kernels.backend import BLOCK_SIZE, Backend, KVDtype, KVLayout, LoadSpec
from chairlift.kernels.native import NativeBackend, available_isas, best_isa
from chairlift.kernels.ops import F32
from chairlift.kernels.reference import ReferenceBackend, to_bf16
from chairlift.kernels.rounding import ActivationBits
from chairlift.models import registry
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.spec import ModelSpec, RawTensor
from conftest import TinyGGUF
from kernels.test_record import SPEC
from support.step_arrays import Part, make_step
from support.tiny_native import MAX_ROWS, NUM_BLOCKS, in_chunks, load, logits_of, tokens_of, whole

ISAS = available_isas()
ARCHITECTURES = ["llama", "qwen2", "qwen3"]
WEIGHT_TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"]
MIXED_TYPES = {
    "attn_v.weight": "Q6_K",
    "attn_k.weight": "Q4_1",
    "ffn_up": "Q5_0",
    "attn_output": "Q8_0",
    "token_embd": "Q6_K",
}
"""Beside Q4_K, as llama-quantize mixes them: Q and K of one layout, V and up of others."""
KV_DTYPES: list[KVDtype] = ["bf16", "int8"]
LONG_BLOCKS = 150
"""Enough for positions beyond four of the attention's splits (512 each)."""


def row_errors(got: F32, expected: F32) -> F32:
    """Largest error of each row over the largest logit."""
    errors: F32 = np.abs(got - expected).max(axis=1) / np.abs(expected).max()
    return errors


def check_close(got: F32, expected: F32) -> None:
    """Equal to float rounding, until a lane lies so near a tie that it rounds the other way: by a level of that lane.

    A level is 3e-5 of the largest of 32 activations in 16 bits and 4e-3 of their range in 8, 4e-3 of a query, key,
    value or softmax weight in bf16, 8e-3 of a head's largest in int8; later rows of the sequence see what it moves.
    The median row of short sequences is free of all but the first.
    """
    errors = row_errors(got, expected)
    assert np.quantile(errors, 0.1) < 5e-5
    assert np.median(errors) < 2e-4
    assert errors.max() < 3e-2


def short_parts() -> list[Part]:
    """Ten sequences of four tokens and one that crosses into a second block, all in one step, blocks out of order."""
    short = [Part(tokens_of(i, 4), 0, [11 - i], 4) for i in range(10)]
    return [*short, Part(tokens_of(10, 20), 0, [1, 0], 20)]


@pytest.fixture(scope="module", params=ISAS)
def backend(request: pytest.FixtureRequest) -> NativeBackend:
    return NativeBackend(request.param)


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_native_equals_the_reference(tiny_gguf: TinyGGUF, architecture: str, weight_type: str) -> None:
    """A fused op, a packed layout or a cache that computes something else than the op list says, at any ISA level."""
    wide = weight_type.endswith("_K")  # in whole blocks of 256: more lanes near a tie, and slower
    path = tiny_gguf(architecture, weight_type=weight_type, layers=1 if wide else 2)
    parts = short_parts()
    for kv in KV_DTYPES[:1] if wide else KV_DTYPES:
        expected = logits_of(load(ReferenceBackend(), path, kv), parts)
        for isa in ISAS:
            check_close(logits_of(load(NativeBackend(isa, threads=2), path, kv), parts), expected)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 2, "head_dim": 8},
        {"heads": 2, "kv_heads": 1, "head_dim": 24},
        {"heads": 3, "kv_heads": 3, "head_dim": 40},
        {"heads": 1, "kv_heads": 1, "head_dim": 256},
        {"heads": 40, "kv_heads": 1, "head_dim": 16},
        {"heads": 9, "kv_heads": 3, "head_dim": 64, "hidden": 96, "ffn": 160},
    ],
)
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_head_shapes(tiny_gguf: TinyGGUF, shape: dict[str, int], kv: KVDtype) -> None:
    """Heads that end inside a vector, or groups of more query heads than one attention task takes."""
    path = tiny_gguf("qwen3", layers=1, **shape)
    parts = short_parts()
    expected = logits_of(load(ReferenceBackend(), path, kv), parts)
    for isa in ISAS:
        check_close(logits_of(load(NativeBackend(isa, threads=2), path, kv), parts), expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mixed_files(tiny_gguf: TinyGGUF, architecture: str) -> None:
    """Q, K, V or gate and up of several types stacked as if of one, or a tied table that is read in another layout."""
    path = tiny_gguf(architecture, tied=True, layers=1, weight_type="Q4_K", types=tuple(MIXED_TYPES.items()))
    parts = short_parts()
    expected = logits_of(load(ReferenceBackend(), path), parts)
    for isa in ISAS:
        check_close(logits_of(load(NativeBackend(isa, threads=2), path), parts), expected)


@pytest.mark.parametrize("weight_type", ["Q6_K", "Q5_1"])
def test_rows_wider_than_a_slice(tiny_gguf: TinyGGUF, weight_type: str) -> None:
    """Rows are rounded 512 lanes at a time: a later slice's scales or (half) sums put elsewhere."""
    path = tiny_gguf("llama", layers=1, weight_type=weight_type, ffn=1280)
    parts = short_parts()
    expected = logits_of(load(ReferenceBackend(), path), parts)
    for isa in ISAS:
        check_close(logits_of(load(NativeBackend(isa, threads=2), path), parts), expected)


def test_rope_scaling_and_tied_weights(tiny_gguf: TinyGGUF) -> None:
    """Frequency factors left out of the compiled rotation, or a tied head packed twice."""
    path = tiny_gguf("llama", rope_freqs=True, tied=True, weight_type="Q8_0")
    parts = short_parts()
    model = load(NativeBackend(threads=2), path)
    check_close(logits_of(model, parts), logits_of(load(ReferenceBackend(), path), parts))
    untied = load(NativeBackend(threads=2), tiny_gguf("llama", rope_freqs=True, weight_type="Q8_0"))
    assert untied.weight_bytes > model.weight_bytes


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(
    ("architecture", "weight_type"),
    [("llama", "Q4_1"), ("qwen2", "Q8_0"), ("qwen3", "BF16"), ("llama", "Q5_0"), ("qwen2", "Q5_K"), ("qwen3", "Q6_K")],
)
def test_company_chunks_and_placement_change_no_bit(
    tiny_gguf: TinyGGUF, backend: NativeBackend, architecture: str, weight_type: str, kv: KVDtype
) -> None:
    """A sum whose order follows the batch, a row that reads a neighbour's block, a chunk that reads unrounded keys."""
    model = load(backend, tiny_gguf(architecture, weight_type=weight_type), kv)
    a, b, c = tokens_of(1, 37), tokens_of(2, 20), tokens_of(3, 1)
    alone = [whole(model, a, [0, 1, 2]), whole(model, b, [3, 4]), whole(model, c, [5])]

    first = [Part(a[:16], 0, [11], 16), Part(b[:7], 0, [2, 9], 7)]
    second = [Part(b[7:], 7, [2, 9], 13), Part(c, 0, [6], 1), Part(a[16:36], 16, [11, 0, 7], 20)]
    third = [Part(a[36:], 36, [11, 0, 7], 1)]
    one, two, three = (logits_of(model, parts) for parts in (first, second, third))

    assert (np.concatenate([one[:16], two[14:], three]) == alone[0]).all()
    assert (np.concatenate([one[16:], two[:13]]) == alone[1]).all()
    assert (two[13:14] == alone[2]).all()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_same_bits(tiny_gguf: TinyGGUF, data: st.DataObject) -> None:
    """Laws that hold for the chunk sizes someone thought of, and not for others."""
    isa, kv = data.draw(st.sampled_from(ISAS)), data.draw(st.sampled_from(KV_DTYPES))
    model = load(NativeBackend(isa, threads=2), tiny_gguf("qwen3", weight_type="Q4_0"), kv)
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    sequences = [tokens_of(seed, length) for seed, length in enumerate(lengths)]
    blocks = data.draw(st.permutations(range(NUM_BLOCKS)))
    tables = [blocks[4 * i : 4 * i + 4][: -(-len(s) // BLOCK_SIZE)] for i, s in enumerate(sequences)]
    alone = [whole(model, s, range(len(t))) for s, t in zip(sequences, tables, strict=True)]

    done = [0] * len(sequences)
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        unfinished = [i for i, s in enumerate(sequences) if done[i] < len(s)]
        parts, owners = [], data.draw(st.permutations(unfinished))
        for i in owners:
            count = data.draw(st.integers(1, min(MAX_ROWS // 3, len(sequences[i]) - done[i])))
            parts.append(Part(sequences[i][done[i] : done[i] + count], done[i], tables[i], count))
        logits = logits_of(model, parts)
        for i, part in zip(owners, parts, strict=True):
            count = len(part.tokens)
            assert (logits[:count] == alone[i][done[i] : done[i] + count]).all()
            logits = logits[count:]
            done[i] += count


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_long_contexts(tiny_gguf: TinyGGUF, backend: NativeBackend, kv: KVDtype) -> None:
    """Splits of a long context or blocks of rows that depend on the chunk or the threads, or are joined wrongly."""
    shape = {"layers": 1, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 32, "context": 4096}
    path = tiny_gguf("llama", weight_type="Q4_1", **shape)
    model = load(backend, path, kv, num_blocks=LONG_BLOCKS, rows=2300)
    tokens = tokens_of(5, 2200)
    table = list(range(138))
    at_once = whole(model, tokens, table)
    assert (in_chunks(model, tokens, table, [1000, 23, 1, 1, 999, 25, 151]) == at_once).all()
    single = load(NativeBackend(backend.isa), path, kv, num_blocks=LONG_BLOCKS, rows=2300)
    assert (whole(single, tokens, table[::-1]) == at_once).all()

    oracle = load(ReferenceBackend(), path, kv, num_blocks=LONG_BLOCKS, rows=2300)
    wanted = 2200 - 1020
    logits_of(oracle, [Part(tokens[:1020], 0, table[:64])])
    check_close(at_once[1020:], logits_of(oracle, [Part(tokens[1020:], 1020, table, wanted)]))


@pytest.mark.parametrize("weight_type", ["Q4_1", "F32"])
def test_threads_change_no_bit(tiny_gguf: TinyGGUF, backend: NativeBackend, weight_type: str) -> None:
    """Work that is cut by the number of threads and summed by the cut."""
    path = tiny_gguf("llama", weight_type=weight_type, hidden=256, heads=16, kv_heads=4, ffn=544)
    tokens, table = tokens_of(9, 200), [3, 0, 2, 1, *range(4, 13)]
    on_one, on_two, on_five = (
        load(NativeBackend(backend.isa, threads=threads), path, num_blocks=13, rows=200) for threads in (1, 2, 5)
    )
    one, two, five = (whole(model, tokens, table) for model in (on_one, on_two, on_five))
    assert (one == two).all()
    assert (one == five).all()
    assert (in_chunks(on_five, tokens, table, [60, 1, 99, 40]) == one).all()


@pytest.mark.parametrize("bits", [8, 16])
def test_rounding_is_its_definition(backend: NativeBackend, bits: ActivationBits) -> None:
    """A scale, offset or tie made otherwise than the specification does: rows through the unit matrix."""
    width = 64
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, width)).astype(np.float32)
    x[22:] = (x[22:] + rng.uniform(-3, 3, (42, 1))) * 10 ** rng.uniform(-20, 20, (42, 1))
    x[1], x[2], x[3], x[4] = x[1] + 5, x[2] - 5, 0, 1e-45
    x[5, :2], x[6, :2], x[7] = [3e38, -3e38], [3.4e38, 3.3e38], 1e-37
    x[8, 3], x[9, 3], x[10, 3] = np.inf, -np.inf, np.nan
    x[11], x[12], x[13, :2], x[14] = x[11] * 1e-36, np.round(x[12] * 100) / 2, [127, -127], -0.0
    x[15], x[15, ::32] = np.arange(width) + 0.5, 254
    x[16], x[17], x[18], x[19], x[20] = -x[15], x[17] * 1e30, x[18] * 1e-30, 7e-37, x[20] * 1e-34
    unit = np.zeros((width, width // 32, 34), np.uint8)
    unit[:, :, :2] = np.array([1], np.float16).view(np.uint8)
    unit[np.arange(width), np.arange(width) // 32, 2 + np.arange(width) % 32] = 1
    tensors = {
        "x": RawTensor("x", (64, width), "F32", x.view(np.uint8).reshape(-1)),
        "unit": RawTensor("ffn_up.weight", (width, width), "Q8_0", unit.reshape(-1)),
        "head": RawTensor("head", (64, width), "F32", np.eye(64, dtype=np.float32).view(np.uint8).reshape(-1)),
    }

    def forward(ops: Any, spec: ModelSpec, weights: Any) -> Any:
        return ops.logits(ops.linear(ops.embed(weights["x"]), weights["unit"]), weights["head"])

    spec = dataclasses.replace(SPEC, vocab_size=64, hidden_size=width)
    layout = KVLayout(NUM_BLOCKS, BLOCK_SIZE)

    def through(made: Backend) -> F32:
        model = made.load(LoadSpec(spec, forward, tensors, layout, 64))
        return whole(model, range(64), range(4))

    rounded = through(NativeBackend(backend.isa, activation_bits=bits))
    assert np.array_equal(rounded, through(ReferenceBackend(bits)), equal_nan=True)
    assert np.isfinite(rounded).any(axis=1).sum() > 50


def test_bf16_rounding_is_its_definition(backend: NativeBackend) -> None:
    """A tie rounded up, or lanes beyond the first slice of a row put elsewhere: rows through the unit matrix."""
    width = 1100
    x = np.random.default_rng(0).standard_normal((64, width)).astype(np.float32)
    x[1] = 1 + np.arange(width) / 256  # every other one a tie
    x[2], x[3] = x[2] * 1e35, x[3] * 1e-35
    x[4, 30:40] = 3.4028e38  # becomes infinite
    unit = (np.eye(width, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    head = np.zeros((64, width), np.float32)
    head[np.arange(64), np.arange(64) * 17] = 1
    tensors = {
        "x": RawTensor("x", x.shape, "F32", x.view(np.uint8).reshape(-1)),
        "unit": RawTensor("ffn_up.weight", unit.shape, "BF16", unit.view(np.uint8).reshape(-1)),
        "head": RawTensor("head", head.shape, "F32", head.view(np.uint8).reshape(-1)),
    }

    def forward(ops: Any, spec: ModelSpec, weights: Any) -> Any:
        return ops.logits(ops.linear(ops.embed(weights["x"]), weights["unit"]), weights["head"])

    spec = dataclasses.replace(SPEC, vocab_size=64, hidden_size=width)
    model = backend.load(LoadSpec(spec, forward, tensors, KVLayout(NUM_BLOCKS, BLOCK_SIZE), 64))
    rounded = whole(model, range(64), range(4))
    finite = np.arange(64) != 4
    assert (rounded[finite] == to_bf16(x)[finite][:, np.arange(64) * 17]).all()
    assert not np.isfinite(rounded[4]).any()


def test_callers_from_several_threads_take_turns(tiny_gguf: TinyGGUF, backend: NativeBackend) -> None:
    """Two steps in one set of activations: a step frees the GIL, so nothing else keeps a second caller out."""
    model = load(backend, tiny_gguf())
    sequences = [tokens_of(i, 40) for i in range(4)]
    expected = [whole(model, tokens, [0, 1, 2]) for tokens in sequences]

    def serve(i: int) -> list[bool]:
        table = [3 * i, 3 * i + 1, 3 * i + 2]
        return [bool((whole(model, sequences[i], table) == expected[i]).all()) for _ in range(10)]

    with ThreadPoolExecutor(4) as callers:
        assert all(all(equal) for equal in callers.map(serve, range(4)))


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_what_is_not_finite_stays_with_its_owner(tiny_gguf: TinyGGUF, backend: NativeBackend, kv: KVDtype) -> None:
    """A NaN that a neighbour or the next owner of a block meets: masked lanes must not be multiplied by zero."""
    path = tiny_gguf("llama", layers=1)
    with open_checkpoint(path) as file:
        spec = file.spec
        tensors = dict(registry.model_tensors(spec, file.tensors))
        table = tensors["token_embd.weight"]
        rows = table.data.view(np.float32).reshape(table.shape).copy()
        rows[7] = np.nan
        rows[8, 3] = np.inf
        tensors["token_embd.weight"] = dataclasses.replace(table, data=rows.reshape(-1).view(np.uint8))
        forward = registry.forward_for("llama")
        model = backend.load(LoadSpec(spec, forward, tensors, KVLayout(4, BLOCK_SIZE, kv), 64))
    tokens = [1, 2, 3, 4, 5]
    clean = whole(model, tokens, [0])
    # Also in chunks that end at an odd number of positions: the last one's neighbour in the block is then stale.
    for poison, sizes in itertools.product((7, 8), ([5], [1] * 5)):
        result = model.run(make_step([Part([poison] * 16, 0, [1], 1), Part(tokens, 0, [0], 5)]))
        assert result.finite.tolist() == [False] + [True] * 5
        assert result.logits is not None
        assert (result.logits[1:] == clean).all()
        assert (in_chunks(model, tokens, [1], sizes) == clean).all()


def test_a_mid_prompt_step_needs_no_logits(tiny_gguf: TinyGGUF, backend: NativeBackend) -> None:
    """Empty arrays refused, or a chunk that must sample something."""
    model = load(backend, tiny_gguf())
    tokens = tokens_of(4, 20)
    expected = whole(model, tokens, [0, 1])
    nothing = model.run(make_step([Part(tokens[:16], 0, [2], 0)]))
    assert (len(nothing.tokens), len(nothing.finite)) == (0, 0)
    assert (logits_of(model, [Part(tokens[16:], 16, [2, 3], 4)]) == expected[16:]).all()


@pytest.mark.parametrize("rows", [[0], [59], [0, 1, 2], [3, 17, 18, 40], [*range(0, 60, 2)], [*range(1, 60)]], ids=len)
def test_which_rows_need_logits_changes_no_bit(tiny_gguf: TinyGGUF, backend: NativeBackend, rows: list[int]) -> None:
    """Rows that go on beyond the last attention mixed up with those that do not, or with their residual."""
    path = tiny_gguf(layers=1) if rows == [59] else tiny_gguf()
    all_rows = make_step([Part(tokens_of(4, 60), 0, [0, 1, 2, 3], 60)])
    some = make_step([Part(tokens_of(4, 60), 0, [4, 5, 6, 7], len(rows))])
    some = dataclasses.replace(some, logit_rows=np.array(rows, np.int32))
    model = load(backend, path)
    expected, got = model.run(all_rows).logits, model.run(some).logits
    assert expected is not None
    assert got is not None
    assert (got == expected[rows]).all()


def test_more_logit_rows_than_are_sampled_together(tiny_gguf: TinyGGUF, backend: NativeBackend) -> None:
    """Results of the second 32 rows written over the first, or raw logits given back unasked."""
    model = load(backend, tiny_gguf())
    step = make_step([Part(tokens_of(4, 60), 0, [0, 1, 2, 3], 60)], num_top=3)
    result = model.run(step)
    assert result.logits is not None
    assert (result.tokens == result.logits.argmax(axis=1)).all()
    assert (result.top_ids[:, 0] == result.tokens).all()
    quiet = model.run(dataclasses.replace(step, want_logits=False))
    assert quiet.logits is None
    assert (quiet.tokens == result.tokens).all()
    assert (quiet.logprobs == result.logprobs).all()


def test_sampling_fields_reach_their_rows(tiny_gguf: TinyGGUF, backend: NativeBackend) -> None:
    """Rows mixed up between sampling parameters: someone else's bias, penalty, target or alternatives."""
    path = tiny_gguf()
    step = make_step([Part([1, 2, 3], 0, [0], 3), Part([4], 0, [1])], num_top=2)
    step.sample["target"] = [9, -1, -1, -1]
    step.sample["repetition_penalty"] = [1, 1, 1.7, 1]
    step.sample["temperature"] = [0, 0, 0, 0.8]
    step.sample["seed"] = 2**63 + 5
    step = dataclasses.replace(
        step,
        bias_starts=np.array([0, 0, 1, 1, 2], np.int32),
        bias_ids=np.array([77, 3], np.int32),
        bias_values=np.array([100, -np.inf], np.float32),
        seen_starts=np.array([0, 0, 0, 3, 3], np.int32),
        seen_ids=np.array([5, 6, 9], np.int32),
        seen_counts=np.array([0, 1, 2], np.int32),
    )
    expected, got = load(ReferenceBackend(), path).run(step), load(backend, path).run(step)
    assert got.tokens.tolist() == expected.tokens.tolist()
    assert got.tokens[:2].tolist() == [9, 77]
    assert (got.top_ids == expected.top_ids).all()
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-4)
    np.testing.assert_allclose(got.top_logprobs, expected.top_logprobs, atol=2e-4)


def test_kv_bytes_are_the_pool(tiny_gguf: TinyGGUF) -> None:
    """A pool that differs from the plan's: slots x (K + V) x layers x kv heads x head size, int8 with scales."""
    values = NUM_BLOCKS * BLOCK_SIZE * 2 * 2 * 2 * 16
    assert load(NativeBackend(threads=2), tiny_gguf(), "bf16").kv_bytes == 2 * values
    assert load(NativeBackend(threads=2), tiny_gguf(), "int8").kv_bytes == values + values // 16 * 4


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_packed_bytes_stay_near_the_file(tiny_gguf: TinyGGUF, weight_type: str) -> None:
    """A layout that inflates the weights: what the plan counts must hold on the machine."""
    path = tiny_gguf("llama", weight_type=weight_type, hidden=256, head_dim=16, heads=16, kv_heads=4, ffn=512)
    with open_checkpoint(path) as file:
        file_bytes = sum(len(tensor.data) for tensor in file.tensors.values())
    assert load(NativeBackend(threads=2), path).weight_bytes <= 1.15 * file_bytes


def test_isa_names() -> None:
    """A level that this machine lacks must be refused before its first instruction."""
    assert ISAS[0] == "portable"
    is_slow = ISAS[-1] == "avx512_bf16" and "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    assert best_isa() == ("avx512" if is_slow else ISAS[-1])
    assert NativeBackend(threads=2).isa == best_isa()
    with pytest.raises(ConfigError, match="avx9000"):
        NativeBackend("avx9000")


def test_models_that_the_core_does_not_take(tiny_gguf: TinyGGUF) -> None:
    """A shape that the kernels do not cover must be an error with the reason, not a wrong answer."""
    with pytest.raises(ModelError, match="value heads"):
        load(NativeBackend(threads=2), tiny_gguf("llama", value_dim=32))
    with pytest.raises(ModelError, match="multiple of 8"):
        load(NativeBackend(threads=2), tiny_gguf("qwen3", head_dim=12))


def test_a_pool_beyond_the_address_space_is_refused(tiny_gguf: TinyGGUF) -> None:
    """A failed allocation that ends the process instead of naming what was asked."""
    with pytest.raises(DoesNotFit, match="refuses to map"):
        load(NativeBackend(threads=2), tiny_gguf("llama", head_dim=256, kv_heads=4), num_blocks=2**27 - 1)
