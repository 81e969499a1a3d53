"""The commands of `chairlift bench`: options and help only, so that --help is instant.

A command is a function `name(shared: Shared, url: Url, ...)` under @app.command() and @with_shared; it imports its
module and calls `measure(shared.output, work, tell)` (live.py) there.
"""

from __future__ import annotations

from typing import Annotated

import typer

from chairlift.bench.live import Shared, measure, with_output, with_shared
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
