"""How a request ends by itself: end tokens, stop strings, limits, and what of its text is sent."""

from __future__ import annotations

import pytest

from chairlift.engine.finish import append_prompt_logprobs, append_token
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.engine.sampling_params import TokenLogprob
from chairlift.engine.step import Sampled
from chairlift.errors import EngineError
from support.scheduler_sim import EOS, make_request

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def feed(request: Request, tokens: list[int], limit: int = 10**6) -> list[Output]:
    """The events that these sampled tokens make; the request must not end before the last of them."""
    outputs = []
    for token in tokens:
        assert not request.is_finished
        output = append_token(request, Sampled(token), limit)
        outputs += [output] if output else []
    return outputs


def told(outputs: list[Output]) -> tuple[str, FinishReason | None, int]:
    """Text, end and token count that a client sees."""
    return "".join(o.text for o in outputs), outputs[-1].finish_reason, outputs[-1].num_tokens


def test_the_end_token_gives_no_text_and_counts() -> None:
    """Guards against "</s>" in answers, and against usage that differs from what was sampled."""
    assert told(feed(make_request("r", b"p"), [*b"hello", EOS])) == ("hello", STOP, 6)


def test_a_stop_token_id_is_like_an_end_token() -> None:
    """Guards against `stop_token_ids` that are parsed and ignored, or sent as text."""
    request = make_request("r", b"p", stop_token_ids=frozenset(b"!"))
    assert told(feed(request, [*b"hi!"])) == ("hi", STOP, 3)


def test_ignore_eos_goes_on_and_still_obeys_stop_tokens() -> None:
    """Guards against benchmarks that end early, and against ignore_eos switching off what the client asked for."""
    request = make_request("r", b"p", ignore_eos=True, stop_token_ids=frozenset(b"!"))
    assert told(feed(request, [EOS, *b"a", EOS, *b"b!"])) == ("ab", STOP, 5)


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_is_exact(max_tokens: int) -> None:
    """Guards against one token more or less than asked."""
    request = make_request("r", b"p", max_tokens=max_tokens)
    assert told(feed(request, [*b"hello"][:max_tokens])) == ("hello"[:max_tokens], LENGTH, max_tokens)


def test_the_context_limit_ends_with_length() -> None:
    """Guards against endless generation: prompt and output together never pass the limit."""
    assert told(feed(make_request("r", b"four"), [*b"abc"], limit=7)) == ("abc", LENGTH, 3)


def test_max_tokens_zero_scores_the_prompt_only() -> None:
    """Guards against an answer to a client that asked for none."""
    request = make_request("r", b"p", max_tokens=0)
    assert told(feed(request, [*b"x"])) == ("", LENGTH, 0)
    assert request.output == []


def test_end_on_the_last_allowed_token_is_stop() -> None:
    """Guards against "length" for an answer that came to its end by itself."""
    assert told(feed(make_request("r", b"p", max_tokens=3), [*b"hi", EOS])) == ("hi", STOP, 3)
    assert told(feed(make_request("r", b"p", max_tokens=3, stop=("c",)), [*b"abc"])) == ("ab", STOP, 3)


def test_a_stop_string_over_tokens_is_cut() -> None:
    """Guards against the head of a stop string leaking token by token."""
    request = make_request("r", b"p", stop=("\nUser:",))
    outputs = feed(request, [*b"hi\nUser:"])
    assert told(outputs) == ("hi", STOP, 8)
    assert [o.text for o in outputs] == ["h", "i", ""]


@pytest.mark.parametrize(("last", "reason"), [([EOS], STOP), ([], LENGTH)])
def test_what_was_held_back_is_sent_at_the_end(last: list[int], reason: FinishReason) -> None:
    """Guards against text lost because it might have become a stop string, or a character, and did not."""
    tokens = [*b"a\nU\xc3", *last]
    request = make_request("r", b"p", stop=("\nUser:",), max_tokens=len(tokens))
    assert told(feed(request, tokens)) == ("a\nU\ufffd", reason, len(tokens))


def test_a_stop_string_completed_by_the_flush_counts() -> None:
    """Guards against sending a stop string whose last character only came out at the end."""
    request = make_request("r", b"p", stop=("b\ufffd",), max_tokens=3)
    assert told(feed(request, [*b"ab\xc3"])) == ("a", STOP, 3)


def test_min_tokens_holds_off_every_kind_of_stop() -> None:
    """Guards against an answer shorter than asked: end tokens, stop tokens and stop strings wait alike."""
    request = make_request("r", b"p", min_tokens=3, stop=("a",), stop_token_ids=frozenset(b"!"))
    assert told(feed(request, [*b"a", EOS, *b"ba"])) == ("ab", STOP, 4)
    request = make_request("r", b"p", min_tokens=3, stop_token_ids=frozenset(b"!"))
    assert told(feed(request, [*b"!x!!"])) == ("!x!", STOP, 4)
    request = make_request("r", b"p", min_tokens=3, stop=("a",))
    assert told(feed(request, [*b"aba"])) == ("ab", STOP, 3)


def test_an_event_carries_text_logprobs_or_an_end() -> None:
    """Guards against empty events in streams, and against logprobs lost while text is held back."""
    request = make_request("r", b"p", stop=("ab",))
    assert append_token(request, Sampled(ord("a")), 99) is None
    request = make_request("r", b"p", stop=("ab",), logprobs=0)
    entry = TokenLogprob(ord("a"), -0.5)
    output = append_token(request, Sampled(ord("a"), entry), 99)
    assert output == Output(request, "", 1, (entry,))
    assert request.logprobs == [entry]


@pytest.mark.parametrize("sampled", [None, Sampled(0, ok=False)])
def test_bad_logits_end_the_request_with_an_error(sampled: Sampled | None) -> None:
    """Guards against tokens made from NaN."""
    request = make_request("r", b"p")
    output = append_token(request, sampled, 99)
    assert output is not None
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, request.error)
    assert isinstance(request.error, EngineError)
    assert request.output == []


def test_a_fault_in_its_text_ends_that_request_only() -> None:
    """Guards against a bug in stop handling that reaches the engine loop and with it every neighbour."""
    request = make_request("r", b"p")
    request.stops = None  # type: ignore[assignment]
    output = append_token(request, Sampled(97), 99)
    assert output is not None
    assert output.finish_reason is FinishReason.ERROR
    assert "AttributeError" in str(output.error)


@pytest.mark.parametrize("only_missing", [False, True])
def test_prompt_logprobs_survive_chunks_and_a_replay(only_missing: bool) -> None:
    """Guards against entries doubled or missing after a preemption, whether or not a replay gives them again."""
    entries = [TokenLogprob(token, -float(token)) for token in range(1, 10)]
    request = make_request("r", range(10), prompt_logprobs=0)
    for start, stop in [(0, 4), (4, 7), (0, 7), (7, 10), (0, 10)]:
        known = max(0, len(request.prompt_logprobs) - 1)
        append_prompt_logprobs(request, stop, entries[max(start, known) if only_missing else start : stop])
        assert request.prompt_logprobs[1:] == entries[: max(stop, known)]
    assert request.prompt_logprobs == [None, *entries]


def test_a_prompt_of_one_token_has_one_empty_entry() -> None:
    """Guards against an off-by-one: the first token has no log-probability, whatever the length."""
    request = make_request("r", b"p", prompt_logprobs=3)
    append_prompt_logprobs(request, 1, ())
    assert request.prompt_logprobs == [None]
