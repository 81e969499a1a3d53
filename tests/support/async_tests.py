"""How asynchronous tests are run: a plain test function around a coroutine, without a pytest plugin.

`run` uses real time. Where times must be exact, `support.scripted_server.run_virtual` takes its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(test: Coroutine[Any, Any, T], timeout_s: float = 120) -> T:
    """The result of one coroutine. TimeoutError when it takes longer than that."""
    return asyncio.run(asyncio.wait_for(test, timeout_s))
