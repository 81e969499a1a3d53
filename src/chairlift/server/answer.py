"""Answers as the two endpoints write them, whole and in pieces; both come from the same pieces, so that they are equal.

whole     {"id", "object", "created", "model", "choices": [...], "usage": {...}}
chunks    role  ->  content ...  ->  finish, empty  ->  usage, if asked for         one id and `created` for all
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from chairlift.boot import Loaded
from chairlift.engine.request import FinishReason, Request, TokenLogprob
from chairlift.models.tokenizer import Tokenizer
from chairlift.server.dispatch import Delta
from chairlift.server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from chairlift.server.prepare import Job
from chairlift.server.schema import ChatRequest, CompletionRequest

Json = dict[str, Any]


class Piece(NamedTuple):
    """Text that may be sent, with its tokens' log-probabilities when they were asked for."""

    text: str
    logprobs: Json | None


class _Choice:
    """One choice as it grows. Log-probabilities wait for the text that they belong to."""

    def __init__(self, job: Job, request: Request, echo: str, tokenizer: Tokenizer) -> None:
        self._job = job
        self._request = request
        self._echo = echo
        self._has_echo = bool(job.echoes)
        self._held: list[TokenLogprob] = []
        self._tokenizer = tokenizer
        self._completion_logprobs = CompletionLogprobs(tokenizer)
        self.num_tokens = 0

    def piece(self, delta: Delta) -> Piece | None:
        """What can be sent now; None when there is nothing yet."""
        self.num_tokens = delta.num_tokens
        self._held += delta.logprobs
        is_last = delta.finish_reason is not None
        if not delta.text and not (is_last and (self._held or self._has_echo)):
            return None
        held, self._held = self._held, []
        has_echo, self._has_echo = self._has_echo, False
        text = self._echo + delta.text if has_echo else delta.text
        return Piece(text, self._logprobs(held, has_echo))

    def _logprobs(self, held: list[TokenLogprob], has_echo: bool) -> Json | None:
        body = self._job.body
        if body.num_logprobs is None:
            return None
        if isinstance(body, ChatRequest):
            return chat_logprobs(self._tokenizer, held)
        if not has_echo:
            return self._completion_logprobs.piece(held)
        echoed = self._completion_logprobs.echo(self._echo, self._request.prompt, _of_prompt(self._request))
        new = self._completion_logprobs.piece(held)
        return {name: [*values, *new[name]] for name, values in echoed.items()}


def _of_prompt(request: Request) -> list[TokenLogprob | None]:
    """One entry per prompt token; the first has none, also when the engine had nothing to note for it."""
    return request.prompt_logprobs or [None] * request.num_prompt


@dataclass(slots=True)
class Answer:
    """Writes one job's answer, as JSON values."""

    job: Job
    requests: Sequence[Request]
    loaded: Loaded
    choices: list[_Choice]
    created: int
    has_warned: bool = False  # warnings ride on a stream's first chunk

    @classmethod
    def to(cls, job: Job, requests: Sequence[Request], loaded: Loaded) -> Answer:
        """An answer of which nothing is written yet."""
        echoes = job.echoes or ("",) * len(job.prompts)
        choices = [_Choice(job, r, echoes[i // job.n], loaded.tokenizer) for i, r in enumerate(requests)]
        return cls(job, requests, loaded, choices, int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether it answers a chat completion."""
        return isinstance(self.job.body, ChatRequest)

    def whole(self, deltas: Sequence[Delta]) -> Json:
        """The response of a request that is not streamed, from each choice's whole output."""
        body = self._head("chat.completion" if self.is_chat else "text_completion")
        body["choices"] = [self._whole_choice(delta) for delta in deltas]
        body["usage"] = self.usage()
        if self.is_chat and self.job.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.loaded.tokenizer, _of_prompt(self.requests[0]))
        if self.job.warnings:
            body["warnings"] = list(self.job.warnings)
        return body

    def opening(self) -> list[Json]:
        """The first chunks of a chat: its roles. A text has none."""
        role = {"role": "assistant", "content": ""}
        return [self._chunk([_chat_choice(i, role)]) for i in range(len(self.choices))] if self.is_chat else []

    def chunks(self, delta: Delta) -> list[Json]:
        """The chunks that one choice's news make: content, and an empty one with the reason when it has ended well."""
        made = []
        piece = self.choices[delta.index].piece(delta)
        if piece is not None:
            made.append(self._chunk([self._piece_choice(delta.index, piece)]))
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            made.append(self._chunk([self._last_choice(delta.index, delta.finish_reason)]))
        return made

    def usage_chunk(self) -> Json:
        """The chunk of token counts: no choices."""
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> Json:
        """Token counts. A prompt counts once, however many choices it has."""
        prompt_tokens = sum(map(len, self.job.prompts))
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        cached_tokens = sum(request.num_cached or 0 for request in self.requests[:: self.job.n])
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
            "num_preemptions": sum(request.num_preemptions for request in self.requests),
        }

    def _head(self, kind: str) -> Json:
        return {
            "id": self.job.id,
            "object": kind,
            "created": self.created,
            "model": self.job.model,
            # An answer depends on these and nothing else of the server: see "Determinism" in the docs.
            "system_fingerprint": self.loaded.fingerprint,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._head("chat.completion.chunk" if self.is_chat else "text_completion")
        chunk["choices"] = choices
        if self.job.include_usage:
            chunk["usage"] = None
        if self.job.warnings and not self.has_warned:
            chunk["warnings"] = list(self.job.warnings)
            self.has_warned = True
        return chunk

    def _piece_choice(self, index: int, piece: Piece) -> Json:
        if self.is_chat:
            return _chat_choice(index, {"content": piece.text}, piece.logprobs)
        return {"index": index, "text": piece.text, "logprobs": piece.logprobs, "finish_reason": None}

    def _last_choice(self, index: int, reason: FinishReason) -> Json:
        if self.is_chat:
            return {**_chat_choice(index, {}), "finish_reason": str(reason)}
        return {"index": index, "text": "", "logprobs": None, "finish_reason": str(reason)}

    def _whole_choice(self, delta: Delta) -> Json:
        piece = self.choices[delta.index].piece(delta) or Piece("", None)
        choice: Json = {"index": delta.index, "logprobs": piece.logprobs, "finish_reason": str(delta.finish_reason)}
        if self.is_chat:
            return {**choice, "message": {"role": "assistant", "content": piece.text, "refusal": None}}
        if isinstance(self.job.body, CompletionRequest) and self.job.body.prompt_logprobs is not None:
            request = self.requests[delta.index]
            choice["prompt_logprobs"] = prompt_logprobs(self.loaded.tokenizer, _of_prompt(request))
        return {**choice, "text": piece.text}


def _chat_choice(index: int, delta: Json, logprobs: Json | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
