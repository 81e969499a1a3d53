"""What servers are asked and what their answers mean: OpenAI's chat and text completions as Chairlift, vLLM,
llama-server and Ollama speak them, and Ollama's own API. Knows JSON values; no bytes, no connections, no clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from chairlift.bench.sample import TOKENS, Event, EventKind
from chairlift.bench.wire import BadStream

MAX_EVENTS = 200_000
MAX_TEXT = 2**20
"""Events and characters of one answer that are kept in memory."""

UNFINISHED = frozenset({"error", "abort", "aborted", "cancelled"})
"""Reasons to finish that no answer has: the server gave up."""

Prompt = str | Sequence[Mapping[str, str]]
"""A text, or the messages of a chat."""


class Api(StrEnum):
    """How a server is spoken to."""

    CHAT = "openai-chat"
    COMPLETIONS = "openai-completions"
    OLLAMA = "ollama"

    @property
    def path(self) -> str:
        """Where requests go."""
        return {"openai-chat": "/v1/chat/completions", "openai-completions": "/v1/completions"}.get(self, "/api/chat")


class ServerKind(StrEnum):
    """Which program answers."""

    CHAIRLIFT = "chairlift"
    VLLM = "vllm"
    LLAMA_SERVER = "llama-server"
    OLLAMA = "ollama"
    OTHER = "other"


TAKES_IGNORE_EOS = frozenset({ServerKind.CHAIRLIFT, ServerKind.VLLM, ServerKind.LLAMA_SERVER})
TAKES_MIN_TOKENS = frozenset({ServerKind.CHAIRLIFT, ServerKind.VLLM})


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it is spoken to. `extra` is merged into every request; `kind` decides which fields are sent."""

    url: str
    model: str = ""
    api: Api = Api.CHAT
    api_key: str | None = None
    extra: Mapping[str, Any] | None = None
    kind: ServerKind = ServerKind.OTHER

    @property
    def base(self) -> str:
        """The URL without a slash or `/v1` at its end."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def headers(self) -> dict[str, str]:
        """What identifies the asker."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    @property
    def can_fix_length(self) -> bool:
        """Whether an answer of exactly so many tokens can be asked for; else usage tells how long it became."""
        return self.kind in TAKES_IGNORE_EOS and self.api is not Api.OLLAMA


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request asks for. `is_exact`: neither more nor fewer tokens, where the server can be told so."""

    prompt: Prompt
    max_tokens: int
    is_streamed: bool = True
    is_exact: bool = True
    has_stamps: bool = False
    request_id: str = ""  # sent as X-Request-Id, to find it in a server's log

    def body(self, target: Target) -> dict[str, Any]:
        """The JSON of the request, in the server's own words; greedy, so that it can be repeated."""
        body: dict[str, Any] = {"model": target.model, "stream": self.is_streamed}
        if target.api is Api.OLLAMA:
            body |= {"messages": self._messages(), "options": {"num_predict": self.max_tokens, "temperature": 0}}
            return body | dict(target.extra or {})
        body |= {"max_tokens": self.max_tokens, "temperature": 0}
        body |= {"messages": self._messages()} if target.api is Api.CHAT else {"prompt": self._text()}
        if self.is_streamed:
            body["stream_options"] = {"include_usage": True}
            if self.has_stamps and target.kind is ServerKind.CHAIRLIFT:
                body["stream_options"]["include_timestamps"] = True
        if self.is_exact and target.kind in TAKES_IGNORE_EOS:
            body["ignore_eos"] = True
        if self.is_exact and target.kind in TAKES_MIN_TOKENS:
            body["min_tokens"] = self.max_tokens
        return body | dict(target.extra or {})

    def _messages(self) -> list[dict[str, str]]:
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return [dict(message) for message in self.prompt]

    def _text(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(message["content"] for message in self.prompt)


class Answer:
    """Collects one answer, chunk by chunk or whole. What a server did not say stays None."""

    def __init__(self, api: Api, wall_start_s: float) -> None:
        self._api = api
        self._wall_start_s = wall_start_s
        self._texts: list[str] = []
        self._num_chars = 0
        self._num_reported = 0
        self.events: list[Event] = []
        self.num_prompt_tokens: int | None = None
        self.num_cached_tokens: int | None = None
        self.num_output_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.is_done = False
        self.content_encoding = ""

    @property
    def text(self) -> str:
        """The visible text, or its first MAX_TEXT characters."""
        return "".join(self._texts)

    @property
    def is_complete(self) -> bool:
        """Whether the server said that this is all."""
        return self.is_done or self.finish_reason is not None

    def ping(self, at_s: float, num_bytes: int) -> None:
        """A comment came."""
        self._add(Event(at_s, EventKind.PING, num_bytes=num_bytes))

    def done(self, at_s: float, num_bytes: int) -> None:
        """`[DONE]` came."""
        self.is_done = True
        self._add(Event(at_s, EventKind.DONE, num_bytes=num_bytes))

    def failed(self, data: bytes, at_s: float, num_bytes: int) -> None:
        """An event came that is an error by its name, whatever is in it."""
        self.error = error_text(_json_or_text(data))
        self._add(Event(at_s, EventKind.ERROR, num_bytes=num_bytes))

    def chunk(self, value: Any, at_s: float, num_bytes: int) -> None:
        """One JSON value of a stream. Raises BadStream when it is none that this API has."""
        if not isinstance(value, dict):
            raise BadStream("an event that is no JSON object")
        pieces = self._checked_pieces(value)
        sent_at_s = self._sent_at_s(value)
        num_tokens = self._num_tokens(value) if sum(kind in TOKENS for kind, _ in pieces) == 1 else None
        for kind, text in pieces:
            self._add(
                Event(at_s, kind, len(text), num_tokens if kind in TOKENS else None, sent_at_s, num_bytes=num_bytes)
            )
            num_bytes = 0

    def whole(self, value: Any) -> None:
        """An answer in one piece. Raises BadStream when it is none that this API has."""
        if not isinstance(value, dict):
            raise BadStream("an answer that is no JSON object")
        self._checked_pieces(value)

    def _add(self, event: Event) -> None:
        if len(self.events) >= MAX_EVENTS:
            raise BadStream(f"more than {MAX_EVENTS} events")
        self.events.append(event)

    # -- what a value says --------------------------------------------------------------------------------------------

    def _checked_pieces(self, value: dict[str, Any]) -> list[tuple[EventKind, str]]:
        """Foreign JSON may hold anything anywhere: what does not fit is one kind of failure."""
        try:
            return self._pieces(value)
        except (AttributeError, TypeError, KeyError) as error:
            raise BadStream(f"an event of an unknown shape: {error}") from None

    def _pieces(self, value: dict[str, Any]) -> list[tuple[EventKind, str]]:
        """What it brings, in order; never empty."""
        if value.get("error"):
            self.error = error_text(value)
            return [(EventKind.ERROR, "")]
        pieces = self._ollama(value) if self._api is Api.OLLAMA else self._openai(value)
        return pieces or [(EventKind.ROLE, "")]

    def _openai(self, value: dict[str, Any]) -> list[tuple[EventKind, str]]:
        pieces: list[tuple[EventKind, str]] = []
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            said = choice.get("delta") or choice.get("message") or choice
            pieces += self._said(said)
            if choice.get("finish_reason"):
                self._finished(str(choice["finish_reason"]))
                pieces.append((EventKind.FINISH, ""))
        usage = value.get("usage")
        if isinstance(value.get("timings"), dict):
            self._timings(value["timings"])
        if isinstance(usage, dict):
            self._usage(usage)
            if not choices:
                pieces.append((EventKind.USAGE, ""))
        return pieces

    def _finished(self, reason: str) -> None:
        self.finish_reason = reason
        if reason in UNFINISHED:
            self.error = f"finish_reason {reason}"

    def _ollama(self, value: dict[str, Any]) -> list[tuple[EventKind, str]]:
        pieces = self._said(value.get("message") or {})
        if value.get("done"):
            self._finished(str(value.get("done_reason") or "stop"))
            self.num_prompt_tokens = _count(value.get("prompt_eval_count"))
            self.num_output_tokens = _count(value.get("eval_count"))
            pieces.append((EventKind.FINISH, ""))
        return pieces

    def _said(self, said: dict[str, Any]) -> list[tuple[EventKind, str]]:
        """Texts of a delta or message that are not empty. Reasoning has a name in each of these servers."""
        pieces = []
        thought = said.get("reasoning_content") or said.get("reasoning") or said.get("thinking")
        if thought:
            pieces.append((EventKind.REASONING, str(thought)))
        text = said.get("content") or said.get("text") or said.get("refusal")
        if text:
            pieces.append((EventKind.TEXT, str(text)))
            self._texts.append(str(text)[: MAX_TEXT - self._num_chars])
            self._num_chars += len(self._texts[-1])
        tools = "".join(_tool_texts(said.get("tool_calls") or []))
        if tools:
            pieces.append((EventKind.TOOL, tools))
        return pieces

    def _usage(self, usage: dict[str, Any]) -> None:
        self.num_prompt_tokens = _count(usage.get("prompt_tokens"))
        self.num_output_tokens = _count(usage.get("completion_tokens"))
        cached = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        self.num_cached_tokens = self.num_cached_tokens if cached is None else cached  # some tell it in timings only

    def _timings(self, timings: dict[str, Any]) -> None:
        """llama-server's own; `prompt_n` leaves out what the cache had."""
        cached, computed = _count(timings.get("cache_n")), _count(timings.get("prompt_n"))
        self.num_cached_tokens = cached
        self.num_prompt_tokens = None if computed is None else computed + (cached or 0)
        self.num_output_tokens = _count(timings.get("predicted_n"))

    def _num_tokens(self, value: dict[str, Any]) -> int | None:
        """Tokens in a chunk, where the server says so: by ids, by log-probabilities, or by usage in every chunk."""
        choice = (value.get("choices") or [{}])[0]
        logprobs = choice.get("logprobs") or {}
        for listed in (choice.get("token_ids"), logprobs.get("content"), logprobs.get("tokens")):
            if listed:
                return len(listed)
        if isinstance(value.get("usage"), dict) and self.num_output_tokens is not None:
            before, self._num_reported = self._num_reported, self.num_output_tokens
            return self.num_output_tokens - before
        return None

    def _sent_at_s(self, value: dict[str, Any]) -> float | None:
        """The send stamp on the run's clock: Chairlift's `timestamps`, or when Ollama made the chunk."""
        stamps = value.get("timestamps")
        if isinstance(stamps, dict) and isinstance(stamps.get("sent_s"), int | float):
            return float(stamps["sent_s"]) - self._wall_start_s
        if self._api is Api.OLLAMA and isinstance(value.get("created_at"), str):
            try:
                return datetime.fromisoformat(value["created_at"]).timestamp() - self._wall_start_s
            except ValueError:
                return None
        return None


def _tool_texts(calls: Sequence[Any]) -> list[str]:
    """Names and arguments of tool calls, as far as they came."""
    functions = [call.get("function") or {} for call in calls if isinstance(call, dict)]
    return [str(function.get(field) or "") for function in functions for field in ("name", "arguments")]


def _count(said: Any) -> int | None:
    """A count of tokens as a server wrote it; None for what is none."""
    return said if isinstance(said, int) and said >= 0 else None


def _json_or_text(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def error_text(value: Any) -> str:
    """The words of an error body of any of these servers."""
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]
