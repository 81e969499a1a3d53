"""Small operations on foreign text: cut to a length, made fit for one line, decoded in parts. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

MAX_NAME_CHARS = 100
"""Longest foreign text (a field's name, a model's name) that an error message repeats."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def clip(text: str, limit: int = MAX_NAME_CHARS) -> str:
    """The text, cut to `limit` characters; a cut text ends in "..."."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def one_line(text: str, limit: int = MAX_NAME_CHARS) -> str:
    """The text clipped, with a space for each unprintable character and "?" for each lone surrogate."""
    encodable = clip(text, limit).encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else " " for c in encodable)


def quoted(value: object, limit: int = 80) -> str:
    """The `repr` of a foreign value, clipped: its line breaks are escaped."""
    return clip(repr(value), limit)


def quoted_list(names: Sequence[str], most: int = 3) -> str:
    """`most` names, quoted and escaped, and how many more there are: "'a', 'b', 'c' and 2 more"."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def utf8_decoder() -> codecs.IncrementalDecoder:
    """A decoder for bytes that come in parts. Bytes that no character has become U+FFFD."""
    return _Utf8Decoder(errors="replace")
