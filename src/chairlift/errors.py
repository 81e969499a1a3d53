"""Every error that a user can meet, each with a machine code, an HTTP status and a way out.

ChairliftError
├── ConfigError             a flag, variable or file that cannot be honoured
├── ModelError              a model that cannot be found, read or served
│   └── ModelFileError      one place in one file is wrong
├── DoesNotFit              the machine is too small for what was asked
├── RequestError            400: the client can mend it
│   ├── ContextLengthExceeded
│   ├── ModelNotFound       404
│   └── Unauthorized        401
├── Unavailable             503: ask again later
│   ├── Busy
│   │   ├── QueueFull
│   │   └── QueueWait
│   └── Draining
└── EngineError             500: ours
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

MAX_RETRY_AFTER_S = 60
"""Nobody is told to stay away for longer: much may change in a minute."""


class ChairliftError(Exception):
    """Base of all errors; `str(error)` is one line that a person can act on."""

    code = "internal_error"
    http_status = 500

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigError(ChairliftError):
    """A setting that cannot be honoured; the message names the setting and its limits."""

    code = "invalid_config"


class ModelError(ChairliftError):
    """A model that cannot be found, read or served."""

    code = "model_error"


class ModelFileError(ModelError):
    """A model file that is truncated, hostile or foreign: what is wrong, and where in the file."""

    code = "model_file_error"

    def __init__(self, path: str, what: str, *, offset: int | None = None, hint: str = "") -> None:
        where = "" if offset is None else f" at byte {offset}"
        super().__init__(f"{path}: {what}{where}", hint=hint)


class DoesNotFit(ChairliftError):
    """The machine cannot carry what was asked; the message says needed, available and which flag."""

    code = "does_not_fit"


class RequestError(ChairliftError):
    """A request the client can mend. `param` names the field as the client wrote it."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class ContextLengthExceeded(RequestError):
    """A prompt that can never fit, with both numbers.

    Client libraries know this error by the words "prompt is too long", whatever its code.
    """

    code = "context_length_exceeded"

    def __init__(self, num_prompt_tokens: int, limit: int, *, what: str = "the context length") -> None:
        super().__init__(
            f"the prompt is too long: it has {num_prompt_tokens} tokens, {what} is {limit},"
            " and one token must be left for the answer",
            param="prompt",
            hint="shorten the prompt, or start the server with a larger --max-model-len",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.limit = limit


class ModelNotFound(RequestError):
    """A model name that this server does not serve; lists the names it does."""

    code = "model_not_found"
    http_status = 404

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__(f"model {name!r} is not served here; this server has: {', '.join(served)}", param="model")


class Unauthorized(RequestError):
    """No key, or a wrong one."""

    code = "invalid_api_key"
    http_status = 401


class Unavailable(ChairliftError):
    """The server is well but cannot take this now. `retry_after_s` is at least 1."""

    code = "unavailable"
    http_status = 503

    def __init__(self, message: str, *, retry_after_s: int = 1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = max(1, retry_after_s)


class Busy(Unavailable):
    """Too many others are being served: how many, and how long one more would have to wait, as far as is known."""

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
    """More requests wait than `max_queue` allows."""

    code = "queue_full"


class QueueWait(Busy):
    """It has waited for a slot for longer than `max_queue_wait` allows."""

    code = "queue_wait"


class Draining(Unavailable):
    """The server is shutting down and finishes what it has begun."""

    code = "draining"


class EngineError(ChairliftError):
    """A step failed; nothing the client did."""

    code = "engine_error"
