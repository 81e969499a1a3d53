"""The end of a listening socket without losing who has just connected.

Closing it resets every connection that waits to be accepted, and its sender cannot know whether the request was begun.
So the kernel is first told to drop further attempts to connect, the queue is emptied, and only then it is closed:

    attempt ──> SYN ──(dropped from here on; the sender repeats it after a second, and is then refused or taken by
                       whoever listens next: nothing was sent, so a proxy may go elsewhere)
                 └──> queue ──> accepted and answered
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct

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


def stop_accepting(sock: socket.socket) -> None:
    """Lets nobody new into the queue of a listening TCP socket.

    Where the kernel knows no socket filters nothing happens, and a connection made in the instant of closing is reset.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in _DROP_SYN))
    with contextlib.suppress(OSError):
        sock.setsockopt(
            socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(_DROP_SYN), ctypes.addressof(program))
        )
