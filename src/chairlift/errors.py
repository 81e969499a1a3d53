"""Every error that a user can meet. Each has a machine-readable code, an HTTP status and a hint.

ChairliftError
├── ConfigError             a setting cannot be honoured
├── ModelError              a model cannot be found, read or served
│   └── ModelFileError      one place in a model file is wrong
├── DoesNotFit              the machine is too small for the settings
├── RequestError            400: the client can correct the request
│   ├── ContextLengthExceeded
│   ├── ModelNotFound       404
│   └── Unauthorized        401
├── Unavailable             503: the client can repeat the request later
│   ├── Busy
│   │   ├── QueueFull
│   │   └── QueueWait
│   └── Draining
└── EngineError             500: the server is at fault

`server/http_errors.py` adds the errors that only an HTTP server can have.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

MAX_RETRY_AFTER_S = 60
"""Longest `Retry-After`, since much may change in a minute."""


class ChairliftError(Exception):
    """Base of all errors. `str(error)` is one line: the message, and the hint in parentheses."""

    code = "internal_error"
    http_status = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(ChairliftError):
    """A setting cannot be honoured. The message names the setting and its limits."""

    code = "invalid_config"


class ModelError(ChairliftError):
    """A model cannot be found, read or served."""

    code = "model_error"


class ModelFileError(ModelError):
    """A model file is truncated, malformed or of another format. The message says what is wrong at which byte."""

    code = "model_file_error"

    def __init__(self, path: str, what: str, *, offset: int | None = None, hint: str = "") -> None:
        where = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{path}: {what}{where}", hint=hint)


class DoesNotFit(ChairliftError):
    """The machine is too small for the settings. The message says needed, available and which flag helps."""

    code = "does_not_fit"


class RequestError(ChairliftError):
    """The client can correct the request. `param` is the field's name as the client wrote it, None for no field."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthExceeded(RequestError):
    """The prompt can never fit. The error carries both numbers.

    Client libraries recognise this error by the words "prompt is too long", whatever its code.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        num_prompt_tokens: int,
        limit: int,
        *,
        what: str = "the context length",
        param: str = "prompt",
        is_estimate: bool = False,
    ) -> None:
        """`what` has `limit` tokens. An estimate of `num_prompt_tokens` is a lower bound."""
        has = "has at least" if is_estimate else "has"
        super().__init__(
            f"the prompt is too long: it {has} {num_prompt_tokens} tokens, {what} is {limit},"
            " and one token must be left for the answer",
            param=param,
            hint="shorten the prompt, or start the server with a larger --max-model-len",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.limit = limit


class ModelNotFound(RequestError):
    """The server does not serve a model of this name. The message lists the names that it serves."""

    code = "model_not_found"
    http_status = 404

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__(f"model {name!r} is not served here; this server has: {', '.join(served)}", param="model")


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"
    http_status = 401


class Unavailable(ChairliftError):
    """The server cannot take this request now. `retry_after_s` is at least 1."""

    code = "unavailable"
    http_status = 503

    def __init__(self, message: str, *, retry_after_s: int = 1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = max(1, retry_after_s)


class Busy(Unavailable):
    """Too many requests are at hand. `expected_wait_s` estimates how long one more would wait for a slot."""

    code = "busy"

    def __init__(self, what: str, *, num_waiting: int, num_running: int, expected_wait_s: float) -> None:
        retry_after_s = max(1, min(MAX_RETRY_AFTER_S, ceil(expected_wait_s)))
        super().__init__(
            f"{what}: {num_waiting} waiting, {num_running} running",
            retry_after_s=retry_after_s,
            hint=f"try again in about {retry_after_s} s",
        )
        self.num_waiting = num_waiting
        self.num_running = num_running
        self.expected_wait_s = expected_wait_s


class QueueFull(Busy):
    """`max_queue` requests wait already."""

    code = "queue_full"


class QueueWait(Busy):
    """The request has waited for a slot for longer than `max_queue_wait` allows."""

    code = "queue_wait"


class Draining(Unavailable):
    """The server shuts down: it finishes the requests that it has begun and takes no new ones."""

    code = "draining"


class EngineError(ChairliftError):
    """The engine failed, through no fault of the client."""

    code = "engine_error"
