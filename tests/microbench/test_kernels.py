"""`chairlift bench kernels`: what is timed is the op it says, on memory of its own, and the figures are right."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from chairlift import _native, _native_testing, cli
from chairlift.errors import ConfigError
from chairlift.kernels.backend import KVLayout
from chairlift.kernels.native import NativeBackend
from chairlift.kernels.reference import ReferenceBackend
from chairlift.kernels.validate import check_step
from chairlift.microbench import chains, kernels
from chairlift.microbench.chains import Chain, SequencePart, Unit
from chairlift.microbench.kernels import Ceilings, KernelCommand, KernelOptions, KernelTiming, SampleTiming

OPTIONS = KernelOptions(_native.available_isas(), threads=2, quick=True)
LAYOUTS = kernels.layouts()


@pytest.fixture(autouse=True)
def small_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "WORKING_SET_BYTES", 20_000)


def all_chains() -> list[Chain]:
    products = [chains.matmul(weight_type, layout, 256, 512) for layout, weight_type in LAYOUTS.items()]
    products.append(chains.matmul("Q4_0", "w4", 256, 512, bits=16))
    attention = [chains.attention(6, 2, 32, "bf16"), chains.attention(6, 2, 32, "int8")]
    return [*products, *attention, *chains.row_ops(64, 96)]


def names(chain: Chain) -> str:
    return chain.op.replace(", ", " ")


@pytest.mark.parametrize("isa", OPTIONS.isas)
@pytest.mark.parametrize("chain", all_chains(), ids=names)
def test_the_core_computes_what_the_reference_does(chain: Chain, isa: str) -> None:
    """A table of figures about a kernel that computes something else, or nothing: errors of 0 as well as of 1."""
    expected = kernels.error_logits(ReferenceBackend(chain.activation_bits), chain)
    actual = kernels.error_logits(kernels.native_backend(isa, chain, OPTIONS), chain)
    around = kernels.error_logits(NativeBackend(isa), replace(chain, link=lambda at: at.x))
    assert np.abs(actual - expected).max() < 1e-3 * np.abs(expected).max()
    assert (np.abs(actual - around).max() > 1e-2) is not chain.op.startswith("norm, rounded")


def test_every_layout_of_the_core_is_measured_once() -> None:
    """A layout that is added and never timed, or the same one under each of its weight types."""
    assert {"w4", "w4_min", "w8", "f16", "bf16", "f32"} <= set(LAYOUTS)
    assert all(_native.layout_of(weight_type) == layout for layout, weight_type in LAYOUTS.items())


def test_each_link_of_a_product_has_matrices_of_its_own() -> None:
    """Weights that stay in a cache since every link reads the same ones: memory would look ten times as fast."""
    chain = chains.matmul("Q4_0", "w4", 64, 96)
    assert chain.spec.num_layers >= 3
    whole, shorter = (
        part.load(NativeBackend(), rows=1, blocks=1).weight_bytes
        for part in (chain, chain.shortened(chain.spec.num_layers - 1))
    )
    link_bytes = 2 * 64 * 96 * 18 // 32
    assert link_bytes <= whole - shorter <= 1.15 * link_bytes
    assert link_bytes * chain.spec.num_layers >= chains.WORKING_SET_BYTES


def test_a_chain_of_one_link_stays_whole() -> None:
    """Large matrices make a short chain: there is no second link to look for an error behind."""
    chain = chains.matmul("F32", "f32", 128, 256)
    assert chain.spec.num_layers == chain.shortened(2).spec.num_layers == 1
    assert np.isfinite(kernels.error_logits(NativeBackend(), chain)).all()


@pytest.mark.parametrize(
    "pieces",
    [
        [SequencePart(0, 1)],
        [SequencePart(7, 33)],
        [SequencePart(40, 1)] * 3,
        [SequencePart(0, 20), SequencePart(100, 5), SequencePart(15, 1)],
    ],
)
def test_sequences_share_nothing(pieces: list[SequencePart]) -> None:
    """Sequences over the same blocks would be read from a cache, and a malformed step would not run at all."""
    step = chains.step(pieces)
    blocks = sum(piece.blocks for piece in pieces)
    check_step(step, vocab_size=chains.VOCAB, kv=KVLayout(blocks), max_rows=sum(piece.rows for piece in pieces))
    assert step.block_tables.tolist() == list(range(blocks))
    assert len(set(step.slots.tolist())) == len(step.slots)
    assert step.logit_rows.tolist() == [sum(piece.rows for piece in pieces) - 1]


def test_the_whole_cache_is_filled() -> None:
    """Attention over zeros, whose maximum never changes, is not the attention that users wait for."""
    chain = chains.attention(4, 2, 32, "bf16")
    model = chain.load(NativeBackend(), rows=48, blocks=8)
    steps = [chains.step([SequencePart(context, 1)], want_logits=True) for context in range(16, 128, 16)]

    def logits() -> list[Any]:
        return [model.run(step).logits for step in steps]

    before = logits()
    chains.fill(model, blocks=8, rows=48)
    after = logits()
    assert all((one != other).any() for one, other in zip(before, after, strict=True))
    assert all((one != other).any() for one, other in pairwise(after))


def test_work_is_counted_by_hand() -> None:
    """A factor of two in GOP/s, or a chunk priced as if each of its rows saw all the others."""
    product = chains.matmul("Q8_0", "w8", 64, 96)
    assert kernels.operations("matmul", product, [SequencePart(0, 3)]) == 3 * 2 * (64 * 96 + 96 * 64)
    assert kernels.bytes_read("matmul", product, [SequencePart(0, 3)], 1234.0) == 1234
    attention = chains.attention(6, 2, 32, "bf16")
    assert SequencePart(10, 3).visible == 11 + 12 + 13
    assert kernels.operations("attention", attention, [SequencePart(10, 3)] * 2) == 2 * 36 * 6 * (32 + 32) * 2
    assert kernels.bytes_read("attention", attention, [SequencePart(10, 3)] * 2, 0) == 2 * 13 * 2 * (32 + 32) * 2
    add = chains.row_ops(64, 96)[3]
    assert (add.op, kernels.bytes_read("rows", add, [SequencePart(0, 5)], 0)) == ("add", 5 * 64 * 3 * 4)


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([SequencePart(0, 1)], "1 row"),
        ([SequencePart(0, 64)], "64 rows"),
        ([SequencePart(2048, 256)], "256 rows from 2,048"),
        ([SequencePart(1000, 1)], "1 at 1,000"),
        ([SequencePart(1000, 1)] * 20, "20 at 1,000"),
    ],
)
def test_a_load_in_words(pieces: list[SequencePart], words: str) -> None:
    """A table whose lines cannot be told apart."""
    assert kernels.load_of(pieces) == words


def test_the_fastest_of_at_least_three() -> None:
    """One cold run taken for the kernel's speed."""
    runs: list[int] = []
    assert kernels.fastest(0.0, runs.append, 1) > 0
    assert len(runs) == 3


def test_what_would_take_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 rows in plain C++ would hold everything up for a minute."""
    chain, rows = chains.matmul("Q4_0", "w4", 64, 96), [[SequencePart(0, count)] for count in (1, 2, 512)]

    def loads() -> list[str]:
        return [
            timing.load for timing in kernels.time_chain("matmul", chain, rows, NativeBackend("portable"), 0.0, OPTIONS)
        ]

    assert loads() == ["1 row", "2 rows", "512 rows"]
    monkeypatch.setattr(kernels, "LONGEST_S", 0.0)
    assert loads() == ["1 row"]


@pytest.mark.parametrize("isa", OPTIONS.isas)
@pytest.mark.parametrize("unit", ["dot", "fma", "bf16"])
def test_a_peak_counts_what_it_ran(isa: str, unit: Unit) -> None:
    """A ceiling from a loop that the compiler has thrown away would be in the thousands of the kernels' speed."""
    operations = _native_testing.peak(isa, unit, 1000)
    assert operations == 1000 * _native_testing.peak(isa, unit, 1) > 0
    assert 1e8 < kernels.peak(isa, unit, 1) < 1e13


def test_an_unknown_unit_or_level_is_refused() -> None:
    """A ceiling of zero that every kernel exceeds."""
    with pytest.raises(ValueError, match="dot, fma or bf16"):
        _native_testing.peak("portable", "tensor", 1)
    with pytest.raises(ValueError, match="neon"):
        _native_testing.peak("neon", "dot", 1)


def timing(**fields: Any) -> KernelTiming:
    plain = KernelTiming("matmul", "matmul w4", "64 x 96", "avx2", "1 row", 1e-6, 5e3, 2e4, "dot", 1e-7)
    return replace(plain, **fields)


def report_of(*timings: KernelTiming, samples: tuple[SampleTiming, ...] = (), ceilings: bool = True) -> Any:
    top = Ceilings(20e9, {("avx2", "dot"): 100e9, ("avx2", "fma"): 80e9, ("avx2", "bf16"): 40e9}) if ceilings else None
    return KernelCommand(OPTIONS, top, list(timings), list(samples)).report()


def test_figures_stand_beside_their_ceilings() -> None:
    """A percentage of the wrong ceiling, or bytes divided by operations."""
    report = report_of(timing(), timing(kind="attention", unit="bf16"))
    product, attention = report.tables[1].rows[0], report.tables[2].rows[0]
    assert product[4:] == pytest.approx([1, 5, 25, 20, 20, 0.1])
    assert attention[4:] == pytest.approx([1, 5, 25, 20, 50, 0.1])


def test_what_cannot_be_told_is_a_dash() -> None:
    """A link that took less than the noise around it, shown as endlessly fast; a cache's speed held against memory."""
    lost = report_of(timing(seconds=-1e-9)).tables[1].rows[0]
    assert lost[4:9] == [None] * 5
    row_op = report_of(timing(kind="rows", unit=None)).tables[1].rows[0]
    assert (row_op[5], row_op[6:9]) == (pytest.approx(5), [None] * 3)
    interrupted = report_of(timing(), ceilings=False).tables[0].rows[0]
    assert (interrupted[6], interrupted[8]) == (None, None)


def test_a_kernel_that_is_wrong_is_named() -> None:
    """A fast kernel whose error nobody reads."""
    other = SampleTiming("greedy", 100, "avx2", 1e-6, same=False, error=0.0)
    assert report_of(timing(), samples=(replace(other, same=True),)).verdict == []
    verdict = report_of(timing(error=0.5), timing(op="attention bf16", error=float("nan")), samples=(other,)).verdict
    assert [line.split(" does not")[0] for line in verdict] == [
        "attention bf16 at avx2",
        "matmul w4 at avx2",
        "sampling (greedy) at avx2",
    ]


def test_the_command_ends_with_json() -> None:
    """A program that reads the last line and finds a table."""
    arguments = ["bench", "kernels", "--quick", "--only", "sampling", "--isa", "portable", "--threads", "1"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout.splitlines()[-1])
    assert document["command"] == "bench kernels"
    assert set(document["data"]["peaks_ops_s"]) == {"portable dot", "portable fma", "portable bf16"}
    assert [sample["same"] for sample in document["data"]["sampling"]] == [True] * len(kernels.SAMPLED)
    assert document["data"]["memory_bytes_s"] > 1e8


def test_what_there_is_not_cannot_be_asked_for() -> None:
    """A misspelt kind that measures nothing and says so with an empty table."""
    with pytest.raises(ConfigError, match="conv"):
        kernels.kernel_options(None, None, ["conv"])
    with pytest.raises(ConfigError, match="neon"):
        kernels.kernel_options(["neon"], None, None)
    assert kernels.kernel_options(None, 3, ["rows"]).threads == 3
