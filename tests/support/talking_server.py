"""A server on a real socket whose model answers as its prompt asks: other people's clients are tested against it.

    with talking() as url: ...
    python -m support.talking_server PYTHON CLIENT...   runs scripts of tests/clients against it, with that interpreter

A prompt with "break" fails after three tokens, and one with "endless" never ends. Any other is answered with TEXT.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import uvicorn

from chairlift.config import Config
from chairlift.kernels.ops import LogitResult, StepArrays
from chairlift.server import listener
from chairlift.server.app import create_app
from chairlift.server.process import uvicorn_config
from support.in_process_server import fake_loaded
from support.paths import TESTS
from support.scripted_model import EOS, Script, ScriptedModel

TEXT = " Hé🌍, “there”\n"
"""Begins with a space, and has characters of several tokens."""
CLIENTS = TESTS / "clients"


def _broken() -> int:
    raise ValueError("broken kernel")


class Talker(ScriptedModel):
    """Chooses its script by the first of its words that the prompt has."""

    _SCRIPTS: tuple[tuple[bytes, Script], ...] = (
        (b"break", [*b"abc", _broken]),
        (b"endless", list(b"ha" * 1000)),
        (b"", [*TEXT.encode(), EOS]),
    )

    def __init__(self, num_blocks: int, vocab_bytes: Sequence[bytes]) -> None:
        super().__init__(num_blocks)
        self._vocab_bytes = vocab_bytes

    def _reduce(self, step: StepArrays, result: LogitResult, i: int, visible: Sequence[int]) -> None:
        prompt = b"".join(self._vocab_bytes[token] for token in visible)
        script = next(script for word, script in self._SCRIPTS if word in prompt)
        self.scripts = [script] * 8
        super()._reduce(step, result, i, visible)


@contextmanager
def talking(config: Config | None = None) -> Iterator[str]:
    """The address of a server that runs in a thread while the block runs."""
    loaded = fake_loaded()
    loaded = replace(loaded, model=Talker(loaded.plan.num_blocks, loaded.tokenizer.vocab_bytes))
    app = create_app(lambda: loaded, config or Config(body_limit_bytes=20_000))
    server = uvicorn.Server(uvicorn_config(app))
    with listener.bind("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def run_client(python: str, name: str, url: str) -> None:
    """Runs one script of tests/clients. Raises CalledProcessError when it fails."""
    subprocess.run([python, str(CLIENTS / f"{name}.py"), url], check=True, timeout=120)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # the clients provoke failures
    with talking() as address:
        for client in sys.argv[2:]:
            run_client(sys.argv[1], client, address)
            print(f"{client}: passed")
