"""The command line on a tiny model and the reference kernels: what it prints, how it fails, how it ends."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chairlift import __version__, cli
from chairlift.config import SETTINGS
from chairlift.store import CATALOGUE
from support.paths import FIXTURES, ROOT

SRC = str(ROOT / "src")

Run = Callable[..., tuple[int, str, str]]
TinyGGUF = Callable[..., Path]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `chairlift ARGS` in this process: exit status, standard output, standard error."""

    def run_main(*args: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["chairlift", *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out, err

    for variable in [name for name in os.environ if name.startswith("CHAIRLIFT_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("CHAIRLIFT_BACKEND", "reference")
    monkeypatch.setenv("TERM", "dumb")
    return run_main


@pytest.fixture
def tiny(tiny_gguf: TinyGGUF) -> str:
    return str(tiny_gguf())


def process(*args: str, model: str) -> subprocess.Popen[str]:
    """The same in a process of its own, for signals and pipes."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("CHAIRLIFT_")}
    environ |= {"CHAIRLIFT_BACKEND": "reference", "CHAIRLIFT_MODEL": model}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-m", "chairlift", *args], env=environ, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # A shell's background job ignores Ctrl-C, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def test_help_loads_nothing_heavy() -> None:
    """`--help` that takes seconds because something imports numpy or the server at the top."""
    code = (
        "import sys, runpy; sys.argv = ['chairlift', 'serve', '--help']\n"
        "try: runpy.run_module('chairlift', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'tokenizers', 'jinja2', 'starlette', 'uvicorn'} & set(sys.modules)))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = subprocess.run([sys.executable, "-c", code], env=environ, text=True, capture_output=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "info", "eval", "pull", "models", "version"])
def test_every_command_has_help(command: str, run: Run) -> None:
    """A command that cannot say what it does."""
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "Usage" in out


def test_every_setting_is_a_flag_of_serve(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of the table that the command line forgot."""
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = run("serve", "--help")
    flags = [setting.flag for setting in SETTINGS.values() if setting.name != "model"]
    assert [flag for flag in flags if flag not in out] == []


def test_generate_streams_an_answer_twice_the_same(run: Run, tiny: str) -> None:
    """An answer that differs from run to run; progress or notes on standard output among the text."""
    args = ("generate", "hello", "--model", tiny, "--max-tokens", "8")
    code, out, _ = run(*args)
    assert code == 0
    assert len(out) > 1
    assert out.endswith("\n")
    assert run(*args)[1] == out


def test_generate_reads_standard_input_and_seeds(run: Run, tiny: str) -> None:
    """`-` taken for a prompt of one dash; --seed that changes nothing, or --temperature that is ignored."""
    args = ("generate", "-", "--model", tiny, "--max-tokens", "8", "--temperature", "5", "--raw")
    one, two, other = (run(*args, "--seed", seed, stdin="hello")[1] for seed in ("1", "1", "2"))
    assert one == two
    assert one != other
    assert run("generate", "hello", *args[2:], "--seed", "1")[1] == one


def test_raw_is_not_the_chat_template(run: Run, tiny: str) -> None:
    """--raw accepted and ignored, or --system where there is no conversation."""
    args = ("generate", "hello", "--model", tiny, "--max-tokens", "8")
    assert run(*args)[1] != run(*args, "--raw")[1]
    assert run(*args, "--system", "Be brief.")[1] != run(*args)[1]
    assert run(*args, "--raw", "--system", "Be brief.")[0] == 2


def test_chat_keeps_history_until_cleared(run: Run, tiny: str) -> None:
    """A second turn that does not see the first; /clear that keeps it; /quit taken for a question."""
    args = ("chat", tiny, "--max-tokens", "6", "--temperature", "0")
    code, out, err = run(*args, stdin="hello\nhello\n/clear\n\nhello\n/quit\nnever\n")
    assert code == 0
    assert "error" not in err
    _, first, _ = run(*args, stdin="hello\n")
    assert out.startswith(first)
    assert out.endswith(first)
    assert out != first * 3


def test_chat_survives_a_prompt_that_is_too_long(run: Run, tiny: str) -> None:
    """One over-long question that ends the conversation."""
    _, want, _ = run("chat", tiny, "--max-tokens", "3", "--temperature", "0", stdin="hi\n")
    code, out, err = run("chat", tiny, "--max-tokens", "3", "--temperature", "0", stdin=f"{'long ' * 600}\nhi\n")
    assert (code, out) == (0, want)
    assert "the context length is 512" in err


def test_info_says_what_was_reserved(run: Run, tiny: str) -> None:
    """A card whose numbers are not the plan's, or JSON that is none."""
    code, out, _ = run("info", tiny, "--json", "--kv-memory", "1MiB", "--served-model-name", "x")
    assert code == 2  # a server's setting
    code, out, _ = run("info", tiny, "--json", "--max-num-seqs", "2", "--kv-cache-dtype", "int8")
    facts = json.loads(out)
    assert code == 0
    assert facts["limits"]["max_num_seqs"] == 2
    assert facts["kv"]["pool_bytes"] == facts["kv"]["pool_tokens"] * facts["kv"]["bytes_per_token"]
    assert facts["kv"]["bytes_per_token"] == 2 * 2 * (16 + 16 + 8)
    assert {"open", "warm-up"} <= facts["startup_s"].keys()
    code, out, _ = run("info", tiny)
    assert code == 0
    assert "tokens/s for one stream" in out


def test_eval_scores_a_file(run: Run, tiny: str, tmp_path: Path) -> None:
    """Windows that overlap or lose tokens, a mean over the wrong count, JSON that is none."""
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 10)
    code, out, _ = run("eval", str(text), "--model", tiny, "--max-model-len", "101")
    result = json.loads(out)
    assert code == 0
    assert result["window"] == 100
    whole = json.loads(run("eval", str(text), "--model", tiny)[1])
    num_tokens = whole["num_tokens"]
    assert 200 < num_tokens < whole["window"]
    assert whole["num_predicted"] == num_tokens - 1
    assert result["num_predicted"] == num_tokens - len(range(0, num_tokens, 100))
    assert result["perplexity"] == math.exp(result["mean_nll"])
    assert run("eval", str(text), "--model", tiny)[1] == run("eval", str(text), "--model", tiny)[1]


def test_eval_of_the_default_model_is_close_to_float32(
    run: Run, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path
) -> None:
    """Precision lost in kernels, cache or tokenizer; the figure to meet was computed by other software in float32."""
    expected = json.loads((FIXTURES / "nll.json").read_text())
    monkeypatch.setenv("CHAIRLIFT_BACKEND", "native")
    code, out, _ = run("eval", str(FIXTURES / "english.txt"), "--model", str(smollm2_path))
    result = json.loads(out)
    assert code == 0
    assert result["num_tokens"] == expected["num_tokens"]
    assert result["num_predicted"] == expected["num_predicted"]
    assert abs(result["mean_nll"] - expected["mean_nll"]) < 0.01


def test_models_and_version(run: Run, tmp_path: Path) -> None:
    """A listing that goes to the network, or that does not say how to fetch."""
    code, out, _ = run("models", "--cache-dir", str(tmp_path))
    assert code == 0
    assert "chairlift pull smollm2" in out
    assert run("version")[1] == f"chairlift {__version__}\n"


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["serve", "--host", "0.0.0.0"], 2, "--allow-open"),
        (["serve", "--port", "99999"], 2, "--port"),
        (["serve", "--kv-memory", "lots"], 2, "--kv-memory"),
        (["serve", "--config", "/nowhere.toml"], 2, "/nowhere.toml"),
        (["info", "no-such-model"], 1, "no-such-model"),
        (["info", "/nowhere/x.gguf"], 1, "/nowhere/x.gguf"),
        (["generate", "x", "--temperature", "nan"], 2, "--temperature"),
        (["generate", "x", "--max-tokens", "0"], 2, "--max-tokens"),
        (["generate", "x", "--stop", ""], 2, "--stop"),
        (["eval", "/nowhere.txt"], 1, "/nowhere.txt"),
        (["pull", "no-such-model"], 1, "no-such-model"),
    ],
)
def test_errors_are_one_line_and_a_status(args: list[str], status: int, words: str, run: Run) -> None:
    """A traceback for a spelling mistake, or a failure that a script takes for success."""
    code, out, err = run(*args)
    assert (code, out) == (status, "")
    assert err.startswith("error: ")
    assert words in err
    assert len(err.splitlines()) <= 2


def test_unknown_flags_are_refused(run: Run) -> None:
    """A misspelt flag that is ignored."""
    code, _, err = run("serve", "--max-num-sequences", "4")
    assert code == 2
    assert "--max-num-sequences" in err


def test_unknown_variables_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable that is ignored."""
    monkeypatch.setenv("CHAIRLIFT_PROT", "1")
    code, _, err = run("models")
    assert code == 2
    assert "CHAIRLIFT_PORT" in err


def test_interrupt_is_clean(tiny_gguf: TinyGGUF) -> None:
    """Ctrl-C answered with a traceback, or not at all while tokens are being waited for."""
    endless = str(tiny_gguf(context=8192))
    running = process("generate", "hello", "--raw", model=endless)  # greedy: it goes round in circles
    assert running.stdout is not None
    running.stdout.read(1)  # it streams: the engine is at work
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=30)
    assert running.returncode != 0
    assert "Traceback" not in err


def test_a_closed_pipe_is_clean(tiny: str) -> None:
    """`chairlift generate ... | head -c1` that ends in a traceback."""
    running = process("generate", "hello", "--raw", "--temperature", "9", model=tiny)
    assert running.stdout is not None
    running.stdout.read(1)
    running.stdout.close()
    _, err = running.communicate(timeout=30)
    assert "Traceback" not in err
    assert "Exception" not in err


def test_a_packaged_model_keeps_its_name(run: Run, tiny: str, tmp_path: Path) -> None:
    """Clients refused because the operator gave the path of the very file that a name stands for."""
    packaged = CATALOGUE["smollm2"].path_in(tmp_path)
    packaged.parent.mkdir(parents=True)
    packaged.symlink_to(tiny)
    names = [
        json.loads(run("info", model, "--json", "--cache-dir", str(tmp_path))[1])["model"]["name"]
        for model in (str(packaged), tiny)
    ]
    assert names == ["smollm2", Path(tiny).stem]
