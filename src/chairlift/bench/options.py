"""Makes the options of a command from dataclasses, so that type, default and help of each stand in one place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of the parameters whose types are dataclasses.

    The fields are written as Typer's own parameters are, `name: Annotated[type, typer.Option(...)] = default`. The help
    lists the command's own options first.
    """
    groups: dict[str, type[Any]] = {}
    own: list[inspect.Parameter] = []
    made_of: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        kind = parameter.annotation
        if not is_dataclass(kind):
            own.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))  # Typer passes all by keyword
            continue
        assert isinstance(kind, type)
        groups[name] = kind
        hints = get_type_hints(kind, include_extras=True)
        made_of += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in fields(kind)
        ]

    def run(**given: Any) -> None:
        made = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind)}) for name, kind in groups.items()
        }
        command(**given, **made)

    functools.update_wrapper(run, command)
    run.__signature__ = inspect.Signature([*own, *made_of])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run
