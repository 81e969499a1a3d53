"""Running a measurement: progress on stderr, the report at the end, and a Ctrl-C that loses nothing.

A measurement has two methods. `work` measures and keeps what it has. `report` makes a Report of what there is at that
moment, even if that is nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, Self
from urllib.parse import urlsplit

import typer

from chairlift.bench.report.report import Report, ReportFiles, emit
from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

INTERRUPTED = 130
"""Exit status after Ctrl-C, as in shells."""


class ProgressDisplay:
    """Progress on stderr: a bar in a terminal, a line for each `say` everywhere."""

    def __init__(self) -> None:
        self._bars: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bars = Progress(console=Console(stderr=True), transient=True)
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, line: str) -> None:
        """Says what begins now. A log shows this line too."""
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def at(self, done: float, total: float | None, what: str = "") -> None:
        """Moves the bar, which only a terminal shows. `total` is None if it is not known."""
        if self._bars is None:
            return
        if self._task is None:
            self._task = self._bars.add_task(what, total=total)
        self._bars.update(self._task, completed=done, total=total, description=what)


class Measurement(Protocol):
    """A command of the bench."""

    async def work(self, progress: ProgressDisplay) -> None:
        """Measures. Raises ChairliftError if it cannot go on."""

    def report(self) -> Report:
        """What was measured so far."""


def measure(files: ReportFiles, measurement: Measurement) -> None:
    """Runs a measurement and emits its report, also if Ctrl-C or SIGTERM ends it early (exit status 130).

    An error that ends the run, such as a server that is gone, is raised after the report of what was measured, if the
    report has a table.
    """
    files.check()
    interrupted = False
    error: ChairliftError | None = None
    load = os.getloadavg()[0]
    with ProgressDisplay() as progress, _terminated_as_interrupted():
        try:
            asyncio.run(measurement.work(progress))
        except KeyboardInterrupt:
            interrupted = True
        except ChairliftError as raised:
            error = raised
    report = measurement.report()
    if error is not None:
        if not report.tables:
            raise error
        report = replace(report, warnings=[*report.warnings, f"ended early: {error.message}"], interrupted=True)
    emit(replace(report, notes=[*report.notes, *load_notes(load)]), files, interrupted=interrupted)
    if error is not None:
        raise error
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM acts as Ctrl-C, so that `timeout 60 chairlift bench ...` reports what was measured too."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_local(url: str) -> bool:
    """Whether the address is this machine's loopback. The local end of a tunnel looks the same."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def machine_note(url: str | None) -> str:
    """The machine that the figures are of. `url` is None for a server that the command started itself."""
    if url is not None and not is_local(url):
        return "The server's machine is not known from here; times include the network between."
    from chairlift.machine import detect

    machine = detect()
    return (
        f"Machine: {machine.threads_reason}, {machine.memory_total_bytes / 2**30:.1f} GiB; "
        "the client ran on it too and took its share."
    )


def load_notes(load: float) -> list[str]:
    """How busy this machine was before the run, by the load average of a minute."""
    note = f"Load average here before the run: {load:.1f}."
    if load > 0.5:
        note += " Something else was at work; run again on a quiet machine before you compare."
    return [note]
