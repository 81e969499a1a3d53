"""HTTP over a socket that the test controls: a client that reads slowly, breaks the protocol, or leaves at any byte."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Reply:
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """One connection for one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def connect(cls, port: int, *, buffer_bytes: int | None = None) -> Wire:
        """`buffer_bytes` limits the client's buffers, so that the server notices a slow reader."""
        sock = socket.socket()
        sock.setblocking(False)
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=buffer_bytes or 2**16)
        except BaseException:
            sock.close()
            raise
        return cls(reader, writer)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> int:
        """Reads the status line and the headers. Returns the status."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        self.status = int(lines[0].split(" ")[1])
        self.headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
        return self.status

    async def pieces(self, pause_s: float = 0.0) -> AsyncIterator[bytes]:
        """The body as it arrives, with a pause before each read. Raises EOFError when the response is cut."""
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self._reader.readexactly(int(self.headers["content-length"]))
            return
        while True:
            await asyncio.sleep(pause_s)
            size = int(await self._reader.readline() or b"-1", 16)
            if size < 0:
                raise EOFError("the answer was cut")
            data = await self._reader.readexactly(size + 2)
            if size == 0:
                return
            yield data[:-2]

    async def reply(self, pause_s: float = 0.0) -> Reply:
        """Reads the whole response."""
        await self.head()
        body = b"".join([piece async for piece in self.pieces(pause_s)])
        return Reply(self.status, self.headers, body)

    def close(self) -> None:
        """Closes the connection."""
        self._writer.close()

    def reset(self) -> None:
        """Resets the connection, as a client does that loses its network."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


def request_bytes(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a request. A header set to "" is left out."""
    fields = {"host": "test", "content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


async def exchange(port: int, request: bytes, *, buffer_bytes: int | None = None, pause_s: float = 0.0) -> Reply:
    """One request and its whole response, on a connection of its own."""
    wire = await Wire.connect(port, buffer_bytes=buffer_bytes)
    try:
        await wire.send(request)
        return await wire.reply(pause_s)
    finally:
        wire.close()
