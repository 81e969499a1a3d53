"""What a sampled token does to its request: output, text, and whether the request ends with it.

Owns the rules by which a request ends by itself, and the fields of a request that hold its output. Knows neither blocks
nor queues.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.engine.request import FinishReason, Output, Request
from chairlift.engine.sampling_params import TokenLogprob
from chairlift.engine.step import Sampled
from chairlift.errors import ChairliftError, EngineError


def append_token(request: Request, sampled: Sampled | None, max_num_tokens: int) -> Output | None:
    """Appends the token that was sampled for `request`. Returns what may be sent, None when nothing may.

    `max_num_tokens` bounds prompt and output together. A request ends with an EngineError when its logits were not
    finite, or when its own detokenizer or stop strings fail: other requests have no part in that.
    """
    if sampled is None or not sampled.ok:
        return finish(request, FinishReason.ERROR, EngineError(f"request {request.id}: its logits were not finite"))
    if request.params.max_tokens == 0:  # only the prompt was to be scored
        return finish(request, FinishReason.LENGTH)
    request.output.append(sampled.token)
    if sampled.logprob is not None:
        request.logprobs.append(sampled.logprob)
    try:
        text, reason = _decode(request, sampled.token, max_num_tokens)
    except Exception as error:
        failure = EngineError(f"request {request.id}: its text failed: {type(error).__name__}: {error}")
        return finish(request, FinishReason.ERROR, failure)
    logprobs = () if sampled.logprob is None else (sampled.logprob,)
    request.finish_reason = reason
    if not (text or logprobs or reason):
        return None
    return Output(request, text, len(request.output), logprobs, reason)


def finish(request: Request, reason: FinishReason, error: ChairliftError | None = None) -> Output:
    """Ends a request for a reason outside of its text. Text that was held back is not sent."""
    request.finish_reason = reason
    request.error = error
    return Output(request, "", len(request.output), finish_reason=reason, error=error)


def append_prompt_logprobs(request: Request, stop: int, entries: Sequence[TokenLogprob]) -> None:
    """Appends the new entries of a prompt that is scored and computed up to position `stop`.

    The last of `entries` belongs to token `stop`, or to the prompt's last token. The first token's entry is None,
    since nothing comes before it. Entries known from before a preemption are kept.
    """
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    num_new = min(stop + 1, request.num_prompt) - len(request.prompt_logprobs)
    if num_new > 0:
        request.prompt_logprobs.extend(entries[-num_new:])


def _decode(request: Request, token: int, max_num_tokens: int) -> tuple[str, FinishReason | None]:
    """The text that the newest token completes, and the reason when the request ends with it."""
    if _is_end_token(request, token):
        return _flush(request), FinishReason.STOP
    text = _before_stops(request, request.detok.push(token))
    if request.stops.matched is not None:
        return text, FinishReason.STOP
    if len(request.output) != request.params.max_tokens and request.num_tokens < max_num_tokens:
        return text, None
    text += _flush(request)
    return text, FinishReason.LENGTH if request.stops.matched is None else FinishReason.STOP


def _is_end_token(request: Request, token: int) -> bool:
    """Whether the newest token ends the request and gives no text. The first `min_tokens` tokens never do."""
    if len(request.output) <= request.params.min_tokens:
        return False
    is_eos = token in request.eos_ids and not request.params.ignore_eos
    return is_eos or token in request.params.stop_token_ids


def _before_stops(request: Request, text: str) -> str:
    """The part of `text` that may be sent. Before `min_tokens`, a stop string is text like any other."""
    return request.stops.push(text) if len(request.output) >= request.params.min_tokens else text


def _flush(request: Request) -> str:
    """All text that is held back, the bytes of an unfinished character first."""
    text = _before_stops(request, request.detok.flush())
    return text + request.stops.flush()
