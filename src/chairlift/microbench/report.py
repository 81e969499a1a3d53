"""The tables of `chairlift bench kernels`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from chairlift import machine
from chairlift.bench.report.report import Cell, Column, Report, Table

if TYPE_CHECKING:
    from chairlift.microbench.chains import Unit
    from chairlift.microbench.kernels import Ceilings, KernelCommand, KernelTiming, SampleTiming

_TITLES = {
    "matmul": "Products: two of them, and the rounding of their inputs",
    "attention": "Attention, one layer, its keys and values written",
    "rows": "Row ops",
}
_NOTES = {
    "matmul": "GB/s of packed weights. a8, a16: bits of the inputs; 16 take two 8-bit products each.",
    "attention": 'GB/s of keys and values. "5 at 4,000": five sequences, one new row each, 4,000 tokens in the cache.',
    "rows": "GB/s of operands and result, which a cache holds.",
}
_COLUMNS = (
    Column("kernel", align="left"),
    Column("lanes", align="left"),
    Column("level", align="left"),
    Column("load", align="left"),
    Column("time", "us"),
    Column("read", "GB/s"),
    Column("of memory", "%"),
    Column("done", "GOP/s"),
    Column("of peak", "%"),
    Column("error", "1e-6"),
)


def report(run: KernelCommand) -> Report:
    """Everything that was measured so far."""
    tables = [_ceilings(run.ceilings)] if run.ceilings else []
    for kind, title in _TITLES.items():
        rows = [_row(timing, run.ceilings) for timing in run.timings if timing.kind == kind]
        if rows:
            tables.append(Table(title, _COLUMNS, rows, _NOTES[kind]))
    if run.samples:
        tables.append(_sampling(run.samples))
    return Report(
        command="bench kernels",
        title=f"Kernels, {run.options.threads} threads",
        tables=tables,
        verdict=_verdict(run.timings, run.samples),
        notes=[
            f"Machine: {machine.detect().threads_reason}. Times are the fastest of several runs.",
            "Errors are shares of the largest logit behind two links.",
        ],
        data=_data(run),
    )


def _ceilings(ceilings: Ceilings) -> Table:
    levels = dict.fromkeys(isa for isa, _ in ceilings.units)
    units: tuple[Unit, ...] = ("dot", "fma", "bf16")
    columns = (Column("level", align="left"), *(Column(unit, "GOP/s") for unit in units), Column("memory", "GB/s"))
    rows: list[list[Cell]] = [
        [isa, *(ceilings.units[isa, unit] / 1e9 for unit in units), ceilings.memory / 1e9] for isa in levels
    ]
    note = "dot: 8-bit products summed; fma: f32 multiply-adds; bf16: products of bf16 values; memory: what is read."
    return Table("Ceilings", columns, rows, note)


def _row(timing: KernelTiming, ceilings: Ceilings | None) -> list[Cell]:
    """One row. Its figures are unknown if the chain took no longer than the same chain without links."""
    known = timing.seconds > 0
    read = timing.read_bytes / timing.seconds if known else None
    done = timing.operations / timing.seconds if known and timing.unit else None
    memory = ceilings.memory if ceilings and timing.kind != "rows" else None
    peak = ceilings.units[timing.isa, timing.unit] if ceilings and timing.unit else None
    return [
        timing.op,
        timing.what,
        timing.isa,
        timing.load,
        timing.seconds * 1e6 if known else None,
        _scaled(read, 1e9),
        _percent(read, memory),
        _scaled(done, 1e9),
        _percent(done, peak),
        timing.error * 1e6,
    ]


def _scaled(value: float | None, by: float) -> float | None:
    return None if value is None else value / by


def _percent(value: float | None, of: float | None) -> float | None:
    return None if value is None or of is None else 100 * value / of


def _sampling(samples: Iterable[SampleTiming]) -> Table:
    columns = (
        Column("sampling", align="left"),
        Column("vocabulary"),
        Column("level", align="left"),
        Column("time", "us"),
        Column("read", "GB/s"),
        Column("token", align="left"),
        Column("error", "1e-6"),
    )
    rows: list[list[Cell]] = [
        [
            sample.how,
            sample.vocab,
            sample.isa,
            sample.seconds * 1e6,
            4 * sample.vocab / sample.seconds / 1e9,
            "the reference's" if sample.same else "ANOTHER",
            sample.error * 1e6,
        ]
        for sample in samples
    ]
    return Table("Sampling, one row on one thread", columns, rows, "Error of the token's log-probability.")


def _verdict(timings: Iterable[KernelTiming], samples: Iterable[SampleTiming]) -> list[str]:
    wrong = {f"{timing.op} at {timing.isa}" for timing in timings if not timing.error < 1e-3}
    wrong |= {f"sampling ({sample.how}) at {sample.isa}" for sample in samples if not sample.same}
    return [f"{name} does not agree with the reference." for name in sorted(wrong)]


def _data(run: KernelCommand) -> dict[str, object]:
    ceilings = run.ceilings
    return {
        "threads": run.options.threads,
        "memory_bytes_s": ceilings.memory if ceilings else None,
        "peaks_ops_s": {f"{isa} {unit}": peak for (isa, unit), peak in ceilings.units.items()} if ceilings else {},
        "timings": [asdict(timing) for timing in run.timings],
        "sampling": [asdict(sample) for sample in run.samples],
    }
