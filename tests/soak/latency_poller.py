"""Measures how quickly small endpoints answer, from a process of its own: `python poller.py PORT`.

Asks each in turn on a new connection, as probes do, until standard input ends. Prints JSON: path -> milliseconds.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time

PATHS = ("/health", "/live", "/metrics")
PAUSE_S = 0.02


def ask(port: int, path: str) -> float:
    """Milliseconds until the whole answer is there. A failure is as slow as it gets."""
    start = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        is_right = response.status == 200
    except (OSError, http.client.HTTPException):
        is_right = False
    finally:
        connection.close()
    return 1000 * (time.perf_counter() - start) if is_right else float("inf")


def main() -> None:
    port = int(sys.argv[1])
    times: dict[str, list[float]] = {path: [] for path in PATHS}
    while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
        for path in PATHS:
            times[path].append(ask(port, path))
    print(json.dumps(times))


if __name__ == "__main__":
    main()
