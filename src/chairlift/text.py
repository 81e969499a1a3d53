"""Small operations on text that more than one part of Chairlift needs. Pure."""

from __future__ import annotations

import codecs

MAX_NAME_CHARS = 100
"""Longest piece of foreign text (a field's name, a model's name) that an error message repeats."""

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


def clip(text: str, limit: int = MAX_NAME_CHARS) -> str:
    """The text, cut to `limit` characters; a cut text ends in "..."."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def one_line(text: str, limit: int = MAX_NAME_CHARS) -> str:
    """The text clipped, with a space for each unprintable character and "?" for each lone surrogate."""
    encodable = clip(text, limit).encode("utf-8", "replace").decode()
    return "".join(c if c.isprintable() else " " for c in encodable)


def utf8_decoder() -> codecs.IncrementalDecoder:
    """A decoder for bytes that come in pieces; bytes that no character has become U+FFFD."""
    return _Utf8Decoder(errors="replace")
