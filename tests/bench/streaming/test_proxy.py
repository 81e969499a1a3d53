"""`chairlift bench proxy`: on mock proxies in virtual time, and (long) on real nginx with and without buffering."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from chairlift.bench.client.client import Client, Clock
from chairlift.bench.client.target import ConnectOptions, ServerKind, Target
from chairlift.bench.report.measure import ProgressDisplay
from chairlift.bench.report.report import Report
from chairlift.bench.streaming.buffering import Pattern
from chairlift.bench.streaming.proxy import ProxyCommand, size
from support.async_tests import run
from support.proxies import free_port, running, tool, write_nginx
from support.scripted_server import (
    WALL_START_S,
    MockLLM,
    Reply,
    Script,
    buffered,
    delayed,
    flushed,
    refusal,
    run_virtual,
    spaced,
    tcp,
    virtual_clock,
)

SERVER = ConnectOptions(timeout_s=60.0)
SKEW_S = -1234.5
"""The server's wall clock is wrong by this."""
TTFT_S = 0.3


def server(passed_on: Callable[[Script], Script] = lambda script: script, *, is_counted: bool = True) -> MockLLM:
    """Chairlift with send stamps behind something that passes its stream on."""

    def answer(n: int, request: dict[str, Any]) -> Script:
        is_stamped = request["stream_options"].get("include_timestamps", False)
        now_s = WALL_START_S + asyncio.get_running_loop().time() + SKEW_S
        gaps = [TTFT_S, *(0.02 for _ in range(request["max_tokens"] - 1))]
        return passed_on(spaced(gaps, stamps_from_s=now_s if is_stamped else None))

    mock = MockLLM(answer)
    mock.pages["/v1/models"] = '{"data": [{"id": "mock", "owned_by": "chairlift"}]}'
    if is_counted:
        mock.pages["/metrics"] = lambda: (
            f"chairlift:time_to_first_token_seconds_count {len(mock.requests)}\n"
            f"chairlift:time_to_first_token_seconds_sum {len(mock.requests) * TTFT_S}\n"
            f"chairlift:e2e_request_latency_seconds_count {len(mock.requests)}\n"
            f"chairlift:e2e_request_latency_seconds_sum {len(mock.requests)}\n"
        )
    return mock


def run_proxy(direct: MockLLM, through: MockLLM | None = None, kind: ServerKind = ServerKind.CHAIRLIFT) -> Report:
    """The command in virtual time."""

    async def test() -> Report:
        mocks = {"http://direct": direct, "http://proxy": through or direct}

        @asynccontextmanager
        async def connect(url: str, options: ConnectOptions, clock: Clock) -> AsyncIterator[Client]:
            async with mocks[url].client(Target(url, "mock", kind=kind), clock) as client:
                yield client

        other = None if through is None else "http://proxy"
        made = ProxyCommand("http://direct", other, SERVER, 3, 400, connect=connect, clock=virtual_clock())
        with ProgressDisplay() as progress:
            await made.work(progress)
        return made.report()

    return run_virtual(test())


def test_a_way_that_buffers_nothing_is_clean() -> None:
    """A tool that finds something wherever it looks."""
    report = run_proxy(server())
    assert report.verdict == [
        "this address: clean: pieces arrive as they are made.",
        "no delay of its own: 0 ms after the engine, whose clock is its own.",
    ]
    assert report.warnings == []


def test_a_buffer_of_16_kb_is_named_with_what_to_change() -> None:
    """An hour with a profiler on the model, for a proxy's default."""
    report = run_proxy(server(lambda script: buffered(script, 16384)))
    assert report.verdict[0] == "this address: buffer ≈ 16 KB: pieces arrive in bursts of equal size."
    assert report.verdict[1].startswith("this address: the text that waited longest was held for ")
    advice = " ".join(report.verdict)
    assert all(name in advice for name in ("proxy_buffering off", "option http-no-delay", "Response Buffering"))
    assert "delay" not in advice.replace("http-no-delay", "")


def test_a_delay_is_told_from_a_buffer() -> None:
    """A second that everything is late, sought in the model or in a buffer."""
    report = run_proxy(server(lambda script: delayed(script, 1.0)))
    assert report.verdict[0] == "this address: clean: pieces arrive as they are made."
    assert report.verdict[1] == "delay ≈ 1.0 s after the engine, whose clock is its own."


def test_two_addresses_show_where_it_is() -> None:
    """Clocks that differ by twenty minutes, which must not matter; and a proxy that is innocent."""
    late = run_proxy(server(), server(lambda script: delayed(script, 1.0)))
    assert "delay ≈ 1.0 s after the direct address." in late.verdict
    through_buffer = run_proxy(server(), server(lambda script: buffered(script, 16384)))
    assert "direct: clean: pieces arrive as they are made." in through_buffer.verdict
    assert "through: buffer ≈ 16 KB: pieces arrive in bursts of equal size." in through_buffer.verdict
    assert "What buffers it lies between the two addresses." in through_buffer.verdict
    assert not any("delay of its own" in line for line in through_buffer.verdict)
    both = run_proxy(server(lambda script: buffered(script, 8192)), server(lambda script: buffered(script, 8192)))
    assert any("The direct address is buffered as well" in line for line in both.verdict)


def test_a_flush_at_fixed_times() -> None:
    """A proxy without a buffer to switch off, that sends once in a while."""
    report = run_proxy(server(lambda script: flushed(script, 0.7)))
    assert report.verdict[0] == "this address: flushed every ≈ 0.7 s: pieces arrive in bursts at equal times."


def test_without_stamps_it_says_what_it_cannot_know() -> None:
    """Certainty about a proxy from a server that may send in bursts itself."""
    mock = server(lambda script: buffered(script, 16384), is_counted=False)
    report = run_proxy(mock, kind=ServerKind.OTHER)
    assert report.verdict[0].startswith("this address: buffer ≈ 16 KB")
    assert any("No send stamps" in note for note in report.notes)
    clean = run_proxy(server(is_counted=False), kind=ServerKind.OTHER)
    assert clean.verdict == ["this address: clean: pieces arrive as they are made."]
    assert any("late by the same time cannot be told" in note for note in clean.notes)
    assert "not exported" in clean.tables[0].rows[0]


def test_a_compressed_stream_is_named() -> None:
    """A proxy that compresses, found by nobody who measures without accepting it."""

    def answer(n: int, request: dict[str, Any]) -> Reply:
        plain = b"".join(data for _, data in spaced([0.1, *[0.02] * (request["max_tokens"] - 1)]))
        return Reply([(5.0, gzip.compress(plain))], headers={"content-encoding": "gzip"})

    report = run_proxy(MockLLM(answer), kind=ServerKind.OTHER)
    assert report.verdict[0].startswith("this address: the whole answer comes at its end")
    assert any("comes compressed (gzip)" in note for note in report.notes)


def test_an_address_that_brought_nothing_acquits_nobody() -> None:
    """ "Neither address is buffered" of a proxy that refused every stream, or for one that was never asked."""
    assert (
        run_proxy(server(), MockLLM(lambda *_: refusal(502))).verdict[-1].startswith("Where it is buffered, if it is,")
    )
    never = ProxyCommand("http://a", "http://b", SERVER, 3, 400).report()
    assert (never.verdict[-1][:20], never.tables) == ("Where it is buffered", [])


def test_streams_that_fail_are_no_evidence() -> None:
    """A verdict on a proxy from its own error pages."""
    report = run_proxy(MockLLM(lambda *_: refusal(503, "full")))
    assert report.verdict[0].startswith("this address: not known")
    assert report.warnings == ["this address: 3 of 3 streams failed (http 503: full)."]


def test_advice_is_for_the_proxy_that_answers() -> None:
    """Three pages of settings for somebody whose headers name their proxy."""
    mock = server(lambda script: buffered(script, 16384))
    mock.page_headers["server"] = "nginx/1.26.0"
    report = run_proxy(mock)
    assert next(line for line in report.verdict if line.startswith("To change")).startswith("To change: nginx: ")
    assert "HAProxy" not in " ".join(report.verdict)
    assert "Response headers name: nginx." in report.notes


@pytest.mark.parametrize(
    ("num_bytes", "said"), [(16384, "16 KB"), (16000, "16 KB"), (10240, "10.0 KB"), (4100, "4 KB")]
)
def test_sizes_as_people_name_them(num_bytes: int, said: str) -> None:
    """ "16,229 bytes", which nobody finds in a manual."""
    assert size(num_bytes) == said


# -- real nginx -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "pattern", "sizes"),
    [
        ("", Pattern.BUFFER, (4096, 8192)),
        ("proxy_buffer_size 16k; proxy_buffers 8 16k;", Pattern.BUFFER, (16384,)),
        ("proxy_buffering off;", Pattern.CLEAN, None),
        ("proxy_http_version 1.1;", Pattern.CLEAN, None),  # chunks are passed on one by one, whatever the buffers
        ("proxy_http_version 1.1; gzip on; gzip_types text/event-stream; gzip_min_length 0;", Pattern.WHOLE, None),
    ],
    ids=["defaults", "16k", "off", "chunked", "gzip"],
)
def test_real_nginx_is_told_apart(
    tmp_path: Path, settings: str, pattern: Pattern, sizes: tuple[int, ...] | None
) -> None:
    """Mock proxies that behave as no proxy does."""
    port = free_port()

    async def test() -> ProxyCommand:
        mock = MockLLM(lambda _, request: spaced([0.1, *[0.006] * (request["max_tokens"] - 1)]))
        async with tcp(mock) as direct:
            site = f"location / {{ proxy_pass {direct}; {settings} }}"
            main = write_nginx(tmp_path, f"server {{ listen 127.0.0.1:{port}; {site} }}")
            with (
                running([tool("nginx"), "-p", str(tmp_path), "-c", str(main), "-e", f"{tmp_path}/error.log"], port),
                ProgressDisplay() as progress,
            ):
                made = ProxyCommand(direct, f"http://127.0.0.1:{port}", SERVER, 1, 600)
                await made.work(progress)
        return made

    direct, through = run(test()).routes
    assert direct.buffering.pattern is Pattern.CLEAN
    assert through.proxy == "nginx"
    found = through.buffering
    assert found.pattern is pattern, found
    assert {sample.content_encoding for sample in through.samples} == {"gzip" if "gzip" in settings else ""}
    if sizes is not None:
        assert found.num_bytes is not None
        assert any(abs(found.num_bytes / each - 1) < 0.06 for each in sizes), found
