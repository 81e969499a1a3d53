"""A server, how it is reached, and what one request asks of it, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from chairlift.bench.options import option


class Api(StrEnum):
    """The HTTP API that a server is asked over."""

    CHAT = "openai-chat"
    COMPLETIONS = "openai-completions"
    OLLAMA = "ollama"

    @property
    def path(self) -> str:
        """The path of its POST requests."""
        return {"openai-chat": "/v1/chat/completions", "openai-completions": "/v1/completions"}.get(self, "/api/chat")


class ApiChoice(StrEnum):
    """The values of --api."""

    AUTO = "auto"
    CHAT = "chat"
    COMPLETIONS = "completions"
    OLLAMA = "ollama"


class ServerKind(StrEnum):
    """The program behind the address."""

    CHAIRLIFT = "chairlift"
    VLLM = "vllm"
    LLAMA_SERVER = "llama-server"
    OLLAMA = "ollama"
    OTHER = "other"


TAKES_IGNORE_EOS = frozenset({ServerKind.CHAIRLIFT, ServerKind.VLLM, ServerKind.LLAMA_SERVER})
TAKES_MIN_TOKENS = frozenset({ServerKind.CHAIRLIFT, ServerKind.VLLM})


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """The options of every command that asks a server."""

    model: str | None = option("Model.", show_default="the first listed")
    api: ApiChoice = option("API to ask over.", default=ApiChoice.AUTO)
    api_key: str | None = option("Key to send.", metavar="KEY")
    timeout_s: float = option("Most seconds of a request.", "--timeout", default=600.0, min=0.1, metavar="S")


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the way to ask it. `kind` decides which fields are sent."""

    url: str
    model: str = ""
    api: Api = Api.CHAT
    api_key: str | None = None
    kind: ServerKind = ServerKind.OTHER
    card: Mapping[str, Any] = field(default_factory=dict)
    """What Chairlift says of itself in /v1/models; empty for other servers."""

    @property
    def base(self) -> str:
        """The URL without a slash or `/v1` at its end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def name(self) -> str:
        """Model, address and program, for titles."""
        return f"{self.model} on {self.base} ({self.kind})"

    @property
    def headers(self) -> dict[str, str]:
        """The API key as a header; empty without a key."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    @property
    def can_fix_length(self) -> bool:
        """Whether the server can be told how many tokens an answer has. If not, usage tells how long it became."""
        return self.kind in TAKES_IGNORE_EOS and self.api is not Api.OLLAMA

    @property
    def one_stream_ceiling(self) -> float | None:
        """Tokens/s that memory allows one stream: bandwidth / bytes read for a token. None if the server tells none."""
        rate = self.card.get("one_stream_ceiling_tokens_per_s")
        return float(rate) if isinstance(rate, int | float) and rate > 0 else None

    def output_ceiling(self, in_flight: float) -> float | None:
        """Tokens/s of all running streams, each at the ceiling of one. A request that waits for a slot adds nothing."""
        limits = self.card.get("limits")
        slots = limits.get("max_num_seqs") if isinstance(limits, dict) else None
        running = min(in_flight, slots if isinstance(slots, int) else math.inf)
        return None if self.one_stream_ceiling is None else self.one_stream_ceiling * running


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What one request asks for. `is_exact`: an answer of exactly `max_tokens`, if the server can be told so."""

    prompt: str
    max_tokens: int
    is_streamed: bool = True
    is_exact: bool = True
    has_stamps: bool = False  # asks for the time at which the server sent each chunk
    request_id: str = ""  # sent as X-Request-Id, to find the request in the server's log

    def body(self, target: Target) -> dict[str, Any]:
        """The JSON of the request, in the fields that this server knows. Greedy, so that it can be repeated."""
        body: dict[str, Any] = {"model": target.model, "stream": self.is_streamed}
        if target.api is Api.COMPLETIONS:
            body["prompt"] = self.prompt
        else:
            body["messages"] = [{"role": "user", "content": self.prompt}]
        if target.api is Api.OLLAMA:
            return body | {"options": {"num_predict": self.max_tokens, "temperature": 0}}
        body |= {"max_tokens": self.max_tokens, "temperature": 0}
        if self.is_streamed:
            body["stream_options"] = {"include_usage": True}
            if self.has_stamps and target.kind is ServerKind.CHAIRLIFT:
                body["stream_options"]["include_timestamps"] = True
        if self.is_exact and target.kind in TAKES_IGNORE_EOS:
            body["ignore_eos"] = True
        if self.is_exact and target.kind in TAKES_MIN_TOKENS:
            body["min_tokens"] = self.max_tokens
        return body
