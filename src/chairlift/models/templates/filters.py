"""The filters and string methods that templates may use, each bounded by its arguments before it runs.

Anything that is not named here is refused: chat templates do not pad, wrap or print in other ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import Environment, nodes, pass_environment, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS

from chairlift.models.templates.budget import ELEMENT, TooMuch, current, text_units

_MAX_ELEMENTS = 128 << 10
_MAX_INT_BITS = 4096
_MAX_PADDING = 1000
_MAX_NEEDLE = 100


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Filters whose result is at most a few times their argument, and quickly made.
_HARMLESS = _words("""
    abs attr capitalize count d default e escape first float forceescape int items last length list lower map reject
    rejectattr reverse safe select selectattr string upper
""")
# Filters that loop in Python, or sort.
_OF_FEW = _words("dictsort groupby max min sort title unique urlencode")


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's filters without those that no chat template needs (wordwrap, xmlattr, random, ...)."""
    filters: dict[str, Callable[..., Any]] = {name: FILTERS[name] for name in _HARMLESS}
    filters |= {name: _of_few(FILTERS[name]) for name in _OF_FEW}
    filters |= {"center": _center, "format": _format, "indent": _indent, "join": _join, "replace": _replace}
    return filters | {"round": _round, "sum": _sum, "tojson": _tojson, "trim": _trim}


def _of_few(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def of_few(*args: Any, **kwargs: Any) -> Any:
        values: list[Any] = [list(value) if isinstance(value, Iterator | range) else value for value in args]
        for value in values:
            current().weigh(value)
            if len(value if isinstance(value, str | list | tuple | dict) else ()) > _MAX_ELEMENTS:
                raise TooMuch("it works on too large a value")
        return function(*values, **kwargs)

    return of_few


def _center(value: Any, width: int = 80) -> Any:
    _check_width(text_units(value), width)
    return FILTERS["center"](value, width)


def _format(value: Any, *args: Any, **kwargs: Any) -> Any:
    check_percent(str(value), (*args, *kwargs.values()))
    return FILTERS["format"](value, *args, **kwargs)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    padding = len(width) if isinstance(width, str) else width
    _check_width(0, padding)
    current().make(len(s) + padding * (s.count("\n") + 1))
    return FILTERS["indent"](s, width, first, blank)


@pass_eval_context
def _join(eval_ctx: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
    values = list(value)
    current().make(sum(map(text_units, values)) + text_units(d) * len(values))
    return FILTERS["join"](eval_ctx, values, d, attribute)


@pass_eval_context
def _replace(eval_ctx: nodes.EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    text_units(s)
    _check_replacement(str(s), str(old), str(new))
    return FILTERS["replace"](eval_ctx, s, old, new, count)


def _round(value: float, precision: int = 0, method: str = "common") -> Any:
    if abs(precision) > _MAX_PADDING:
        raise TooMuch("it rounds to too many places")
    return FILTERS["round"](value, precision, method)


@pass_environment
def _sum(environment: Environment, iterable: Iterable[Any], attribute: str | None = None, start: float = 0) -> Any:
    # Lists would be added in quadratic time.
    if not isinstance(start, int | float):
        raise TypeError("only numbers can be summed")
    return FILTERS["sum"](environment, iterable, attribute, start)


def _trim(value: Any, chars: str | None = None) -> Any:
    _check_needle(chars)
    return FILTERS["trim"](value, chars)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates expect it: unlike Jinja's own, nothing is escaped for HTML."""
    _check_width(0, len(indent) if isinstance(indent, str) else indent or 0)
    _check_width(0, sum(map(len, separators or ())))
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    pieces = []
    for piece in encoder.iterencode(value):
        current().make(len(piece))
        pieces.append(piece)
    return "".join(pieces)


# Methods of strings whose result is at most a few times the string, and linear in their arguments.
_PLAIN_METHODS = _words("""
    capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower
    isnumeric isprintable isspace istitle isupper lower partition removeprefix removesuffix startswith swapcase title
    upper
""")
# Methods that take the product of both lengths when they search from the right or for any of some characters.
_NEEDLE_METHODS = _words("lstrip rfind rindex rpartition rstrip strip")
_SPLIT_METHODS = _words("rsplit split splitlines")
_PADDING_METHODS = _words("center ljust rjust zfill")


def checked_string_call(text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments for `text.name(...)`, once it is known that the call is bounded."""
    first = args[0] if args else None
    if name in _NEEDLE_METHODS:
        _check_needle(first)
    elif name in _SPLIT_METHODS:
        separator = kwargs.get("sep", first)
        _check_needle(separator)
        num_parts = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
        current().make(len(text) + ELEMENT * num_parts)
    elif name in _PADDING_METHODS and isinstance(first, int):
        _check_width(len(text), first)
    elif name == "replace" and len(args) > 1 and isinstance(first, str) and isinstance(args[1], str):
        _check_replacement(text, first, args[1])
    elif name == "join" and isinstance(first, Iterable):
        values = list(first)
        current().make(sum(map(text_units, values)) + len(text) * len(values))
        return (values,)
    elif name not in _PLAIN_METHODS:
        raise SecurityError(f"a template may not call {name!r} of a string in this way")
    return args


def _check_needle(needle: Any) -> None:
    if isinstance(needle, str) and len(needle) > _MAX_NEEDLE:
        raise TooMuch("it searches for too long a text")


def _check_width(num_chars: int, width: int) -> None:
    if width > max(num_chars, _MAX_PADDING):
        raise TooMuch("it pads text too far")


def _check_replacement(text: str, old: str, new: str) -> None:
    current().make(len(text) + text.count(old) * max(0, len(new) - len(old)))


def check_percent(text: str, values: Any) -> None:
    """Refuses `text % values` where the result could be large."""
    if re.search(r"%(\([^)]*\))?[#0\- +]*(\*|\d{4}|\d*\.(\*|\d{4}))", text):
        raise TooMuch("it pads text too far")
    check_fields(text, text.count("%"), values)


def check_fields(text: str, num_fields: int, values: Any) -> None:
    """Takes room for the longest result: `text` with all of `values` in each of its fields."""
    current().make(len(text) + num_fields * (text_units(values) + _MAX_PADDING))


def check_product(left: Any, right: Any) -> None:
    """Takes room for `left * right`, or refuses it."""
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            current().make(len(value) * max(0, times) * (1 if isinstance(value, str) else ELEMENT))


def check_bits(num_bits: int) -> None:
    """Refuses integers that take long to compute with or to print."""
    if num_bits > _MAX_INT_BITS:
        raise TooMuch("it computes too large a number")
