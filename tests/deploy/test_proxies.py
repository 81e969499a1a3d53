"""Chairlift behind the nginx and HAProxy that deploy/ ships: nothing is buffered, lost, or sent twice.

Needs the real programs; scripts/check-long runs this (`pytest -m long`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.proxies import (
    PROXIES,
    Behaviour,
    Instance,
    Proxy,
    Start,
    backends,
    free_port,
    nginx,
    running,
    tool,
    write_nginx,
)

pytestmark = pytest.mark.long

TinyGGUF = Callable[..., Path]

CHAT = "/v1/chat/completions"
BODY = {"model": "x", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(params=list(PROXIES))
def start(request: pytest.FixtureRequest) -> Start:
    """Starts one of the proxies."""
    return PROXIES[str(request.param)]


# -- streams ----------------------------------------------------------------------------------------------------------


class Lockstep:
    """A backend that sends each event only when its reader has had the one before: who buffers, waits for ever."""

    NUM_EVENTS = 5

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen = threading.Semaphore(0)
        self.num_seen_in_time = 0

    def __call__(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream; charset=utf-8")
        handler.end_headers()  # without a length: the body ends with the connection, in every version of HTTP
        for i in range(self.NUM_EVENTS):
            handler.wfile.write(f"data: {i}\n\n".encode())
            if self._seen.acquire(timeout=self._patience_s):
                self.num_seen_in_time += 1

    def read(self, client: httpx.Client) -> None:
        """Reads the stream, telling the backend of each event."""
        with client.stream("POST", CHAT, json=BODY, headers={"accept-encoding": "gzip"}) as answer:
            assert answer.status_code == 200
            events = [self._note(line) for line in answer.iter_lines() if line]
        assert events == [f"data: {i}" for i in range(self.NUM_EVENTS)]

    def _note(self, line: str) -> str:
        self._seen.release()
        return line


def test_every_event_arrives_before_the_next_is_sent(start: Start, tmp_path: Path) -> None:
    """A proxy that buffers events: text that comes in lumps, long after it was made."""
    backend = Lockstep(patience_s=10)
    with backends(backend, backend) as ports, start(tmp_path, ports) as proxy, proxy.client() as client:
        backend.read(client)
    assert backend.num_seen_in_time == Lockstep.NUM_EVENTS


def test_without_the_shipped_settings_nginx_buffers(tmp_path: Path) -> None:
    """A check that would pass whatever the settings are."""
    backend = Lockstep(patience_s=0.2)
    with backends(backend) as (behind,):
        port = free_port()
        site = f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{behind}; }} }}"
        main = write_nginx(tmp_path, site)
        with (
            running([tool("nginx"), "-p", str(tmp_path), "-c", str(main), "-e", f"{tmp_path}/error.log"], port),
            httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
        ):
            backend.read(client)
    assert backend.num_seen_in_time == 0


# -- what goes elsewhere, and what does not ---------------------------------------------------------------------------


def answering(status: int, name: str) -> Behaviour:
    """Answers with a status and a body that names the server."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        body = json.dumps({"error" if status >= 400 else "served_by": {"message": name}}).encode()
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(body)))
        if status == 503:
            handler.send_header("retry-after", "7")
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_a_request_refused_by_one_is_served_by_the_other(tmp_path: Path) -> None:
    """An instance that drains or is full turns people away while the other is idle."""
    full, idle = answering(503, "one"), answering(200, "two")
    with backends(full, idle) as ports, nginx(tmp_path, ports) as proxy, proxy.client() as client:
        answers = [client.post(CHAT, json=BODY) for _ in range(12)]
    assert [(answer.status_code, answer.json()) for answer in answers] == [
        (200, {"served_by": {"message": "two"}})
    ] * 12


def test_an_instance_that_is_away_is_passed_over(start: Start, tmp_path: Path) -> None:
    """Requests lost because one of two is being restarted."""
    with backends(None, answering(200, "two")) as ports, start(tmp_path, ports) as proxy, proxy.client() as client:
        assert [client.post(CHAT, json=BODY).status_code for _ in range(12)] == [200] * 12


@pytest.mark.parametrize("other", [answering(503, "two"), None], ids=["both-full", "other-away"])
def test_when_all_are_full_the_client_learns_when_to_come_back(
    start: Start, tmp_path: Path, other: Behaviour | None
) -> None:
    """A proxy's own page in the place of a 503 that says why and when."""
    with backends(answering(503, "one"), other) as ports, start(tmp_path, ports) as proxy, proxy.client() as client:
        for _ in range(4):
            answer = client.post(CHAT, json=BODY)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
            assert answer.json()["error"]["message"] in ("one", "two")


def test_a_proxy_speaks_the_clients_language_when_nobody_is_there(start: Start, tmp_path: Path) -> None:
    """A page of HTML where a client looks for `error.message`."""
    with start(tmp_path, (free_port(), free_port())) as proxy, proxy.client() as client:
        for answer in (client.post(CHAT, json=BODY), client.get("/health")):
            assert answer.status_code in (502, 503)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["retry-after"]


def test_a_request_that_was_begun_is_never_sent_twice(start: Start, tmp_path: Path) -> None:
    """A request that brings an instance down gets the next one too; work that is done twice."""
    num_begun = 0

    def die(handler: BaseHTTPRequestHandler) -> None:
        nonlocal num_begun
        num_begun += 1

    with backends(die, die) as ports, start(tmp_path, ports) as proxy, proxy.client() as client:
        assert client.post(CHAT, json=BODY).status_code == 502
    assert num_begun == 1


def test_only_the_api_is_let_through(start: Start, tmp_path: Path) -> None:
    """Numbers of a team's work shown to everybody who finds the host."""
    open_backend = answering(200, "x")
    with backends(open_backend, open_backend) as ports, start(tmp_path, ports) as proxy, proxy.client() as client:
        paths = ("/metrics", "/", "/live", "/health", "/v1/models")
        statuses = {path: client.get(path).status_code for path in paths}
    assert statuses == {"/metrics": 404, "/": 404, "/live": 404, "/health": 200, "/v1/models": 200}


# -- real instances ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tiny_gguf: TinyGGUF) -> Iterator[tuple[Instance, Instance]]:
    model = tiny_gguf(context=8192)
    one, other = Instance(model), Instance(model)
    for instance in (one, other):
        instance.start()
    yield one, other
    assert [instance.end() for instance in (one, other)] == [0, 0]


@contextmanager
def riders(proxy: Proxy, count: int) -> Iterator[list[str]]:
    """Clients that ask one thing after the other until the block ends; gives what went wrong, "" for what did not."""
    outcomes: list[str] = []
    is_over = threading.Event()

    def ride(is_streamed: bool) -> None:
        with proxy.client() as client:
            while not is_over.is_set():
                try:
                    outcomes.append(ask_streamed(client) if is_streamed else ask(client))
                except httpx.HTTPError as error:
                    outcomes.append(repr(error))

    threads = [threading.Thread(target=ride, args=(i % 2 == 0,)) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield outcomes
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def request(num_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"messages": BODY["messages"], "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, **fields}


def ask(client: httpx.Client) -> str:
    answer = client.post(CHAT, json=request(1000))
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text}"
    return "" if answer.json()["usage"]["completion_tokens"] == 1000 else answer.text


def ask_streamed(client: httpx.Client) -> str:
    body = request(2000, stream=True, stream_options={"include_usage": True})
    with client.stream("POST", CHAT, json=body) as answer:
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.read().decode()}"
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    if lines[-1:] != ["data: [DONE]"]:
        return f"cut after {lines[-1:]}"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    return "" if chunks[-1].get("usage", {}).get("completion_tokens") == 2000 else lines[-2]


@pytest.mark.timeout(600)  # twelve starts of a server, on whatever machine
def test_restarts_under_load_lose_nothing(start: Start, tmp_path: Path, two: tuple[Instance, Instance]) -> None:
    """An update of the server that costs somebody an answer."""
    num_cut_into = 0
    with start(tmp_path, tuple(instance.port for instance in two)) as proxy, riders(proxy, 6) as outcomes:
        for place in (0, 1) * 3:
            instance, before = two[place], len(outcomes)
            _until(lambda: instance.server.metric("num_requests_running") > 0 and len(outcomes) > before)  # noqa: B023
            proxy.put_aside(("one", "two")[place], lambda: _num_inside(instance))  # noqa: B023
            assert instance.end() == 0
            proxy.see_gone(("one", "two")[place])
            lines = [line for line in instance.server.lines if "draining:" in line]
            num_cut_into += any("draining: 0 requests" not in line for line in lines)
            instance.start()
            proxy.take_back(("one", "two")[place])
    assert [outcome for outcome in outcomes if outcome] == []
    assert num_cut_into > 0, "no instance had work when it was told to end"


def _num_inside(instance: Instance) -> float:
    """Requests that an instance works at or keeps waiting."""
    return instance.server.metric("num_requests_running") + instance.server.metric("num_requests_waiting")


def _until(condition: Callable[[], bool]) -> None:
    """Waits for what the load will bring about."""
    while not condition():
        pass


def test_nginx_passes_chairlifts_own_words(tmp_path: Path, two: tuple[Instance, Instance]) -> None:
    """A limit of the proxy below that of the server, or a refusal that arrives as a broken connection."""
    with nginx(tmp_path, (two[0].port, two[1].port)) as proxy, proxy.client() as client:
        large = client.post(CHAT, content=b" " * (4 * 2**20 + 1), headers={"content-type": "application/json"})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")
        wrong = client.post(CHAT, json={"model": "nobody's", **request(1)})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "model_not_found")
        assert client.get("/health").json()["status"] == "ready"


def test_who_leaves_the_proxy_leaves_the_server(start: Start, tmp_path: Path, two: tuple[Instance, Instance]) -> None:
    """A slot that is held for somebody who closed the window."""

    def num_cancelled() -> float:
        return sum(instance.server.metric("requests_cancelled_total") for instance in two)

    before = num_cancelled()
    with start(tmp_path, tuple(instance.port for instance in two)) as proxy, proxy.client() as client:
        with client.stream("POST", CHAT, json=request(8000, stream=True)) as answer:
            next(answer.iter_lines())
        _until(lambda: num_cancelled() == before + 1)
