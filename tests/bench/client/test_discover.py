"""Who answers at an address, by what its endpoints say."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from chairlift.bench.client.client import BenchError
from chairlift.bench.client.connect import connect, discover
from chairlift.bench.client.target import Api, ApiChoice, ConnectOptions, ServerKind, Target
from support.async_tests import run
from support.scripted_server import MockLLM, refusal, run_virtual, tcp


@pytest.mark.parametrize(
    ("owner", "kind"),
    [
        ("chairlift", ServerKind.CHAIRLIFT),
        ("vllm", ServerKind.VLLM),
        ("llamacpp", ServerKind.LLAMA_SERVER),
        ("library", ServerKind.OLLAMA),
        ("somebody", ServerKind.OTHER),
    ],
)
def test_servers_are_known_by_what_they_say(owner: str, kind: ServerKind) -> None:
    """A vLLM asked in words that only Chairlift knows."""
    found = discovered({"/v1/models": json.dumps({"data": [{"id": "a", "owned_by": owner}, {"id": "b"}]})})
    assert (found.kind, found.model) == (kind, "a")


def test_ollama_is_known_by_its_version() -> None:
    """A model of a person's own, which Ollama says that person owns."""
    assert discovered({"/api/version": '{"version": "0.9.0"}'}).kind is ServerKind.OLLAMA
    assert discovered({"/api/version": "[]"}).kind is ServerKind.OTHER


@pytest.mark.parametrize("page", ["oops", "[]", '{"data": [1]}', '{"data": []}'])
def test_a_server_without_models_is_told_so(page: str) -> None:
    """A traceback where one line would do; but a model that was named needs no list."""
    with pytest.raises(BenchError, match="no model"):
        discovered({"/v1/models": page})
    assert discovered({"/v1/models": page}, Target("http://mock", "mine")).model == "mine"


def test_a_server_with_keys_says_so() -> None:
    """ "No model" where it is a key that is missing."""

    async def test() -> None:
        mock = MockLLM(lambda *_: refusal(500))
        mock.page_status = 401
        async with mock.client() as client:
            with pytest.raises(BenchError, match="wants a key"):
                await discover(client)

    run_virtual(test())


def test_what_chairlift_says_of_itself() -> None:
    """A ceiling that is known and not shown, or one made up for a server that tells none."""
    facts = {"one_stream_ceiling_tokens_per_s": 90.5, "model": {"chat_template": False}}
    listed = {"data": [{"id": "a", "owned_by": "chairlift", "chairlift": facts}, {"id": "b", "chairlift": 3}]}

    async def test(model: str) -> tuple[float | None, dict[str, Any]]:
        mock = MockLLM(lambda *_: refusal(500), {"/v1/models": json.dumps(listed)})
        async with mock.client(Target("http://mock", model)) as client:
            assert client.target.one_stream_ceiling is None
            await discover(client)
            return client.target.one_stream_ceiling, dict(client.target.card)

    assert run_virtual(test("a")) == (90.5, facts)
    assert run_virtual(test("b")) == (None, {})


@pytest.mark.parametrize(
    ("asked", "has_template", "api"),
    [
        ("auto", True, Api.CHAT),
        ("auto", False, Api.COMPLETIONS),
        ("chat", False, Api.CHAT),
        ("completions", True, Api.COMPLETIONS),
        ("ollama", True, Api.OLLAMA),
    ],
)
def test_a_model_without_a_chat_template_is_asked_for_text(asked: str, has_template: bool, api: Api) -> None:
    """Every request to a base model refused, because nobody said which API."""
    facts = {"model": {"chat_template": has_template}}
    listed = {"data": [{"id": "a", "owned_by": "chairlift", "chairlift": facts}]}

    async def test() -> Api:
        mock = MockLLM(lambda *_: refusal(500), {"/v1/models": json.dumps(listed)})
        options = ConnectOptions(api=ApiChoice(asked), timeout_s=10.0)
        async with tcp(mock) as url, connect(url, options) as client:
            return client.target.api

    assert run(test()) is api


def discovered(pages: dict[str, str | Callable[[], str]], target: Target | None = None) -> Target:
    async def test() -> Target:
        async with MockLLM(lambda *_: refusal(500), pages).client(target or Target("http://mock")) as client:
            return await discover(client)

    return run_virtual(test())
