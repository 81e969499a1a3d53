"""An engine without a server, for one caller at a time: `generate`, `chat`, `info` and `eval` run on it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from types import TracebackType

from chairlift.boot import Loaded
from chairlift.engine.request import Output
from chairlift.engine.sampling_params import SamplingParams


class Session:
    """The engine of one loaded model, running for as long as the `with` block lasts."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._outputs: queue.SimpleQueue[list[Output]] = queue.SimpleQueue()
        self._engine = loaded.engine(self._outputs.put)
        self._num_requests = 0

    def __enter__(self) -> Session:
        start_s = time.perf_counter()
        self._engine.warm_up()
        self._loaded.timings["warm-up"] = time.perf_counter() - start_s
        self._engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.stop()

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[Output]:
        """Runs one request to its end. Leaving the iterator early cancels it. Raises the error that ended the request.

        Outputs of an earlier request that was left early are passed over.
        """
        self._num_requests += 1
        request = self._loaded.request(str(self._num_requests), prompt, params, stream=True)
        self._engine.submit([request])
        try:
            while True:
                for output in self._outputs.get():
                    if output.request is not request:
                        continue
                    if output.error is not None:
                        raise output.error
                    yield output
                    if output.finish_reason is not None:
                        return
        finally:
            self._engine.cancel([request])
