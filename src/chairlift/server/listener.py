"""The listening socket: bound before anything slow begins, and closed without losing a client that has connected.

Closing resets every connection that waits to be accepted, and its client cannot know whether the request was begun. So
`stop_accepting` first tells the kernel to drop new attempts to connect, and uvicorn empties the queue before it closes:

    attempt ──> SYN ──(dropped from here on. The client repeats it after a second, and is then refused or accepted by
                       the next process: it has sent nothing, so a proxy may go elsewhere)
                 └──> queue ──> accepted and answered
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct

from chairlift.errors import ConfigError

_BACKLOG = 2048
_SO_ATTACH_FILTER = 26  # <asm-generic/socket.h>; Python's socket module lacks it
_TCP_FLAGS = 13  # byte of a TCP header (RFC 9293, 3.1) with FIN, SYN, RST, PSH, ACK from the lowest bit on
_SYN, _ACK = 0x02, 0x10

# Classic BPF, <linux/filter.h>: (code, skip if true, skip if false, operand).
_DROP_SYN = (
    (0x30, 0, 0, _TCP_FLAGS),  # load the byte
    (0x54, 0, 0, _SYN | _ACK),  # keep two bits
    (0x15, 0, 1, _SYN),  # the first packet of a connection?
    (0x06, 0, 0, 0),  # yes: drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # no: keep all of it
)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises ConfigError when the address cannot be used."""
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # create_server adds the address to strerror, in its own words.
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}", hint="choose another --port") from None


def url_of(sock: socket.socket) -> str:
    """The base URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def stop_accepting(sock: socket.socket) -> None:
    """Has the kernel drop new attempts to connect to a listening TCP socket.

    Does nothing where the kernel has no socket filters: a connection made in the instant of closing is then reset.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in _DROP_SYN))
    with contextlib.suppress(OSError):
        sock.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN), ctypes.addressof(program))
        )
