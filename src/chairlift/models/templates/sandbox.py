"""A Jinja environment for untrusted templates: they come inside model files, and nobody has read them.

Jinja's own sandbox keeps a template from Python's internals and from changing its input. It does not keep a template
from running for ever or filling memory; this one does. Each compilation and each rendering has a `RenderBudget`, and an
operation that can take long or grow is weighed *before* it runs. Knows nothing of chats.

    where a template could run away            what stops it
    for loops, macros, calls, filters, tests   a tick each; the thread's CPU time is looked at every few ticks
    + * ** %, ~, slices, output                weighed: one value is at most 16 Mi units, all together 64 Mi
    text between tags inside a loop            its length is charged at every round
    center, indent, join, replace, format ...  their result is weighed from the arguments
    == in [..], sort, tojson, printing a list  the value's unfolded size is weighed (lists may share and double)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from chairlift.models.templates.budget import ELEMENT, MAX_VALUE, TooMuch, current, fresh_budget, text_units
from chairlift.models.templates.filters import (
    bounded_filters,
    check_bits,
    check_fields,
    check_percent,
    check_product,
    checked_string_call,
)

_MAX_SOURCE = 256 << 10


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles and renders templates within a budget.

    The caller adds `globals` of its own. Errors are Jinja's and `TooMuch`; a rendering also raises Python's own errors,
    such as a TypeError for a number added to a string.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, extensions: Sequence[str | type[Extension]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_printed)
        self.filters = {name: _counted(function) for name, function in bounded_filters().items()}
        self.filters |= {_EACH: _each, _WEIGHED: _weighed, _MADE: _made, _JOINED: _joined}
        tests: Mapping[str, Any] = self.tests
        self.tests = {name: _counted(test) for name, test in tests.items()}
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _dict
        del self.globals["lipsum"]

    def compiled(self, source: str) -> Template:
        """The template of `source`. Raises TemplateSyntaxError, TooMuch, or any error of Jinja's compiler."""
        if len(source) > _MAX_SOURCE:
            raise TooMuch(f"it has {len(source)} characters; the limit is {_MAX_SOURCE}")
        with fresh_budget():
            return self.from_string(_Guards(self).visit(self.parse(source)))

    def rendered(self, template: Template, variables: Mapping[str, Any]) -> str:
        """The output of a template that this environment compiled."""
        pieces, num_chars = [], 0
        with fresh_budget():
            for piece in template.generate(variables):
                num_chars += len(piece)
                if num_chars > MAX_VALUE:
                    raise TooMuch("it prints too much text")
                pieces.append(piece)
        return "".join(pieces)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template: a macro, a function, or a bounded method of a string or container."""
        budget = current()
        budget.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = checked_string_call(owner, __obj.__name__, args, kwargs)
        elif isinstance(owner, int | float | complex | bytes | type):
            raise SecurityError(f"a template may not call {__obj.__name__!r}")
        result = super().call(__context, __obj, *args, **kwargs)
        budget.made(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The operators whose result may be larger than their operands."""
        budget = current()
        if operator == "%" and isinstance(left, str):
            check_percent(left, right)
        elif operator == "*":
            check_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * abs(right))
        elif isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            budget.make((len(left) + len(right)) * (1 if isinstance(left, str) else ELEMENT))
        budget.tick()
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, weighed before Jinja's own checked version of it runs."""
        checked = super().wrap_str_format(value)
        if checked is None:
            return None
        template: str = value.__self__

        def weighed(*args: Any, **kwargs: Any) -> str:
            if re.search(r"\{[^{}]*(\{|\d{4})", template):
                raise SecurityError("a template may not compute the width of a field")
            check_fields(template, template.count("{"), (*args, *kwargs.values()))
            return checked(*args, **kwargs)

        return weighed


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore: those reach its own workings."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold {name[:80]!r}")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


# A template cannot write these names, so only the guards below can refer to these filters.
_EACH, _WEIGHED, _MADE, _JOINED = "guard each", "guard weighed", "guard made", "guard joined"


class _Guards(NodeTransformer):
    """Wraps the syntax for which Jinja's sandbox has no hook in hidden filters."""

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise TemplateSyntaxError("recursive loops are not supported", node.lineno)
        num_literal_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = self._filter(node.iter, _EACH, nodes.Const(num_literal_chars))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        # A comparison or search takes no longer than its right side is large.
        self.generic_visit(node)
        for operand in node.ops:
            operand.expr = self._filter(operand.expr, _WEIGHED)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        # Tuples can be keys: hashing one walks all that it unfolds to.
        self.generic_visit(node)
        return self._filter(node, _WEIGHED) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(node, _MADE) if isinstance(node.arg, nodes.Slice) else node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), _JOINED)

    def _filter(self, node: Any, name: str, *args: nodes.Expr) -> nodes.Filter:
        around = nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)
        around.set_environment(self._environment)
        return around


def _each(values: Iterable[Any], num_literal_chars: int) -> Iterator[Any]:
    """The values of a loop. Each round is charged for the text between the tags of its body."""
    budget = current()
    for value in values:
        budget.make(num_literal_chars)
        yield value


def _weighed(value: Any) -> Any:
    current().weigh(value)
    return value


def _made(value: Any) -> Any:
    current().made(value)
    return value


def _joined(values: Sequence[Any]) -> str:
    """The operator `~`."""
    current().make(sum(map(text_units, values)))
    return "".join(map(str, values))


def _printed(value: Any) -> str:
    """The text that `{{ value }}` prints."""
    current().make(text_units(value))
    return value if isinstance(value, str) else str(value)


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its arguments weighed and its result charged; `wraps` keeps Jinja's marks on it."""

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        budget.tick()
        for value in (*args, *kwargs.values()):
            budget.weigh(value)
        result = function(*args, **kwargs)
        budget.made(result)
        return result

    return counted
