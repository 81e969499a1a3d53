"""Tells a service manager (systemd with `Type=notify`) that the server is ready, stops or is alive, and its status.

Each message is one datagram to the socket that NOTIFY_SOCKET names; the protocol is sd_notify(3). Sending never waits,
and a failure neither delays nor ends the server.
"""

from __future__ import annotations

import logging
import socket

from chairlift.engine.engine import State

log = logging.getLogger(__name__)

_STATUS: dict[State, str] = {
    "loading": "loading the model",
    "ready": "ready",
    "stalled": "stalled: there is work, and no step finishes",
    "draining": "draining: no new requests, those at hand are finished",
    "dead": "failed",
}
_NEWS: dict[State, str] = {"ready": "READY=1", "draining": "STOPPING=1", "dead": "STOPPING=1"}


class ServiceManager:
    """The service manager, if there is one."""

    def __init__(self, address: str | None) -> None:
        """`address` is a path, or a name after "@" (Linux's abstract sockets); None when there is no manager."""
        self._address = "\0" + address[1:] if address and address.startswith("@") else address
        self._state: State | None = None

    def tell(self, state: State) -> None:
        """Sends the server's state if it has changed. The server calls this often."""
        if state != self._state:
            self._state = state
            news = [_NEWS[state]] if state in _NEWS else []
            self._send([*news, f"STATUS={_STATUS[state]}"])

    def alive(self) -> None:
        """Says that the event loop runs. systemd counts WatchdogSec= from here."""
        self._send(["WATCHDOG=1"])

    def _send(self, lines: list[str]) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            log.warning("the service manager was not told %s: %s", lines[0], error)
