"""`chairlift bench kernels`: how fast each kernel is here, beside the most that memory and arithmetic units can do.

    ceilings   bytes/s that all threads read together; operations/s of a loop without waits, at each level
    chains     matmul, attention and row ops, as a model runs them (chains.py); the fastest of several runs
    sampling   one row of logits to a token, on one thread

An error is that of the last row's logits after two links, against the reference, as a share of the largest logit.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from chairlift import _native, _native_testing, cost, machine
from chairlift.bench.report.measure import ProgressDisplay
from chairlift.bench.report.report import Report
from chairlift.errors import ConfigError
from chairlift.kernels import sampling
from chairlift.kernels.backend import BLOCK_SIZE, Backend
from chairlift.kernels.native import NativeBackend, available_isas
from chairlift.kernels.ops import F32, SAMPLE_DTYPE
from chairlift.kernels.reference import ReferenceBackend
from chairlift.kernels.rounding import ActivationBits
from chairlift.microbench import chains
from chairlift.microbench.chains import Chain, SequencePart, Unit
from chairlift.models import quant

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
SHAPES = ((576, 1536), (2048, 8192))
HEADS = ((9, 3, 64), (32, 8, 64))
"""Heads, KV heads and head size of the default model, and of one with about 1B parameters."""
DECODES = ((1, 200), (1, 1000), (1, 8000), (5, 4000), (20, 1000))
"""Sequences, and tokens in the cache of each."""
CHUNKS = ((0, 256), (2048, 256))
"""Tokens in the cache, and rows of a chunk of a prompt."""
ROW_OP_ROWS = (1, 16, 256)
ERROR_LINKS = 2
LONGEST_S = 1.0
"""Seconds. A case is left out if one run would take longer."""

KINDS = ("matmul", "attention", "rows", "sampling")


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What to measure."""

    isas: Sequence[str]
    threads: int
    kinds: Sequence[str] = KINDS
    quick: bool = False

    @property
    def budget_s(self) -> float:
        """Seconds for the repetitions of one case."""
        return 0.03 if self.quick else 0.15


def kernel_options(
    isas: Sequence[str] | None, threads: int | None, kinds: Sequence[str] | None, *, quick: bool = False
) -> KernelOptions:
    """The options, with this machine's values for those not given. Raises ConfigError for an unknown level or kind."""
    for name in kinds or ():
        if name not in KINDS:
            raise ConfigError(f"--only {name!r} is not known", hint=f"there are {', '.join(KINDS)}")
    for isa in isas or ():
        NativeBackend(isa)
    return KernelOptions(isas or available_isas(), threads or machine.detect().threads, kinds or KINDS, quick)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The most that any kernel can reach on these threads."""

    memory: float  # bytes/s
    units: dict[tuple[str, Unit], float]  # level, unit -> operations/s


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """One link of a chain, on all threads."""

    kind: str
    op: str
    what: str
    isa: str
    load: str  # rows, and the contexts they attend to
    seconds: float
    read_bytes: float  # weights, cached keys and values, or a row op's operands
    operations: float
    unit: Unit | None
    error: float


@dataclass(frozen=True, slots=True)
class SampleTiming:
    """One row of logits on one thread."""

    how: str
    vocab: int
    isa: str
    seconds: float
    same: bool  # the reference's token
    error: float  # of the token's log-probability


@dataclass(slots=True)
class KernelCommand:
    """The command: its work, and the report on the cases so far."""

    options: KernelOptions
    ceilings: Ceilings | None = None
    timings: list[KernelTiming] = field(default_factory=list)
    samples: list[SampleTiming] = field(default_factory=list)

    async def work(self, progress: ProgressDisplay) -> None:
        """Case by case. Ctrl-C takes effect between two of them."""
        progress.say("ceilings")
        self.ceilings = measure_ceilings(self.options)
        for name, chain, parts in cases(self.options):
            progress.say(f"{chain.op} {chain.what}")
            expected = error_logits(ReferenceBackend(chain.activation_bits), chain)
            for isa in self.options.isas:
                backend = native_backend(isa, chain, self.options)
                actual = error_logits(backend, chain)
                error = float(np.abs(actual - expected).max() / np.abs(expected).max())
                for timing in time_chain(name, chain, parts, backend, error, self.options):
                    self.timings.append(timing)
                    await asyncio.sleep(0)
        if "sampling" in self.options.kinds:
            progress.say("sampling")
            for sample in time_sampling(self.options):
                self.samples.append(sample)
                await asyncio.sleep(0)

    def report(self) -> Report:
        """What was measured so far."""
        from chairlift.microbench.report import report

        return report(self)


def measure_ceilings(options: KernelOptions) -> Ceilings:
    """Reads memory and computes in registers, for some tenths of a second each."""
    seconds = 0.1 if options.quick else 0.4
    memory = machine.read_speed(np.ones(1 << 25, np.int64), options.threads, seconds=seconds)
    units: tuple[Unit, ...] = ("dot", "fma", "bf16")
    return Ceilings(memory, {(isa, unit): peak(isa, unit, options.threads) for isa in options.isas for unit in units})


def peak(isa: str, unit: Unit, threads: int) -> float:
    """Operations/s of threads that run at once, by the processor time that each got; the best of five tries."""
    rounds = 1000
    while _timed(_native_testing.peak, isa, unit, rounds) < 0.01:
        rounds *= 2
    speeds: list[float] = []

    def turn() -> None:
        start = time.thread_time()
        operations = _native_testing.peak(isa, unit, rounds)
        speeds.append(operations / (time.thread_time() - start))

    for _ in range(5):
        runners = [threading.Thread(target=turn) for _ in range(threads)]
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join()
    tries = [speeds[first : first + threads] for first in range(0, len(speeds), threads)]
    return max(sum(each) for each in tries)


def cases(options: KernelOptions) -> Iterator[tuple[str, Chain, list[list[SequencePart]]]]:
    """Kind, chain, and the steps that it is timed with."""
    most = 1 if options.quick else None
    rows = [[SequencePart(0, count)] for count in (ROWS[::3] if options.quick else ROWS)]
    if "matmul" in options.kinds:
        for hidden, ffn in SHAPES[:most]:
            for layout, weight_type in layouts().items():
                choices: tuple[ActivationBits, ...] = (8,) if layout in chains.FLOAT_LAYOUTS else (8, 16)
                for bits in choices:
                    yield "matmul", chains.matmul(weight_type, layout, hidden, ffn, bits), rows
    if "attention" in options.kinds:
        decodes = [
            [SequencePart(context, 1)] * count for count, context in (DECODES[::2] if options.quick else DECODES)
        ]
        chunks = [[SequencePart(start, count)] for start, count in CHUNKS]
        for heads in HEADS[:most]:
            for kv_dtype in ("bf16", "int8"):
                yield "attention", chains.attention(*heads, kv_dtype), decodes + chunks
    if "rows" in options.kinds:
        for chain in chains.row_ops(*SHAPES[-1]):
            yield "rows", chain, [[SequencePart(0, count)] for count in ROW_OP_ROWS]


def layouts() -> dict[str, str]:
    """Each layout of packed weights, and a weight type that is packed into it."""
    found: dict[str, str] = {}
    for weight_type in quant.supported_types():
        try:
            found.setdefault(_native.layout_of(weight_type), weight_type)
        except ValueError:
            continue  # the core has no kernel for this type
    return found


def native_backend(isa: str, chain: Chain, options: KernelOptions) -> NativeBackend:
    """The compiled core at one level, rounding activations as the chain asks."""
    return NativeBackend(isa, threads=options.threads, activation_bits=chain.activation_bits)


def error_logits(backend: Backend, chain: Chain) -> F32:
    """Logits after two links, of a prompt that is longer than a tile of any kernel."""
    short = chain.shortened(ERROR_LINKS)
    parts = [SequencePart(0, 21)]
    model = short.load(backend, rows=21, blocks=parts[0].blocks)
    logits = model.run(chains.step(parts, want_logits=True)).logits
    assert logits is not None
    return logits


def time_chain(
    kind: str,
    chain: Chain,
    steps: Sequence[Sequence[SequencePart]],
    backend: NativeBackend,
    error: float,
    options: KernelOptions,
) -> Iterator[KernelTiming]:
    """Times the chain at one level with every step, except for those that would take too long."""
    rows = max(max(sum(part.rows for part in parts) for parts in steps), 32 * BLOCK_SIZE)
    blocks = max(max(sum(part.blocks for part in parts) for parts in steps), rows // BLOCK_SIZE)
    whole, empty = (part.load(backend, rows=rows, blocks=blocks) for part in (chain, chain.shortened(0)))
    if kind == "attention":
        chains.fill(whole, blocks, rows)
    weight_bytes = (whole.weight_bytes - empty.weight_bytes) / chain.spec.num_layers
    slowest = 0.0  # seconds per unit of work, to predict what takes too long
    for parts in steps:
        work = operations(kind, chain, parts)
        if slowest * work * chain.spec.num_layers > LONGEST_S:
            continue
        arrays = chains.step(parts)
        around_s = fastest(options.budget_s / 3, empty.run, arrays)
        seconds = (fastest(options.budget_s, whole.run, arrays) - around_s) / chain.spec.num_layers
        slowest = seconds / work
        yield KernelTiming(
            kind, chain.op, chain.what, backend.isa, load_of(parts), seconds,
            bytes_read(kind, chain, parts, weight_bytes), work if chain.unit else 0, chain.unit, error,
        )  # fmt: skip


def operations(kind: str, chain: Chain, parts: Sequence[SequencePart]) -> float:
    """Multiplications and additions of one link; for a row op, the values that it writes."""
    rows = sum(part.rows for part in parts)
    if kind == "matmul":
        return 2.0 * rows * sum(chain.tensors[name].num_elements for name in ("up.0", "down.0"))
    if kind == "attention":
        layer = chain.spec.layers[0]
        return 4.0 * sum(part.visible for part in parts) * layer.num_heads * layer.head_dim
    return float(rows * chain.spec.hidden_size)


def bytes_read(kind: str, chain: Chain, parts: Sequence[SequencePart], weight_bytes: float) -> float:
    """Bytes that one link must read: weights, the cache, or the operands and the result of a row op."""
    if kind == "matmul":
        return weight_bytes
    if kind == "attention":
        tokens = sum(part.start + part.rows for part in parts)
        return tokens * cost.kv_bytes_per_token(chain.spec, chain.kv_dtype) / chain.spec.num_layers
    return sum(part.rows for part in parts) * chain.spec.hidden_size * 4.0 * (len(chain.inputs) + 1)


def load_of(parts: Sequence[SequencePart]) -> str:
    """A step in words, for the table."""
    first = parts[0]
    if len(parts) > 1 or (first.rows == 1 and first.start):
        return f"{len(parts)} at {first.start:,}"
    return f"{first.rows} row{'s' if first.rows > 1 else ''}" + (f" from {first.start:,}" if first.start else "")


def fastest(budget_s: float, run: Callable[..., object], *arguments: object) -> float:
    """Seconds of the fastest of three runs, or of as many as the budget allows; a disturbance only slows a run."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < budget_s:
        times.append(_timed(run, *arguments))
    return min(times)


def _timed(run: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


VOCABS = (49152, 151936)
SAMPLED: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 40, min-p": {"temperature": 0.8, "top_k": 40, "min_p": 0.05},
    "penalties, 20 logprobs": {"temperature": 0.8, "top_p": 0.95, "presence_penalty": 0.5, "num_top": 20},
}
SEEN_TOKENS = 1000


def time_sampling(options: KernelOptions) -> Iterator[SampleTiming]:
    """Times rows of logits that look like those of a model: a few likely tokens above a wide bell."""
    rng = np.random.default_rng(0)
    for vocab in VOCABS[: 1 if options.quick else None]:
        logits = (2.5 * rng.standard_normal(vocab)).astype(np.float32)
        logits[rng.integers(0, vocab, 20)] += np.linspace(4, 9, 20, dtype=np.float32)
        for how, fields in SAMPLED.items():
            yield from _time_row(how, fields, logits, options)


def _time_row(how: str, fields: dict[str, float], logits: F32, options: KernelOptions) -> Iterator[SampleTiming]:
    record = np.zeros(1, SAMPLE_DTYPE)
    for name, value in {"top_p": 1.0, "repetition_penalty": 1.0, "num_top": -1, "target": -1, **fields}.items():
        record[name] = value
    seen_ids = np.arange(SEEN_TOKENS if "presence_penalty" in fields else 0, dtype=np.int32)
    bias, seen = (np.zeros(0, np.int32), np.zeros(0, np.float32)), (seen_ids, np.ones(len(seen_ids), np.int32))
    expected = sampling.reduce_logits(logits, record[0], bias, seen)
    for isa in options.isas:
        arguments = (isa, logits, record.view(np.uint8), bias, seen)
        token, logprob, *_ = _native_testing.reduce_logits(*arguments)
        seconds = fastest(options.budget_s / 3, _native_testing.reduce_logits, *arguments)
        error = abs(logprob - expected.logprob)
        yield SampleTiming(how, len(logits), isa, seconds, token == expected.token, error)
