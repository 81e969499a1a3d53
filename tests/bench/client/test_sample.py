"""The times of one request, each against arithmetic done by hand."""

from __future__ import annotations

from chairlift.bench.client.sample import Event, EventKind, Sample


def sample(*events: tuple[float, EventKind], num_output_tokens: int | None = None) -> Sample:
    """Due at 1, sent at 1.5, over at 6."""
    made = tuple(Event(at_s, kind) for at_s, kind in events)
    return Sample(0, 1.0, 1.5, 6.0, True, made, num_output_tokens=num_output_tokens)


def test_the_role_is_no_token() -> None:
    """A first chunk that only names the speaker, sent before the prompt is read, taken for the first token."""
    seen = sample((1.5, EventKind.ROLE), (2.0, EventKind.PING), (3.5, EventKind.TEXT), (4.0, EventKind.FINISH))
    assert seen.first_token_s == 2.5
    assert seen.first_visible_s == 2.5
    assert seen.token_times == (3.5,)


def test_reasoning_is_a_token_and_not_visible() -> None:
    """A model that thinks for minutes and looks fast, or one whose thoughts are not counted at all."""
    seen = sample((2.0, EventKind.REASONING), (3.0, EventKind.REASONING), (5.0, EventKind.TOOL), num_output_tokens=4)
    assert seen.first_token_s == 1.0
    assert seen.first_visible_s == 4.0
    assert seen.itl_s == (1.0, 2.0)
    assert seen.tpot_s == 1.0


def test_latency_counts_from_when_it_was_due() -> None:
    """A client that falls behind and hides the wait that it caused."""
    seen = sample((2.0, EventKind.TEXT))
    assert (seen.dispatch_delay_s, seen.e2e_s) == (0.5, 5.0)


def test_tokens_are_counted_by_usage() -> None:
    """Chunks counted as tokens: four tokens a chunk would make a server four times slower than it is."""
    events = [(2.0 + i, EventKind.TEXT) for i in range(4)]
    seen = sample(*events, num_output_tokens=16)
    assert seen.tokens_per_event == 4.0
    assert seen.tpot_s == 3.0 / 15
    assert sample(*events).tokens_per_event is None
    assert sample(*events).tpot_s is None


def test_what_was_not_seen_is_not_made_up() -> None:
    """A TTFT of 0, or of E2E, for an answer that came in one piece or not at all."""
    seen = Sample(0, 1.0, 1.5, 6.0, False, num_output_tokens=1)
    assert (seen.first_token_s, seen.first_visible_s, seen.tpot_s, seen.tokens_per_event) == (None, None, None, None)
    assert (seen.token_times, seen.itl_s) == ((), ())
    assert sample((2.0, EventKind.TEXT), num_output_tokens=1).tpot_s is None
