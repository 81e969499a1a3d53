"""What a sampled token does to its request: output, text, and whether it was the last one.

Owns the rules by which a request ends by itself; knows neither blocks nor queues.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.engine.request import FinishReason, Output, Request, TokenLogprob
from chairlift.engine.step import Sampled
from chairlift.errors import ChairliftError, EngineError


def accept(request: Request, sampled: Sampled | None, max_tokens_in_all: int) -> Output | None:
    """Appends the token that was sampled for `request` and tells what may be sent, if anything.

    A request whose logits were not finite, or whose own detokenizer or stops fail, ends with an EngineError: its
    neighbours have no part in that. `max_tokens_in_all` bounds prompt and output together.
    """
    if sampled is None or not sampled.ok:
        return finish(request, FinishReason.ERROR, EngineError(f"request {request.id}: its logits were not finite"))
    if request.params.max_tokens == 0:  # only the prompt was to be scored
        return finish(request, FinishReason.LENGTH)
    request.output.append(sampled.token)
    if sampled.logprob is not None:
        request.logprobs.append(sampled.logprob)
    try:
        text, reason = _take_in(request, sampled.token, max_tokens_in_all)
    except Exception as error:
        failure = EngineError(f"request {request.id}: its text failed: {type(error).__name__}: {error}")
        return finish(request, FinishReason.ERROR, failure)
    logprobs = () if sampled.logprob is None else (sampled.logprob,)
    request.finish_reason = reason
    if not (text or logprobs or reason):
        return None
    return Output(request, text, len(request.output), logprobs, reason)


def finish(request: Request, reason: FinishReason, error: ChairliftError | None = None) -> Output:
    """Ends a request from outside: what it held back is not sent."""
    request.finish_reason = reason
    request.error = error
    return Output(request, "", len(request.output), finish_reason=reason, error=error)


def accept_prompt_logprobs(request: Request, stop: int, entries: Sequence[TokenLogprob]) -> None:
    """Adds the newest entries of a scored prompt, computed up to position `stop`: up to the one of token `stop`.

    The first prompt token has none, since nothing comes before it. Those known from before a preemption are kept.
    """
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    num_new = min(stop + 1, request.num_prompt) - len(request.prompt_logprobs)
    if num_new > 0:
        request.prompt_logprobs.extend(entries[-num_new:])


def _take_in(request: Request, token: int, max_tokens_in_all: int) -> tuple[str, FinishReason | None]:
    """The text that the newest token sets free, and why it is the last one if it is."""
    if _is_terminal(request, token):
        return _flush(request), FinishReason.STOP
    text = _past_stops(request, request.detok.push(token))
    if request.stops.matched is not None:
        return text, FinishReason.STOP
    if len(request.output) != request.params.max_tokens and request.num_tokens < max_tokens_in_all:
        return text, None
    text += _flush(request)
    return text, FinishReason.LENGTH if request.stops.matched is None else FinishReason.STOP


def _is_terminal(request: Request, token: int) -> bool:
    """Whether the newest token ends the request and gives no text: only after `min_tokens` that do."""
    if len(request.output) <= request.params.min_tokens:
        return False
    is_eos = token in request.eos_ids and not request.params.ignore_eos
    return is_eos or token in request.params.stop_token_ids


def _past_stops(request: Request, text: str) -> str:
    """What may be sent of `text`; before `min_tokens` a stop string is text like any other."""
    return request.stops.push(text) if len(request.output) >= request.params.min_tokens else text


def _flush(request: Request) -> str:
    """All that is held back, the bytes of an unfinished character first."""
    text = _past_stops(request, request.detok.flush())
    return text + request.stops.flush()
