"""The types of all response bodies. The code that answers builds these, and /openapi.json is made of them.

They are TypedDicts: a response is a plain dict, quick to build once per token, whose keys mypy checks. A `NotRequired`
key may be absent. An answer has the keys below and no others; those of an `_Open` type may get further keys in later
versions, and their readers must expect that.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Generic, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, Field, with_config
from starlette.responses import Response
from typing_extensions import TypedDict

from chairlift.engine.engine import State

BodyT = TypeVar("BodyT")

Finish = Literal["stop", "length"]


def encode(value: object) -> bytes:
    """JSON in ASCII without spaces; a NaN is a bug and raises ValueError."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


class TypedResponse(Response, Generic[BodyT]):
    """A whole response, whose body is of type `BodyT`."""


class JsonResponse(TypedResponse[BodyT]):
    """A whole response in JSON."""

    media_type = "application/json"

    def __init__(self, content: BodyT, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(encode(content), status_code, headers)


@with_config(ConfigDict(extra="forbid", strict=True))
class _Closed(TypedDict):
    pass


@with_config(ConfigDict(extra="allow", strict=True))
class _Open(TypedDict):
    pass


# -- answers ----------------------------------------------------------------------------------------------------------


class CachedTokens(_Closed):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class Usage(_Closed):
    """Token counts. A prompt counts once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    num_preemptions: int


class Timestamps(_Closed):
    """When the event was handed to the socket, and when its newest token left the engine: seconds since 1970."""

    sent_s: float
    token_s: float | None


class _Answer(_Closed):
    id: str
    created: int
    model: str
    system_fingerprint: str
    warnings: NotRequired[Annotated[list[str], Field(description="what the server ignored in the request")]]


class _Chunk(_Answer):
    usage: NotRequired[Usage | None]
    timestamps: NotRequired[Timestamps]


class TopLogprob(_Closed):
    """A token, its natural-log probability and its raw bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The token that was chosen, and the likeliest ones in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Closed):
    """One entry per token of the answer."""

    content: list[ChatLogprob]
    refusal: None


class RankedToken(_Closed):
    """One of a prompt's tokens, or one that was likely in its place."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, RankedToken] | None]


class ChatMessage(_Closed):
    """The answer of a chat."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Closed):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(_Answer):
    """The answer to a chat in one piece."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


class ChatDelta(_Closed):
    """What a chunk adds: first the role, then text, at the end nothing."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChunkChoice(_Closed):
    """What a chunk says of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(_Chunk):
    """One event of a chat's stream."""

    object: Literal["chat.completion.chunk"]
    choices: Annotated[list[ChatChunkChoice], Field(max_length=1)]


class TextLogprobs(_Closed):
    """Four lists with one entry per token. `text_offset` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(_Closed):
    """One of `n` texts for one of the prompts."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish
    prompt_logprobs: NotRequired[PromptLogprobs]


class TextCompletion(_Answer):
    """The answer to a text in one piece."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(_Closed):
    """What a chunk says of one choice."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextChunk(_Chunk):
    """One event of a text's stream."""

    object: Literal["text_completion"]
    choices: Annotated[list[TextChunkChoice], Field(max_length=1)]


# -- errors -----------------------------------------------------------------------------------------------------------


class ErrorDetail(_Open):
    """What went wrong."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str
    num_prompt_tokens: NotRequired[int]
    limit: NotRequired[int]
    waiting: NotRequired[int]
    running: NotRequired[int]
    expected_wait_s: NotRequired[float]
    retry_after_s: NotRequired[int]


class ErrorBody(_Closed):
    """The body of every error."""

    error: ErrorDetail


class ErrorEvent(ErrorBody):
    """The last event of a stream that failed."""

    timestamps: NotRequired[Timestamps]


# -- what the server says of itself -----------------------------------------------------------------------------------


class ModelEntry(_Closed):
    """One name that requests may ask for."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    chairlift: Annotated[dict[str, Any], Field(description="what the start card says")]


class ModelList(_Closed):
    """Every name that requests may ask for."""

    object: Literal["list"]
    data: list[ModelEntry]


class Waiting(_Open):
    """One waiting request. Its id is null where it belongs to another API key."""

    position: int
    waited_s: float
    expected_wait_s: float
    id: str | None


class Queue(_Open):
    """The queue: how many requests wait and run, and each that waits."""

    object: Literal["queue"]
    max_queue: int
    max_queue_wait_s: float | None
    max_num_seqs: int
    num_waiting: int
    num_running: int
    num_preempted: int
    expected_wait_s: float
    waiting: list[Waiting]


class Health(_Open):
    """Readiness, and the engine's numbers once a model is loaded."""

    status: State
    uptime_s: float
    model: NotRequired[str]
    num_running: NotRequired[int]
    num_waiting: NotRequired[int]
    max_num_seqs: NotRequired[int]
    max_queue: NotRequired[int]
    kv_used: NotRequired[float]
    kv_full_conversations: NotRequired[float]
    num_steps: NotRequired[int]
    num_preemptions: NotRequired[int]
    last_step_age_s: NotRequired[float | None]
    notes: NotRequired[list[str]]


class Liveness(_Closed):
    """Whether a restart would help: it would when `status` is "dead"."""

    status: State


class Version(_Closed):
    """This server's version."""

    version: str


class Root(_Closed):
    """The paths that this server serves."""

    server: Literal["chairlift"]
    version: str
    paths: list[str]
