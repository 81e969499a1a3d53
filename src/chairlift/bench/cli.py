"""The commands of `chairlift bench`: options and help only, so that --help is instant.

A command is a function under @app.command() and @with_options. Its parameters are its own options and dataclasses of
options (options.py). It imports its module and calls `measure(files, measurement)` (report/measure.py).
"""

from __future__ import annotations

from typing import Annotated

import typer

from chairlift.bench.client.target import ConnectOptions
from chairlift.bench.load.options import ArrivalOptions, WorkOptions
from chairlift.bench.options import with_options
from chairlift.bench.report.measure import measure
from chairlift.bench.report.report import ReportFiles

app = typer.Typer(
    help="Measure a server: any that speaks the OpenAI API, or Ollama's.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[str, typer.Argument(help="Where the server is, like http://127.0.0.1:8000; /v1 may follow.")]


@app.command()
@with_options
def stream(
    url: Url,
    server: ConnectOptions,
    files: ReportFiles,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each kind.")] = 20,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Words of each prompt; about as many tokens.")] = 128,
) -> None:
    """Does streaming make it faster? The same work streamed and not, in turns."""
    from chairlift.bench.streaming.stream import StreamCommand

    measure(files, StreamCommand(url, server, requests, tokens, prompt_tokens))


@app.command()
@with_options
def proxy(
    url: Url,
    server: ConnectOptions,
    files: ReportFiles,
    through: Annotated[
        str | None, typer.Option(metavar="URL", help="The same server through the proxy; URL is then the direct way.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Streams to look at, each address.")] = 3,
    tokens: Annotated[int, typer.Option(min=32, help="Tokens of each; a large buffer needs many.")] = 400,
) -> None:
    """Is something between the server and here buffering the stream, or late to pass it on?"""
    from chairlift.bench.streaming.proxy import ProxyCommand

    measure(files, ProxyCommand(url, through, server, requests, tokens))


@app.command()
@with_options
def batching(
    files: ReportFiles,
    model: Annotated[str | None, typer.Argument(help="As for `serve`.", show_default="smollm2")] = None,
    long: Annotated[int, typer.Option(min=2, help="Tokens of the long answer.")] = 1200,
    short: Annotated[int, typer.Option(min=2, help="Tokens of a one-line answer.")] = 24,
    num_short: Annotated[int, typer.Option("--with", min=0, help="One-line answers asked for with it.")] = 4,
    num_late: Annotated[int, typer.Option("--late", min=0, help="And while it is written.")] = 3,
    sizes: Annotated[list[int] | None, typer.Option(min=1, help="Size of a static batch; again for more.")] = None,
) -> None:
    """Serial, static and continuous batching on this machine, one server for each: which requests wait for which."""
    from chairlift.bench.local.batching import SIZES, BatchingCommand, MixedLoad

    measure(files, BatchingCommand(model, MixedLoad(long, short, num_short, num_late), sizes or SIZES))


Urls = Annotated[list[str], typer.Argument(help="Two servers or more; the first is what the others are compared to.")]

_HONEST = (
    "Latency counts from the moment at which a request was due, so that waiting in the client is not hidden. Every run "
    "warms up until steady, asks in words that no cache has seen, repeats nothing, and says what makes it doubtful. "
)
_SPREADS = (
    "In the JSON, a spread is num, mean, p50, p95, p99 and max in seconds, for ttft_s, visible_s, itl_s, tpot_s, e2e_s "
    "and dispatch_s; beside them stand stalls, capacity (tokens/s), failures by cause, goodput, little (users / (think "
    "+ latency)), cache_hit_rate and doubts by name."
)


@app.command(epilog=f"{_HONEST}{_SPREADS} All of that is in `data`.")
@with_options
def load(url: Url, arrivals: ArrivalOptions, work: WorkOptions, server: ConnectOptions, files: ReportFiles) -> None:
    """Latency, stalls, capacity and failures under a load: users who think, a rate, or so many requests at once."""
    from chairlift.bench.load import single

    measure(files, single.command(url, server, work.spec(arrivals)))


Users = Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of users, ascending.", rich_help_panel="Load")]


@app.command(
    epilog=f"{_HONEST}{_SPREADS} `data.steps` has one such for each number of users; data.knee_users the knee."
)
@with_options
def steps(
    url: Url, work: WorkOptions, server: ConnectOptions, files: ReportFiles, users: Users = "1,2,5,10,20"
) -> None:
    """What changes with more people: the same work for 1, 2, 5, 10, 20 users, and the knee beyond which they queue."""
    from chairlift.bench.load import steps as module

    measure(files, module.command(url, server, work.steps(module.parse_users(users))))


Rounds = Annotated[int, typer.Option(min=1, max=100, help="Turns of every server.", rich_help_panel="Measuring")]


@app.command(
    epilog=f"{_HONEST}{_SPREADS} `data.servers` has one such for each server and round; data.ratios the ratios of each "
    "round, their median, and whether all rounds agree (is_told_apart)."
)
@with_options
def compare(
    urls: Urls,
    arrivals: ArrivalOptions,
    work: WorkOptions,
    server: ConnectOptions,
    files: ReportFiles,
    rounds: Rounds = 3,
) -> None:
    """The same work in turns against several servers, round by round; ratios with their spread."""
    from chairlift.bench.load import compare as module

    measure(files, module.command(urls, server, work.spec(arrivals), rounds))


@app.command()
@with_options
def kernels(
    files: ReportFiles,
    isa: Annotated[list[str] | None, typer.Option(help="Level; again for more.", show_default="all here")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads.", show_default="as for `serve`")] = None,
    only: Annotated[list[str] | None, typer.Option(help="matmul, attention, rows, sampling; again for more.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, shorter runs.")] = False,
) -> None:
    """Each kernel at each instruction set level on this machine, beside what memory and arithmetic units can do."""
    from chairlift.microbench.kernels import KernelCommand, kernel_options

    measure(files, KernelCommand(kernel_options(isa, threads, only, quick=quick)))
