"""Connects to a server: finds out which program answers, and which model it serves."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from chairlift.bench.client.client import BenchError, Client, Clock
from chairlift.bench.client.target import Api, ApiChoice, ConnectOptions, ServerKind, Target

_OWNERS = {
    "chairlift": ServerKind.CHAIRLIFT,
    "vllm": ServerKind.VLLM,
    "llamacpp": ServerKind.LLAMA_SERVER,
    "library": ServerKind.OLLAMA,
}
_APIS = {ApiChoice.COMPLETIONS: Api.COMPLETIONS, ApiChoice.OLLAMA: Api.OLLAMA}


@asynccontextmanager
async def connect(
    url: str, options: ConnectOptions, clock: Clock | None = None, *, accepts_gzip: bool = False
) -> AsyncIterator[Client]:
    """A client whose server is known. Raises BenchError as `discover` does."""
    if not url.startswith(("http://", "https://")):
        raise BenchError(f"{url} is no address of a server", hint=f"http://{url} for example")
    target = Target(url, options.model or "", _APIS.get(options.api, Api.CHAT), options.api_key)
    async with Client(target, clock=clock, timeout_s=options.timeout_s, accepts_gzip=accepts_gzip) as client:
        model = (await discover(client)).card.get("model")
        if options.api is ApiChoice.AUTO and isinstance(model, dict) and model.get("chat_template") is False:
            client.target = replace(client.target, api=Api.COMPLETIONS)
        yield client


async def discover(client: Client) -> Target:
    """Completes the client's target with the kind of server, a model (the first one, if none was named) and its card.

    Raises BenchError if nobody answers, or if there is no model.
    """
    target = client.target
    status, body, _ = await client.get("/v1/models")
    if status in (401, 403):
        raise BenchError(f"{target.base} wants a key (status {status})", hint="give it with --api-key")
    models = _models(body) if status == 200 else []
    kind = next((_OWNERS[owner] for _, owner, _ in models if owner in _OWNERS), ServerKind.OTHER)
    if kind is ServerKind.OTHER and await _is_ollama(client):
        kind = ServerKind.OLLAMA
    model = target.model or next((name for name, _, _ in models), "")
    if not model:
        raise BenchError(f"{target.base}/v1/models lists no model (status {status})", hint="name one with --model")
    card = next((card for name, _, card in models if name == model), {})
    client.target = replace(target, kind=kind, model=model, card=card)
    return client.target


async def _is_ollama(client: Client) -> bool:
    """Ollama names people as the owners of models; it is known by its version."""
    status, body, _ = await client.get("/api/version")
    try:
        return status == 200 and "version" in json.loads(body)
    except (ValueError, TypeError):
        return False


def _models(body: bytes) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, owner and Chairlift's card of each model in /v1/models; empty for any other body."""
    try:
        listed = [
            (str(each["id"]), str(each.get("owned_by")), each.get("chairlift")) for each in json.loads(body)["data"]
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return [(name, owner, card if isinstance(card, dict) else {}) for name, owner, card in listed]
