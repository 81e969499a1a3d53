"""A model that says what a test wrote, behind the real engine and the real application.

with Scripted() as server:
    server.say([*b"Hello", EOS])              one list of tokens per choice
    server.stream(CHAT, body), server.whole(CHAT, body)

A script may hold a function in a token's place, which the engine thread calls: it may wait, or raise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from chairlift.config import Config
from chairlift.kernels.ops import LogitResult, StepArrays
from chairlift.server.app import create_app
from support.fake_model import FakeModel
from support.in_process_server import Call, fake_loaded, serving

EOS = 270
"""`<|im_end|>` of the tiny vocabulary, whose tokens below 256 are the bytes."""
T = TypeVar("T")
Script = Sequence[int | Callable[[], int]]


def logprob_of(token: int) -> float:
    """The log-probability that the model gives to a token it says, wherever that stands; exact in 32 bits."""
    return -(token % 16 + 1) / 16


class ScriptedModel(FakeModel):
    """Says its scripts, one per choice, and then end tokens."""

    def __init__(self, num_blocks: int, before_run: Callable[[StepArrays], None] | None = None) -> None:
        super().__init__(num_blocks, before_run=before_run)
        self.scripts: Sequence[Script] = ()

    def _reduce(self, step: StepArrays, result: LogitResult, i: int, visible: Sequence[int]) -> None:
        record = step.sample[i]
        token = int(record["target"])
        if token < 0:
            script, index = self.scripts[record["choice"]] if self.scripts else (), int(record["index"])
            said = script[index] if index < len(script) else EOS
            token = said() if callable(said) else said
        num_top = max(0, int(record["num_top"]))
        likeliest = [token, *(other for other in range(256) if other != token)][:num_top]
        result.tokens[i], result.logprobs[i] = token, logprob_of(token)
        result.top_ids[i, :num_top] = likeliest
        result.top_logprobs[i, :num_top] = [logprob_of(token), *range(-2, -num_top - 1, -1)][:num_top]


class Scripted:
    """The application on a scripted model, for as long as the block lasts.

    In lockstep no step begins before all that the last one made has been sent, so that each token has its own chunk.
    """

    def __init__(self, *, config: Config | None = None, lockstep: bool = False, **loaded: Any) -> None:
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._config = config or Config()
        self.loaded = fake_loaded(**loaded)
        self.model = ScriptedModel(self.loaded.plan.num_blocks, self._settle if lockstep else None)
        self.loaded = replace(self.loaded, model=self.model)

    def __enter__(self) -> Scripted:
        self.app = create_app(lambda: self.loaded, self._config)
        self.http = self.run(self._stack.enter_async_context(serving(self.app)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.run(self._stack.aclose())
        self._runner.close()

    def _settle(self, _: StepArrays) -> None:
        asyncio.run_coroutine_threadsafe(_rounds(), self._runner.get_loop()).result(20)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs something on the server's loop."""
        return self._runner.run(work)

    def say(self, *scripts: Script) -> None:
        """What the choices of the next requests will be."""
        self.model.scripts = scripts

    def call(self, path: str, body: Any, **headers: str) -> Call:
        """One request and its whole response."""
        return self.run(self._call(path, body, headers))

    async def _call(self, path: str, body: Any, headers: dict[str, str]) -> Call:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await Call(self.app, path, body, headers=named).done()

    def whole(self, path: str, body: dict[str, Any]) -> Any:
        """The answer in one piece."""
        call = self.call(path, body)
        assert call.status == 200, call.body
        return call.json

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of the answer in pieces, without the last."""
        call = self.call(path, {**body, "stream": True})
        assert call.status == 200, call.body
        *events, last = call.events
        assert last == "[DONE]"
        return events


async def _rounds() -> None:
    """Lets everything that is ready run, and what that makes ready."""
    for _ in range(10):
        await asyncio.sleep(0)
