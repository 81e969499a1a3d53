"""Turns the bytes of a stream into messages: server-sent events, or lines of JSON, however the bytes were cut."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_MESSAGE_BYTES = 2**20
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[\x00-\xff])")  # a \r at the end may be half of \r\n


class BadStream(Exception):
    """The bytes are not a stream of the expected kind."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message; `data` is None for a comment. `num_bytes` counts everything since the message before.

    `is_error`: its event or field is named "error", which is how some servers report one.
    """

    data: bytes | None
    num_bytes: int
    is_error: bool = False


class SseParser:
    """Server-sent events of the HTML standard, and the field `error:` that llama-server used to send instead."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._num_bytes = 0
        self._is_error = False

    def feed(self, data: bytes) -> list[Message]:
        """Messages that these bytes complete. Raises BadStream if one is longer than MAX_MESSAGE_BYTES."""
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
