"""The shapes of all responses, as models: what /openapi.json says of them, and what tests hold every answer against.

Nothing is made from these when a request is answered: answer.py writes plain dictionaries. A field with a default may
be absent. Where operators read (health, the line, the card), more fields than these may come; an answer has these and
no others.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Finish = Literal["stop", "length"]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _OpenShape(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


# -- answers ----------------------------------------------------------------------------------------------------------


class CachedTokens(_Shape):
    """Prompt tokens that were not computed again."""

    cached_tokens: int


class Usage(_Shape):
    """Token counts. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    num_preemptions: int


class Timestamps(_Shape):
    """When an event was handed to the socket, and when its newest token left the engine: seconds since 1970."""

    sent_s: float
    token_s: float | None


class _Head(_Shape):
    id: str
    created: int
    model: str
    system_fingerprint: str
    warnings: list[str] = Field(default=[], description="what of the request was ignored")


class Likely(_Shape):
    """A token, its natural-log probability and its raw bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Likely):
    """The token that was chosen, and the likeliest ones in its place."""

    top_logprobs: list[Likely]


class ChatLogprobs(_Shape):
    """One entry per token of the answer."""

    content: list[ChatLogprob]
    refusal: None


class Ranked(_Shape):
    """One of a prompt's tokens, or one that was likely in its place."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, Ranked] | None]


class ChatMessage(_Shape):
    """The answer of a chat."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Shape):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(_Head):
    """The answer to a chat in one piece."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = []


class ChatDelta(_Shape):
    """What a chunk adds: first the role, then text, at the end nothing."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(_Shape):
    """What a chunk says of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class _Chunk(_Head):
    usage: Usage | None = None
    timestamps: Timestamps | None = None


class ChatChunk(_Chunk):
    """One event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice] = Field(max_length=1)


class TextLogprobs(_Shape):
    """Four lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Shape):
    """One of `n` texts for one of the prompts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish
    prompt_logprobs: PromptLogprobs = []


class TextCompletion(_Head):
    """The answer to a text in one piece."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(_Shape):
    """What a chunk says of one choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextChunk(_Chunk):
    """One event of a text's stream."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice] = Field(max_length=1)


# -- errors -----------------------------------------------------------------------------------------------------------


class ErrorDetail(_OpenShape):
    """What went wrong; some errors have numbers beside."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str


class ErrorBody(_Shape):
    """The body of every error."""

    error: ErrorDetail


class ErrorEvent(ErrorBody):
    """The last event of a stream that failed."""

    timestamps: Timestamps | None = None


# -- what the server says of itself -----------------------------------------------------------------------------------

State = Literal["loading", "ready", "stalled", "draining", "dead"]


class ModelEntry(_Shape):
    """One name that requests may ask for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    chairlift: dict[str, Any] = Field(description="what the start card says")


class ModelList(_Shape):
    """Every name."""

    object: Literal["list"]
    data: list[ModelEntry]


class Waiting(_OpenShape):
    """One that waits."""

    position: int
    waited_s: float
    expected_wait_s: float
    id: str | None


class Queue(_OpenShape):
    """The line."""

    object: Literal["queue"]
    num_waiting: int
    num_running: int
    expected_wait_s: float
    waiting: list[Waiting]


class Health(_OpenShape):
    """Readiness, and from loaded on the numbers."""

    status: State
    uptime_s: float


class Live(_Shape):
    """Liveness."""

    status: State


class Version(_Shape):
    """This server's version."""

    version: str


class Root(_Shape):
    """Where to go from here."""

    server: Literal["chairlift"]
    version: str
    paths: list[str]
