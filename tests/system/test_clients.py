"""Programs of other people on a real socket: those that are quick to install. scripts/check-clients runs the rest."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator

import pytest

from support.talking_server import run_client, talking


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with talking() as address:
        yield address


@pytest.mark.parametrize("name", ["openai_sync", "openai_async"])
def test_openais_package_is_content(url: str, name: str) -> None:
    """Fault: a shape, an order or an error that is right by our own reading only (see tests/clients)."""
    run_client(sys.executable, name, url)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_is_content(url: str) -> None:
    """Fault: a stream over HTTP/1.0, a refused upload or a HEAD that a plain client cannot read."""
    run_client(sys.executable, "curl", url)
