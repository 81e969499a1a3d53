"""The op list on numpy arrays: the specification of the arithmetic and the oracle of the compiled core. Not fast.

No row's result depends on the other rows of its step. Ops that sum over lanes run row by row, because the first row of
`X @ W` need not equal `X[:1] @ W`; the rest are elementwise, or matrix products of integers small enough to be exact in
float32 in any order. Keys and values are read back from the cache, as it rounded them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError
from chairlift.kernels import sampling
from chairlift.kernels.backend import KVDtype, KVLayout, LoadSpec
from chairlift.kernels.cpu import CPUBackend, CPUSettings, choose_threads, wanted_bits
from chairlift.kernels.ops import F32, I32, MAX_TOP, Activation, Forward, LogitResult, StepArrays
from chairlift.kernels.rounding import ActivationBits, input_bits, score_scale
from chairlift.kernels.validate import check_step
from chairlift.machine import Machine
from chairlift.models import quant
from chairlift.models.spec import ModelSpec, RawTensor, RopeSpec

TILE, SPLIT = 64, 512
"""Positions that share a softmax maximum, and those after which a new one begins; counted from position 0."""

LOG2_E = np.float32(np.log2(np.e))


@dataclass(frozen=True, slots=True)
class BlockMatrix:
    """A quantised weight (N, K), groups of K that share a scale first: w = scale * (levels - zero) + offset."""

    levels: npt.NDArray[np.int8 | np.uint8]  # (K / group, group, N)
    scale: F32  # (K / group, N)
    offset: F32 | None  # (K / group, N)
    zero: int
    input_bits: ActivationBits

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.levels.nbytes + self.scale.nbytes + (0 if self.offset is None else self.offset.nbytes)


@dataclass(frozen=True, slots=True)
class Bf16Matrix:
    """A weight (N, K) of bf16, whose inputs are rounded to bf16 too."""

    values: F32

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.values.nbytes


Weight = BlockMatrix | Bf16Matrix | F32


class ReferenceBackend(CPUBackend):
    """Loads models for numpy. `activation_bits` are those that MLP inputs are rounded to."""

    def __init__(self, activation_bits: ActivationBits = 8, *, threads: int = 1, notes: tuple[str, ...] = ()) -> None:
        super().__init__("numpy", threads=threads, activation_bits=activation_bits, notes=notes)

    def load(self, load: LoadSpec) -> ReferenceModel:
        """Decodes the weights (tied ones once) and allocates the pool. ModelError names a tensor it cannot decode."""
        unique = {id(tensor): tensor for tensor in load.tensors.values()}
        decoded = {key: load_weight(tensor, self.activation_bits) for key, tensor in unique.items()}
        weights = {name: decoded[id(tensor)] for name, tensor in load.tensors.items()}
        return ReferenceModel(load.spec, load.forward, weights, load.kv, load.max_rows)


def make_backend(settings: CPUSettings, machine: Machine) -> ReferenceBackend:
    """The backend for these settings. ConfigError for an instruction set: numpy chooses its own."""
    if settings.isa is not None:
        raise ConfigError(f"--isa {settings.isa} chooses among compiled kernels; --backend reference has none")
    threads, notes = choose_threads(settings.threads, machine)
    return ReferenceBackend(wanted_bits(settings), threads=threads, notes=notes)


class ReferenceModel:
    """A loaded model: runs one step at a time."""

    def __init__(
        self, spec: ModelSpec, forward: Forward, weights: Mapping[str, Weight], kv: KVLayout, max_rows: int
    ) -> None:
        self._spec = spec
        self._forward = forward
        self._weights = weights
        self._kv = kv
        self._max_rows = max_rows
        self._pools = [
            [Cache(kv, layer.num_kv_heads, width) for width in (layer.head_dim, layer.value_dim)]
            for layer in spec.layers
        ]

    @property
    def weight_bytes(self) -> int:
        """Bytes that the decoded weights take."""
        unique = {id(weight): weight for weight in self._weights.values()}
        return sum(weight.nbytes for weight in unique.values())

    @property
    def kv_bytes(self) -> int:
        """Bytes that the KV pool takes."""
        return sum(cache.nbytes for pair in self._pools for cache in pair)

    @property
    def load_s(self) -> Mapping[str, float]:
        """Not told apart."""
        return {}

    def run(self, step: StepArrays) -> LogitResult:
        """Runs one step. Raises EngineError when it is malformed."""
        check_step(step, vocab_size=self._spec.vocab_size, kv=self._kv, max_rows=self._max_rows)
        ops = ReferenceOps(self._spec, self._kv, self._pools, step)
        with np.errstate(all="ignore"):  # what is not finite is reported by row
            return reduce_rows(self._forward(ops, self._spec, self._weights), step)


@dataclass(frozen=True, slots=True)
class Kept:
    """Keys or values as a cache holds them, or a query, times `scale` where there is one."""

    data: F32  # (positions, kv heads, width): bf16 values, or levels of int8
    scale: F32 | None = None  # (positions, kv heads)

    def __getitem__(self, positions: slice) -> Kept:
        return Kept(self.data[positions], None if self.scale is None else self.scale[positions])


class Cache:
    """Keys or values of one layer, (slots, kv heads, width): bf16, or int8 with a scale per slot and head."""

    def __init__(self, kv: KVLayout, num_heads: int, width: int) -> None:
        slots = kv.num_blocks * kv.block_size
        self._dtype: KVDtype = kv.dtype
        self._data = np.zeros((slots, num_heads, width), np.uint16 if kv.dtype == "bf16" else np.int8)
        self._scale = np.zeros((slots if kv.dtype == "int8" else 0, num_heads), np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._data.nbytes + self._scale.nbytes

    def write(self, slots: I32, x: F32) -> None:
        """Stores (rows, heads, width)."""
        if self._dtype == "bf16":
            self._data[slots] = to_bf16(x).view(np.uint32) >> 16
            return
        self._data[slots], self._scale[slots] = to_levels(x)

    def read(self, slots: npt.NDArray[np.integer]) -> Kept:
        """What the slots hold."""
        data = self._data[slots]
        if self._dtype == "int8":
            return Kept(data.astype(np.float32), self._scale[slots])
        return Kept((data.astype(np.uint32) << 16).view(np.float32), None)


class ReferenceOps:
    """The op list for one step. Activations are float32 (rows, width)."""

    def __init__(self, spec: ModelSpec, kv: KVLayout, pools: list[list[Cache]], step: StepArrays) -> None:
        self._spec = spec
        self._block_size = kv.block_size
        self._pools = pools
        self._step = step

    def embed(self, table: Weight) -> F32:
        """Rows of the table at the step's tokens, dequantised."""
        tokens = self._step.tokens
        if isinstance(table, Bf16Matrix):
            table = table.values
        if isinstance(table, np.ndarray):
            return table[tokens]
        levels = table.levels[:, :, tokens].astype(np.float32) - np.float32(table.zero)
        columns: F32 = table.scale[:, None, tokens] * levels
        if table.offset is not None:
            columns += table.offset[:, None, tokens]
        return np.ascontiguousarray(columns.reshape(-1, len(tokens)).T)

    def rms_norm(self, x: F32, weight: Weight, eps: float) -> F32:
        """x / sqrt(mean(x^2) + eps) * weight over each group of len(weight) lanes (Zhang and Sennrich 2019)."""
        gain = plain(weight)

        def one(row: F32) -> F32:
            groups = row.reshape(-1, len(gain))
            mean_square = np.mean(groups * groups, axis=1, keepdims=True)
            normed: F32 = groups / np.sqrt(mean_square + np.float32(eps)) * gain
            return normed.reshape(-1)

        return by_row(one, x)

    def linear(self, x: F32, weight: Weight, bias: Weight | None = None) -> F32:
        """x @ weight.T + bias."""
        if isinstance(weight, BlockMatrix):
            y = block_linear(x, weight)
        elif isinstance(weight, Bf16Matrix):
            y = float_linear(to_bf16(x), weight.values)
        else:
            y = float_linear(x, weight)
        return y if bias is None else y + plain(bias)

    def rope(self, x: F32, rope: RopeSpec, head_dim: int) -> F32:
        """Rotates the first rope.dim lanes of each head by the row's position."""
        rows, half = len(x), rope.dim // 2
        heads = x.reshape(rows, -1, head_dim).copy()
        pairs = np.arange(half)
        first, second = (2 * pairs, 2 * pairs + 1) if rope.style == "interleaved" else (pairs, pairs + half)
        cos, sin = np.stack([rotation(rope, int(p)) for p in self._step.positions], axis=1)[:, :, None, :]
        a, b = heads[:, :, first], heads[:, :, second]
        heads[:, :, first] = a * cos - b * sin
        heads[:, :, second] = a * sin + b * cos
        return heads.reshape(x.shape)

    def attend(  # noqa: PLR0913 - all that models ask of attention
        self,
        q: F32,
        k: F32,
        v: F32,
        layer: int,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Weight | None = None,
    ) -> F32:
        """Writes k and v of the whole step, then lets each row attend to what it sees of its sequence."""
        spec, step = self._spec.layers[layer], self._step
        keys, values = self._pools[layer]
        keys.write(step.slots, k.reshape(-1, spec.num_kv_heads, spec.head_dim))
        values.write(step.slots, v.reshape(-1, spec.num_kv_heads, spec.value_dim))
        queries = q.reshape(-1, spec.num_kv_heads, spec.group_size, spec.head_dim)
        scores = Scores(scale, softcap, None if sinks is None else plain(sinks).reshape(-1, spec.group_size))
        out = np.empty((len(q), spec.num_heads * spec.value_dim), np.float32)
        for s in range(len(step.seq_starts) - 1):
            table = step.block_tables[step.table_starts[s] : step.table_starts[s + 1]]
            slots = (table[:, None] * self._block_size + np.arange(self._block_size)).reshape(-1)
            for row in range(step.seq_starts[s], step.seq_starts[s + 1]):
                end = int(step.positions[row]) + 1
                first = 0 if window is None else max(0, end - window)
                seen = slots[first:end]
                out[row] = attention(queries[row], keys.read(seen), values.read(seen), scores, first).reshape(-1)
        return out

    def gated(self, gate: F32, up: F32, activation: Activation) -> F32:
        """activation(gate) * up."""
        return by_row(ACTIVATIONS[activation], gate) * up

    def add(self, a: F32, b: F32) -> F32:
        """a + b."""
        return a + b

    def logits(self, x: F32, head: Weight) -> F32:
        """linear(x, head) for the step's logit rows, (L, vocab)."""
        wanted = self._step.logit_rows
        return self.linear(x[wanted], head) if len(wanted) else np.zeros((0, self._spec.vocab_size), np.float32)


def load_weight(tensor: RawTensor, activation_bits: ActivationBits = 8) -> Weight:
    """A weight as the ops hold it: scales in 16 bits."""
    decoded = quant.decode(tensor)
    if isinstance(decoded, np.ndarray):
        return Bf16Matrix(decoded) if tensor.type_name == "BF16" and decoded.ndim == 2 else decoded
    decoded = decoded.with_half_scales()
    levels = decoded.q.reshape(len(decoded.q), -1, decoded.group).transpose(1, 2, 0)
    offset = None if decoded.offset is None else np.ascontiguousarray(decoded.offset.T)
    scale = np.ascontiguousarray(decoded.scale.T)
    bits = input_bits(tensor.name, activation_bits)
    return BlockMatrix(np.ascontiguousarray(levels), scale, offset, decoded.zero, bits)


def plain(weight: Weight) -> F32:
    """A norm's or bias's vector, which the registry has checked to be of a float type."""
    assert isinstance(weight, np.ndarray)
    return weight


def by_row(op: Callable[[F32], F32], x: F32) -> F32:
    """The op on each row by itself, so that a sum's order depends on the row's width only."""
    return np.stack([op(row) for row in x])


def silu(x: F32) -> F32:
    """x / (1 + exp(-x)); 0 where the exponential overflows, as it should."""
    y: F32 = x / (np.exp(-x) + 1)
    return y


def gelu_tanh(x: F32) -> F32:
    """x / 2 * (1 + tanh(u)), written as x / (1 + exp(-2 u)), u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    cubic = x * (np.float32(1) + np.float32(0.044715) * x * x)
    y: F32 = x / (np.exp(np.float32(-2 * np.sqrt(2 / np.pi)) * cubic) + 1)
    return y


ACTIVATIONS: Mapping[Activation, Callable[[F32], F32]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def float_linear(x: F32, weight: F32) -> F32:
    """Products in float32, summed as numpy does, pairwise, one row at a time. Those of bf16 are exact."""
    return by_row(lambda row: (weight * row).sum(axis=1), x)


def block_linear(x: F32, weight: BlockMatrix) -> F32:
    """Rounded activations times block-quantised weights, summed over groups in ascending order in float32.

    Per group: x_scale * (w_scale * (dot - zero * total) + offset * total), dot and total being integers. A dot is made
    of two, of the levels' high and low bytes (8-bit levels have nine bits with their offset): each below 2^24, so that
    float32 products are exact in any order.
    """
    q, x_scale = quant.quantise_rows(x, weight.input_bits)
    group = weight.levels.shape[1]
    x_scale = x_scale.repeat(quant.BLOCK // group, axis=1)
    lanes = q.astype(np.int32).reshape(len(x), -1, group)
    total = lanes.sum(axis=2, dtype=np.int32)
    high = lanes + 128 >> 8
    low = (lanes - 256 * high).astype(np.float32)
    high = high.astype(np.float32)
    y: F32 = np.zeros((len(x), weight.scale.shape[1]), np.float32)
    for i, levels in enumerate(weight.levels):
        parts = levels.astype(np.float32)
        dot = 256 * (high[:, i] @ parts).astype(np.int32) + (low[:, i] @ parts).astype(np.int32)
        term: F32 = weight.scale[i] * (dot - weight.zero * total[:, i, None]).astype(np.float32)
        if weight.offset is not None:
            term += weight.offset[i] * total[:, i, None].astype(np.float32)
        y += x_scale[:, i, None] * term
    return y


@lru_cache(maxsize=1 << 16)
def rotation(rope: RopeSpec, position: int) -> F32:
    """(cos, sin) of each pair's angle, (2, dim / 2): computed in float64, rounded once."""
    exponents = -2.0 * np.arange(rope.dim // 2) / rope.dim
    angles = position * rope.scale * rope.theta**exponents / np.array(rope.factors or 1.0)
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)


def to_bf16(x: F32) -> F32:
    """The nearest values of bf16, ties to even, as float32; a NaN stays one."""
    bits = x.view(np.uint32)
    nearest = bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))
    kept: F32 = (np.where(np.isnan(x), bits | np.uint32(0x400000), nearest) & np.uint32(0xFFFF0000)).view(np.float32)
    return kept


def to_levels(x: F32, most: int = 127) -> tuple[F32, F32]:
    """Levels from -most to most of each row (..., width), and its scale amax / most."""
    amax = np.abs(x).max(axis=-1)
    with np.errstate(all="ignore"):
        inverse = (np.float32(most) / amax)[..., None]
        lanes = np.where(np.isfinite(inverse) & (inverse > 0), x * inverse, np.float32(0))
    return np.rint(lanes), amax / np.float32(most)


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer makes scores of products: see `Ops.attend`. Inside, scores are in units of ln 2."""

    scale: float
    softcap: float | None = None
    sinks: F32 | None = None  # (kv heads, group)

    @property
    def per_product(self) -> np.float32:
        """What a product of query and key is multiplied by."""
        return np.float32(score_scale(self.scale)) * LOG2_E

    def capped(self, scores: F32) -> F32:
        """Scores kept within the softcap."""
        if self.softcap is None:
            return scores
        cap = np.float32(self.softcap) * LOG2_E
        capped: F32 = cap * np.tanh(scores / cap)
        return capped


def aligned(first: int, count: int, size: int) -> Iterator[slice]:
    """`count` positions from `first` on, cut at multiples of `size`; slices count from `first`."""
    begin = 0
    while begin < count:
        end = min(count, begin + size - (first + begin) % size)
        yield slice(begin, end)
        begin = end


def attention(q: F32, keys: Kept, values: Kept, scores: Scores, first: int = 0) -> F32:
    """One row: q (kv heads, group, width) on keys and values of positions from `first` on, (kv heads, group, width).

    Splits of SPLIT positions by themselves, joined in ascending order (Milakov and Gimelshein 2018; Dao 2023), then
    the sinks.
    """
    if keys.scale is None:
        query = Kept(to_bf16(q * scores.per_product))
    else:
        levels, of_level = to_levels(q)
        query = Kept(levels, of_level * scores.per_product)
    whole = None
    for split in aligned(first, len(keys.data), SPLIT):
        part = attend_split(query, keys[split], values[split], scores, first + split.start)
        whole = part if whole is None else join(whole, part)
    assert whole is not None
    if scores.sinks is not None:
        nothing = np.zeros_like(whole.out)
        whole = join(whole, Softmax(scores.sinks * LOG2_E, np.ones_like(whole.sum), nothing))
    out: F32 = whole.out / whole.sum[:, :, None]
    return out


@dataclass(frozen=True, slots=True)
class Softmax:
    """Of some positions, per query: the largest score in units of ln 2, the weights' sum, the values' weighted sum."""

    max: F32  # (kv heads, group)
    sum: F32
    out: F32  # (kv heads, group, width)


def attend_split(q: Kept, keys: Kept, values: Kept, of: Scores, first: int) -> Softmax:
    """Tiles of TILE positions under a running maximum; weights are rounded to bf16, with int8 to 16 bits.

    Those are levels of a weight times its value's scale, by one scale for the tile.

    einsum without optimisation calls no BLAS: its order of summation depends on the shapes only.
    """
    queries = q.data.shape[:2]
    out = np.zeros((*queries, values.data.shape[2]), np.float32)
    state = Softmax(np.full(queries, -np.inf, np.float32), np.zeros(queries, np.float32), out)
    for tile in aligned(first, len(keys.data), TILE):
        key, value = keys[tile], values[tile]
        scores = np.einsum("hgd,phd->hgp", q.data, key.data, optimize=False)
        if q.scale is not None and key.scale is not None:
            scores *= key.scale.T[:, None] * q.scale[:, :, None]
        scores = of.capped(scores)
        top = np.maximum(state.max, scores.max(axis=2))
        weights = np.exp2(scores - top[:, :, None])
        if value.scale is None:
            weights = to_bf16(weights)
            out = np.einsum("hgp,phd->hgd", weights, value.data, optimize=False)
        else:
            levels, of_level = to_levels(weights * value.scale.T[:, None], 32767)
            out = np.einsum("hgp,phd->hgd", levels, value.data, optimize=False) * of_level[:, :, None]
        state = join(state, Softmax(top, weights.sum(axis=2), out))
    return state


def join(a: Softmax, b: Softmax) -> Softmax:
    """Two softmaxes under the larger maximum."""
    top = np.maximum(a.max, b.max)
    left, right = np.exp2(a.max - top), np.exp2(b.max - top)
    out = a.out * left[:, :, None] + b.out * right[:, :, None]
    return Softmax(top, a.sum * left + b.sum * right, out)


def reduce_rows(logits: F32, step: StepArrays) -> LogitResult:
    """Samples each logit row (L, vocab)."""
    count = len(logits)
    result = LogitResult(
        tokens=np.zeros(count, np.int32),
        logprobs=np.zeros(count, np.float32),
        top_ids=np.full((count, MAX_TOP), -1, np.int32),
        top_logprobs=np.zeros((count, MAX_TOP), np.float32),
        finite=np.zeros(count, np.bool_),
        logits=logits if step.want_logits else None,
    )
    for i in range(count):
        bias = slice(step.bias_starts[i], step.bias_starts[i + 1])
        seen = slice(step.seen_starts[i], step.seen_starts[i + 1])
        choice = sampling.reduce_logits(
            logits[i],
            step.sample[i],
            (step.bias_ids[bias], step.bias_values[bias]),
            (step.seen_ids[seen], step.seen_counts[seen]),
        )
        result.tokens[i], result.logprobs[i], result.finite[i] = choice.token, choice.logprob, choice.finite
        result.top_ids[i], result.top_logprobs[i] = choice.top_ids, choice.top_logprobs
    return result
