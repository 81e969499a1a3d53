"""What a request may be, over HTTP: refused before the headers, in one shape, and never with its own words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel, ValidationError

from chairlift.config import Config
from chairlift.errors import RequestError
from chairlift.server.prepare import Preparer
from chairlift.server.schema import MAX_NAMED, MAX_PROMPTS, ChatRequest, CompletionRequest, field_table, markdown
from support.in_process_server import CHAT, TEXT, assert_error, fake_loaded
from support.paths import ROOT
from support.scripted_model import EOS, Scripted

SECRET = "platypus-7351"


@pytest.fixture(scope="module")
def server() -> Iterator[Scripted]:
    with Scripted(config=Config(body_limit_bytes=20_000)) as running:
        running.say([*b"Hi", EOS])
        yield running


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


OPTION = "stream_options.include_usage"
MESSAGE = b'{"messages": [{"role": "user", "content": "Hi"}]'
DEEP = b"[" * 300 + b"]" * 300
REFUSED: list[tuple[str, bytes | dict[str, Any], int, str, str | None]] = [
    (CHAT, b"", 400, "invalid_json", None),
    (CHAT, b"{nope " + SECRET.encode(), 400, "invalid_json", None),
    (CHAT, MESSAGE + b', "temperature": NaN}', 400, "invalid_json", None),
    (CHAT, MESSAGE + b', "temperature": -Infinity}', 400, "invalid_json", None),
    (CHAT, MESSAGE + b', "temperature": 1e999}', 400, "invalid_json", None),
    (CHAT, MESSAGE + b', "metadata": ' + DEEP + b"}", 400, "invalid_json", None),
    (CHAT, MESSAGE + b', "user": "\xff\xfe"}', 400, "invalid_json", None),
    (CHAT, MESSAGE + b', "user": "\\ud800"}', 400, "invalid_json", None),
    (CHAT, MESSAGE + b', "seed": 1, "seed": 2}', 400, "invalid_json", None),
    (CHAT, b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}', 400, "invalid_json", None),
    (CHAT, MESSAGE.decode().encode("utf-16"), 400, "invalid_json", None),
    (CHAT, b"[" + MESSAGE + b"}]", 400, "invalid_request", None),
    (CHAT, {}, 400, "invalid_request", "messages"),
    (CHAT, {"messages": []}, 400, "invalid_request", "messages"),
    (CHAT, {"messages": SECRET}, 400, "invalid_request", "messages"),
    (CHAT, {"messages": [SECRET]}, 400, "invalid_request", "messages"),
    (CHAT, {"messages": [{"role": SECRET, "content": "x"}]}, 400, "invalid_request", "messages[0].role"),
    (CHAT, user(None), 400, "invalid_request", "messages[0].content"),
    (CHAT, user([{"type": "text"}]), 400, "invalid_request", "messages[0].content[0].text"),
    (CHAT, user([{"type": "image_url", "image_url": SECRET}]), 400, "invalid_request", "messages[0].content[0]"),
    (CHAT, user("x", audio={"id": SECRET}), 400, "unsupported_parameter", "messages[0].audio"),
    (CHAT, {**user(SECRET), "temperature": SECRET}, 400, "invalid_request", "temperature"),
    (CHAT, {**user(SECRET), "temperature": True}, 400, "invalid_request", "temperature"),
    (CHAT, {**user(SECRET), "n": 0}, 400, "invalid_request", "n"),
    (CHAT, {**user(SECRET), "max_tokens": "5"}, 400, "invalid_request", "max_tokens"),
    (CHAT, {**user(SECRET), "stop": [SECRET] * 17}, 400, "invalid_request", "stop"),
    (CHAT, {**user(SECRET), "logit_bias": {SECRET: 1}}, 400, "invalid_request", "logit_bias"),
    (CHAT, {**user(SECRET), "tools": [{"type": SECRET}]}, 400, "unsupported_parameter", "tools"),
    (CHAT, {**user("x"), "response_format": {"type": SECRET}}, 400, "unsupported_parameter", "response_format"),
    (CHAT, {**user("x"), "stream_options": {"include_usage": 1}}, 400, "invalid_request", OPTION),
    (CHAT, {**user(SECRET), "model": "gpt-4"}, 404, "model_not_found", "model"),
    (CHAT, user(SECRET * 50), 400, "context_length_exceeded", "messages"),
    (CHAT, user(SECRET * 2000), 413, "request_too_large", None),
    (TEXT, {}, 400, "invalid_request", "prompt"),
    (TEXT, {"prompt": []}, 400, "invalid_request", "prompt"),
    (TEXT, {"prompt": {SECRET: SECRET}}, 400, "invalid_request", "prompt"),
    (TEXT, {"prompt": [SECRET, 1]}, 400, "invalid_request", "prompt"),
    (TEXT, {"prompt": [10**9]}, 400, "invalid_request", "prompt"),
    (TEXT, {"prompt": SECRET, "suffix": SECRET}, 400, "unsupported_parameter", "suffix"),
    (TEXT, {"prompt": SECRET * 50}, 400, "context_length_exceeded", "prompt"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_before_the_headers_and_say_where(
    server: Scripted, path: str, body: bytes | dict[str, Any], status: int, code: str, param: str | None, stream: bool
) -> None:
    """Fault (CASES B10, D5, D10, D14): 200 and an error in the stream, a 500, a shape of another make, an echo."""
    call = server.call(path, {**body, "stream": stream} if isinstance(body, dict) else body)
    error = assert_error(call, status, code)
    assert error["param"] == param
    assert call.body.isascii()
    assert SECRET not in call.body.decode()
    assert len(call.body) < 600


def test_a_prompt_too_long_is_said_in_words_that_clients_know(server: Scripted) -> None:
    """Fault: litellm and langchain tell this error by its words, and fall back to a larger model only if they do."""
    error = assert_error(server.call(CHAT, user("x" * 600)), 400, "context_length_exceeded")
    assert "prompt is too long" in error["message"]
    assert (error["num_prompt_tokens"], error["limit"]) == (618, 512)


def test_a_template_refuses_in_its_own_words() -> None:
    """Fault (CASES D15): a 500, or a 200 whose stream says it, when the template does not take the messages."""
    template = "{% if messages|length % 2 == 0 %}{{ raise_exception('roles must alternate') }}{% endif %}x"
    with Scripted(template=template) as server:
        messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        for stream in (False, True):
            error = assert_error(server.call(CHAT, {"messages": messages, "stream": stream}), 400, "invalid_request")
            assert (error["message"], error["param"]) == ("roles must alternate", "messages")


KNOWS_TWO = (
    "{% for m in messages %}{% if m.role == 'user' %}U:{{ m.content }}{% elif m.role == 'assistant' %}"
    "A:{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("role", ["system", "developer", "tool", "function"])
def test_a_message_that_the_template_passes_over_is_refused(role: str) -> None:
    """Fault: a template drops messages of a role that it does not know, and the model never sees the instructions."""
    body = {"messages": [{"role": role, "content": "4"}, {"role": "user", "content": "4"}]}
    with pytest.raises(RequestError, match="passes over") as caught:
        ask(body, template=KNOWS_TWO)
    assert caught.value.param == "messages[0].role"
    ask(body)
    ask(body, template="{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    ask(body, template=KNOWS_TWO.replace("== 'user'", "in ['user', 'system', 'tool', 'function']"))


def ask(body: dict[str, Any], config: Config | None = None, **options: Any) -> list[str]:
    """The warnings about a chat request."""
    preparer = Preparer(fake_loaded(**options), config or Config())
    return list(preparer.chat(json.dumps(body).encode(), "x").warnings)


def test_fields_of_text_parts_are_not_dropped_without_a_word() -> None:
    """Fault (CASES D24): a part's `cache_control` or the like is ignored, and nobody says so."""
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}, "annotations": None}
    (warning,) = ask(user([part, part]))
    assert "messages[].content[].cache_control" in warning
    with pytest.raises(RequestError):
        ask(user([part]), Config(strict=True))


def test_all_that_is_ignored_is_counted() -> None:
    """Fault: the hundredth unknown field is ignored without a word."""
    warnings = ask({**user("Hi"), **{f"x{i}": i for i in range(MAX_NAMED + 3)}})
    assert len(warnings) == MAX_NAMED + 1
    assert warnings[-1] == "3 further fields were ignored"


def test_a_hundred_thousand_wrong_values_make_one_error() -> None:
    """Fault: each value of a huge `logit_bias` makes an error of its own, and everybody waits for a second."""
    body = {"prompt": "a", "logit_bias": {str(i): "x" for i in range(5000)}}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    assert caught.value.error_count() == 1


def test_prompts_are_counted_before_they_are_read(server: Scripted) -> None:
    """Fault: hundreds of thousands of prompts are checked one by one, only to be too many for any server."""
    for prompt in (["a"] * (MAX_PROMPTS + 1), [[1]] * (MAX_PROMPTS + 1)):
        error = assert_error(server.call(TEXT, {"prompt": prompt}), 400, "invalid_request")
        assert str(MAX_PROMPTS) in error["message"]


def test_many_names_in_one_object_are_read_in_linear_time() -> None:
    """Fault: looking for names that come twice takes the square of their number."""
    body = {**user("Hi"), "metadata": {str(i): i for i in range(200_000)}}
    assert ask(body) == []


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip"])
def test_compressed_bodies_are_refused_for_what_they_are(server: Scripted, encoding: str) -> None:
    """Fault: "invalid JSON at column 1" for a body that is not JSON on purpose."""
    assert_error(server.call(CHAT, user("Hi"), content_encoding=encoding), 415, "unsupported_media_type")
    assert server.call(CHAT, user("Hi"), content_encoding="identity").status == 200


@pytest.mark.parametrize("path", [CHAT, TEXT, "/health", "/v1/models", "/nope", "/v1/chat/completions/", "/v1//models"])
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"])
def test_every_method_on_every_path_is_answered_in_shape(server: Scripted, path: str, method: str) -> None:
    """Fault: the framework's own pages for what is served in another way, or not at all."""
    answer = server.run(server.http.request(method, path, json={}))
    is_post = path in (CHAT, TEXT)
    is_known = is_post or path in ("/health", "/v1/models")

    allowed = ("POST",) if is_post else ("GET", "HEAD")
    expected = (404, "not_found") if not is_known else (400, "invalid_request") if is_post else (200, "")
    if is_known and method not in allowed:
        expected = (405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == set(allowed)
    assert (answer.status_code, answer.headers["content-type"]) == (expected[0], "application/json")
    if expected[0] != 200 and method != "HEAD":  # a HEAD has no body
        assert_error(answer, *expected)


# -- the table of fields ----------------------------------------------------------------------------------------------


def test_the_page_of_fields_is_current() -> None:
    """Fault: a page that lists last month's fields."""
    assert (ROOT / "docs/api-fields.md").read_text(encoding="utf-8") == markdown()


def test_every_field_is_on_the_page_once_for_each_endpoint() -> None:
    """Fault: a field that was added to a model and to no table."""
    for model in (ChatRequest, CompletionRequest):
        for row in field_table(model):
            assert f"| `{row.name}` | {row.limits} |" in markdown()


@pytest.mark.parametrize(("model", "params"), [(ChatRequest, chat_params), (CompletionRequest, text_params)])
def test_openais_own_fields_are_all_known(model: type[BaseModel], params: Any) -> None:
    """Fault (CASES D20, D24): a field that OpenAI's package can send is called unknown and passed over."""
    sent = {
        **get_type_hints(params.CompletionCreateParamsBase),
        **get_type_hints(params.CompletionCreateParamsStreaming),
    }
    assert set(sent) - set(model.model_fields) == set()
