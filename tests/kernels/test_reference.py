"""The reference backend: each op against a plainer twin, the laws bit for bit, and steps that are malformed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import EngineError
from chairlift.kernels.backend import BLOCK_SIZE, KVDtype, KVLayout, LoadSpec
from chairlift.kernels.ops import F32, StepArrays
from chairlift.kernels.reference import (
    Cache,
    ReferenceBackend,
    ReferenceModel,
    ReferenceOps,
    Scores,
    attention,
    load_weight,
    to_bf16,
)
from chairlift.kernels.rounding import ActivationBits
from chairlift.kernels.sampling import log_softmax
from chairlift.models import quant, registry
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.spec import ModelSpec, RawTensor, RopeSpec
from conftest import TinyGGUF
from support import tiny_gguf as tiny
from support.step_arrays import Part, make_step
from support.weight_encoders import ENCODERS

ARCHITECTURES = ["llama", "qwen2", "qwen3"]
WEIGHT_TYPES = ["F32", "BF16", "Q8_0", "Q4_1", "Q5_0", "Q5_K", "Q6_K"]
KV_DTYPES: list[KVDtype] = ["bf16", "int8"]
NUM_BLOCKS = 12
MAX_ROWS = 64


def load(tiny_gguf: TinyGGUF, architecture: str = "llama", kv: KVDtype = "bf16", **shape: Any) -> ReferenceModel:
    with open_checkpoint(tiny_gguf(architecture, **shape)) as file:
        spec = file.spec
        tensors = registry.model_tensors(spec, file.tensors)
        layout = KVLayout(NUM_BLOCKS, BLOCK_SIZE, kv)
        forward = registry.forward_for(architecture)
        return ReferenceBackend().load(LoadSpec(spec, forward, tensors, layout, MAX_ROWS))


def tokens_of(seed: int, count: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, count)]


def logits_of(model: ReferenceModel, parts: Sequence[Part]) -> F32:
    logits = model.run(make_step(parts)).logits
    assert logits is not None
    return logits


def whole(model: ReferenceModel, tokens: Sequence[int], table: Sequence[int]) -> F32:
    """Logits of every row of one sequence, computed alone in one step."""
    return logits_of(model, [Part(tokens, 0, table, len(tokens))])


@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_answer_does_not_depend_on_company_chunks_or_placement(
    tiny_gguf: TinyGGUF, architecture: str, weight_type: str, kv: KVDtype
) -> None:
    """A sum whose order follows the batch, a row that reads a neighbour's block, a chunk that reads unrounded keys."""
    model = load(tiny_gguf, architecture, kv, weight_type=weight_type)
    a, b, c = tokens_of(1, 37), tokens_of(2, 20), tokens_of(3, 1)
    alone = [whole(model, a, [0, 1, 2]), whole(model, b, [3, 4]), whole(model, c, [5])]

    first = [Part(a[:16], 0, [11], 16), Part(b[:7], 0, [2, 9], 7)]
    second = [Part(b[7:], 7, [2, 9], 13), Part(c, 0, [6], 1), Part(a[16:36], 16, [11, 0, 7], 20)]
    third = [Part(a[36:], 36, [11, 0, 7], 1)]
    one, two, three = (logits_of(model, parts) for parts in (first, second, third))

    assert (np.concatenate([one[:16], two[14:], three]) == alone[0]).all()
    assert (np.concatenate([one[16:], two[:13]]) == alone[1]).all()
    assert (two[13:14] == alone[2]).all()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_same_bits(tiny_gguf: TinyGGUF, data: st.DataObject) -> None:
    """Laws that hold for the chunk sizes someone thought of, and not for others."""
    model = load(tiny_gguf, "qwen3", data.draw(st.sampled_from(KV_DTYPES)), weight_type="Q4_0")
    sequences = [
        tokens_of(seed, length)
        for seed, length in enumerate(data.draw(st.lists(st.integers(1, 40), max_size=3, min_size=1)))
    ]
    blocks = data.draw(st.permutations(range(NUM_BLOCKS)))
    tables = [blocks[4 * i : 4 * i + 4][: -(-len(s) // BLOCK_SIZE)] for i, s in enumerate(sequences)]
    alone = [whole(model, s, range(len(t))) for s, t in zip(sequences, tables, strict=True)]

    done = [0] * len(sequences)
    seen: list[list[F32]] = [[] for _ in sequences]
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        parts, owners = [], []
        for i in data.draw(st.permutations([i for i, s in enumerate(sequences) if done[i] < len(s)])):
            count = data.draw(st.integers(1, min(MAX_ROWS // 3, len(sequences[i]) - done[i])))
            parts.append(Part(sequences[i][done[i] : done[i] + count], done[i], tables[i], count))
            owners.append(i)
            done[i] += count
        logits = logits_of(model, parts)
        for i, part in zip(owners, parts, strict=True):
            seen[i].append(logits[: len(part.tokens)])
            logits = logits[len(part.tokens) :]
    for got, expected in zip(seen, alone, strict=True):
        assert (np.concatenate(got) == expected).all()


def test_sequences_may_share_blocks(tiny_gguf: TinyGGUF) -> None:
    """A prefix hit that differs from computing the prefix: shared blocks must read as one's own."""
    model = load(tiny_gguf, weight_type="Q8_0")
    prefix, a, b = tokens_of(1, 32), tokens_of(2, 5), tokens_of(3, 9)
    alone = [whole(model, prefix + tail, [0, 1, 2])[32:] for tail in (a, b)]
    logits_of(model, [Part(prefix, 0, [7, 4])])
    shared = logits_of(model, [Part(a, 32, [7, 4, 5], len(a)), Part(b, 32, [7, 4, 8], len(b))])
    assert (shared == np.concatenate(alone)).all()


def test_later_tokens_are_not_seen(tiny_gguf: TinyGGUF) -> None:
    """Attention past a row's own position: fine in decode, wrong in every prompt."""
    model = load(tiny_gguf)
    tokens = tokens_of(1, 30)
    changed = [*tokens[:20], *tokens_of(2, 10)]
    before, after = whole(model, tokens, [0, 1]), whole(model, changed, [2, 3])
    assert (before[:20] == after[:20]).all()
    assert (before[20:] != after[20:]).any(axis=1).all()


def test_a_freed_block_is_as_good_as_new(tiny_gguf: TinyGGUF) -> None:
    """Values left by a former owner that leak into a partly filled block."""
    model = load(tiny_gguf, kv="int8")
    fresh = whole(model, tokens_of(1, 5), [3])
    whole(model, tokens_of(2, 48), [3, 4, 5])
    assert (whole(model, tokens_of(1, 5), [3]) == fresh).all()


def test_tied_weights_are_loaded_once(tiny_gguf: TinyGGUF) -> None:
    """A tied head decoded twice: a fifth of a small model's memory for nothing."""
    tied, untied = load(tiny_gguf, tied=True), load(tiny_gguf)
    assert untied.weight_bytes - tied.weight_bytes == 271 * 64 * 4
    assert np.isfinite(whole(tied, [1, 2, 3], [0])).all()


def test_kv_bytes_are_the_pool(tiny_gguf: TinyGGUF) -> None:
    """A pool that differs from what cost.py says: slots x (K + V) x layers x kv heads x head size, int8 with scales."""
    values = NUM_BLOCKS * BLOCK_SIZE * 2 * 2 * 2 * 16
    assert load(tiny_gguf, kv="bf16").kv_bytes == 2 * values
    assert load(tiny_gguf, kv="int8").kv_bytes == values + values // 16 * 4


def test_results_are_by_logit_row(tiny_gguf: TinyGGUF) -> None:
    """Rows mixed up between sampling parameters: someone else's temperature, target or alternatives."""
    model = load(tiny_gguf)
    step = make_step([Part([1, 2, 3], 0, [0], 3), Part([4], 0, [1])])
    step.sample["num_top"] = [2, -1, 0, 3]
    step.sample["target"] = [9, -1, -1, -1]
    starts = np.array([0, 0, 1, 1, 1], np.int32)
    step = dataclasses.replace(
        step, bias_starts=starts, bias_ids=np.array([77], np.int32), bias_values=np.array([100], np.float32)
    )
    result = model.run(step)
    assert result.logits is not None
    assert result.tokens.tolist() == [9, 77, result.logits[2].argmax(), result.logits[3].argmax()]
    assert (result.top_ids >= 0).sum(axis=1).tolist() == [2, 0, 0, 3]
    assert result.logprobs[0] == log_softmax(result.logits[0])[9]
    assert result.finite.all()
    assert model.run(dataclasses.replace(step, want_logits=False)).logits is None


def test_a_step_may_need_no_logits(tiny_gguf: TinyGGUF) -> None:
    """A chunk in the middle of a prompt: no row samples."""
    model = load(tiny_gguf, weight_type="Q4_1")
    assert len(model.run(make_step([Part([1, 2], 0, [0], 0)])).tokens) == 0
    model = load(tiny_gguf, weight_type="F32")
    assert len(model.run(make_step([Part([1, 2], 0, [0], 0)])).tokens) == 0


def test_numbers_out_of_range_cost_their_own_row_only(tiny_gguf: TinyGGUF) -> None:
    """An infinity that spreads to a neighbour, or that stays unnoticed."""
    with open_checkpoint(tiny_gguf("llama")) as file:
        spec = file.spec
        tensors = registry.model_tensors(spec, file.tensors)
        table = quant.dequantise(tensors["token_embd.weight"]).copy()
        table[7] = np.nan
        tensors["token_embd.weight"] = RawTensor(
            "token_embd.weight", table.shape, "F32", table.view(np.uint8).reshape(-1)
        )
        for kv in KV_DTYPES:
            layout = KVLayout(NUM_BLOCKS, BLOCK_SIZE, kv)
            model = ReferenceBackend().load(LoadSpec(spec, registry.forward_for("llama"), tensors, layout, 8))
            result = model.run(make_step([Part([1, 2], 0, [0], 2), Part([7, 3], 0, [1], 2), Part([3], 0, [2])]))
            assert result.finite.tolist() == [True, True, False, False, True]


# ---- ops ----


def ops_for(positions: Sequence[int], spec: ModelSpec) -> ReferenceOps:
    step = make_step([Part([0], p, range(p // BLOCK_SIZE + 1)) for p in positions])
    return ReferenceOps(spec, KVLayout(NUM_BLOCKS), [], step)


def spec_of(tiny_gguf: TinyGGUF) -> ModelSpec:
    with open_checkpoint(tiny_gguf()) as file:
        return file.spec


def raw(array: F32, type_name: str) -> RawTensor:
    data = np.frombuffer(ENCODERS[type_name](array), np.uint8)
    return RawTensor("w", array.shape, type_name, data)


def held(tensor: RawTensor) -> F32:
    """The weights with scales of 16 bits."""
    numbers = quant.decode(tensor)
    return numbers.with_half_scales().dequantise() if isinstance(numbers, quant.Quantised) else numbers


def random(shape: tuple[int, ...], seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("weight_type", tiny.WEIGHT_TYPES)
def test_linear_is_the_matrix_product(tiny_gguf: TinyGGUF, weight_type: str, bits: ActivationBits) -> None:
    """A scale, zero point or offset applied to the wrong block: against float64 on the dequantised numbers."""
    tensor = dataclasses.replace(raw(random((24, 256)), weight_type), name="blk.0.ffn_up.weight")
    x, bias = random((5, 256), 1) * np.float32(3), random((24,), 2)
    seen = x
    if weight_type.startswith("Q"):
        q, scale = quant.quantise_rows(x, bits)
        seen = (q.reshape(5, 8, 32) * scale[:, :, None]).reshape(5, 256)
    elif weight_type == "BF16":
        seen = to_bf16(x)
    exact = seen.astype(np.float64) @ held(tensor).astype(np.float64).T + bias
    got = ops_for([0], spec_of(tiny_gguf)).linear(x, load_weight(tensor, bits), load_weight(raw(bias, "F32")))
    assert got.dtype == np.float32
    assert np.abs(got - exact).max() < 1e-6 * np.abs(exact).max()


@pytest.mark.parametrize("weight_type", tiny.WEIGHT_TYPES)
def test_embedding_is_the_dequantised_row(tiny_gguf: TinyGGUF, weight_type: str) -> None:
    """An embedding read with a transposed or shifted index."""
    tensor = raw(random((40, 256)), weight_type)
    step = make_step([Part([5, 0, 39, 5], 0, [0])])
    ops = ReferenceOps(spec_of(tiny_gguf), KVLayout(NUM_BLOCKS), [], step)
    assert (ops.embed(load_weight(tensor)) == held(tensor)[[5, 0, 39, 5]]).all()


def test_rms_norm_of_rows_and_of_heads(tiny_gguf: TinyGGUF) -> None:
    """A norm over the whole row where each head has its own (Qwen3), or an eps outside the root."""
    x, gain = random((3, 64)), random((16,), 1)
    got = ops_for([0], spec_of(tiny_gguf)).rms_norm(x, load_weight(raw(gain, "F32")), 0.5)
    heads = x.astype(np.float64).reshape(3, 4, 16)
    exact = heads / np.sqrt((heads**2).mean(axis=2, keepdims=True) + 0.5) * gain
    assert np.abs(got - exact.reshape(3, 64)).max() < 1e-6


@pytest.mark.parametrize("style", ["interleaved", "halves"])
def test_rope_turns_each_pair_by_its_angle(tiny_gguf: TinyGGUF, style: Any) -> None:
    """Wrong partner lanes, a wrong sign, or scale and factors on the wrong side: against complex multiplication."""
    rope = RopeSpec(12, 100.0, style, scale=0.5, factors=(1.0, 1.0, 2.0, 4.0, 8.0, 8.0))
    x, positions = random((3, 64)), [0, 1, 150]
    got = ops_for(positions, spec_of(tiny_gguf)).rope(x, rope, 16).reshape(3, 4, 16)
    heads = x.reshape(3, 4, 16)
    first = [0, 2, 4, 6, 8, 10] if style == "interleaved" else [0, 1, 2, 3, 4, 5]
    second = [1, 3, 5, 7, 9, 11] if style == "interleaved" else [6, 7, 8, 9, 10, 11]
    for row, lane in itertools.product(range(3), range(6)):
        angle = positions[row] * 0.5 * 100.0 ** (-2 * lane / 12) / rope.factors[lane]
        turned = (heads[row, :, first[lane]] + 1j * heads[row, :, second[lane]]) * np.exp(1j * angle)
        assert got[row, :, first[lane]] == pytest.approx(turned.real, abs=1e-6)
        assert got[row, :, second[lane]] == pytest.approx(turned.imag, abs=1e-6)
    assert (got[:, :, 12:] == heads[:, :, 12:]).all(), "lanes beyond rope.dim do not turn"
    assert (got[0] == heads[0]).all(), "position 0 does not turn"


def test_silu_gate(tiny_gguf: TinyGGUF) -> None:
    """An exponential that overflows, or gate and up swapped."""
    gate = np.array([[-200.0, -1.0, 0.0, 2.0, 200.0]], np.float32)
    with np.errstate(over="ignore"):
        got = ops_for([0], spec_of(tiny_gguf)).gated(gate, np.full((1, 5), 3, np.float32), "silu")
    assert got[0] == pytest.approx([0, -3 / (1 + np.e), 0, 6 / (1 + np.exp(-2)), 600], rel=1e-6)


def eight_bits(x: F32) -> npt.NDArray[np.float64]:
    """The nearest values with eight significant bits, ties to even: bf16."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    rounded: npt.NDArray[np.float64] = np.ldexp(np.rint(mantissa * 256) / 256, exponent)
    return rounded


def test_bf16_is_eight_significant_bits() -> None:
    """Bits cut off instead of rounded, ties that always go up, or a NaN whose last bits carry it into infinity."""
    x = np.concatenate([random((4000,)), np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0, 3e38], np.float32)])
    assert (to_bf16(x) == eight_bits(x)).all()
    special = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000, 0x7F7FFFFF], np.uint32)
    got = to_bf16(special.view(np.float32))
    assert np.isnan(got[:3]).all()
    assert got[3:].tolist() == [np.inf, -np.inf, np.inf]


def test_attention_is_softmax_over_what_the_cache_holds(tiny_gguf: TinyGGUF) -> None:
    """A wrong scale, a query head on a wrong key head, or keys used before the cache rounded them."""
    spec = spec_of(tiny_gguf)
    q, k, v = random((6, 64)), random((6, 32), 1), random((6, 32), 2)
    layout = KVLayout(NUM_BLOCKS)
    pools = [[Cache(layout, 2, 16), Cache(layout, 2, 16)]]
    got = ReferenceOps(spec, layout, pools, make_step([Part([0] * 6, 0, [4])])).attend(q, k, v, 0, scale=0.25)
    rounded = [eight_bits(x).reshape(6, 2, 16) for x in (k, v)]
    for row, head in itertools.product(range(6), range(4)):
        keys, values = (x[: row + 1, head // 2] for x in rounded)
        query = eight_bits(q[row, head * 16 : head * 16 + 16] * np.float32(0.25 / np.log(2)))
        scores = keys @ query
        weights = eight_bits(np.exp2(scores - scores.max()))
        assert got[row, head * 16 : head * 16 + 16] == pytest.approx(weights / weights.sum() @ values, abs=1e-6)


@pytest.mark.parametrize("count", [64, 65, 512, 513, 1100])
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_tiles_and_splits_are_one_softmax(kv: KVDtype, count: int) -> None:
    """A tile or a split under the wrong maximum, counted twice or left out."""
    slots, heads = np.arange(count), (1, 2, 16)
    q, keys, values = random(heads), random((count, 1, 16), 1), random((count, 1, 16), 2)
    keys *= np.linspace(1, 3, count, dtype=np.float32)[:, None, None]  # the maximum moves to the end
    caches = [Cache(KVLayout(70, BLOCK_SIZE, kv), 1, 16) for _ in range(2)]
    for cache, x in zip(caches, (keys, values), strict=True):
        cache.write(slots.astype(np.int32), x)
    keys_kept, values_kept = (cache.read(slots) for cache in caches)
    got = attention(q, keys_kept, values_kept, Scores(0.25))
    scores = np.exp(keys[:, 0].astype(np.float64) @ q[0].T.astype(np.float64) / 4)
    expected = (scores / scores.sum(axis=0)).T @ values[:, 0]
    assert got[0] == pytest.approx(expected, abs=0.02 if kv == "bf16" else 0.06)


@pytest.mark.parametrize("kv", KV_DTYPES)
def test_cache_rounds_within_its_format(kv: KVDtype) -> None:
    """A scale shared by heads or tokens: one loud head would silence the others."""
    cache = Cache(KVLayout(2, BLOCK_SIZE, kv), 2, 8)
    x = random((3, 2, 8)) * np.array([1e-3, 1e3], np.float32)[None, :, None]
    x[1, 0] = 0
    slots = np.array([30, 0, 17], np.int32)
    cache.write(slots, x)
    kept = cache.read(slots)
    error = np.abs(kept.data * (1 if kept.scale is None else kept.scale[:, :, None]) - x)
    assert (error[1, 0] == 0).all()
    amax = np.abs(x).max(axis=2, keepdims=True)
    assert (error <= (amax / 254 * 1.001 if kv == "int8" else amax * 2.0**-8 * 1.001)).all()


# ---- malformed steps ----

MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    ("no rows", {"tokens": []}, "0 rows"),
    ("a token beyond the vocabulary", {"tokens": [1, 271, 3, 4]}, "tokens"),
    ("a negative token", {"tokens": [1, -1, 3, 4]}, "tokens"),
    ("positions of another length", {"positions": [0, 1, 2]}, "positions"),
    ("a gap in a sequence", {"positions": [0, 1, 3, 0]}, "consecutive"),
    ("a slot beyond the pool", {"slots": [80, 81, 192, 32]}, "slots"),
    ("a slot in another's block", {"slots": [80, 81, 82, 83]}, "slots differ"),
    ("a block beyond the pool", {"block_tables": [5, 12]}, "block_tables"),
    ("two sequences in one block", {"block_tables": [5, 5], "slots": [80, 81, 82, 80]}, "share a slot"),
    ("rows that no sequence has", {"seq_starts": [0, 3, 3]}, "seq_starts"),
    ("a sequence without rows", {"seq_starts": [0, 4, 4]}, "seq_starts"),
    ("a table for each sequence", {"table_starts": [0, 2]}, "table_starts"),
    ("a table that ends too early", {"positions": [14, 15, 16, 0], "slots": [94, 95, 96, 32]}, "table ends"),
    ("a logit row beyond the rows", {"logit_rows": [2, 4]}, "logit_rows"),
    ("logit rows in another order", {"logit_rows": [3, 2]}, "ascending"),
    ("a record for each logit row", {"logit_rows": [3]}, "sample"),
    ("bias without starts", {"bias_ids": [1]}, "bias_starts"),
    ("bias beyond the vocabulary", {"bias_starts": [0, 1, 1], "bias_ids": [271]}, "bias_ids"),
    ("bias without values", {"bias_starts": [0, 1, 1], "bias_ids": [1]}, "bias_values"),
    ("starts that fall", {"seen_starts": [0, 2, 1], "seen_ids": [1], "seen_counts": [1]}, "seen_starts"),
    ("a count below 0", {"seen_starts": [0, 0, 1], "seen_ids": [1], "seen_counts": [-1]}, "seen_counts"),
]


def good_step() -> StepArrays:
    return make_step([Part([1, 2, 3], 0, [5]), Part([4], 0, [2])])


@pytest.mark.parametrize(("change", "says"), [case[1:] for case in MALFORMED], ids=[case[0] for case in MALFORMED])
def test_a_malformed_step_is_an_engine_error(tiny_gguf: TinyGGUF, change: dict[str, Any], says: str) -> None:
    """An index that reads or writes someone else's memory, or a numpy error without a name."""
    arrays: dict[str, Any] = {name: np.array(values, np.int32) for name, values in change.items()}
    with pytest.raises(EngineError, match=says):
        load(tiny_gguf).run(dataclasses.replace(good_step(), **arrays))


def test_sampling_records_are_checked(tiny_gguf: TinyGGUF) -> None:
    """A target or a count of alternatives that no row has room for."""
    model = load(tiny_gguf)
    assert model.run(good_step()).finite.all()
    for name, value in (("target", 271), ("num_top", 21)):
        step = good_step()
        step.sample[name][1] = value
        with pytest.raises(EngineError, match=name):
            model.run(step)
    with pytest.raises(EngineError, match="sample"):
        model.run(dataclasses.replace(good_step(), sample=np.zeros(2)))
    with pytest.raises(EngineError, match="tokens"):
        model.run(dataclasses.replace(good_step(), tokens=good_step().tokens.astype(np.int64)))


def test_too_many_rows_are_refused(tiny_gguf: TinyGGUF) -> None:
    """A step larger than the buffers that were allocated for good."""
    with pytest.raises(EngineError, match="65 rows"):
        load(tiny_gguf).run(make_step([Part([0] * 65, 0, range(5))]))
