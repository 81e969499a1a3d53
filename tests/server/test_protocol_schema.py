"""The server against its own description: whatever is sent, no 500, and no response that is not described."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from pydantic import TypeAdapter
from schemathesis.checks import CHECKS, load_all_checks
from starlette.routing import Route

from chairlift.config import Config
from chairlift.server import responses
from chairlift.server.app import create_app
from chairlift.server.routes import description
from support.async_tests import run
from support.in_process_server import CHAT, HELLO, TEXT, Call, Gate, client, fake_app, serving, until
from support.scripted_model import EOS, Scripted
from support.stream_cases import NAMES, path_of

load_all_checks()
_TAKEN = [CHECKS.get_one("positive_data_acceptance")]
"""Not checked: what depends on the model (names, room, token ids) is no part of the description."""
CHUNKS: dict[str, TypeAdapter[Any]] = {CHAT: TypeAdapter(responses.ChatChunk), TEXT: TypeAdapter(responses.TextChunk)}
ERROR_EVENT: TypeAdapter[Any] = TypeAdapter(responses.ErrorEvent)
MODES = list(schemathesis.GenerationMode)


@pytest.fixture(scope="module")
def api() -> Any:
    return schemathesis.openapi.from_dict(description())


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with Scripted(max_model_len=160) as running:
        running.say(*[[*b"Hi", EOS]] * 8)
        yield running


def send(server: Scripted, case: Any) -> httpx.Response:
    """Sends what was made up, as it was made up."""
    made: Any = requests.Request(**case.as_transport_kwargs("http://test")).prepare()
    return server.run(server.http.request(made.method, made.url, headers=dict(made.headers), content=made.body))


def check_events(path: str, answer: httpx.Response) -> None:
    """Each event of a stream has the shape of a chunk."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        *events, done = [block for block in answer.text.split("\n\n") if block and not block.startswith(":")]
        assert done == "data: [DONE]"
        for event in events:
            CHUNKS[path].validate_json(event.removeprefix("data: "))


def fuzz(api: Any, server: Scripted, path: str, mode: Any, num_examples: int) -> Counter[int]:
    """Sends that many made-up requests; the statuses they got."""
    statuses: Counter[int] = Counter()

    @settings(max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(api[path]["POST"].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        answer = send(server, case)
        case.validate_response(answer, excluded_checks=_TAKEN)
        check_events(path, answer)
        statuses[answer.status_code] += 1

    check()
    return statuses


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_made_up_requests(api: Any, server: Scripted, path: str, mode: Any) -> None:
    """Fault: a 500, an undescribed status, type, header or body, or something that breaks the rules and is taken."""
    statuses = fuzz(api, server, path, mode, 40)
    is_good = mode is schemathesis.GenerationMode.POSITIVE
    for _ in range(4 if is_good else 0):  # now and then none of forty asks for so little that it has room
        if not statuses[200]:
            statuses += fuzz(api, server, path, mode, 40)
    assert (statuses[200] > 0) == is_good


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_many_made_up_requests(api: Any, server: Scripted, path: str, mode: Any) -> None:
    """Fault: as above, further from the beaten track."""
    fuzz(api, server, path, mode, 500)


GETS = [path for path, operations in description()["paths"].items() if "get" in operations]


@pytest.mark.parametrize("path", GETS)
def test_what_is_read_has_its_shape(api: Any, server: Scripted, path: str) -> None:
    """Fault: /v1/models, /health or another page says something else than is described."""
    statuses = set()
    for name in ("fake", "alias", "nope", "a/b", "ü"):
        case = api[path]["GET"].Case(path_parameters={"name": name} if "{name}" in path else {})
        answer = send(server, case)
        case.validate_response(answer)
        statuses.add(answer.status_code)
    assert statuses == ({200, 404} if "{name}" in path else {200})


def test_what_is_read_while_loading_has_its_shape(api: Any) -> None:
    """Fault: before there is a model, an undescribed status, or a 500."""

    def never() -> Any:
        raise AssertionError("the lifespan was not run")

    async def test() -> None:
        async with client(create_app(never, Config())) as http:
            for path in GETS:
                case = api[path]["GET"].Case(path_parameters={"name": "fake"} if "{name}" in path else {})
                answer = await http.get(path.replace("{name}", "fake"))
                assert answer.status_code in (200, 503)
                case.validate_response(answer, excluded_checks=[CHECKS.get_one("not_a_server_error")])

    run(test())


def exact(path: str, method: str, status: int) -> Draft202012Validator:
    """What is described of a JSON body, and nothing beside it, also where later versions may send more."""
    made = json.loads(json.dumps(description()))
    for component in made["components"]["schemas"].values():
        component["additionalProperties"] = False
    content = made["paths"][path][method]["responses"][str(status)]["content"]["application/json"]
    return Draft202012Validator({**content["schema"], "components": made["components"]})


def test_open_bodies_hold_what_is_described_and_no_more() -> None:
    """Fault: /health, the queue or an error says something that the description has forgotten."""

    async def test() -> None:
        gate = Gate()
        app = fake_app(gate, max_num_seqs=1, max_queue=1)
        async with serving(app) as http:
            gate.close()
            calls = [Call(app, CHAT, HELLO)]
            await gate.entered()
            calls.append(Call(app, CHAT, HELLO))
            await until(lambda: app.state.service.snapshot().num_waiting == 1)
            queue = await http.get("/v1/queue")
            assert len(queue.json()["waiting"]) == 1
            seen = [("/v1/queue", "get", queue), ("/health", "get", await http.get("/health"))]
            seen.append((CHAT, "post", await http.post(CHAT, json=HELLO)))  # the queue is full
            gate.open()
            await asyncio.gather(*(call.done() for call in calls))
            seen.append((TEXT, "post", await http.post(TEXT, json={"prompt": "a" * 600})))
            assert [answer.status_code for _, _, answer in seen] == [200, 200, 503, 400]
            for path, method, answer in seen:
                exact(path, method, answer.status_code).validate(answer.json())

    run(test())


def test_the_description_names_every_path_and_no_other() -> None:
    """Fault: a path that machines do not know of, or that is gone."""
    served = {route.path.replace(":path", "") for route in fake_app().routes if isinstance(route, Route)}
    assert set(description()["paths"]) == served


@pytest.mark.parametrize("name", NAMES)
def test_recorded_streams_have_their_shape(name: str) -> None:
    """Fault: a description of chunks that leaves out what some ends send (see stream_cases.py)."""
    chunk = CHUNKS[CHAT if name.startswith("chat") else TEXT]
    *events, _ = path_of(name).read_text().removesuffix("\n\n").split("\n\n")
    for event in events:
        data = event.removeprefix("data: ")
        (ERROR_EVENT if "error" in json.loads(data) else chunk).validate_json(data)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"n": 2, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1, "num_ctx": 1}),
        (TEXT, {}),
        (TEXT, {"n": 2, "logprobs": 2, "prompt_logprobs": 1, "echo": True, "num_ctx": 1}),
        (TEXT, {"prompt": ["a", "b"], "max_tokens": 0, "echo": True}),
    ],
)
def test_whole_answers_have_their_shape(server: Scripted, path: str, fields: dict[str, Any]) -> None:
    """Fault: a field that is sent and not described, whatever is asked for."""
    body = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    shape: Any = responses.ChatCompletion if path == CHAT else responses.TextCompletion
    TypeAdapter(shape).validate_python(server.whole(path, {**body, **fields}))
