"""Server-sent events as a browser reads them, piece by piece: the oracle for the server's streams."""

from __future__ import annotations

import codecs


class SSEParser:
    """Follows the HTML standard, section "Event stream interpretation". Keeps the events' data, and the comments."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._text = ""
        self._data: list[str] = []
        self.events: list[str] = []
        self.comments: list[str] = []

    def feed(self, piece: bytes) -> None:
        """Takes the next bytes, which may be cut anywhere."""
        self._text += self._decoder.decode(piece)
        while True:
            ends = [at for at in (self._text.find("\r"), self._text.find("\n")) if at >= 0]
            # A "\r" at the very end may be half of a "\r\n".
            if not ends or (self._text[min(ends)] == "\r" and min(ends) == len(self._text) - 1):
                return
            end = min(ends)
            line = self._text[:end]
            self._text = self._text[end + (2 if self._text.startswith("\r\n", end) else 1) :]
            self._line(line)

    def _line(self, line: str) -> None:
        if not line:
            if self._data:
                self.events.append("\n".join(self._data))
            self._data = []
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not name:
            self.comments.append(value)
        elif name == "data":
            self._data.append(value)

    @property
    def is_complete(self) -> bool:
        """Whether the parser holds no part of an event that the end of the stream would discard."""
        return not self._text and not self._data


def parsed(*pieces: bytes) -> SSEParser:
    """A parser that has read these."""
    parser = SSEParser()
    for piece in pieces:
        parser.feed(piece)
    return parser
