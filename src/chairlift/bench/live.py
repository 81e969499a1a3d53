"""What happens while a command runs: options that all share, progress on stderr, and a Ctrl-C that loses nothing.

A command gives `measure` two functions: `work`, which measures and keeps what it has, and `tell`, which makes a Report
of what there is at that moment, be it nothing.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import ipaddress
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import urlsplit

import typer

from chairlift.bench.report import Output, Report, emit
from chairlift.errors import ChairliftError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


class Api(StrEnum):
    """Which API the server is asked over."""

    AUTO = "auto"
    CHAT = "chat"
    COMPLETIONS = "completions"
    OLLAMA = "ollama"


@dataclass(frozen=True, slots=True)
class Shared:
    """The options of every command that asks a server."""

    output: Output
    model: str | None  # None: the first that the server lists
    api: Api
    api_key: str | None
    timeout_s: float


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_REPORT = [
    _option("json", Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result.")], None),
    _option(
        "html", Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with pictures.")], None
    ),
]
_ASKING = [
    _option("model", Annotated[str | None, typer.Option(help="Model.", show_default="the first listed")], None),
    _option("api", Annotated[Api, typer.Option(help="API to ask over.")], Api.AUTO),
    _option("api_key", Annotated[str | None, typer.Option(metavar="KEY", help="Key to send.")], None),
    _option("timeout", Annotated[float, typer.Option(min=0.1, metavar="S", help="Most seconds of a request.")], 600.0),
]


def with_shared(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of Shared and hands it that as first argument; output files are checked first."""

    def make(given: dict[str, Any], output: Output) -> Shared:
        values = {row.name: given.pop(row.name) for row in _ASKING}
        return Shared(output=output, timeout_s=values.pop("timeout"), **values)

    return _with_options(command, [*_ASKING, *_REPORT], make)


def with_output(command: Callable[..., None]) -> Callable[..., None]:
    """Only --json and --html, for a command that starts its servers itself; hands it the Output."""
    return _with_options(command, _REPORT, lambda _, output: output)


def _with_options(
    command: Callable[..., None], rows: list[inspect.Parameter], make: Callable[[dict[str, Any], Output], Any]
) -> Callable[..., None]:
    def run(**given: Any) -> None:
        output = Output(given.pop("json"), given.pop("html"))
        output.check()
        first = make(given, output)
        command(first, **given)

    functools.update_wrapper(run, command)
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    # Arguments first, as keywords: Typer passes nothing by position.
    keywords = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    run.__signature__ = inspect.Signature([*keywords, *rows])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


class Live:
    """Progress on stderr: a bar in a terminal, a line for each `say` anywhere."""

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, line: str) -> None:
        """What is done now, for a log as well."""
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def at(self, done: float, total: float | None, what: str = "") -> None:
        """How far it is; only a terminal shows it. An unknown total is None."""
        if self._bars is None:
            return
        if self._task is None:
            self._task = self._bars.add_task(what, total=total)
        self._bars.update(self._task, completed=done, total=total, description=what)


def measure(output: Output, work: Callable[[Live], Coroutine[Any, Any, None]], tell: Callable[[], Report]) -> None:
    """Runs `work` and emits what `tell` makes of it, also when Ctrl-C or SIGTERM ends it early (exit status 130).

    An error that ends it, such as a server that is gone, is raised after what was measured, if there is a table of it.
    """
    interrupted = False
    error: ChairliftError | None = None
    load = load_average()
    with Live() as live, _terminated_as_interrupted():
        try:
            asyncio.run(work(live))
        except KeyboardInterrupt:
            interrupted = True
        except ChairliftError as raised:
            error = raised
    report = tell()
    if error is not None:
        if not report.tables:
            raise error
        report = replace(report, warnings=[*report.warnings, f"ended early: {error.message}"], interrupted=True)
    emit(replace(report, notes=[*report.notes, *noise(load)]), output, interrupted=interrupted)
    if error is not None:
        raise error
    if interrupted:
        raise typer.Exit(INTERRUPTED)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """A supervisor that ends the run (`timeout 60 chairlift bench ...`) gets what was measured as well."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_local(url: str) -> bool:
    """Whether the address is this machine's loopback (a tunnel's end looks the same)."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def machine_note(url: str | None) -> str:
    """What the figures were measured on; None is a server that this command started itself."""
    if url is not None and not is_local(url):
        return "The server's machine is not known from here; times include the network between."
    from chairlift.machine import detect

    machine = detect()
    return (
        f"Machine: {machine.threads_reason}, {machine.memory_total_bytes / 2**30:.1f} GiB; "
        "the client ran on it too and took its share."
    )


def load_average() -> float | None:
    """Of the last minute, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def noise(load: float | None) -> list[str]:
    """How busy this machine was before the run: the load average of the last minute."""
    if load is None:
        return []
    said = f"Load average here before the run: {load:.1f}."
    if load > 0.5:
        said += " Something else was at work; run again on a quiet machine before you compare."
    return [said]
