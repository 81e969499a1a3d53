"""Outputs on their way out of the engine: a step's are held until the kernels of the next one are about to run.

The reader of outputs needs the interpreter. Woken before the kernels run, it would only delay the engine.
"""

from __future__ import annotations

from collections.abc import Callable

from chairlift.engine.request import Output


class Delivery:
    """Holds the outputs of one step at most. The engine thread calls it; `send` is safe from any thread."""

    def __init__(self, deliver: Callable[[list[Output]], None]) -> None:
        """`deliver` puts outputs into a queue. It must not fail and must not block."""
        self._deliver = deliver
        self._held: list[Output] = []

    def hold(self, outputs: list[Output]) -> None:
        """Keeps a step's outputs until `flush`, which must have been called since the last step."""
        assert not self._held, "outputs of the step before were not flushed"
        self._held = outputs

    def flush(self) -> None:
        """Delivers what is held. Before a request is ended from outside, so that its end comes after its text."""
        held, self._held = self._held, []
        self.send(held)

    def send(self, outputs: list[Output]) -> None:
        """Delivers outputs at once."""
        if outputs:
            self._deliver(outputs)
