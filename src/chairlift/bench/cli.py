"""The commands of `chairlift bench`: options and help only, so that --help is instant.

A command is a function `name(shared: Shared, url: Url, ...)` under @app.command() and @with_shared; it imports its
module and calls `measure(shared.output, work, tell)` (live.py) there.
"""

from __future__ import annotations

from typing import Annotated

import typer

from chairlift.bench.live import Shared, measure, with_output, with_shared
from chairlift.bench.options import ArrivalFlags, WorkFlags, with_arrivals, with_work
from chairlift.bench.report import Output

app = typer.Typer(
    help="Measure a server: any that speaks the OpenAI API, or Ollama's.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[str, typer.Argument(help="Where the server is, like http://127.0.0.1:8000; /v1 may follow.")]


@app.command()
@with_shared
def stream(
    shared: Shared,
    url: Url,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each kind.")] = 20,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Words of each prompt; about as many tokens.")] = 128,
) -> None:
    """Does streaming make it faster? The same work streamed and not, in turns."""
    from chairlift.bench.stream import StreamRun

    run = StreamRun(url, shared, requests, tokens, prompt_tokens)
    measure(shared.output, run.work, run.report)


@app.command()
@with_shared
def proxy(
    shared: Shared,
    url: Url,
    through: Annotated[
        str | None, typer.Option(metavar="URL", help="The same server through the proxy; URL is then the direct way.")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Streams to look at, each address.")] = 3,
    tokens: Annotated[int, typer.Option(min=32, help="Tokens of each; a large buffer needs many.")] = 400,
) -> None:
    """Is something between the server and here gathering the stream, or late to pass it on?"""
    from chairlift.bench.proxy import ProxyRun

    run = ProxyRun(url, through, shared, requests, tokens)
    measure(shared.output, run.work, run.report)


@app.command()
@with_output
def batching(
    output: Output,
    model: Annotated[str | None, typer.Argument(help="As for `serve`.", show_default="smollm2")] = None,
    long: Annotated[int, typer.Option(min=2, help="Tokens of the long answer.")] = 1200,
    short: Annotated[int, typer.Option(min=2, help="Tokens of a one-line answer.")] = 24,
    num_short: Annotated[int, typer.Option("--with", min=0, help="One-line answers asked for with it.")] = 4,
    num_late: Annotated[int, typer.Option("--late", min=0, help="And while it is written.")] = 3,
    sizes: Annotated[list[int] | None, typer.Option(min=1, help="Size of a static batch; again for more.")] = None,
) -> None:
    """Serial, static and continuous batching on this machine, one server for each: who waits for whom."""
    from chairlift.bench.batching import SIZES, Batching, Load

    run = Batching(model, Load(long, short, num_short, num_late), sizes or SIZES)
    measure(output, run.work, run.report)


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
@with_shared
@with_work
@with_arrivals
def load(shared: Shared, work: WorkFlags, arrivals: ArrivalFlags, url: Url) -> None:
    """Latency, stalls, capacity and failures under a load: users who think, a rate, or so many requests at once."""
    from chairlift.bench import single

    single.load(shared, work.wanted(arrivals.arrivals(work.thinking), arrivals.trace), url)


Users = Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of users, ascending.", rich_help_panel="Load")]


@app.command(
    epilog=f"{_HONEST}{_SPREADS} `data.steps` has one such for each number of users; data.knee_users the knee."
)
@with_shared
@with_work
def steps(shared: Shared, work: WorkFlags, url: Url, users: Users = "1,2,5,10,20") -> None:
    """What changes with more people: the same work for 1, 2, 5, 10, 20 users, and the knee beyond which they queue."""
    from chairlift.bench import steps as module

    module.steps(shared, work.steps(module.parse_users(users)), url)


Rounds = Annotated[int, typer.Option(min=1, max=100, help="Turns of every server.", rich_help_panel="Measuring")]


@app.command(
    epilog=f"{_HONEST}{_SPREADS} `data.servers` has one such for each server and round; data.ratios the ratios of each "
    "round, their median, and whether all rounds agree (is_told_apart)."
)
@with_shared
@with_work
@with_arrivals
def compare(shared: Shared, work: WorkFlags, arrivals: ArrivalFlags, urls: Urls, rounds: Rounds = 3) -> None:
    """The same work in turns against several servers, round by round; ratios with their spread."""
    from chairlift.bench import compare as module
    from chairlift.errors import ConfigError

    if len(urls) < 2:
        raise ConfigError("compare needs two servers", hint="chairlift bench compare URL URL")
    wanted = work.wanted(arrivals.arrivals(work.thinking), arrivals.trace)
    module.compare(shared, wanted, urls, rounds)


@app.command()
@with_output
def kernels(
    output: Output,
    isa: Annotated[list[str] | None, typer.Option(help="Level; again for more.", show_default="all here")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads.", show_default="as for `serve`")] = None,
    only: Annotated[list[str] | None, typer.Option(help="matmul, attention, rows, sampling; again for more.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer cases, shorter runs.")] = False,
) -> None:
    """Each kernel at each instruction set level on this machine, beside what memory and arithmetic units can do."""
    from chairlift.bench.kernels import KernelRun, wanted

    run = KernelRun(wanted(isa, threads, only, quick=quick))
    measure(output, run.work, run.report)
