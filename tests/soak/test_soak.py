"""The soak in short, on a tiny model; and that it would notice what it looks for."""

from __future__ import annotations

from typing import Any

import pytest

from soak import run as soak
from soak.cases import MALFORMED, TEXT, Case, Malformed, answer_of, parse_stream, secret_case, text_of
from soak.clients import Asking, Refused, Tally
from support import fault_injection as faults
from support.async_tests import run
from support.raw_http import Reply


@pytest.mark.long
def test_a_short_storm_loses_nothing() -> None:
    """Fault: an answer changes, a block leaks, a request hangs or a socket stays open when everything happens at once.

    Times are judged by scripts/soak on a machine of its own, not here.
    """
    options = soak.parse_options(["--tiny", "--seconds", "5", "--cases", "20", "--p99-ms", "inf"])
    report = soak.run(options)
    assert report["lost"] == []
    assert report["counted"]["num_preemptions"] > 0
    assert report["counted"]["requests_cancelled"] > 0
    assert min(report["tried"][kind] for kind in ("whole", "streamed", "slow", "left", "malformed", "secret")) > 0


@pytest.mark.long
def test_short_campaigns_of_faults_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the campaigns run, and what they lose is not reported."""
    options = soak.parse_options(["--faults", "--seconds", "0", "--seed", "5"])
    report = soak.run_faults(options)
    assert report["lost"] == []
    assert report["tried"]["campaigns"] == 1
    assert report["tried"]["failed_steps"] > 0
    monkeypatch.setattr(faults.Report, "expect", lambda self, is_so, otherwise: self.lost.append(otherwise))
    assert soak.run_faults(options)["num_lost"] > 0


def reckon(tally: Tally) -> list[str]:
    """What a look at the secrets alone finds."""
    run(soak.check_secrets(Asking(1, tally), -1.0))
    return tally.lost


@pytest.mark.parametrize("owner", ["0000000001", None])
def test_a_secret_in_the_wrong_answer_is_noticed(owner: str | None) -> None:
    """Fault: a search that finds nothing because it looks for nothing."""
    said: Any = [("so the word is xx00000000002 and", [], ["length"])]
    tally = Tally(secrets={"0000000001": None, "0000000002": None})
    if owner is None:
        tally.texts.append(text_of(said))
    else:
        tally.secrets[owner] = said
    assert len(reckon(tally)) == 1


def test_an_own_secret_is_no_loss() -> None:
    """Fault: a soak that fails whenever the model does as it is told."""
    tally = Tally(secrets={"0000000001": [("0000000001", [], ["stop"])], "0000000002": None})
    assert reckon(tally) == []


def test_an_answer_is_the_same_however_it_is_read() -> None:
    """Fault: two different answers compared as equal, or the pieces of one as different."""
    case = Case(TEXT, {"prompt": "x"})
    logprobs: dict[str, list[Any]] = {
        "tokens": ["a", "b"],
        "token_logprobs": [-1, -2],
        "top_logprobs": [{}, {}],
        "text_offset": [0, 1],
    }
    first, second = ({k: v[i : i + 1] for k, v in logprobs.items()} for i in range(2))

    def event(text: str, logprobs: Any, end: str | None = None) -> Any:
        return {"choices": [{"index": 0, "text": text, "logprobs": logprobs, "finish_reason": end}]}

    whole = answer_of(case, [event("ab", logprobs, "stop")])
    pieces = [event("a", first), event("b", second), event("", None, "stop")]
    assert answer_of(case, pieces) == whole
    assert answer_of(case, pieces[:-1]) != whole
    assert answer_of(case, [pieces[0], pieces[2]]) != whole


@pytest.mark.parametrize(
    "body",
    [b'data: {"choices": []}\n\n', b'data: {"error": {"code": "x"}}\n\ndata: [DONE]\n\n', b""],
    ids=["cut", "error", "nothing"],
)
def test_a_broken_stream_is_no_answer(body: bytes) -> None:
    """Fault: half a stream taken for a whole answer."""
    with pytest.raises(ValueError, match="stream"):
        parse_stream(body)
    assert parse_stream(b': ping\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n') == [{"choices": []}]


def test_an_unintended_refusal_is_noticed() -> None:
    """Fault: every 503 waved through."""
    asking = Asking(1, Tally())
    good = Reply(503, {"retry-after": "3"}, b'{"error": {"code": "queue_full"}}')
    with pytest.raises(Refused):
        asking._take_refusal(good, 0.0)
    for headers, code in (({"retry-after": "3"}, "loading"), ({"retry-after": "0"}, "queue_full")):
        with pytest.raises(ValueError, match="not intended"):
            asking._take_refusal(Reply(503, headers, b'{"error": {"code": "%s"}}' % code.encode()), 0.0)


def test_the_corpus_is_varied() -> None:
    """Fault: a hundred ways to write the same mistake."""
    assert {bad.status for bad in MALFORMED} == {400, 401, 404, 405, 413, 415}
    assert len(set(MALFORMED)) == len(MALFORMED) >= 60
    assert not Malformed(400, b"").is_right(Reply(200, {}, b"{}"))
    assert secret_case("a" * 10).request().count(b"a" * 10) == 1
