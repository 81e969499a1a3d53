"""`chairlift bench stream` and `proxy` as a user starts them, against a real Chairlift with a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.bench.client.client import Client
from chairlift.bench.client.connect import discover
from chairlift.bench.client.sample import EventKind, Sample
from chairlift.bench.client.target import GenerationRequest, Target
from support.async_tests import run
from support.server_process import Server, serving

TinyGGUF = Callable[..., Path]


@pytest.fixture(scope="module")
def server(tiny_gguf: TinyGGUF) -> Iterator[Server]:
    with serving(tiny_gguf()) as running:
        yield running


def bench(*words: str) -> tuple[str, dict[str, Any]]:
    """What the command printed, and the document on its last line."""
    command = [sys.executable, "-m", "chairlift", "bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return done.stdout, document


def test_streamed_or_not(server: Server, tmp_path: Path) -> None:
    """Two halves that only fit their own mocks: fields, counters and lengths of the real server."""
    file = tmp_path / "stream.json"
    words = ("--requests", "2", "--tokens", "24", "--prompt-tokens", "12", "--json", str(file))
    shown, document = bench("stream", f"{server.url}/v1", *words)
    assert json.loads(file.read_text()) == document
    data = document["data"]
    assert data["server"] == "chairlift"
    for mode in ("streamed", "not streamed"):
        assert data[mode]["num_output_tokens"] == [24, 24]
        assert data[mode]["engine_ttft_s"] is not None
    # A tiny model has reason for two warnings: random bytes wait until they are letters, a cache may hold its weights.
    expected = ("tokens; gaps are between pieces", "where reading the weights for each token allows")
    assert [line for line in document["warnings"] if not any(words in line for words in expected)] == []
    assert "does not make the model faster" in shown
    assert "engine, streamed" in data["streamed"]["residuals_s"]  # the client's needs letters in both streams


def test_nothing_between(server: Server) -> None:
    """A command that works on mocks alone."""
    shown, document = bench("proxy", server.url, "--requests", "1", "--tokens", "64")
    assert document["data"]["this address"]["num_output_tokens"] == [64]
    assert "this address:" in shown


def test_stamps_are_asked_for_and_read(server: Server) -> None:
    """Send stamps under another name than the server's, so that every verdict is by arrival alone."""

    async def ask() -> Sample:
        async with Client(Target(server.url)) as client:
            await discover(client)
            return await client.ask(GenerationRequest("Hello", 32, has_stamps=True))

    sample = run(ask())
    assert sample.failure is None
    assert sample.num_output_tokens == 32
    assert all(event.sent_at_s is not None for event in sample.events if event.kind is not EventKind.DONE)


@pytest.mark.parametrize(
    ("url", "said"), [("http://127.0.0.1:9", "does not answer"), ("127.0.0.1:9", "is no address of a server")]
)
def test_nobody_there(url: str, said: str) -> None:
    """A traceback for a wrong port."""
    command = [sys.executable, "-m", "chairlift", "bench", "stream", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {url} {said}")
