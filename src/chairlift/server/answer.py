"""Answers as the two endpoints write them, whole and in chunks. Both come from the same fragments, so they are equal.

whole     {"id", "object", "created", "model", "choices": [...], "usage": {...}}
chunks    role  ->  content ...  ->  finish, empty  ->  usage, if asked for         one id and `created` for all
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from chairlift.boot import Loaded
from chairlift.engine.request import FinishReason, Request
from chairlift.engine.sampling_params import TokenLogprob
from chairlift.server import logprobs, responses
from chairlift.server.dispatch import Delta
from chairlift.server.prepare import PreparedRequest
from chairlift.server.responses import Finish

WholeT = TypeVar("WholeT", responses.ChatCompletion, responses.TextCompletion)
ChunkT = TypeVar("ChunkT", responses.ChatChunk, responses.TextChunk)
ChunkChoiceT = TypeVar("ChunkChoiceT", responses.ChatChunkChoice, responses.TextChunkChoice)

_FINISH: dict[FinishReason | None, Finish] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""How an answer ends. A choice that failed or was cancelled has no such end."""


class Fragment(NamedTuple):
    """Text that may be sent now, with its tokens' log-probabilities if asked for."""

    text: str
    entries: list[TokenLogprob]
    echo: str | None  # the prompt, to be repeated before the text


class _Choice:
    """One choice as it grows. Log-probabilities wait for the text that they belong to."""

    def __init__(self, echo: str | None) -> None:
        self._echo = echo
        self._held: list[TokenLogprob] = []
        self.num_tokens = 0

    def take(self, delta: Delta) -> Fragment | None:
        """None when there is nothing to send yet."""
        self.num_tokens = delta.num_tokens
        self._held += delta.logprobs
        is_last = delta.finish_reason is not None
        if not delta.text and not (is_last and (self._held or self._echo is not None)):
            return None
        fragment = Fragment(delta.text, self._held, self._echo)
        self._held, self._echo = [], None
        return fragment


class ResponseBuilder(ABC, Generic[WholeT, ChunkT, ChunkChoiceT]):
    """Builds the response to one request, as a whole or chunk by chunk."""

    def __init__(self, prepared: PreparedRequest, requests: Sequence[Request], loaded: Loaded) -> None:
        self.prepared = prepared
        self._requests = requests
        self._tokenizer = loaded.tokenizer
        echoes = prepared.echoes or (None,) * len(prepared.prompts)
        self._choices = [_Choice(echo) for echo in echoes for _ in range(prepared.n)]
        self._has_warned = False
        self._created = int(time.time())
        # All of the server that an answer depends on.
        self._fingerprint = loaded.fingerprint

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> WholeT:
        """The response that is not streamed, from each choice's whole output."""

    def opening(self) -> list[ChunkT]:
        """The chunks that come before any output: the roles of a chat, none for a text."""
        return []

    @abstractmethod
    def _chunk(self, choices: list[ChunkChoiceT]) -> ChunkT: ...

    @abstractmethod
    def _chunk_choice(self, index: int, fragment: Fragment | None, finish: Finish | None) -> ChunkChoiceT: ...

    def chunks(self, delta: Delta) -> list[ChunkT]:
        """The chunks that new output of one choice makes: content, and an empty one when the choice has ended well."""
        made = []
        fragment = self._choices[delta.index].take(delta)
        if fragment is not None:
            made.append(self._chunk([self._chunk_choice(delta.index, fragment, None)]))
        finish = _FINISH.get(delta.finish_reason)
        if finish is not None:
            made.append(self._chunk([self._chunk_choice(delta.index, None, finish)]))
        return made

    def usage_chunk(self) -> ChunkT:
        """The chunk that has token counts and no choices."""
        chunk = self._chunk([])
        chunk["usage"] = self._usage()
        return chunk

    def _with_extras(self, chunk: ChunkT) -> ChunkT:
        """Adds a null `usage` if the last chunk will have one, and the warnings to the first chunk."""
        if self.prepared.include_usage:
            chunk["usage"] = None
        if not self._has_warned and self.prepared.warnings:
            chunk["warnings"] = list(self.prepared.warnings)
            self._has_warned = True
        return chunk

    def _usage(self) -> responses.Usage:
        prompt_tokens = sum(map(len, self.prepared.prompts))
        completion_tokens = sum(choice.num_tokens for choice in self._choices)
        cached_tokens = sum(request.num_cached or 0 for request in self._requests[:: self.prepared.n])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "num_preemptions": sum(request.num_preemptions for request in self._requests),
        }

    def _prompt_logprobs(self, index: int) -> responses.PromptLogprobs:
        return logprobs.prompt_logprobs(self._tokenizer, _prompt_entries(self._requests[index]))


class ChatBuilder(ResponseBuilder[responses.ChatCompletion, responses.ChatChunk, responses.ChatChunkChoice]):
    """Builds the response of /v1/chat/completions."""

    def whole(self, deltas: Sequence[Delta]) -> responses.ChatCompletion:
        """The response that is not streamed."""
        body: responses.ChatCompletion = {
            "id": self.prepared.id,
            "object": "chat.completion",
            "created": self._created,
            "model": self.prepared.model,
            "system_fingerprint": self._fingerprint,
            "choices": [self._whole_choice(delta) for delta in deltas],
            "usage": self._usage(),
        }
        if self.prepared.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._prompt_logprobs(0)
        if self.prepared.warnings:
            body["warnings"] = list(self.prepared.warnings)
        return body

    def _whole_choice(self, delta: Delta) -> responses.ChatChoice:
        fragment = self._choices[delta.index].take(delta)
        return {
            "index": delta.index,
            "logprobs": self._logprobs(fragment),
            "finish_reason": _FINISH[delta.finish_reason],
            "message": {"role": "assistant", "content": fragment.text if fragment else "", "refusal": None},
        }

    def opening(self) -> list[responses.ChatChunk]:
        """The role of each choice."""
        role: responses.ChatDelta = {"role": "assistant", "content": ""}
        empty = [self._chunk_choice(i, None, None) for i in range(len(self._choices))]
        return [self._chunk([{**choice, "delta": role}]) for choice in empty]

    def _chunk(self, choices: list[responses.ChatChunkChoice]) -> responses.ChatChunk:
        chunk: responses.ChatChunk = {
            "id": self.prepared.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self.prepared.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }
        return self._with_extras(chunk)

    def _chunk_choice(self, index: int, fragment: Fragment | None, finish: Finish | None) -> responses.ChatChunkChoice:
        delta: responses.ChatDelta = {"content": fragment.text} if fragment else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(fragment), "finish_reason": finish}

    def _logprobs(self, fragment: Fragment | None) -> responses.ChatLogprobs | None:
        if fragment is None or self.prepared.body.num_logprobs is None:
            return None
        return logprobs.chat_logprobs(self._tokenizer, fragment.entries)


class TextBuilder(ResponseBuilder[responses.TextCompletion, responses.TextChunk, responses.TextChunkChoice]):
    """Builds the response of /v1/completions."""

    def __init__(self, prepared: PreparedRequest, requests: Sequence[Request], loaded: Loaded) -> None:
        super().__init__(prepared, requests, loaded)
        self._logprobs_builders = [logprobs.TextLogprobsBuilder(loaded.tokenizer) for _ in requests]

    def whole(self, deltas: Sequence[Delta]) -> responses.TextCompletion:
        """The response that is not streamed."""
        body: responses.TextCompletion = {
            "id": self.prepared.id,
            "object": "text_completion",
            "created": self._created,
            "model": self.prepared.model,
            "system_fingerprint": self._fingerprint,
            "choices": [self._whole_choice(delta) for delta in deltas],
            "usage": self._usage(),
        }
        if self.prepared.warnings:
            body["warnings"] = list(self.prepared.warnings)
        return body

    def _whole_choice(self, delta: Delta) -> responses.TextChoice:
        fragment = self._choices[delta.index].take(delta)
        choice: responses.TextChoice = {
            "index": delta.index,
            "logprobs": self._logprobs(delta.index, fragment),
            "finish_reason": _FINISH[delta.finish_reason],
            "text": _text(fragment),
        }
        if self.prepared.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(delta.index)
        return choice

    def _chunk(self, choices: list[responses.TextChunkChoice]) -> responses.TextChunk:
        chunk: responses.TextChunk = {
            "id": self.prepared.id,
            "object": "text_completion",
            "created": self._created,
            "model": self.prepared.model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }
        return self._with_extras(chunk)

    def _chunk_choice(self, index: int, fragment: Fragment | None, finish: Finish | None) -> responses.TextChunkChoice:
        found = self._logprobs(index, fragment)
        return {"index": index, "text": _text(fragment), "logprobs": found, "finish_reason": finish}

    def _logprobs(self, index: int, fragment: Fragment | None) -> responses.TextLogprobs | None:
        if fragment is None or self.prepared.body.num_logprobs is None:
            return None
        builder, request = self._logprobs_builders[index], self._requests[index]
        if fragment.echo is None:
            return builder.output(fragment.entries)
        prompt = builder.prompt(fragment.echo, request.prompt, _prompt_entries(request))
        return logprobs.joined(prompt, builder.output(fragment.entries))


def _text(fragment: Fragment | None) -> str:
    return (fragment.echo or "") + fragment.text if fragment else ""


def _prompt_entries(request: Request) -> list[TokenLogprob | None]:
    """One per prompt token, also when the engine noted none; None for the first."""
    return request.prompt_logprobs or [None] * request.num_prompt
