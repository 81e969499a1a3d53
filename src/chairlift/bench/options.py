"""Makes the options of a command from dataclasses, so that type, default and help of each are in one place.

    @dataclass
    class WorkOptions:                                            @app.command()
        seed: int | None = option("Decides lengths.", min=0)      @with_options
                                                                  def load(url: Url, work: WorkOptions) -> None: ...

Knows no room of the bench: each room has the options of what it does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import field, fields, is_dataclass
from typing import Any, get_type_hints

import typer

_OWN = inspect.Parameter.KEYWORD_ONLY  # Typer passes everything by keyword


def option(help: str, *flags: str, default: Any = None, panel: str | None = None, **more: Any) -> Any:
    """The field of an option. `more` goes to typer.Option; without `flags` the name of the field makes the flag."""
    shown = typer.Option(default, *flags, help=help, rich_help_panel=panel, **more)
    return field(default=default, metadata={"option": shown})


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of the parameters whose types are dataclasses of options.

    The help lists the command's own options first.
    """
    groups: dict[str, type[Any]] = {}
    own: list[inspect.Parameter] = []
    grouped: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = parameter.annotation
        if not is_dataclass(kind):
            own.append(parameter.replace(kind=_OWN))
            continue
        assert isinstance(kind, type)
        groups[name], hints = kind, get_type_hints(kind)
        for each in fields(kind):
            shown = each.metadata["option"]
            grouped.append(inspect.Parameter(each.name, _OWN, default=shown, annotation=hints[each.name]))

    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{each.name: given.pop(each.name) for each in fields(kind)})
        command(**given)

    functools.update_wrapper(run, command)
    run.__signature__ = inspect.Signature([*own, *grouped])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run
