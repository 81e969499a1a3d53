"""Everything around an answer: errors of the protocol, keys, origins, and what the server says of itself."""

from __future__ import annotations

import json
import logging

import pytest
from starlette.routing import Route

from chairlift.config import Config
from chairlift.keys import ApiKey
from chairlift.server.routes import description
from support.async_tests import run
from support.in_process_server import CHAT, HELLO, Call, assert_error, fake_app, serving

KEYS = Config(api_key=(ApiKey.parse("first-key"), ApiKey.parse("second-key")))


# -- the protocol -----------------------------------------------------------------------------------------------------


def test_protocol_errors_have_one_shape() -> None:
    """Fault: the framework's own error pages, which no client can read."""

    async def test() -> None:
        app = fake_app(config=Config(body_limit_bytes=2000))
        async with serving(app) as http:
            assert_error(await http.get("/nope"), 404, "not_found")
            assert_error(await http.get("/v1/models/"), 404, "model_not_found")
            assert_error(await http.get("/v1/models/nope"), 404, "model_not_found")
            wrong_method = await http.get(CHAT)
            assert_error(wrong_method, 405, "method_not_allowed")
            assert wrong_method.headers["allow"] == "POST"
            assert_error(await http.post("/health"), 405, "method_not_allowed")
            assert_error(
                await http.post(CHAT, content=b"{nope", headers={"content-type": "application/json"}),
                400,
                "invalid_json",
            )
            assert_error(await http.post(CHAT, json=[1]), 400, "invalid_request")
            assert_error(await http.post(CHAT, json={**HELLO, "tools": [{}]}), 400, "unsupported_parameter")
            assert_error(await http.post(CHAT, json={**HELLO, "user": "x" * 2000}), 413, "request_too_large")
            for kind in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
                answer = await http.post(CHAT, content=b"{}", headers={"content-type": kind})
                assert_error(answer, 415, "unsupported_media_type")
            answer = await http.post(
                CHAT, content=json.dumps(HELLO), headers={"content-type": "application/json; charset=utf-8"}
            )
            assert answer.status_code == 200

    run(test())


def test_a_body_is_refused_by_its_length_alone_and_while_it_grows() -> None:
    """Fault (CASES A29): megabytes are read to be refused, or a wrong length is believed."""

    async def test() -> None:
        app = fake_app(config=Config(body_limit_bytes=2000))
        async with serving(app):
            for length in ("2001", "9" * 30):
                call = Call(app, CHAT, HELLO, headers={"content-length": length})
                call._inbox.get_nowait()  # nothing will come: the answer must not wait for it
                await call.done()
                assert_error(call, 413, "request_too_large")
            for length in ("5", "x", "²"):
                call = Call(app, CHAT, b"[" * 2001, headers={"content-length": length})
                await call.done()
                assert_error(call, 413, "request_too_large")

    run(test())


def test_request_ids_go_in_and_out() -> None:
    """Fault: an id cannot be found in the log, or brings foreign characters into it."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            assert (await http.get("/live", headers={"x-request-id": "a-B.3_"})).headers["x-request-id"] == "a-B.3_"
            for odd in ("", "a b", "a\tb", "x" * 65, "a#1", "ü"):
                headers = {b"x-request-id": odd.encode("latin-1")}
                given = (await http.get("/nope", headers=headers)).headers["x-request-id"]
                assert len(given) == 32
            same = [
                (await http.post(CHAT, json=HELLO, headers={"x-request-id": "mine"})).json()["id"] for _ in range(2)
            ]
            assert same[0] != same[1]

    run(test())


def test_refusals_leave_a_line_without_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    """Fault: an operator cannot see who is refused, or reads what they wrote."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            await http.post(CHAT, json={**HELLO, "model": "platypus"}, headers={"x-request-id": "me-1"})

    with caplog.at_level(logging.INFO, "chairlift"):
        run(test())
    assert "refused id=me-1 status=404 code=model_not_found" in caplog.text
    assert "platypus" not in caplog.text


def test_unforeseen_failures_are_a_500_in_shape(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault: a bug closes the connection, or tells a client what it should not know."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            monkeypatch.setattr("chairlift.server.answer.ChatBuilder.whole", None)
            error = assert_error(await http.post(CHAT, json=HELLO), 500, "internal_error")
            assert "NoneType" not in error["message"]

    run(test())
    assert "NoneType" in caplog.text


# -- keys and origins -------------------------------------------------------------------------------------------------


def test_keys() -> None:
    """Fault: a path forgotten by the check, a key in the log, or probes that need one."""

    async def test() -> None:
        app = fake_app(config=KEYS)
        async with serving(app) as http:
            for path in ("/", "/health", "/live", "/metrics", "/version", "/openapi.json"):
                assert (await http.get(path)).status_code == 200
            for path in ("/v1/models", "/v1/models/fake", "/v1/queue", "/nope"):
                answer = await http.get(path)
                assert_error(answer, 401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
            wrong = (
                "",
                "first-key",
                "Bearer",
                "Bearer ",
                "Bearer wrong",
                "Basic first-key",
                "Bearer first-key2",
                "Bearer first-key second-key",
            )
            for authorization in wrong:
                answer = await http.post(CHAT, json=HELLO, headers={"authorization": authorization})
                assert_error(answer, 401, "invalid_api_key")
                assert "first-key" not in answer.text
            for authorization in ("Bearer first-key", "bearer second-key"):
                assert (await http.post(CHAT, json=HELLO, headers={"authorization": authorization})).status_code == 200

    run(test())


def test_origins() -> None:
    """Fault: any web page may use the server, or the one that should cannot, not even to read an error."""

    async def test() -> None:
        app = fake_app(config=Config(api_key=(ApiKey.parse("first-key"),), cors_origin=("https://chat.example",)))
        async with serving(app) as http:
            preflight = {
                "origin": "https://chat.example",
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization",
            }
            answer = await http.options(CHAT, headers=preflight)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://chat.example")
            answer = await http.post(CHAT, json=HELLO, headers={"origin": "https://chat.example"})
            assert_error(answer, 401, "invalid_api_key")
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
            answer = await http.get("/live", headers={"origin": "https://evil.example"})
            assert "access-control-allow-origin" not in answer.headers
        app = fake_app()
        async with serving(app) as http:
            answer = await http.get("/live", headers={"origin": "https://chat.example"})
            assert "access-control-allow-origin" not in answer.headers

    run(test())


# -- what it says of itself -------------------------------------------------------------------------------------------


def test_models_list_every_name_with_its_limits() -> None:
    """Fault (CASES A3, D14): limits nobody can look up; aliases that work but are not listed."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            listed = (await http.get("/v1/models")).json()
            assert listed["object"] == "list"
            assert [model["id"] for model in listed["data"]] == ["fake", "alias"]
            assert [model["max_model_len"] for model in listed["data"]] == [512, 512]
            assert listed["data"][0]["chairlift"]["kv"]["pool_tokens"] == 1024
            assert (await http.get("/v1/models/alias")).json()["id"] == "alias"
            answer = (await http.post(CHAT, json={**HELLO, "model": "alias"})).json()
            assert answer["model"] == "alias"

    run(test())


def test_openapi_describes_what_is_served() -> None:
    """Fault: a description written by hand, which says something else."""
    paths = {route.path.replace(":path", "") for route in fake_app().routes if isinstance(route, Route)}
    assert set(description()["paths"]) <= paths
    schemas = description()["components"]["schemas"]
    assert schemas["ChatRequest"]["required"] == ["messages"]
    text = json.dumps(description())
    for name in (word.split('"')[0] for word in text.split("#/components/schemas/")[1:]):
        assert name in schemas


def test_health_has_the_numbers() -> None:
    """Fault: "ok", and nothing to act on."""

    async def test() -> None:
        app = fake_app()
        async with serving(app) as http:
            await http.post(CHAT, json=HELLO)
            body = (await http.get("/health")).json()
            assert body["status"] == "ready"
            assert (body["num_running"], body["num_waiting"], body["kv_used"]) == (0, 0, 0.0)
            assert body["num_steps"] >= 8
            assert (body["max_num_seqs"], body["kv_full_conversations"]) == (8, 2.0)
            assert (await http.get("/live")).json() == {"status": "ready"}

    run(test())
