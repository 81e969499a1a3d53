"""Request bodies: what is honoured, what is refused, and that no value can do anything else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config import Config
from chairlift.errors import ContextLengthExceeded, ModelNotFound, RequestError
from chairlift.models.checkpoint import GenerationDefaults
from chairlift.server.body import parse_json
from chairlift.server.http_errors import (
    MAX_MESSAGE_CHARS,
    InvalidJson,
    UnknownParameter,
    UnsupportedParameter,
    error_body,
)
from chairlift.server.prepare import PreparedRequest, Preparer
from chairlift.server.responses import encode
from chairlift.server.schema import ChatRequest, CompletionRequest, field_table, parse
from support.in_process_server import HELLO, fake_loaded

USER = {"role": "user", "content": "Hi"}


def preparer(config: Config | None = None, **options: Any) -> Preparer:
    return Preparer(fake_loaded(**options), config or Config())


def chat(fields: dict[str, Any], config: Config | None = None, **options: Any) -> PreparedRequest:
    body = json.dumps({"messages": [USER], **fields}).encode()
    return preparer(config, **options).chat(body, "x")


def text(fields: dict[str, Any], config: Config | None = None, **options: Any) -> PreparedRequest:
    body = json.dumps({"prompt": "Hi", **fields}).encode()
    return preparer(config, **options).completion(body, "x")


_WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (True, "1", -0.1, 2.1, [], {}),
    "top_p": (-0.1, 1.1, "0.5", False),
    "min_p": (-0.1, 1.1),
    "top_k": (-2, 1.5, 2**31, True),
    "repetition_penalty": (0, -1, 101),
    "presence_penalty": (-2.1, 2.1, "0"),
    "frequency_penalty": (-2.1, 2.1),
    "n": (0, -1, 1.0, 2.5, "1", True, 9, 10**30),
    "max_tokens": (-1, 2.5, "5", True, []),
    "min_tokens": (-1, 17, 1.0),
    "seed": (2**64, -(2**63) - 1, 0.5, "1", True),
    "stop": ("", [""], ["a"] * 17, ["x" * 1001], [1], 1, {}),
    "stop_token_ids": ([-1], [271], ["1"], [1.0], 5, [1] * 257),
    "logit_bias": ({"a": 1}, {"271": 1}, {"-1": 1}, {"1": 101}, {"1": "1"}, {"٣": 1}, [], {"1": None}),
    "stream": (1, "true", []),
    "stream_options": ({"include_usage": True}, [], "x"),
    "prompt_logprobs": (-1, 21, True),
    "ignore_eos": (1, "yes"),
    "cache_salt": ("", "x" * 257, 1),
    "model": (1, [], True),
}
WRONG_FOR_BOTH = [(name, value) for name, values in _WRONG.items() for value in values]


def test_a_model_advises_where_a_request_is_silent() -> None:
    """Fault: sampling defaults of a checkpoint that are read and ignored, or that overrule what a client asked for."""
    advised = GenerationDefaults(temperature=0.6, top_p=0.9, top_k=40)
    preparing = Preparer(replace(fake_loaded(), generation=advised), Config())

    def params(**fields: Any) -> tuple[float, float, int]:
        body = json.dumps({"messages": [USER], **fields}).encode()
        chosen = preparing.chat(body, "x").params
        return chosen.temperature, chosen.top_p, chosen.top_k

    assert params() == (0.6, 0.9, 40)
    assert params(temperature=0, top_p=1, top_k=0) == (0.0, 1.0, 0)
    silent = chat({}).params
    assert (silent.temperature, silent.top_p, silent.top_k) == (1.0, 1.0, 0)


@pytest.mark.parametrize(("name", "value"), WRONG_FOR_BOTH, ids=lambda v: json.dumps(v)[:20])
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    """Fault (CASES D5, D10): a value of the wrong type or beyond its limits is taken, rounded or ignored."""
    for ask, extra in ((chat, {"max_tokens": 16}), (text, {})):
        with pytest.raises(RequestError) as caught:
            ask({**extra, name: value})
        assert caught.value.param == name
        assert caught.value.http_status == 400
        assert name in error_body(caught.value)["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("logprobs", 1), ("top_logprobs", 21), ("top_logprobs", 2), ("max_tokens", 0), ("max_completion_tokens", 0),
     ("messages", []), ("messages", None), ("messages", "Hi"), ("messages", [1]), ("chat_template_kwargs", [])],
)  # fmt: skip
def test_wrong_chat_values(name: str, value: Any) -> None:
    """Fault: as above, for the fields that only chats have."""
    with pytest.raises(RequestError) as caught:
        chat({name: value})
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("logprobs", True), ("logprobs", 21), ("max_tokens", 0), ("prompt", []), ("prompt", [[]]), ("prompt", ["a", 1]),
     ("prompt", [[1], []]), ("prompt", [True]), ("prompt", [1.0]), ("prompt", None), ("prompt", {}), ("prompt", [271]),
     ("prompt", [-1]), ("prompt", ""), ("echo", 1), ("prompt", ["a"] * 25)],
)  # fmt: skip
def test_wrong_text_values(name: str, value: Any) -> None:
    """Fault: as above, for the fields that only texts have; an id outside the vocabulary; more than can ever wait."""
    with pytest.raises(RequestError) as caught:
        text({name: value})
    assert caught.value.param == name


def test_null_means_default_everywhere() -> None:
    """Fault: clients send null for what they do not set, and a server takes it for a wrong type."""
    for model, ask in ((ChatRequest, chat), (CompletionRequest, text)):
        fields = {row.name: None for row in field_table(model) if row.name not in ("messages", "prompt")}
        job, plain = ask(fields), ask({})
        assert job.warnings == ()
        assert job.params.temperature == plain.params.temperature == 1.0
        assert job.params.max_tokens == plain.params.max_tokens


def test_neutral_values_pass_and_others_are_refused_by_name() -> None:
    """Fault (CASES D20, D24): real clients send neutral values of many fields; anything else must not be ignored."""
    for model, ask in ((ChatRequest, chat), (CompletionRequest, text)):
        for name, info in model.model_fields.items():
            extra = info.json_schema_extra
            assert isinstance(extra, dict)
            accepted: Any = extra.get("enum")
            if accepted is None:
                continue
            for value in accepted:
                assert ask({name: value}).warnings == ()
            with pytest.raises(UnsupportedParameter) as caught:
                ask({name: {"something": "else"}})
            assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("name", "value"), [("priority", False), ("store", 0), ("best_of", True), ("echo", 0)])
def test_neutral_values_are_compared_by_type(name: str, value: Any) -> None:
    """Fault: Python's `False == 0` lets a wrong type pass."""
    with pytest.raises(RequestError) as caught:
        (text if name == "best_of" else chat)({name: value})
    assert caught.value.param == name


def test_no_effect_fields_take_anything() -> None:
    """Fault: a label such as `user` ends a request."""
    assert chat({"user": "me", "metadata": {"a": "b"}, "safety_identifier": 1}).warnings == ()


def test_unknown_fields_are_named_or_refused() -> None:
    """Fault (CASES D24): a field is ignored without a word."""
    unknown = {
        "num_ctx": 4096,
        "xtc_threshold": 0.1,
        "stream": True,
        "stream_options": {"include_usage": True, "odd": 1},
    }
    warnings = chat(unknown).warnings
    assert [
        name for name in ("num_ctx", "xtc_threshold", "stream_options.odd") if any(name in w for w in warnings)
    ] == [
        "num_ctx",
        "xtc_threshold",
        "stream_options.odd",
    ]
    with pytest.raises(UnknownParameter) as caught:
        chat({"num_ctx": 4096}, Config(strict=True))
    assert caught.value.param == "num_ctx"


def test_what_a_template_does_not_read_is_named() -> None:
    """Fault: a field of a message, or a variable, is dropped by the template and nobody says so."""
    fields = {"messages": [{**USER, "name": "me", "weight": None}], "chat_template_kwargs": {"enable_thinking": False}}
    named = chat(fields).warnings
    assert ["messages[].name" in named[0], "chat_template_kwargs.enable_thinking" in named[1]] == [True, True]
    assert chat(fields, template="{{ messages[0].name }}{{ enable_thinking }}").warnings == ()
    with pytest.raises(UnknownParameter):
        chat(fields, Config(strict=True))


def test_every_field_states_its_limits_and_handling() -> None:
    """Fault: the docs' table has holes."""
    for model in (ChatRequest, CompletionRequest):
        for row in field_table(model):
            assert row.limits
            assert row.handling in ("honoured", "neutral only", "refused", "no effect")


def test_both_names_of_the_token_limit_count() -> None:
    """Fault (CASES D5): `max_completion_tokens` is ignored, or hides `max_tokens`."""
    assert chat({"max_tokens": 5}).params.max_tokens == 5
    assert chat({"max_completion_tokens": 5}).params.max_tokens == 5
    assert chat({"max_completion_tokens": 5, "max_tokens": 3}).params.max_tokens == 3
    assert chat({"max_completion_tokens": 2, "max_tokens": 3}).params.max_tokens == 2
    assert chat({}).params.max_tokens is None
    assert text({}).params.max_tokens == 16
    assert text({"max_tokens": 0, "echo": True}).params.max_tokens == 0


def test_too_many_tokens_are_clamped_to_the_room_left() -> None:
    """Fault (CASES D4): max_tokens beyond the context is an error, or runs over it."""
    made = preparer()
    job = made.completion(b'{"prompt": "abc", "max_tokens": 1000000000}', "x")
    (request,) = made.requests(job, key_name="")
    assert request.params.max_tokens == 512 - 3
    with pytest.raises(RequestError) as caught:
        text({"max_tokens": 10**9}, Config(strict=True))
    assert caught.value.param == "max_tokens"


def test_seeds() -> None:
    """Fault: a negative seed is refused or two of them meet; requests without one are all alike."""
    assert chat({"seed": 7}).params.seed == 7
    assert chat({"seed": -1}).params.seed == 2**64 - 1
    assert chat({"seed": 2**64 - 1}).params.seed == 2**64 - 1


def test_temperatures_too_small_to_divide_by_are_greedy() -> None:
    """Fault: logits / 1e-40 leave float32."""
    assert chat({"temperature": 1e-40}).params.temperature == 0
    assert chat({"temperature": 0.01}).params.temperature > 0


def test_choices_share_all_but_their_number() -> None:
    """Fault (CASES D7): n is ignored, or the choices are equal or not reproducible."""
    made = preparer()
    job = made.completion(b'{"prompt": ["a", "b"], "n": 2, "seed": 5}', "x")
    requests = made.requests(job, key_name="k")
    assert [request.id for request in requests] == ["cmpl-x-0#0", "cmpl-x-0#1", "cmpl-x-1#0", "cmpl-x-1#1"]
    assert [request.params.choice for request in requests] == [0, 1, 0, 1]
    assert {request.params.seed for request in requests} == {5}
    assert {request.key_name for request in requests} == {"k"}


def test_too_long_prompts_carry_both_numbers() -> None:
    """Fault (CASES D1, D2): silent truncation, or an error that no program can read."""
    for ask, fields, param in (
        (chat, {"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        (text, {"prompt": "a" * 512}, "prompt"),
        (text, {"prompt": ["a", "b" * 512]}, "prompt"),
        (text, {"prompt": [5] * 512}, "prompt"),
    ):
        with pytest.raises(ContextLengthExceeded) as caught:
            ask(fields)
        detail = error_body(caught.value)["error"]
        assert (detail["code"], detail["param"], detail["limit"]) == ("context_length_exceeded", param, 512)
        assert detail["num_prompt_tokens"] >= 512
    assert len(text({"prompt": "a" * 511}).prompts[0]) == 511


def test_hopeless_prompts_are_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault (CASES A29): megabytes are tokenised only to be refused."""
    made = preparer()
    monkeypatch.setattr(type(made._loaded.tokenizer), "encode", None)
    with pytest.raises(ContextLengthExceeded, match="at least"):
        made.completion(json.dumps({"prompt": "a" * 10**6}).encode(), "x")


def test_unknown_model_lists_names_and_clips_ours() -> None:
    """Fault (CASES D14): a wrong name is served, looked up elsewhere, or echoed at length."""
    assert chat({"model": "alias"}).model == "alias"
    assert chat({"model": None}).model == "fake"
    for name in ("", "fake:latest", "FAKE", "x" * 5000):
        with pytest.raises(ModelNotFound, match="fake, alias") as caught:
            chat({"model": name})
        assert len(str(caught.value)) < 300


MESSAGES_WRONG: list[tuple[Any, str]] = [
    ({"content": "x"}, "messages[0].role"),
    ({"role": "wizard", "content": "x"}, "messages[0].role"),
    ({"role": ["user"], "content": "x"}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": []}, "messages[0].content"),
    ({"role": "assistant", "content": None}, "messages[0].content"),
    ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
    ({"role": "assistant", "content": "x", "audio": {"id": "y"}}, "messages[0].audio"),
    ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("message", "param"), MESSAGES_WRONG, ids=[json.dumps(m)[:40] for m, _ in MESSAGES_WRONG])
def test_odd_messages_are_refused_where_they_are_odd(message: Any, param: str) -> None:
    """Fault: an odd message renders as "None", vanishes in the template, or is a 500."""
    with pytest.raises(RequestError) as caught:
        chat({"messages": [message]})
    assert caught.value.param == param


def test_unsupported_parts_are_named() -> None:
    """Fault: an image is dropped and the model guesses."""
    with pytest.raises(RequestError, match="image_url"):
        chat({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})


def test_text_parts_equal_a_string() -> None:
    """Fault: parts are rendered as a Python list."""
    parts = [{"type": "text", "text": "Hi"}]
    assert chat({"messages": [{"role": "user", "content": parts}]}).prompts == chat({}).prompts
    several = chat({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "you"}]}]})
    assert several.prompts == chat({"messages": [{"role": "user", "content": "Hi\nyou"}]}).prompts


def test_developer_is_system_where_the_template_knows_no_better() -> None:
    """Fault: the newer role name breaks older templates."""
    system, developer = ({"messages": [{"role": role, "content": "x"}, USER]} for role in ("system", "developer"))
    assert chat(system).prompts == chat(developer).prompts


def test_template_refusals_are_the_clients_to_mend() -> None:
    """Fault (CASES D15): a template's own refusal is a 500."""
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
    with pytest.raises(RequestError, match="no system here") as caught:
        chat({"messages": [{"role": "system", "content": "x"}, USER]}, template=strict)
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="no chat template"):
        chat({}, template=None)


def test_template_variables() -> None:
    """Fault: variables for the template are dropped, or can replace the messages."""
    template = "{{ messages[0].content }}{% if thinking is defined %}{{ thinking }}{% endif %}"
    job = chat({"chat_template_kwargs": {"thinking": "yes"}}, template=template)
    assert bytes(job.prompts[0]) == b"Hiyes"
    for name in ("messages", "tools", "a b"):
        with pytest.raises(RequestError) as caught:
            chat({"chat_template_kwargs": {name: "x"}}, template=template)
        assert caught.value.param == "chat_template_kwargs"


NOT_JSON = [
    b"", b"{", b"nope", b"{'a': 1}", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b'{"a": 1e999}',
    b'{"a": [[-1E+4000]]}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b"[" * 100_000 + b"]" * 100_000, b"{} {}",
    b"\xef\xbb\xbf{}", b"1" * 10_000, b'{"a": ' + b"9" * 400 + b".5}", b"\x00",
]  # fmt: skip


@pytest.mark.parametrize("body", NOT_JSON, ids=lambda b: repr(b[:20]))
def test_what_is_not_json_is_a_400(body: bytes) -> None:
    """Fault (CASES D10): NaN and infinities pass range checks; nesting or bad bytes are a 500."""
    with pytest.raises(InvalidJson) as caught:
        parse_json(body)
    assert len(str(caught.value)) < 120
    encode(error_body(caught.value))


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"3", b"true"])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    """Fault: valid JSON of another kind is a 500."""
    with pytest.raises(RequestError, match="JSON object"):
        preparer().chat(body, "x")


def test_a_million_wrong_items_make_one_error() -> None:
    """Fault: a validator reports each of a million items, and takes minutes and gigabytes to do so."""
    body = {"prompt": [1] * 200_000 + ["x"]}
    with pytest.raises(RequestError) as caught:
        parse(CompletionRequest, body, strict=False)
    assert len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = [row.name for row in (*field_table(ChatRequest), *field_table(CompletionRequest))]


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4), st.booleans())
def test_any_value_is_taken_or_refused_in_order(fields: dict[str, Any], is_chat: bool) -> None:
    """Fault: some combination of values raises anything but an error that serialises, or lets a NaN through."""
    ask = PREPARER.chat if is_chat else PREPARER.completion
    base = HELLO if is_chat else {"prompt": "x"}
    try:
        job = ask(json.dumps({**base, **fields}).encode(), "x")
    except RequestError as error:
        encode(error_body(error))
    else:
        assert math.isfinite(job.params.temperature)
        for request in PREPARER.requests(job, key_name=""):
            assert 0 <= (request.params.max_tokens or 0) <= 512 - len(request.prompt)


PREPARER = preparer()


@given(st.text(max_size=3000))
def test_messages_of_errors_are_short_and_encode(message: str) -> None:
    """Fault: an error echoes the client's input at length, or cannot be sent."""
    body = error_body(RequestError(message, param="x"))
    assert len(body["error"]["message"]) <= MAX_MESSAGE_CHARS
    assert json.loads(encode(body)) == body


def test_foreign_exceptions_say_nothing() -> None:
    """Fault: a traceback's text, perhaps with a prompt in it, reaches a client."""
    detail = error_body(ValueError("secret prompt"))["error"]
    assert "secret" not in json.dumps(detail)
    assert (detail["type"], detail["code"]) == ("server_error", "internal_error")
