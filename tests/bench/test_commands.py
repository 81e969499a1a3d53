"""`chairlift bench load`, `steps` and `compare` as they are typed, against a real server with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift import cli
from support.server_process import Server, serving

SMALL = ("--prompt-tokens", "120", "--output-tokens", "6", "--requests", "6", "--warmup", "2", "--seed", "1")


@pytest.fixture(scope="module")
def server(tiny_gguf: Callable[..., Path]) -> Iterator[Server]:
    with serving(tiny_gguf()) as running:
        yield running


def start(*args: str) -> subprocess.Popen[str]:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [sys.executable, "-m", "chairlift", "bench", *args], env=environ, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
    )  # fmt: skip


Bench = Callable[..., tuple[dict[str, Any], str, str]]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs it in this process: the document of the last line, all of stdout, and stderr."""

    def run(*args: str, status: int = 0) -> tuple[dict[str, Any], str, str]:
        monkeypatch.setattr(sys, "argv", ["chairlift", "bench", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert ended.value.code == status, err
        return (json.loads(out.splitlines()[-1]) if out else {}), out, err

    return run


@pytest.mark.parametrize(
    "load", [("--users", "2", "--think", "0.02"), ("--rate", "20"), ("--concurrency", "2", "--shared-prefix", "1:60")]
)
def test_load_in_each_of_its_kinds(bench: Bench, server: Server, load: tuple[str, ...], tmp_path: Path) -> None:
    """A kind of load that the mocks know and a server does not; lengths that are not those that were asked for."""
    file = tmp_path / "result.json"
    document, out, err = bench("load", server.url, *load, *SMALL, "--slo", "ttft=30,e2e=60", "--json", str(file))
    data = document["data"]
    assert (document["command"], document["interrupted"]) == ("bench load", False)
    assert json.loads(file.read_text()) == document
    assert (data["num_ok"], data["num_requests"], data["failures"]) == (6, 6, {})
    assert data["output_tokens"]["p50"] == 6
    assert data["prompt_tokens"]["mean"] == pytest.approx(120, rel=0.1)
    assert data["goodput"]["share"] == 1.0
    assert data["one_stream_ceiling_tokens_per_s"] > 0
    assert data["engine_queue_mean_s"] is not None
    assert data["num_preemptions"] == 0
    assert "What each request felt" in out
    assert "What each request felt" not in err
    hits = data["cache_hit_rate"]
    assert hits > 0.3 if "--shared-prefix" in load else hits < 0.2
    assert "warm cache" not in {doubt["name"] for doubt in data["doubts"]}


def test_a_second_run_meets_no_warm_cache_unless_it_wants_to(bench: Bench, server: Server) -> None:
    """Run twice: 49 times the speed, since the prompts were still there."""
    salted = [bench("load", server.url, *SMALL)[0]["data"]["cache_hit_rate"] for _ in range(2)]
    assert max(salted) < 0.2
    kept = [bench("load", server.url, *SMALL, "--salt", "x")[0]["data"] for _ in range(2)]
    assert kept[1]["cache_hit_rate"] > 0.5
    assert "warm cache" not in {doubt["name"] for doubt in kept[1]["doubts"]}, "it was asked for"


def test_a_trace_and_whole_answers(bench: Bench, server: Server, tmp_path: Path) -> None:
    """Options that only the help knows."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"at_s": 0.02 * i, "prompt": f"Say {i}.", "output_tokens": 3 + i} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    document, out, _ = bench("load", server.url, "--trace", str(trace), "--no-stream")
    data = document["data"]
    assert (data["num_ok"], data["ttft_s"], data["work"]["trace_requests"]) == (4, None, 4)
    assert data["output_tokens"]["max"] == 6
    assert "not measurable without streaming" in out


def test_steps(bench: Bench, server: Server) -> None:
    """A sweep whose steps are all the same, or a report that breaks on real figures."""
    document, _, _ = bench("steps", server.url, "--users", "1,3", *SMALL)
    data = document["data"]
    assert [step["little"]["users"] for step in data["steps"]] == [1, 3]
    assert all(step["num_ok"] == 6 for step in data["steps"])
    assert "knee" in data["knee_rule"]


def test_compare(bench: Bench, server: Server) -> None:
    """A server compared to itself: all works, and there are too few rounds to tell anything."""
    document, _, err = bench("compare", server.url, server.url + "/v1", "--rounds", "2", *SMALL)
    data = document["data"]
    assert [len(rounds) for rounds in data["servers"].values()] == [2, 2]
    assert all(run["num_ok"] == 6 for rounds in data["servers"].values() for run in rounds)
    assert not any(ratio["is_told_apart"] for ratio in data["ratios"]["B/A"].values())
    assert any(warning.startswith("few rounds") for warning in document["warnings"])
    firsts = [line.split(": ")[1][0] for line in err.splitlines() if line.startswith("round")]
    assert firsts == ["A", "B", "B", "A"]


def test_ctrl_c_tells_what_was_measured(server: Server) -> None:
    """An hour of measuring lost to one key."""
    before = server.metric("request_success_total")
    process = start("load", server.url, "--requests", "100000", "--prompt-tokens", "50", "--output-tokens", "2")
    while server.metric("request_success_total") < before + 40:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    document = json.loads(out.splitlines()[-1])
    assert document["interrupted"]
    assert 0 < document["data"]["num_ok"] < 100_000
    assert document["data"]["failures"] == {}
    assert "interrupted" in {doubt["name"] for doubt in document["data"]["doubts"]}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("load", "--users", "2", "--rate", "3"), "different kinds of load"),
        (("load", "--think", "2"), "give --users"),
        (("load", "--prompt-tokens", "many"), "--prompt-tokens"),
        (("load", "--output-tokens", "0"), "--output-tokens"),
        (("load", "--slo", "speed=1"), "--slo"),
        (("load", "--requests", "5", "--duration", "5"), "one of them ends the run"),
        (("load", "--trace", "/nowhere"), "cannot read the trace"),
        (("load", "--trace", "/nowhere", "--warmup", "3"), "is measured as it is"),
        (("load", "--trace", "/nowhere", "--output-tokens", "100"), "is measured as it is"),
        (("load", "--users", "2", "--even"), "give --rate"),
        (("steps", "--users", "1,5", "--max-in-flight", "4"), "5 users would wait for each other"),
        (("steps", "--users", "3,2,1"), "must ascend"),
        (("compare",), "needs two servers"),
    ],
)
def test_what_cannot_be_honoured_is_refused_at_once(bench: Bench, args: tuple[str, ...], said: str) -> None:
    """An option that is parsed and ignored."""
    name, *rest = args
    _, out, err = bench(name, "http://127.0.0.1:1", *rest, status=2)
    assert said in err
    assert out == ""
