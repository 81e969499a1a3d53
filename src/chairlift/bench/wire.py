"""Bytes of a stream to messages: server-sent events, or a line of JSON each. However the bytes were cut, the same comes
out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

MAX_MESSAGE_BYTES = 2**20
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[\x00-\xff])")  # a last \r may be half of an end: it waits for its successor


class BadStream(Exception):
    """Bytes that are no stream of this kind."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `data` is None for a comment. `num_bytes` counts everything since the message before.

    `is_error`: its event or its field is named so, which is how some servers tell what went wrong.
    """

    data: bytes | None
    num_bytes: int
    is_error: bool = False


class Parser(Protocol):
    """Takes bytes as they come, gives messages once they are whole."""

    def feed(self, data: bytes) -> list[Message]:
        """Messages that these bytes complete. Raises BadStream when one grows beyond MAX_MESSAGE_BYTES."""


class SseParser:
    """Server-sent events as the HTML standard has them, and the field `error:` that llama-server had in its place."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_bytes = 0
        self._is_error = False

    def feed(self, data: bytes) -> list[Message]:
        """Messages that these bytes complete."""
        buffer, messages, start = self._rest + data, [], 0
        for found in _LINE_END.finditer(buffer):
            line = buffer[start : found.start()]
            self._num_bytes += found.end() - start
            start = found.end()
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b":"):
                messages.append(self._message(None))
            elif line.startswith(b"error:"):
                self._data.append(line[6:].removeprefix(b" "))
                self._is_error = True
            elif line in (b"event: error", b"event:error"):
                self._is_error = True
            elif not line and self._data:
                messages.append(self._message(b"\n".join(self._data)))
                self._data.clear()
        self._rest = buffer[start:]
        _check_size(len(self._rest) + self._num_bytes)
        return messages

    def _message(self, data: bytes | None) -> Message:
        is_error = self._is_error and data is not None
        message = Message(data, self._num_bytes, is_error)
        self._num_bytes = 0
        self._is_error &= not is_error
        return message


class LineParser:
    """A JSON document on each line, as Ollama's own API streams."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Lines that these bytes complete; empty ones are skipped."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        _check_size(len(self._rest))
        return [Message(line, len(line) + 1) for line in lines if line.strip()]


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_MESSAGE_BYTES:
        raise BadStream(f"a message of more than {MAX_MESSAGE_BYTES} bytes")
