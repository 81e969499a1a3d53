"""The two request bodies, field by field: type, limits, and how the server handles the field.

The models below give each field one of four handlings:

    honoured       the field does what OpenAI's (or vLLM's) documentation says, within the limits written beside it
    neutral only   the field is not supported: values that change nothing pass, any other is a 400 that names the field
    refused        the field is not supported, and any value but null is a 400 that names it
    no effect      the field is a label for the client's own use, and no answer depends on it

Other fields are unknown: the response's `warnings` name them, and --strict refuses them. The limits of a field are one
phrase, of which docs/api-fields.md, the OpenAPI document and the error message ("`temperature` must be ...") are made.
This module knows neither the model nor the engine: prepare.py checks what depends on them (token ids, slots).
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from chairlift.errors import RequestError
from chairlift.kernels.ops import MAX_TOP
from chairlift.server.http_errors import UnknownParameter, UnsupportedParameter
from chairlift.text import one_line

MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 256
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAX_PROMPTS = 1024
"""Most prompts in one request. Bounds the time that parsing them takes, however many the server could hold."""
MAX_NAMED = 32
"""Most unknown fields that warnings name."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for /v1/completions. A chat has no default and may use all the room left."""

# fail_fast stops at the first wrong item: a million of them must not make a million errors.
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
Strings = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
ListsOfTokenIds = Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
# chat.py checks the messages, since it can say which one is wrong. This schema is for OpenAPI.
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": _TEXT_PART}]},
    },
}
Messages = Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]], Field(min_length=1, fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100)]

Handling = Literal["honoured", "neutral only", "refused", "no effect"]


def honoured(limits: str, default: Any = None, **constraints: Any) -> Any:
    """A field with the handling "honoured". `limits` completes the sentence "must be ..."."""
    return Field(default, description=limits, json_schema_extra={"x-handling": "honoured"}, **constraints)


def neutral(*values: Any) -> Any:
    """A field that may hold only null and these values, since the server would have to ignore any other."""
    accepted = [None, *values]
    handling = "neutral only" if values else "refused"
    return Field(None, description=_listed(accepted), json_schema_extra={"x-handling": handling, "enum": accepted})


def no_effect() -> Any:
    """A field that may hold anything, since no answer depends on it."""
    return Field(None, description="anything", json_schema_extra={"x-handling": "no effect"})


def _few(value: Any) -> Any:
    """Refuses a too large object before its values are checked and each makes an error of its own."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise ValueError
    return value


def _listed(values: list[Any]) -> str:
    words = {None: "null", True: "true", False: "false"}
    shown = [
        words[v] if v is None or isinstance(v, bool) else str(v).replace("'", '"') if v != "" else '""' for v in values
    ]
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " or " + shown[-1]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(_Body):
    """`stream_options`: how a stream is sent."""

    include_usage: bool | None = honoured("true or false: a last chunk with the token counts", False)
    include_timestamps: bool | None = honoured("true or false: each event says when it was sent (ours alone)", False)
    include_obfuscation: Any = neutral(False)
    continuous_usage_stats: Any = neutral(False)


class _Common(_Body):
    """The fields of both of OpenAI's endpoints."""

    model: str | None = honoured("the name of a served model, a string; without it the server's first")
    stream: bool | None = honoured("true or false", False)
    stream_options: StreamOptions | None = honoured("an object, together with `stream: true`")
    n: int | None = honoured("a whole number from 1 to the server's slots", 1, ge=1)
    stop: Stop | Stops | None = honoured(
        f"a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"
    )
    seed: int | None = honoured("a whole number that fits 64 bits; without it a fresh one", ge=-(2**63), lt=2**64)
    temperature: float | None = honoured(
        "a number from 0 to 2; below 0.00001 counts as 0, which takes the likeliest", 1.0, ge=0, le=2
    )
    top_p: float | None = honoured("a number from 0 to 1", 1.0, ge=0, le=1)
    presence_penalty: float | None = honoured("a number from -2 to 2", 0.0, ge=-2, le=2)
    frequency_penalty: float | None = honoured("a number from -2 to 2", 0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Bias], BeforeValidator(_few), Field(max_length=MAX_LOGIT_BIAS)] | None = honoured(
        f"an object of at most {MAX_LOGIT_BIAS} token ids (as strings), each with a number from -100 to 100"
    )
    response_format: Any = neutral({"type": "text"})
    service_tier: Any = neutral("auto", "default")
    user: Any = no_effect()
    metadata: Any = no_effect()
    safety_identifier: Any = no_effect()
    prompt_cache_key: Any = no_effect()


class _Extensions(_Body):
    """The fields that vLLM adds to both endpoints."""

    top_k: int | None = honoured("a whole number from 1; 0 or -1 is off", 0, ge=-1, lt=2**31)
    min_p: float | None = honoured("a number from 0 to 1", 0.0, ge=0, le=1)
    repetition_penalty: float | None = honoured("a number from 0.01 to 100; 1 is off", 1.0, ge=0.01, le=100)
    ignore_eos: bool | None = honoured("true or false", False)
    min_tokens: int | None = honoured("a whole number from 0 to `max_tokens`", 0, ge=0, lt=2**31)
    stop_token_ids: StopTokenIds | None = honoured(f"a list of at most {MAX_STOP_TOKEN_IDS} token ids")
    prompt_logprobs: int | None = honoured(f"a whole number from 0 to {MAX_TOP}, without `stream`", ge=0, le=MAX_TOP)
    cache_salt: str | None = honoured("a string of 1 to 256 characters", min_length=1, max_length=256)
    priority: Any = neutral(0)
    request_id: Any = no_effect()
    session_id: Any = no_effect()
    use_beam_search: Any = neutral(False)
    length_penalty: Any = neutral(1)
    early_stopping: Any = neutral(False)
    skip_special_tokens: Any = neutral(True)
    spaces_between_special_tokens: Any = neutral(True)
    include_stop_str_in_output: Any = neutral(False)
    truncate_prompt_tokens: Any = neutral()
    truncation_side: Any = neutral("left", "right")
    allowed_token_ids: Any = neutral()
    bad_words: Any = neutral([])
    logits_processors: Any = neutral([])
    logprob_token_ids: Any = neutral()
    thinking_token_budget: Any = neutral(-1)
    repetition_detection: Any = neutral()
    watermarking: Any = neutral(False)
    structured_outputs: Any = neutral()
    guided_json: Any = neutral()
    guided_regex: Any = neutral()
    guided_choice: Any = neutral()
    guided_grammar: Any = neutral()
    guided_decoding_backend: Any = neutral()
    guided_whitespace_pattern: Any = neutral()
    return_tokens_as_token_ids: Any = neutral(False)
    return_token_ids: Any = neutral(False)
    return_token_offsets: Any = neutral(False)
    return_mm_kwargs: Any = neutral(True)
    routed_experts_prompt_start: Any = neutral(0)
    stream_interval: Any = neutral(1)
    kv_transfer_params: Any = neutral()
    ec_transfer_params: Any = neutral()
    vllm_xargs: Any = neutral({})


class _ChatExtensions(_Extensions):
    """The fields that vLLM adds to chats."""

    add_generation_prompt: bool | None = honoured("true or false", True)
    chat_template_kwargs: dict[str, Any] | None = honoured("an object of further variables for the chat template")
    chat_template: Any = neutral()
    continue_final_message: Any = neutral(False)
    add_special_tokens: Any = neutral(False)
    echo: Any = neutral(False)
    documents: Any = neutral([])
    include_reasoning: Any = neutral(True, False)
    return_prompt_text: Any = neutral(False)
    media_io_kwargs: Any = neutral({})
    mm_processor_kwargs: Any = neutral({})


class ChatRequest(_ChatExtensions, _Common):
    """POST /v1/chat/completions."""

    messages: Messages = honoured("a list of at least one message object", ...)
    max_tokens: int | None = honoured("a whole number from 1; more than there is room for means all the room", ge=1)
    max_completion_tokens: int | None = honoured(
        "a whole number from 1; the newer name of `max_tokens`, and the smaller of the two counts", ge=1
    )
    logprobs: bool | None = honoured("true or false", False)
    top_logprobs: int | None = honoured(
        f"a whole number from 0 to {MAX_TOP}, together with `logprobs: true`", 0, ge=0, le=MAX_TOP
    )
    tools: Any = neutral([])
    tool_choice: Any = neutral("none", "auto")
    parallel_tool_calls: Any = neutral(True, False)
    functions: Any = neutral([])
    function_call: Any = neutral("none", "auto")
    modalities: Any = neutral(["text"])
    audio: Any = neutral()
    prediction: Any = neutral()
    reasoning_effort: Any = neutral("none")
    verbosity: Any = neutral("medium")
    web_search_options: Any = neutral()
    moderation: Any = neutral()
    store: Any = neutral(False)
    prompt_cache_retention: Any = neutral("in_memory", "in-memory")
    prompt_cache_options: Any = neutral({}, {"mode": "implicit"})

    @property
    def wanted_tokens(self) -> int | None:
        """The smaller of the two fields that limit the answer; None without a limit."""
        return min((n for n in (self.max_tokens, self.max_completion_tokens) if n is not None), default=None)

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per output token; None without logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class _CompletionExtensions(_Extensions):
    """The fields that vLLM adds to texts."""

    add_special_tokens: bool | None = honoured("true or false: whether text gets the model's first token", True)
    prompt_embeds: Any = neutral()


class CompletionRequest(_CompletionExtensions, _Common):
    """POST /v1/completions."""

    prompt: str | Strings | TokenIds | ListsOfTokenIds = honoured(
        f"a string, a list of token ids, or a list of at most {MAX_PROMPTS} of either; no list may be empty", ...
    )
    max_tokens: int | None = honoured(
        f"a whole number from 1, or 0 with `echo`; without it {DEFAULT_COMPLETION_TOKENS}",
        DEFAULT_COMPLETION_TOKENS,
        ge=0,
    )
    logprobs: int | None = honoured(f"a whole number from 0 to {MAX_TOP}", ge=0, le=MAX_TOP)
    echo: bool | None = honoured("true or false", False)
    best_of: Any = neutral(1)
    suffix: Any = neutral("")

    @property
    def wanted_tokens(self) -> int | None:
        """`max_tokens`, or its default."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per output token; None without logprobs."""
        return self.logprobs


B = TypeVar("B", bound=_Body)
AnyRequest = ChatRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field's row in the documentation."""

    name: str
    limits: str
    handling: Handling
    default: Any


def field_table(model: type[BaseModel]) -> list[FieldRow]:
    """A row for every field of a body, in order."""
    rows = []
    for name, info in model.model_fields.items():
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        handling: Any = extra["x-handling"]
        rows.append(FieldRow(name, info.description or "", handling, None if info.is_required() else info.default))
    return rows


def parse(model: type[B], data: object, *, strict: bool) -> tuple[B, list[str]]:
    """The request and the warnings about it. A RequestError names the field and its limits, never the value."""
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object")
    unknown = _check_neutral(model, data, "")
    options = data.get("stream_options")
    if isinstance(options, dict):
        unknown += _check_neutral(StreamOptions, options, "stream_options.")
    if unknown and strict:
        raise UnknownParameter(unknown[0])
    try:
        request = model.model_validate(data)
    except ValidationError as error:
        raise _explain(model, error) from None
    if isinstance(request, ChatRequest | CompletionRequest):
        _check_together(request)
    return request, warn(unknown, "unknown field `{}` was ignored")


def warn(names: list[str], wording: str) -> list[str]:
    """A warning for each name, and one that counts those beyond MAX_NAMED."""
    warnings = [wording.format(one_line(name)) for name in names[:MAX_NAMED]]
    num_more = len(names) - MAX_NAMED
    return [*warnings, f"{num_more} further fields were ignored"] if num_more > 0 else warnings


def _check_neutral(model: type[BaseModel], data: dict[str, Any], prefix: str) -> list[str]:
    """The unknown names. Raises UnsupportedParameter for a known field whose value is not neutral."""
    unknown = []
    for name, value in data.items():
        info = model.model_fields.get(name)
        if info is None:
            unknown.append(prefix + name)
        elif isinstance(info.json_schema_extra, dict) and "enum" in info.json_schema_extra:
            accepted: Any = info.json_schema_extra["enum"]
            if not any(_same(value, neutral_value) for neutral_value in accepted):
                raise UnsupportedParameter(prefix + name, info.description or "")
    return unknown


def _same(value: Any, neutral_value: Any) -> bool:
    """Equality of JSON values: true is not 1."""
    return isinstance(value, bool) == isinstance(neutral_value, bool) and bool(value == neutral_value)


def _explain(model: type[BaseModel], error: ValidationError) -> RequestError:
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    name = str(first["loc"][0])
    info = model.model_fields[name]
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return RequestError(f"`{name}` is required: it must be {info.description}", param=name)
    if name == "stream_options" and len(first["loc"]) > 1:
        inner = str(first["loc"][1])
        name, info = f"{name}.{inner}", StreamOptions.model_fields[inner]
    return RequestError(f"`{name}` must be {info.description}", param=name)


def _check_together(request: AnyRequest) -> None:
    """Checks what depends on two fields."""
    wanted = request.wanted_tokens
    if isinstance(request, CompletionRequest) and wanted == 0 and not request.echo:
        raise refuse(request, "max_tokens")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise refuse(request, "top_logprobs")
    if request.stream_options is not None and not request.stream:
        raise refuse(request, "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise refuse(request, "prompt_logprobs")
    if wanted is not None and (request.min_tokens or 0) > wanted:
        raise refuse(request, "min_tokens")


def stop_strings(request: AnyRequest) -> tuple[str, ...]:
    """The stop strings, from either way to write `stop`."""
    if isinstance(request.stop, str):
        return (request.stop,)
    return tuple(request.stop or ())


def refuse(request: AnyRequest, name: str) -> RequestError:
    """The error that names a field and its limits."""
    return RequestError(f"`{name}` must be {type(request).model_fields[name].description}", param=name)


# -- the docs ---------------------------------------------------------------------------------------------------------

_DOCS_HEAD = """# Fields of a request

Made from `src/chairlift/server/schema.py` by `python -m chairlift.server.schema > docs/api-fields.md`; a test keeps it
true. [The API](api.md) says what surrounds them.

Every field may be null, which means its default; `messages` and `prompt` are required. A value beyond its limits is a
400 that names the field. The server handles a field in one of four ways:

- **honoured**: the field does what OpenAI's (or vLLM's) documentation says, within these limits.
- **neutral only**: the field is not supported. Clients often send these values, which change nothing. Others are a 400.
- **refused**: the field is not supported; anything but null is a 400.
- **no effect**: the field is a label for the client's own use.

The server ignores a field that is on none of these lists and names it in the answer's `warnings`. With `--strict` it is
a 400.
"""

_SECTIONS: tuple[tuple[str, type[BaseModel]], ...] = (
    ("Both endpoints", _Common),
    ("Inside `stream_options`", StreamOptions),
    ("`/v1/chat/completions`", ChatRequest),
    ("`/v1/completions`", CompletionRequest),
    ("vLLM's extensions", _Extensions),
    ("vLLM's extensions, chats only", _ChatExtensions),
    ("vLLM's extensions, texts only", _CompletionExtensions),
)


def markdown() -> str:
    """docs/api-fields.md, from the models."""
    lines = [_DOCS_HEAD.rstrip("\n")]
    for title, model in _SECTIONS:
        lines += ["", f"## {title}", "", "| field | may be | default | |", "|---|---|---|---|"]
        own = inspect.get_annotations(model)
        for row in field_table(model):
            if row.name in own:
                default = "" if row.default is None else f"`{json.dumps(row.default)}`"
                lines.append(f"| `{row.name}` | {row.limits} | {default} | {row.handling} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
