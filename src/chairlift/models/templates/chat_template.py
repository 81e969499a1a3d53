"""Renders a chat template: a list of messages becomes the text that the model was trained on.

Owns the names, functions and tags that templates expect, and the errors that reach a client. `sandbox.py` keeps a
hostile template in bounds; `models/tokenizer.py` turns the text into tokens.

A model without a template gets none: its training text is unknown. Completions work without one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from chairlift.errors import ModelError, RequestError
from chairlift.models.templates.budget import TooMuch
from chairlift.models.templates.sandbox import BoundedEnvironment
from chairlift.text import clip

_MAX_MESSAGE_CHARS = 500


class ChatTemplate:
    """A compiled chat template; any number of threads may render it at once.

    `source` is the template's text. `tokenizer_specials` maps the names of control tokens that a template may use
    (`bos_token`, `eos_token`, ...) to their text, as `Tokenizer.special_tokens` does. `now` is the clock behind
    `strftime_now`. Raises ModelError for a template that does not compile.
    """

    def __init__(
        self,
        source: str,
        tokenizer_specials: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._specials = dict(tokenizer_specials)
        self._environment = BoundedEnvironment([_GenerationTag, loopcontrols])
        self._environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime(now)}
        try:
            self._template = self._environment.compiled(source)
        except Exception as error:
            line = getattr(error, "lineno", None)
            where = "" if line is None else f" in line {line}"
            raise ModelError(f"the model's chat template does not compile{where}: {_text_of(error)}") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for `messages`; `kwargs` are further variables for the template and win over control tokens.

        Raises RequestError when the template refuses the messages (with its own words), fails on them, or asks for more
        time or memory than the sandbox grants.
        """
        variables = self._specials | kwargs
        variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        variables.setdefault("documents", None)
        try:
            return self._environment.rendered(self._template, variables)
        except _Refusal as refusal:
            raise RequestError(_text_of(refusal), param="messages") from None
        except TooMuch as error:
            raise RequestError(f"the model's chat template was stopped: {_text_of(error)}", param="messages") from None
        except Exception as error:
            message = f"the model's chat template cannot take these messages: {_text_of(error)}"
            raise RequestError(message, param="messages") from None


class _Refusal(TemplateError):
    """Raised by `raise_exception`: the template itself refuses these messages."""


def _raise_exception(message: object) -> None:
    raise _Refusal(message if isinstance(message, str) else "the chat template refuses these messages")


def _strftime(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(format: str) -> str:
        # The C library pads a field to any width that is written before its letter.
        if len(format) > _MAX_MESSAGE_CHARS or re.search(r"\d{4}", format):
            raise TooMuch("it pads a date too far")
        return now().strftime(format)

    return strftime_now


class _GenerationTag(Extension):
    """`{% generation %}`, which marks the assistant's text for training and prints it unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _text_of(error: Exception) -> str:
    """The error in one line. Jinja's errors give their message only, since their `str` quotes the template."""
    text = (error.message if isinstance(error, TemplateError) else str(error)) or type(error).__name__
    return clip(" ".join(text.split()), _MAX_MESSAGE_CHARS)
