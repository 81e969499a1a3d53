"""From a body to what the engine needs. Whatever can be refused is refused here, while a status code can still be sent.

Runs in a worker thread, since rendering and tokenising a long prompt may take a while and the event loop has others to
serve.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from chairlift.boot import Loaded
from chairlift.config import Config
from chairlift.engine.request import Request
from chairlift.engine.sampling_params import SamplingParams
from chairlift.errors import ContextLengthExceeded, ModelNotFound, RequestError
from chairlift.keys import prefix_salt
from chairlift.server.body import parse_json
from chairlift.server.chat import ignored, render
from chairlift.server.http_errors import UnknownParameter
from chairlift.server.schema import (
    AnyRequest,
    ChatRequest,
    CompletionRequest,
    parse,
    refuse,
    stop_strings,
    warn,
)
from chairlift.text import one_line

T = TypeVar("T")

GREEDY_BELOW = 1e-5
"""A temperature below this counts as 0: dividing logits by it would leave the range of float32."""

_SHRINK = 4
"""Unicode normalisation may compose characters. It makes one byte of at most three; four is on the safe side."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One HTTP request, checked and tokenised. It has `len(prompts) * n` choices, prompt by prompt."""

    body: AnyRequest
    id: str
    model: str  # as the client called it
    prompts: tuple[tuple[int, ...], ...]
    echoes: tuple[str, ...]  # the text of each prompt; empty unless the answer is to repeat it
    params: SamplingParams
    warnings: tuple[str, ...]
    asks_timestamps: bool = False  # by a header

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.body.n or 1

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        options = self.body.stream_options
        return options is not None and bool(options.include_usage)

    @property
    def include_timestamps(self) -> bool:
        """Whether each event of a stream says when it was sent."""
        options = self.body.stream_options
        return self.asks_timestamps or (options is not None and bool(options.include_timestamps))


class Preparer:
    """Prepares requests for one model. Keeps nothing of them: any number of threads may use it at once."""

    def __init__(self, loaded: Loaded, config: Config) -> None:
        self._loaded = loaded
        self._config = config
        self._max_token_bytes = max(map(len, loaded.tokenizer.vocab_bytes))
        self._secret = secrets.token_bytes(32)  # so that no client can make the salt of another key

    def chat(self, body: bytes, id: str) -> PreparedRequest:
        """From the body of /v1/chat/completions. Raises RequestError."""
        request, warnings = parse(ChatRequest, parse_json(body), strict=self._config.strict)
        model = self._model_name(request)
        text = render(request, self._loaded.template)
        warnings += self._ignored(request)
        prompt = self._encode(text, add_bos=True, param="messages")
        return self._prepared(request, f"chatcmpl-{id}", model, [prompt], warnings)

    def completion(self, body: bytes, id: str) -> PreparedRequest:
        """From the body of /v1/completions. Raises RequestError."""
        request, warnings = parse(CompletionRequest, parse_json(body), strict=self._config.strict)
        model = self._model_name(request)
        self._check_count(request, len(_several(request.prompt)))
        add_bos = request.add_special_tokens is not False
        prompts = [
            self._encode(prompt, add_bos=add_bos, param="prompt") if isinstance(prompt, str) else self._ids(prompt)
            for prompt in _several(request.prompt)
        ]
        return self._prepared(request, f"cmpl-{id}", model, prompts, warnings)

    def requests(self, prepared: PreparedRequest, *, key_name: str) -> list[Request]:
        """The engine's requests: one for each choice of each prompt. The choices of one prompt are a group."""
        made = []
        for i, prompt in enumerate(prepared.prompts):
            group = prepared.id if len(prepared.prompts) == 1 else f"{prepared.id}-{i}"
            for choice in range(prepared.n):
                params = _with_choice(prepared.params, choice, room=self._loaded.plan.max_model_len - len(prompt))
                made.append(
                    self._loaded.request(
                        f"{group}#{choice}",
                        prompt,
                        params,
                        stream=bool(prepared.body.stream),
                        group=group,
                        salt=self._salt(key_name, prepared.body.cache_salt or ""),
                        key_name=key_name,
                    )
                )
        return made

    def _salt(self, key_name: str, asked: str) -> str:
        """The prefix cache's salt. A client's own salt divides the prompts of its key."""
        return prefix_salt(self._secret, key_name, asked) if self._config.isolate_keys else asked

    def _prepared(
        self, body: AnyRequest, id: str, model: str, prompts: list[list[int]], warnings: list[str]
    ) -> PreparedRequest:
        self._check_count(body, len(prompts))
        param = "messages" if isinstance(body, ChatRequest) else "prompt"
        for prompt in prompts:
            self._check_length(body, len(prompt), param)
        echoes: tuple[str, ...] = ()
        if isinstance(body, CompletionRequest) and body.echo:
            given = _several(body.prompt)
            echoes = tuple(p if isinstance(p, str) else self._loaded.tokenizer.decode(p) for p in given)
        params = _sampling(body, self._loaded, self._config)
        return PreparedRequest(body, id, model, tuple(map(tuple, prompts)), echoes, params, tuple(warnings))

    def _ignored(self, request: ChatRequest) -> list[str]:
        """Warnings about fields that the template does not read; with --strict an error about the first."""
        names = [] if self._loaded.template is None else ignored(request, self._loaded.template)
        if names and self._config.strict:
            raise UnknownParameter(names[0])
        return warn(names, "`{}` was ignored: this model's chat template does not name it")

    def _model_name(self, body: AnyRequest) -> str:
        if body.model is None:
            return self._loaded.names[0]
        if body.model not in self._loaded.names:
            raise ModelNotFound(one_line(body.model), self._loaded.names)
        return body.model

    def _check_count(self, body: AnyRequest, num_prompts: int) -> None:
        slots, queue = self._loaded.plan.max_num_seqs, self._loaded.plan.max_queue
        n = body.n or 1
        if n > slots:
            raise RequestError(f"`n` must be at most {slots}, the slots of this server", param="n")
        if n * num_prompts > slots + queue:
            raise RequestError(
                f"{num_prompts} prompts with {n} choices each are more than this server can ever hold"
                f" ({slots} slots and {queue} waiting)",
                param="prompt",
            )

    def _check_length(self, body: AnyRequest, num_tokens: int, param: str) -> None:
        limit = self._loaded.plan.max_model_len
        if num_tokens == 0:
            raise RequestError(f"`{param}` holds no token", param=param)
        if num_tokens >= limit:
            raise ContextLengthExceeded(num_tokens, limit, param=param)
        if self._config.strict and (body.wanted_tokens or 0) > limit - num_tokens:
            raise RequestError(
                f"`max_tokens` must be at most {limit - num_tokens}: the prompt has {num_tokens} of {limit} tokens",
                param="max_tokens",
            )

    def _encode(self, text: str, *, add_bos: bool, param: str) -> list[int]:
        tokenizer, limit = self._loaded.tokenizer, self._loaded.plan.max_model_len
        least = len(text) // (self._max_token_bytes * _SHRINK)
        if least >= limit:
            raise ContextLengthExceeded(least, limit, param=param, is_estimate=True)
        return tokenizer.encode(text, add_bos=add_bos and tokenizer.add_bos, parse_special=True)

    def _ids(self, ids: list[int]) -> list[int]:
        vocab_size = self._loaded.tokenizer.vocab_size
        if not 0 <= min(ids) <= max(ids) < vocab_size:
            raise RequestError(f"`prompt` holds a token id outside 0 to {vocab_size - 1}", param="prompt")
        return ids


def _several(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Any]:
    """The prompts of a request, from any of the four ways to write them."""
    return prompt if isinstance(prompt, list) and isinstance(prompt[0], str | list) else [prompt]


def _with_choice(params: SamplingParams, choice: int, *, room: int) -> SamplingParams:
    """The parameters of one choice, with at most `room` tokens."""
    wanted = room if params.max_tokens is None else min(params.max_tokens, room)
    return replace(params, choice=choice, max_tokens=wanted, min_tokens=min(params.min_tokens, wanted))


def _chosen(body: AnyRequest, name: str, advised: T | None, default: T) -> T:
    """A field's value if the request has one, else what the model's makers advise, else the default."""
    asked: T | None = getattr(body, name) if name in body.model_fields_set else None
    return next((value for value in (asked, advised) if value is not None), default)


def _sampling(body: AnyRequest, loaded: Loaded, config: Config) -> SamplingParams:
    advised, tokenizer = loaded.generation, loaded.tokenizer
    temperature = _chosen(body, "temperature", advised.temperature, 1.0)
    echo = isinstance(body, CompletionRequest) and body.echo
    return SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(0, _chosen(body, "top_k", advised.top_k, 0)),
        top_p=_chosen(body, "top_p", advised.top_p, 1.0),
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_bias(body, tokenizer.vocab_size),
        seed=_seed(body, config),
        max_tokens=body.wanted_tokens,
        min_tokens=body.min_tokens or 0,
        stop=stop_strings(body),
        stop_token_ids=_stop_ids(body, tokenizer.vocab_size),
        ignore_eos=bool(body.ignore_eos),
        logprobs=body.num_logprobs,
        prompt_logprobs=_most(body.prompt_logprobs, body.num_logprobs if echo else None),
    )


def _most(a: int | None, b: int | None) -> int | None:
    return max((n for n in (a, b) if n is not None), default=None)


def _seed(body: AnyRequest, config: Config) -> int:
    """The request's seed, else the server's, else a fresh one; as unsigned 64 bits."""
    seed = config.seed if body.seed is None else body.seed
    return secrets.randbits(64) if seed is None else seed % 2**64


def _bias(body: AnyRequest, vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in (body.logit_bias or {}).items():
        # isdigit alone takes digits of other scripts; ten of them are enough for any vocabulary.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < vocab_size):
            raise RequestError(
                f"`logit_bias` must be keyed by token ids from 0 to {vocab_size - 1}, as strings", param="logit_bias"
            )
        bias[int(key)] = value
    return bias


def _stop_ids(body: AnyRequest, vocab_size: int) -> frozenset[int]:
    ids = frozenset(body.stop_token_ids or ())
    if not all(0 <= token < vocab_size for token in ids):
        raise refuse(body, "stop_token_ids")
    return ids
