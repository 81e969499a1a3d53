"""What a service manager is told, where one listens (systemd's `Type=notify`): ready, stopping, a status line, alive.

One datagram to the socket that NOTIFY_SOCKET names, per piece of news. Nothing here waits for the manager, and nothing
that fails here may hold up or end the server. The protocol is that of sd_notify(3).
"""

from __future__ import annotations

import logging
import socket

log = logging.getLogger(__name__)

_STATUS = {
    "loading": "loading the model",
    "ready": "ready",
    "stalled": "stalled: there is work, and no step finishes",
    "draining": "draining: no new requests, those at hand are finished",
    "dead": "failed",
}
_NEWS = {"ready": "READY=1", "draining": "STOPPING=1", "dead": "STOPPING=1"}


class ServiceManager:
    """The service manager, if there is one."""

    def __init__(self, address: str | None) -> None:
        """`address` is a path, or a name after "@" (Linux's abstract sockets); None when nobody listens."""
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self._state = ""

    def tell(self, state: str) -> None:
        """Says where the server is in its life; to be called often, since only changes are sent."""
        if state != self._state:
            self._state = state
            news = [_NEWS[state]] if state in _NEWS else []
            self._send([*news, f"STATUS={_STATUS[state]}"])

    def alive(self) -> None:
        """Says that the event loop turns: WatchdogSec= counts from here."""
        self._send(["WATCHDOG=1"])

    def _send(self, lines: list[str]) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("the service manager was not told %s: %s", lines[0], error)
