"""The real default model behind real sockets, driven by the official client: what must hold for a new user."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from support.paths import FIXTURES
from support.server_process import Server, serving

QUESTIONS = [
    "What is the capital of Germany?",
    "Name three colours.",
    "Why is the sky blue? Answer at length.",
    "Write a short poem about snow.",
    "Count from one to ten.",
    "Who wrote Hamlet?",
    "Explain what a chairlift is.",
    "Give me a recipe for pancakes.",
]


@pytest.fixture(scope="module")
def server(smollm2_path: Path) -> Iterator[Server]:
    with serving(smollm2_path) as running:
        yield running


def ask(client: OpenAI, question: str, **options: Any) -> str:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 48, **options}
    messages: Any = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model="smollm2", messages=messages, **fields)
    return answer.choices[0].message.content or ""


def ask_streamed(client: OpenAI, question: str, stamps: list[float] | None = None, **options: Any) -> str:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 48, **options}
    messages: Any = [{"role": "user", "content": question}]
    text = ""
    for chunk in client.chat.completions.create(model="smollm2", messages=messages, stream=True, **fields):
        if chunk.choices and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
            if stamps is not None:
                stamps.append(time.monotonic())
    return text


def test_capital_of_germany_streamed_and_not(server: Server) -> None:
    """Fault: the model does not speak sense, or a stream loses or adds text."""
    client = server.client()
    whole = ask(client, QUESTIONS[0])
    assert "Berlin" in whole
    assert ask_streamed(client, QUESTIONS[0]) == whole


@pytest.mark.parametrize(
    "flags",
    [[], ["--max-num-batched-tokens", "16"], ["--no-prefix-caching"]],
    ids=["default", "16-tokens-a-step", "no-prefix-caching"],
)
def test_eight_at_once_stream_together_and_equal_alone(smollm2_path: Path, flags: Sequence[str]) -> None:
    """Fault: one request at a time, or text that depends on the company."""
    with serving(smollm2_path, *flags) as running:
        client = running.client()
        # Long enough that the first is still talking when a busy machine has started the last.
        options = {"max_tokens": 120, "extra_body": {"ignore_eos": True}}
        alone = [ask(client, question, **options) for question in QUESTIONS]
        stamps: list[list[float]] = [[] for _ in QUESTIONS]
        peak = Peak(running)
        with ThreadPoolExecutor(len(QUESTIONS)) as pool, peak:
            numbers = range(len(QUESTIONS))
            together = list(pool.map(lambda i: ask_streamed(client, QUESTIONS[i], stamps[i], **options), numbers))
        assert together == alone
        assert peak.value == len(QUESTIONS)
        assert max(s[0] for s in stamps) < min(s[-1] for s in stamps), "all had begun before the first had ended"


class Peak:
    """Watches num_requests_running while a block runs."""

    def __init__(self, server: Server) -> None:
        self.value = 0.0
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.is_set():
            self.value = max(self.value, self._server.metric("num_requests_running"))

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def test_loss_equals_an_independent_float32_run(server: Server) -> None:
    """Fault: quantised kernels, rope or tokenizer subtly wrong; `echo` log-probabilities off by one."""
    expected = json.loads((FIXTURES / "nll.json").read_text())
    text = (FIXTURES / "english.txt").read_text()
    answer = subprocess.run(
        [sys.executable, "-m", "chairlift", "eval", str(FIXTURES / "english.txt")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    result = json.loads(answer.stdout.strip().splitlines()[-1])
    assert result["num_predicted"] == expected["num_predicted"] >= 2000
    assert abs(result["mean_nll"] - expected["mean_nll"]) < 0.01
    assert abs(echo_nll(server, text) - expected["mean_nll"]) < 0.01


def echo_nll(server: Server, text: str, window: int = 1024) -> float:
    """Mean loss through /v1/completions, by the fixture's protocol: windows without overlap."""
    client = server.client()

    def score(prompt: Any) -> list[float | None]:
        fields: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 0}
        answer = client.completions.create(model="smollm2", prompt=prompt, **fields)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.token_logprobs is not None
        return list(logprobs.token_logprobs)

    from chairlift.models.checkpoint import open_checkpoint

    file = open_checkpoint(Path(server.process.args[4]))  # type: ignore[index, arg-type]
    ids = file.tokenizer().encode(text, add_bos=False, parse_special=False)
    losses: list[float] = []
    for start in range(0, len(ids), window):
        scores = score(ids[start : start + window])
        assert scores[0] is None
        losses.extend(-value for value in scores[1:] if value is not None)
    return sum(losses) / len(losses)


def test_a_pool_too_small_for_four_changes_nothing(smollm2_path: Path) -> None:
    """Fault (CASES A1): KV shortage ends requests or changes their text."""
    with serving(smollm2_path, "--max-model-len", "512", "--kv-memory", "16MiB", "--max-num-seqs", "4") as running:
        client = running.client()
        options = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
        alone = [ask(client, question, **options) for question in QUESTIONS[:4]]
        assert running.metric("num_preemptions_total") == 0
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda q: ask(client, q, **options), QUESTIONS[:4]))
        assert together == alone
        assert running.metric("num_preemptions_total") > 0


def test_second_turn_reuses_the_first(server: Server) -> None:
    """Fault: generated tokens are not shared, so that every turn reads the whole chat again."""
    client = server.client()
    messages: Any = [{"role": "user", "content": "Tell me a story about a mountain railway, in a few sentences."}]
    first = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=80, temperature=0)
    assert first.usage is not None
    messages += [{"role": "assistant", "content": first.choices[0].message.content}]
    messages += [{"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(model="smollm2", messages=messages, max_tokens=8, temperature=0)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.prompt_tokens + first.usage.completion_tokens - 16


def test_sigterm_drains(smollm2_path: Path) -> None:
    """Fault: a restart cuts answers, or exits as if it had failed."""
    with serving(smollm2_path) as running:
        client = running.client()
        stamps: list[float] = []
        with ThreadPoolExecutor(1) as pool:
            options = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
            future = pool.submit(ask_streamed, client, QUESTIONS[2], stamps, **options)
            while not stamps:
                time.sleep(0.005)
            running.process.send_signal(signal.SIGTERM)
            assert len(future.result(60)) > 200
        assert running.process.wait(20) == 0


def test_idle_server_rests(server: Server) -> None:
    """Fault: threads that poll, or spin, while nobody asks anything.

    uvicorn wakes ten times a second. The share of a processor is bounded loosely: after a sleep, a virtual machine may
    take ten times as long for the same code (3 ms a wake were seen), and a thread that spins takes all of one.
    """
    ask(server.client(), QUESTIONS[0])
    time.sleep(0.5)  # what is measured is idleness: nothing to synchronise with
    before, wake_ups, start = server.cpu_seconds(), server.wake_ups(), time.monotonic()
    time.sleep(2.0)
    seconds = time.monotonic() - start
    assert (server.wake_ups() - wake_ups) / seconds < 30
    assert (server.cpu_seconds() - before) / seconds < 0.3
