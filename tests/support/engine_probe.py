"""What a test wants to know of a running engine, and how it holds one still."""

from __future__ import annotations

import threading

from chairlift.engine.engine import Engine
from chairlift.kernels.ops import StepArrays


class Gate:
    """Lets a test hold the model before a step, and say when it may go on."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.held = threading.Event()

    def __call__(self, step: StepArrays) -> None:
        if not self.open.is_set():
            self.held.set()
            assert self.open.wait(20)

    def close(self) -> None:
        self.held.clear()
        self.open.clear()


def state_of(engine: Engine) -> str:
    """A call, so that a type checker does not take the state for a constant."""
    return engine.state


def is_idle(engine: Engine) -> bool:
    """Whether no request runs or waits, and no output is held. The last delivery may be on its way still."""
    return not engine._scheduler.has_work and not engine._delivery._held
