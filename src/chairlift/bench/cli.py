"""The commands of `chairlift bench`: options and help only, so that --help is instant.

A command is a function `name(shared: Shared, url: Url, ...)` under @app.command() and @with_shared; it imports its
module and calls `measure(shared.output, work, tell)` (live.py) there.
"""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Measure a server: any that speaks the OpenAI API, or Ollama's.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[str, typer.Argument(help="Where the server is, like http://127.0.0.1:8000; /v1 may follow.")]
