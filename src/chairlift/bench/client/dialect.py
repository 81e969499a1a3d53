"""What the answers of servers mean: OpenAI's chat and text completions as Chairlift, vLLM, llama-server and Ollama
write them, and Ollama's own API. Knows JSON values; no bytes, no connections, no clock.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from chairlift.bench.client.sample import TOKENS, Event, EventKind
from chairlift.bench.client.target import Api
from chairlift.bench.client.wire import BadStream

MAX_EVENTS = 200_000
"""Events of one answer that are kept in memory."""

UNFINISHED = frozenset({"error", "abort", "aborted", "cancelled"})
"""Finish reasons that say that the server gave up."""


class AnswerParser:
    """Reads one answer, chunk by chunk or in one piece. A value that the server did not send stays None."""

    def __init__(self, api: Api, wall_start_s: float) -> None:
        self._api = api
        self._wall_start_s = wall_start_s
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
    def is_complete(self) -> bool:
        """Whether the server said that the answer is complete."""
        return self.is_done or self.finish_reason is not None

    def event(self, kind: EventKind, at_s: float, num_bytes: int) -> None:
        """Takes an event without a JSON value: a comment, or `[DONE]`."""
        self.is_done |= kind is EventKind.DONE
        self._add(Event(at_s, kind, num_bytes=num_bytes))

    def failed(self, data: bytes, at_s: float, num_bytes: int) -> None:
        """An event came whose name says that it is an error."""
        self.error = error_text(json_or_text(data))
        self._add(Event(at_s, EventKind.ERROR, num_bytes=num_bytes))

    def chunk(self, value: Any, at_s: float, num_bytes: int) -> None:
        """One JSON value of a stream. Raises BadStream if this API has no such value."""
        kinds = self._kinds(value)
        sent_at_s = self._sent_at_s(value)
        num_tokens = self._num_tokens(value) if sum(kind in TOKENS for kind in kinds) == 1 else None
        for kind in kinds:
            self._add(Event(at_s, kind, num_tokens if kind in TOKENS else None, sent_at_s, num_bytes))
            num_bytes = 0

    def whole(self, value: Any) -> None:
        """An answer in one piece. Raises BadStream if this API has no such value."""
        self._kinds(value)

    def _add(self, event: Event) -> None:
        if len(self.events) >= MAX_EVENTS:
            raise BadStream(f"more than {MAX_EVENTS} events")
        self.events.append(event)

    def _kinds(self, value: Any) -> list[EventKind]:
        """Reads a value: what it brings, in order, and never nothing. A shape that no server sends raises BadStream."""
        if not isinstance(value, dict):
            raise BadStream("a message that is no JSON object")
        if value.get("error"):
            self.error = error_text(value)
            return [EventKind.ERROR]
        try:
            return (self._ollama(value) if self._api is Api.OLLAMA else self._openai(value)) or [EventKind.ROLE]
        except (AttributeError, TypeError, KeyError) as error:
            raise BadStream(f"an event of an unknown shape: {error}") from None

    def _openai(self, value: dict[str, Any]) -> list[EventKind]:
        kinds: list[EventKind] = []
        choices = value.get("choices")
        for choice in choices if isinstance(choices, list) else []:
            said = choice.get("delta") or choice.get("message") or choice
            kinds += self._said(said)
            if choice.get("finish_reason"):
                self._finished(str(choice["finish_reason"]))
                kinds.append(EventKind.FINISH)
        usage = value.get("usage")
        if isinstance(value.get("timings"), dict):
            self._timings(value["timings"])
        if isinstance(usage, dict):
            self._usage(usage)
            if not choices:
                kinds.append(EventKind.USAGE)
        return kinds

    def _finished(self, reason: str) -> None:
        self.finish_reason = reason
        if reason in UNFINISHED:
            self.error = f"finish_reason {reason}"

    def _ollama(self, value: dict[str, Any]) -> list[EventKind]:
        kinds = self._said(value.get("message") or {})
        if value.get("done"):
            self._finished(str(value.get("done_reason") or "stop"))
            self.num_prompt_tokens = _count(value.get("prompt_eval_count"))
            self.num_output_tokens = _count(value.get("eval_count"))
            kinds.append(EventKind.FINISH)
        return kinds

    def _said(self, said: dict[str, Any]) -> list[EventKind]:
        """The kinds of text in a delta or message that are not empty. Each server has its own name for reasoning."""
        functions = [call.get("function") or {} for call in said.get("tool_calls") or [] if isinstance(call, dict)]
        brought = {
            EventKind.REASONING: said.get("reasoning_content") or said.get("reasoning") or said.get("thinking"),
            EventKind.TEXT: said.get("content") or said.get("text") or said.get("refusal"),
            EventKind.TOOL: any(function.get("name") or function.get("arguments") for function in functions),
        }
        return [kind for kind, text in brought.items() if text]

    def _usage(self, usage: dict[str, Any]) -> None:
        self.num_prompt_tokens = _count(usage.get("prompt_tokens"))
        self.num_output_tokens = _count(usage.get("completion_tokens"))
        cached = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        self.num_cached_tokens = self.num_cached_tokens if cached is None else cached  # timings may tell it

    def _timings(self, timings: dict[str, Any]) -> None:
        """Counts of llama-server. Its `prompt_n` leaves out the tokens that were in the cache."""
        cached, computed = _count(timings.get("cache_n")), _count(timings.get("prompt_n"))
        self.num_cached_tokens = cached
        self.num_prompt_tokens = None if computed is None else computed + (cached or 0)
        self.num_output_tokens = _count(timings.get("predicted_n"))

    def _num_tokens(self, value: dict[str, Any]) -> int | None:
        """Tokens in a chunk by its ids, its log-probabilities, or usage in every chunk; None if it has none of them."""
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
        """The send stamp on the run's clock: Chairlift's `timestamps` or Ollama's `created_at`; None without one."""
        stamps = value.get("timestamps")
        if isinstance(stamps, dict) and isinstance(stamps.get("sent_s"), int | float):
            return float(stamps["sent_s"]) - self._wall_start_s
        if self._api is Api.OLLAMA and isinstance(value.get("created_at"), str):
            try:
                return datetime.fromisoformat(value["created_at"]).timestamp() - self._wall_start_s
            except ValueError:
                return None
        return None


def _count(said: Any) -> int | None:
    """A count of tokens as a server wrote it; None for any other value."""
    return said if isinstance(said, int) and said >= 0 else None


def json_or_text(data: bytes) -> Any:
    """A body as JSON, or as text if it is none."""
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")


def error_text(value: Any) -> str:
    """The message in an error body of any of these servers."""
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:300]
