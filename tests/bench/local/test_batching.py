"""Servers that a measurement starts for itself, and the batching experiment on a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import typer

from chairlift import config
from chairlift.bench.client.sample import Event, EventKind, Sample
from chairlift.bench.local import batching
from chairlift.bench.local.batching import BatchingCommand, MixedLoad, PolicyRun, held_s, lane
from chairlift.bench.local.server import LocalServer, LoggedRequest, ObservedRequest, TimedRequest, command, serving
from chairlift.bench.report import measure
from chairlift.bench.report.measure import ProgressDisplay
from chairlift.bench.report.report import ReportFiles, Span, line
from chairlift.errors import ChairliftError
from support.async_tests import run

TinyGGUF = Callable[..., Path]
SMALL = ("--max-model-len", "256", "--threads", "1")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def sample(*token_s: float, end_s: float, due_s: float = 0.0) -> Sample:
    events = tuple(Event(at_s, EventKind.TEXT) for at_s in token_s)
    return Sample(0, due_s, due_s, end_s, True, events, num_output_tokens=len(token_s))


def logged(queue_s: float) -> LoggedRequest:
    return LoggedRequest("chatcmpl-static-0-1f#0", queue_s, 0.1, 3, 0)


def observed(sample: Sample, logged: LoggedRequest | None = None) -> ObservedRequest:
    return ObservedRequest(TimedRequest("short 1", "p", 3, 0.0), sample, logged)


def spans(sample: Sample, logged: LoggedRequest | None = None, *, can_be_held: bool = False) -> Sequence[Span]:
    return lane(observed(sample, logged), can_be_held=can_be_held).spans


def test_every_policy_answers_all_and_leaves_no_server(tiny_gguf: TinyGGUF, monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment that compares three policies by different requests, or that leaves servers behind."""
    pids: list[int] = []
    run_load = batching.run_load

    async def noting(server: LocalServer, load: MixedLoad, run: PolicyRun) -> None:
        pids.append(server.pid)
        await run_load(server, load, run)

    monkeypatch.setattr(batching, "run_load", noting)
    experiment = BatchingCommand(str(tiny_gguf()), MixedLoad(40, 4, 2, 2, 0.02), [2], SMALL)
    run(experiment.work(ProgressDisplay()))
    report = experiment.report()
    assert [(done.policy, done.slots) for done in experiment.runs] == [
        ("serial", None), ("static", None), ("continuous", None), ("static", 2)
    ]  # fmt: skip
    names = ["first", "long", "short 1", "short 2", "late 1", "late 2"]
    for done in experiment.runs:
        assert [each.request.name for each in done.requests] == names
        assert [each.sample.failure for each in done.requests] == [None] * 6
        assert [each.sample.num_output_tokens for each in done.requests] == [4, 40, 4, 4, 4, 4]
        assert [each.logged and each.logged.num_output_tokens for each in done.requests] == [4, 40, 4, 4, 4, 4]
    assert report.warnings == []
    assert [row[0] for row in report.tables[0].rows] == ["serial", "static", "continuous"]
    assert [chart.kind for chart in report.charts] == ["timeline"] * 3 + ["lines"]
    assert json.loads(line(report))["data"]["load"]["long_tokens"] == 40
    assert len(pids) == 4
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_experiment_ends_its_server(
    stop: signal.Signals, tiny_gguf: TinyGGUF, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Ctrl-C that leaves a server on the port and gigabytes in memory."""
    pids: list[int] = []

    async def never(server: LocalServer, load: MixedLoad, run: PolicyRun) -> None:
        pids.append(server.pid)
        run.requests.append(observed(sample(1.0, 2.0, end_s=2.0)))
        os.kill(os.getpid(), stop)
        await asyncio.Event().wait()

    monkeypatch.setattr(batching, "run_load", never)
    experiment = BatchingCommand(str(tiny_gguf()), MixedLoad(), [], SMALL)
    with pytest.raises(typer.Exit) as ended:
        measure.measure(ReportFiles(), experiment)
    assert ended.value.exit_code == measure.INTERRUPTED
    document = json.loads(capsys.readouterr().out.split("\n")[-2])
    assert document["interrupted"] is True
    assert [run["policy"] for run in document["data"]["runs"]] == ["serial"]
    assert len(pids) == 1
    assert not is_alive(pids[0])


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    """A measurement that waits for minutes for a server that has long ended."""

    async def start() -> None:
        async with serving(str(tmp_path / "none.gguf")):
            pass

    with pytest.raises(ChairliftError, match=r"ended before it was ready[\s\S]*none\.gguf"):
        run(start())


def test_a_report_of_nothing_is_a_report() -> None:
    """Ctrl-C during the first start, and a traceback instead of an end."""
    report = BatchingCommand(None, MixedLoad(), []).report()
    assert report.tables == []
    assert json.loads(line(report))["data"]["runs"] == []


def test_servers_get_only_what_is_named() -> None:
    """A measurement of settings that were left in the shell."""
    given = {"CHAIRLIFT_API_KEY": "secret", "NOTIFY_SOCKET": "/x", "PATH": "/bin"}
    assert config.environment_without_settings(given) == {"PATH": "/bin"}
    words = command("m.gguf", "/cache", ["--batching", "serial"])
    assert words[2:5] == ["chairlift", "serve", "m.gguf"]
    assert words[-2:] == ["--batching", "serial"]


def test_log_lines_are_found_by_the_request_id() -> None:
    """Queue times of one request shown as another's whose id begins alike; a line of garbage that ends the reader."""
    server = LocalServer("http://127.0.0.1:1", 0.0, 0)
    fields = "prompt_tokens=10 cached_tokens=0 output_tokens=3 preemptions=1"
    facts = {name: int(value) for name, value in (part.split("=") for part in fields.split())}
    times = dict.fromkeys(("queue_s", "prefill_s", "ttft_s", "e2e_s"), 0.5)
    whole = {"event": "request", "id": "chatcmpl-serial-1-63fc185f#0", "end": "stop", **facts, **times}
    for text in ("", "no JSON", "[]", "null", '{"event": "work"}', '{"event": "request"}', json.dumps(whole)):
        server.read(text)

    async def both() -> tuple[LoggedRequest | None, LoggedRequest | None]:
        return await server.logged("serial-1", 0.01), await server.logged("serial-11", 0.01)

    found, other = run(both())
    assert found is not None
    assert (found.num_preemptions, found.queue_s, found.num_output_tokens) == (1, 0.5, 3)
    assert other is None


def test_a_lane_shows_where_the_time_went() -> None:
    """A timeline in which waiting looks like work."""
    assert spans(sample(3.0, 4.0, end_s=4.0, due_s=1.0), logged(1.5)) == [
        Span("queued", 1.0, 2.5),
        Span("prefill", 2.5, 3.0),
        Span("decode", 3.0, 4.0),
    ]
    assert spans(sample(end_s=2.0, due_s=1.0)) == [Span("failed", 1.0, 2.0)]
    unknown = spans(sample(3.0, 4.0, end_s=4.0, due_s=1.0))
    assert [span.kind for span in unknown] == ["prefill", "decode"]


def test_held_is_only_what_a_batch_holds() -> None:
    """A last token that came with the held end, counted as decoding for seconds; a slow last token called held."""
    late = sample(1.0, 1.1, 1.2, 9.0, end_s=9.0)
    assert spans(late, logged(0.5), can_be_held=True)[-2:] == [
        Span("decode", 1.0, 1.2),
        Span("held", 1.2, 9.0),
    ]
    assert held_s(observed(late, logged(0.5)), can_be_held=True) == 9.0 - 1.2
    assert spans(late, logged(0.5))[-1] == Span("decode", 1.0, 9.0)
    assert held_s(observed(sample(1.0, 2.0, 3.0, end_s=3.0), logged(0.5)), can_be_held=True) == 0.0
