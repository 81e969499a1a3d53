"""`chairlift wait`: asks a server's /health until it is ready, for scripts, health checks and service files.

    not reachable ──> loading ──> ready                  exit status 0
          └──────────────┴──> the time is over                       1
                         └──> dead, or gone while loading            3

Any other state is waited out: a draining server may have a successor. Status 2 is a wrong command line.
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
"""Between two questions."""
GONE_S = 3.0
"""A server that was loading and to which nobody can connect for so long has ended."""
_ANSWER_S = 5.0
_MAX_BODY_BYTES = 65536

UNREACHABLE = "not reachable"
SILENT = "no answer"


class Outcome(IntEnum):
    """How waiting ended; the value is the exit status."""

    READY = 0
    LATE = 1
    FAILED = 3


@dataclass(frozen=True, slots=True)
class Server:
    """Where to ask."""

    url: str
    is_https: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Server:
        """From http(s)://host[:port][/prefix]; the /v1 of a client's base URL may stay. Raises ConfigError."""
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
        """What /health says: a state, why there is none, or "HTTP 502" from something that is no Chairlift."""
        make = http.client.HTTPSConnection if self.is_https else http.client.HTTPConnection
        connection = make(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", self.path)
            response = connection.getresponse()
            return "ready" if response.status == 200 else _told(response.status, response.read(_MAX_BODY_BYTES))
        except TimeoutError:
            return SILENT
        except (OSError, http.client.HTTPException):
            return UNREACHABLE
        finally:
            connection.close()


def _told(status: int, body: bytes) -> str:
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
) -> Outcome:
    """Asks until the server is ready, it has failed, or `timeout_s` are over; it asks at least once.

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
        if state != UNREACHABLE:
            was_loading, gone_since_s = was_loading if state == SILENT else state == "loading", None
        elif was_loading and gone_since_s is None:
            gone_since_s = past_s
        if state == "ready":
            return Outcome.READY
        if state == "dead" or (gone_since_s is not None and past_s - gone_since_s >= GONE_S):
            tell(f"{server.url}: {'failed' if state == 'dead' else 'ended while it was loading'}")
            return Outcome.FAILED
        if past_s >= timeout_s:
            tell(f"{server.url}: not ready within {timeout_s:g} s")
            return Outcome.LATE
        sleep(min(PAUSE_S, timeout_s - past_s))
