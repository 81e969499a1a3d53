"""`chairlift wait`: asks a server's /health until it is ready, for scripts, health checks and service files.

    not reachable ──> loading ──> ready                  exit status 0
          └──────────────┴──> the time limit is over                 1
                         └──> dead, or gone while loading            3

Waiting goes on through any other state: a draining server may have a successor. Exit status 2 means a wrong command
line.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import urlsplit

from chairlift.errors import ConfigError

PAUSE_S = 0.25
"""Between two requests to /health."""
GONE_S = 3.0
"""A server that was loading and refuses connections for this long has ended."""
_ANSWER_S = 5.0
_MAX_BODY_BYTES = 65536

UNREACHABLE = "not reachable"
SILENT = "no answer"


class WaitOutcome(IntEnum):
    """How waiting ended. The value is the exit status."""

    READY = 0
    LATE = 1
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Server:
    """The address of a server."""

    url: str
    is_https: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Server:
        """From http(s)://host[:port][/prefix]; drops the /v1 of a client's base URL. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"{url!r} is not the address of a server", hint="it looks like http://127.0.0.1:8000")
        is_https = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(url, is_https, host, port or (443 if is_https else 80), f"{base}/health")

    def state(self, timeout_s: float) -> str:
        """The state that /health tells, UNREACHABLE, SILENT, or "HTTP 502" where something else answers."""
        make = http.client.HTTPSConnection if self.is_https else http.client.HTTPConnection
        connection = make(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", self.path)
            response = connection.getresponse()
            return "ready" if response.status == 200 else _state_in(response.status, response.read(_MAX_BODY_BYTES))
        except TimeoutError:
            return SILENT
        except (OSError, http.client.HTTPException):
            return UNREACHABLE
        finally:
            connection.close()


def _state_in(status: int, body: bytes) -> str:
    try:
        state = json.loads(body)["status"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"HTTP {status}"
    return state if state in ("loading", "stalled", "draining", "dead") else f"HTTP {status}"


def wait(
    server: Server,
    timeout_s: float,
    tell: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> WaitOutcome:
    """Asks, at least once, until the server is ready, has failed, or `timeout_s` have passed.

    `tell` gets a line whenever the state changes.
    """
    start_s = clock()
    last, was_loading = "", False
    gone_since_s: float | None = None
    while True:
        state = server.state(min(_ANSWER_S, max(1.0, timeout_s - (clock() - start_s))))
        past_s = clock() - start_s
        if state != last:
            tell(f"{server.url}: {state} ({past_s:.1f} s)")
            last = state
        if state == UNREACHABLE:
            if was_loading and gone_since_s is None:
                gone_since_s = past_s
        else:
            gone_since_s = None
            was_loading = state == "loading" or (state == SILENT and was_loading)
        if state == "ready":
            return WaitOutcome.READY
        if state == "dead" or (gone_since_s is not None and past_s - gone_since_s >= GONE_S):
            tell(f"{server.url}: {'failed' if state == 'dead' else 'ended while it was loading'}")
            return WaitOutcome.FAILED
        if past_s >= timeout_s:
            tell(f"{server.url}: not ready within {timeout_s:g} s")
            return WaitOutcome.LATE
        sleep(min(PAUSE_S, timeout_s - past_s))
