"""`chairlift wait`, the news for a service manager, and the end of a listening socket."""

from __future__ import annotations

import errno
import json
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from chairlift import wait as waiting
from chairlift.cli import main
from chairlift.config import notify_socket
from chairlift.engine.engine import State
from chairlift.errors import ConfigError
from chairlift.server import listener
from chairlift.server.notify import ServiceManager
from chairlift.wait import Server, WaitOutcome, wait

Answer = tuple[int, bytes]
Answering = Callable[[list[Answer]], str]


def told(state: str) -> Answer:
    """As /health answers."""
    return (200 if state == "ready" else 503), json.dumps({"status": state}).encode()


@pytest.fixture
def answering() -> Iterator[Answering]:
    """`answering(list)`: the address of a server whose /health gives these answers in turn, the last one for ever."""
    running: list[tuple[HTTPServer, threading.Thread]] = []

    def start(answers: list[Answer]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = (
                    (answers.pop(0) if len(answers) > 1 else answers[0]) if self.path == "/health" else (404, b"")
                )
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        running.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address where nobody listens, and nobody will."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_s += max(seconds, 0.001)


def waited(url: str, timeout_s: float) -> tuple[WaitOutcome, list[str], float]:
    """The outcome, what was told without address and times, and how long it took."""
    lines: list[str] = []
    clock = Clock()
    outcome = wait(Server.parse(url), timeout_s, lines.append, clock=clock, sleep=clock.sleep)
    assert all(line.startswith(f"{url}: ") for line in lines)
    return outcome, [line.removeprefix(f"{url}: ").split(" (")[0] for line in lines], clock.now_s - 100


def test_waits_through_every_state_until_ready(answering: Answering) -> None:
    """A server called ready while it loads; a state that ends waiting although it passes."""
    states = ["loading", "loading", "stalled", "draining", "loading", "ready"]
    url = answering([*map(told, states), told("dead")])
    assert waited(url, 60)[:2] == (WaitOutcome.READY, ["loading", "stalled", "draining", "loading", "ready"])


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_clients_base_url_will_do(answering: Answering, suffix: str) -> None:
    """A 404 for somebody who pastes the address that the client library was given."""
    server = Server.parse(answering([told("ready")]) + suffix)
    assert wait(server, 0, lambda _: None) is WaitOutcome.READY


def test_a_prefix_is_kept() -> None:
    """A server behind a path of a proxy that is asked at the root."""
    assert Server.parse("https://example.org/llm/v1") == Server(
        "https://example.org/llm/v1", True, "example.org", 443, "/llm/health"
    )
    assert Server.parse("http://[::1]:8000").host == "::1"


@pytest.mark.parametrize("state", ["loading", "stalled", "draining"])
def test_the_limit_holds(answering: Answering, state: str) -> None:
    """Waiting for ever, or an exit status that a script takes for ready."""
    outcome, lines, seconds = waited(answering([told(state)]), 7)
    assert (outcome, lines) == (WaitOutcome.LATE, [state, "not ready within 7 s"])
    assert 7 <= seconds < 7.01


def test_a_limit_of_zero_asks_once(answering: Answering) -> None:
    """A health check that never asks, or that asks twice."""
    answers = [told("ready"), told("dead")]
    assert waited(answering(answers), 0)[0] is WaitOutcome.READY
    assert answers == [told("dead")]


def test_a_dead_server_is_not_waited_for(answering: Answering) -> None:
    """Five minutes of waiting for something that said it is dead."""
    outcome, lines, seconds = waited(answering([told("loading"), told("dead")]), 300)
    assert (outcome, lines[-1]) == (WaitOutcome.FAILED, "failed")
    assert seconds < 1


def test_a_server_that_is_not_there_yet_is_waited_for(nowhere: str) -> None:
    """`chairlift serve & chairlift wait` that gives up before the port is open."""
    outcome, lines, seconds = waited(nowhere, 20)
    assert (outcome, lines) == (WaitOutcome.LATE, ["not reachable", "not ready within 20 s"])
    assert seconds >= 20


def test_a_server_that_ended_while_loading_has_failed(monkeypatch: pytest.MonkeyPatch, nowhere: str) -> None:
    """A script that waits out its limit because the model file was missing."""
    states = iter(["not reachable", "loading", "no answer"])
    monkeypatch.setattr(Server, "state", lambda *_: next(states, "not reachable"))
    outcome, lines, seconds = waited(nowhere, 300)
    assert (outcome, lines[-1]) == (WaitOutcome.FAILED, "ended while it was loading")
    assert waiting.GONE_S <= seconds < waiting.GONE_S + 3 * waiting.PAUSE_S + 0.1


def test_a_restart_is_not_a_failure(monkeypatch: pytest.MonkeyPatch, nowhere: str) -> None:
    """A short gap between two processes on one port taken for the end."""
    states = iter(["loading", *["not reachable"] * 8, "loading", *["not reachable"] * 8, "ready"])
    monkeypatch.setattr(Server, "state", lambda *_: next(states))
    assert waited(nowhere, 300)[0] is WaitOutcome.READY


@pytest.mark.parametrize(
    "answer", [(502, b"<html>Bad Gateway"), (503, b"[]"), (503, b'{"status": ["x"]}'), (404, b""), (503, b"[" * 60000)]
)
def test_other_servers_answers_are_told_and_waited_out(answering: Answering, answer: Answer) -> None:
    """A traceback for a proxy's page, or a hostile body that becomes a state."""
    assert waited(answering([answer, told("ready")]), 60)[:2] == (WaitOutcome.READY, [f"HTTP {answer[0]}", "ready"])


def test_a_silent_server_is_left_in_time() -> None:
    """One that accepts and never answers, and holds the script beyond its limit."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = Server.parse(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert server.state(0.05) == "no answer"


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:99999", "http://x/?q", "", "http://u:p@x"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    """A spelling mistake that is asked for five minutes."""
    with pytest.raises(ConfigError, match="http://"):
        Server.parse(url)


@pytest.mark.parametrize(
    ("answers", "args", "status"),
    [
        ([told("ready")], [], 0),
        ([told("loading")], ["--timeout", "0"], 1),
        ([told("ready")], ["--timeout", "nan"], 2),
        ([told("ready")], ["--timeout", "-1"], 2),
        ([told("dead")], [], 3),
    ],
)
def test_the_exit_status(
    answering: Answering,
    answers: list[Answer],
    args: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A script that goes on because every end looks alike."""
    monkeypatch.setattr("sys.argv", ["chairlift", "wait", answering(answers), *args])
    with pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (status, "")
    assert err


# -- the service manager ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_abstract", [False, True])
def test_news_reach_the_manager(tmp_path: Path, is_abstract: bool) -> None:
    """systemd that never hears READY=1 and kills a healthy server; the same news ten times a second."""
    name = f"chairlift-test-{tmp_path.name}-{id(tmp_path)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}" if is_abstract else str(tmp_path / "notify"))
        sock.setblocking(False)
        manager = ServiceManager(f"@{name}" if is_abstract else str(tmp_path / "notify"))
        states: list[State] = ["loading", "loading", "ready", "ready", "stalled", "ready", "draining", "draining"]
        for state in states:
            manager.tell(state)
        manager.alive()
        heard = [sock.recv(1000).decode().splitlines() for _ in range(6)]
        with pytest.raises(BlockingIOError):
            sock.recv(1000)
    assert [lines[0].split(": ")[0] for lines in heard] == [
        "STATUS=loading the model", "READY=1", "STATUS=stalled", "READY=1", "STOPPING=1", "WATCHDOG=1"
    ]  # fmt: skip
    assert all(line.startswith("STATUS=") for lines in heard for line in lines[1:])


def test_a_manager_that_is_gone_harms_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that ends because nobody listens to its status."""
    with caplog.at_level(logging.WARNING):
        ServiceManager(str(tmp_path / "nobody")).tell("ready")
    assert "READY=1" in caplog.text
    caplog.clear()
    ServiceManager(None).tell("ready")
    assert not caplog.records


def test_the_address_comes_from_the_environment() -> None:
    """A setting that only the tests know."""
    assert notify_socket({"NOTIFY_SOCKET": "/run/x"}) == "/run/x"
    assert notify_socket({}) is None


# -- the end of a listening socket ------------------------------------------------------------------------------------


def test_who_has_connected_is_kept_and_nobody_else_comes() -> None:
    """A request lost in the instant of a restart: connected, sent, and reset when the socket was closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as early, socket.socket() as late:
        early.connect(listening.getsockname())
        listener.stop_accepting(listening)
        late.setblocking(False)
        assert late.connect_ex(listening.getsockname()) == errno.EINPROGRESS
        with selectors.DefaultSelector() as selector:
            selector.register(late, selectors.EVENT_WRITE)
            assert selector.select(0.2) == [], "its first packet was dropped: it is neither connected nor refused"
        accepted, _ = listening.accept()
        with accepted:
            early.sendall(b"hello")
            assert accepted.recv(5) == b"hello"
            accepted.sendall(b"world")
            assert early.recv(5) == b"world"
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
