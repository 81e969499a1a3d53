"""What the endpoints share: the model, its engine, and the state of the server.

    load ──> warm up ──> ready ──(SIGTERM)──> draining ──> end
      └───────┴───────────┴──────(failure)──> dead ─────────┘

Lives on the event loop. Loading and warming up happen in a thread, so that /live and /health answer meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from starlette.types import Receive, Scope

from chairlift.boot import Loaded
from chairlift.config import Config
from chairlift.engine.engine import Engine, State
from chairlift.engine.observer import EngineSnapshot
from chairlift.engine.request import Request
from chairlift.errors import Draining, EngineError, QueueWait, Unavailable
from chairlift.server.dispatch import Dispatch, OutputCollector
from chairlift.server.http_errors import ClientGone, Interrupted, Loading
from chairlift.server.log import RequestLog, WorkLog
from chairlift.server.metrics import Metrics
from chairlift.server.prepare import PreparedRequest, Preparer
from chairlift.server.queue_status import QueueStatus
from chairlift.server.sse import Pace

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PREPARING = 64
"""Most requests whose bodies are parsed or tokenised at once. Bounds the memory that they hold."""
_WORKERS = 2
_WATCH_S = 1.0
_SUMMARY_S = 10.0
_LAST_WORDS_S = 1.0


class Serving:
    """A loaded model and what works on it. Exists from the moment that the model is loaded."""

    def __init__(self, loaded: Loaded, config: Config, dispatch: Dispatch) -> None:
        self.loaded = loaded
        self.preparer = Preparer(loaded, config)
        self.metrics = Metrics(loaded.plan)
        self.work_log = WorkLog()
        self.engine: Engine = loaded.engine(dispatch.deliver, [self.metrics, RequestLog(), self.work_log])
        self.metrics.watch(self.engine.snapshot)
        self.queue_status = QueueStatus(self.engine, loaded.plan, time.monotonic)


class Service:
    """The server's state. Calls `on_ready` once the model is warm, and `on_end` once the process should end."""

    def __init__(self, load: Callable[[], Loaded], config: Config, pace: Pace) -> None:
        self.config = config
        self.pace = pace
        self.failure: BaseException | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.on_ready: Callable[[Loaded], None] = lambda _: None
        self.started_s = time.time()
        self._load = load
        self._dispatch = Dispatch()
        self._serving: Serving | None = None  # from loaded on
        self.settled = asyncio.Event()  # set once the server is ready or has failed
        self._draining = False
        self._preparing = asyncio.Semaphore(MAX_PREPARING)
        self._num_answering = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="chairlift-prepare")
        self._tasks: set[asyncio.Task[None]] = set()

    # -- for endpoints ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """What /health tells."""
        engine_state = "loading" if self._serving is None else self._serving.engine.state
        if self.failure is not None or engine_state == "dead":
            return "dead"
        if self._draining:
            return "draining"
        return engine_state if self.settled.is_set() else "loading"

    @property
    def serving(self) -> Serving:
        """The loaded model. Raises Loading."""
        if self._serving is None:
            raise Loading
        return self._serving

    def snapshot(self) -> EngineSnapshot | None:
        """The engine's numbers; None while loading."""
        return None if self._serving is None else self._serving.engine.snapshot()

    def require_open(self) -> Serving:
        """The loaded model, if it takes requests now. Raises Unavailable or one of its kinds."""
        state = self.state
        if state == "dead":
            raise Unavailable("the engine has died; the server must be restarted")
        if state == "draining":
            raise Draining("the server is shutting down", retry_after_s=5)
        if state == "loading":
            raise Loading
        return self.serving

    def refused(self, code: str) -> None:
        """Counts a request that was not answered, by the code of its error."""
        if self._serving is not None and code != QueueWait.code:  # the engine has counted those
            self._serving.metrics.refused(code)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Counts one request as being answered. Draining waits for it."""
        self._num_answering += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            if self._num_answering == 0:
                self._quiet.set()

    async def prepare(self, make: Callable[[bytes, str], PreparedRequest], body: bytes, id: str) -> PreparedRequest:
        """Runs a Preparer's method in a worker thread."""
        if self._preparing.locked():
            raise Unavailable("too many requests are being read at once")
        async with self._preparing:
            try:
                return await asyncio.get_running_loop().run_in_executor(self._workers, make, body, id)
            except asyncio.CancelledError:
                self.serving.metrics.cancelled("preparing")
                raise

    @contextlib.contextmanager
    def submitted(self, requests: Sequence[Request]) -> Iterator[OutputCollector]:
        """Has the engine work on these requests while the block runs. Raises what `Engine.submit` raises."""
        engine = self.serving.engine
        with self._dispatch.collecting(requests) as collector:
            engine.submit(requests)
            try:
                yield collector
            finally:
                unfinished = collector.unfinished
                if unfinished:
                    engine.cancel(unfinished)

    # -- start and end ------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Loads the model, serves while the block runs, and ends the engine."""
        self._dispatch.open(asyncio.get_running_loop())
        self._spawn(self._start())
        self._spawn(self._watch())
        try:
            yield
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self.close()

    def close(self) -> None:
        """Ends the engine's thread and the workers. May be called again."""
        if self._serving is not None:
            self._serving.engine.stop()
        self._workers.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Takes no more requests. Calls `on_end` when those at hand are finished, or `drain_seconds` have passed."""
        if not self._draining:
            self._draining = True
            self._spawn(self._drain())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self) -> None:
        try:
            serving = await _in_thread(lambda: Serving(self._load(), self.config, self._dispatch))
            self._serving = serving
            start = time.perf_counter()
            await _in_thread(serving.engine.warm_up)
            serving.loaded.timings["warm-up"] = time.perf_counter() - start
            serving.engine.start()
            self.on_ready(serving.loaded)
        except Exception as error:
            self._fail(error)
        self.settled.set()

    async def _drain(self) -> None:
        log.info("draining: %d requests to finish", self._num_answering)
        if self._serving is not None:
            self._serving.engine.drain()
        if not await self._quiet_within(self.config.drain_seconds):
            log.warning("ending %d requests: they did not finish in time", self._num_answering)
            self._dispatch.fail_all(Interrupted("the server is shutting down and ended this request"))
            await self._quiet_within(_LAST_WORDS_S)
        self._notice_death()
        if self.failure is None:
            self.on_end()

    async def _quiet_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    async def _watch(self) -> None:
        """Logs changes of state and the work done, and notices the death of the engine."""
        state, since_s = self.state, time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_S)
            if self.state != state:
                log.log(logging.INFO if self.state != "stalled" else logging.ERROR, "%s -> %s", state, self.state)
                state = self.state
            self._notice_death()
            if self._serving is None:
                continue
            now_s = time.monotonic()
            is_due = now_s - since_s >= _SUMMARY_S
            try:
                self._serving.engine.watch()
                if is_due:
                    self._serving.work_log.write(self._serving.engine.snapshot(), now_s - since_s)
            except Exception:
                log.exception("telling the log of the work done failed")  # and a later death must be noticed
            since_s = now_s if is_due else since_s

    def _notice_death(self) -> None:
        if self.failure is None and self.state == "dead":
            self._fail(EngineError("the engine has died"))

    def _fail(self, error: Exception) -> None:
        self.failure = error
        self._dispatch.fail_all(EngineError(f"the server has failed: {type(error).__name__}"))
        self.on_end()


def service_of(scope: Scope) -> Service:
    """The service of the application that handles this request."""
    found: Service = scope["app"].state.service
    return found


async def until_gone(work: Coroutine[None, None, None], receive: Receive) -> None:
    """Runs the work of one request. Cancels it as soon as its client is gone, and then raises ClientGone.

    The work may wait for anything: a place in the queue, a thread, the engine or a slow network.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = task.done()
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
    if not is_done:
        raise ClientGone
    try:
        task.result()
    finally:
        # An error's traceback refers to this frame, and the task to the error. A frame that refers to the task closes
        # a cycle, which would keep the request's body until the garbage collector looks.
        del task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _in_thread(function: Callable[[], T]) -> T:
    """Runs a function in a daemon thread, which does not keep the process from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the thread runs on when nothing waits for it any more

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="chairlift-start", daemon=True).start()
    return await asyncio.wrap_future(future)
