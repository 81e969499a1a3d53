"""Servers that a measurement starts for itself, and the batching experiment on a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from chairlift import config
from chairlift.bench import batching, live
from chairlift.bench.batching import Batching, Load, Part, Run, Told
from chairlift.bench.report import Output, Span, line
from chairlift.bench.sample import Event, EventKind, Sample
from chairlift.bench.servers import LocalServer, Record, command, serving
from chairlift.errors import ChairliftError

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


def record(queue_s: float) -> Record:
    return Record("chatcmpl-static-0-1f#0", 10, 0, 3, queue_s, 0.1, queue_s + 0.1, 2.0, 0, "length")


def told(sample: Sample, record: Record | None = None, *, can_be_held: bool = False) -> Told:
    return Told(Part("short 1", "p", 3, 0.0), sample, record, can_be_held)


def test_every_policy_answers_all_and_leaves_no_server(tiny_gguf: TinyGGUF, monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment that compares three policies by different requests, or that leaves servers behind."""
    pids: list[int] = []
    run_load = batching.run_load

    async def noting(server: LocalServer, load: Load, run: Run) -> None:
        pids.append(server.pid)
        await run_load(server, load, run)

    monkeypatch.setattr(batching, "run_load", noting)
    experiment = Batching(str(tiny_gguf()), Load(40, 4, 2, 2, 0.02), [2], SMALL)
    asyncio.run(experiment.work(live.Live()))
    report = experiment.report()
    assert [(run.policy, run.slots) for run in experiment.runs] == [
        ("serial", None), ("static", None), ("continuous", None), ("static", 2)
    ]  # fmt: skip
    names = ["first", "long", "short 1", "short 2", "late 1", "late 2"]
    for run in experiment.runs:
        assert [told.part.name for told in run.told] == names
        assert [told.sample.failure for told in run.told] == [None] * 6
        assert [told.sample.num_output_tokens for told in run.told] == [4, 40, 4, 4, 4, 4]
        assert [told.record and told.record.num_output_tokens for told in run.told] == [4, 40, 4, 4, 4, 4]
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

    async def never(server: LocalServer, load: Load, run: Run) -> None:
        pids.append(server.pid)
        run.told.append(told(sample(1.0, 2.0, end_s=2.0)))
        os.kill(os.getpid(), stop)
        await asyncio.Event().wait()

    monkeypatch.setattr(batching, "run_load", never)
    experiment = Batching(str(tiny_gguf()), Load(), [], SMALL)
    with pytest.raises(typer.Exit) as ended:
        live.measure(Output(), experiment.work, experiment.report)
    assert ended.value.exit_code == live.INTERRUPTED
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
        asyncio.run(start())


def test_a_report_of_nothing_is_a_report() -> None:
    """Ctrl-C during the first start, and a traceback instead of an end."""
    report = Batching(None, Load(), []).report()
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

    async def both() -> tuple[Record | None, Record | None]:
        return await server.record("serial-1", 0.01), await server.record("serial-11", 0.01)

    found, other = asyncio.run(both())
    assert found is not None
    assert (found.num_preemptions, found.queue_s, found.end) == (1, 0.5, "stop")
    assert other is None


def test_a_lane_shows_where_the_time_went() -> None:
    """A timeline in which waiting looks like work."""
    assert told(sample(3.0, 4.0, end_s=4.0, due_s=1.0), record(1.5)).lane().spans == [
        Span("queued", 1.0, 2.5),
        Span("prefill", 2.5, 3.0),
        Span("decode", 3.0, 4.0),
    ]
    assert told(sample(end_s=2.0, due_s=1.0)).lane().spans == [Span("failed", 1.0, 2.0)]
    unknown = told(sample(3.0, 4.0, end_s=4.0, due_s=1.0)).lane()
    assert [span.kind for span in unknown.spans] == ["prefill", "decode"]


def test_held_is_only_what_a_batch_holds() -> None:
    """A last token that came with the held end, counted as decoding for seconds; a slow last token called held."""
    late = sample(1.0, 1.1, 1.2, 9.0, end_s=9.0)
    assert told(late, record(0.5), can_be_held=True).lane().spans[-2:] == [
        Span("decode", 1.0, 1.2),
        Span("held", 1.2, 9.0),
    ]
    assert told(late, record(0.5), can_be_held=True).held_s == 9.0 - 1.2
    assert told(late, record(0.5)).lane().spans[-1] == Span("decode", 1.0, 9.0)
    assert told(sample(1.0, 2.0, 3.0, end_s=3.0), record(0.5), can_be_held=True).held_s == 0.0
