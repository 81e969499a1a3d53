"""The engine thread: `step = schedule(); result = run(step); commit(step, result)`, for ever.

    any thread     submit ──> waiting queue ──┐                 ┌──> deliver(outputs), once a step
    engine thread                             └─ schedule, run, commit

Owns the thread, its lock and its life. The lock is held while requests move between queue and slots, so that other
threads can submit and look; never while text is made or kernels run. Knows no HTTP and no asyncio.

A failure ends the requests that it concerns. A step that fails is rolled back and tried request by request
(fault_isolation.py); a commit that fails ends its step's requests. When the scheduler's books do not agree after all,
the engine dies: every request gets an error, and no more are taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from chairlift.engine.admission import Admission, QueueView
from chairlift.engine.blocks import BlockPool
from chairlift.engine.delivery import Delivery
from chairlift.engine.fault_isolation import FaultIsolation
from chairlift.engine.finish import finish
from chairlift.engine.observer import EngineSnapshot, Observer
from chairlift.engine.predictor import StepTime
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.engine.runner import Runner
from chairlift.engine.scheduler import Scheduler, SchedulerConfig
from chairlift.engine.step import Step, StepResult
from chairlift.engine.telemetry import Telemetry
from chairlift.engine.wait_estimator import Speed
from chairlift.engine.warm_up import warm_up_request
from chairlift.engine.watchdog import Watchdog
from chairlift.errors import Draining, EngineError
from chairlift.kernels.backend import Model
from chairlift.plan import Plan

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "stalled", "draining", "dead"]

_CHECK_AFTER_IDLE_S = 1.0


@dataclass(slots=True)
class _Life:
    """What has happened to the engine. Each flag is set once, and read by any thread."""

    is_started: bool = False
    is_draining: bool = False
    is_stopping: bool = False
    is_dead: bool = False
    is_recovering: bool = False  # schedule() failed, and has not succeeded since; the engine thread's own
    has_expiry_failed: bool = False  # which is logged once


class Engine:
    """Runs requests to their end."""

    def __init__(
        self,
        plan: Plan,
        model: Model,
        *,
        deliver: Callable[[list[Output]], None],
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`deliver` is called with outputs, on the engine thread or on the one that calls `watch`. See Delivery."""
        self._plan = plan
        self._clock = clock
        self._lock = threading.Condition()  # notified when there is something to do
        self._runner = Runner(model, plan.block_size)
        pool = BlockPool(plan.num_blocks, plan.block_size)
        self._predictor = StepTime()
        config = _scheduler_config(plan)
        self._scheduler = Scheduler(config, pool, self._predictor)
        self._speed = Speed(self._predictor, config.num_slots, config.max_num_batched_tokens)
        self._admission = Admission(
            self._scheduler, self._speed, max_queue=plan.max_queue, max_wait_s=plan.max_queue_wait_s
        )
        self._faults = FaultIsolation()
        self._watchdog = Watchdog(plan.watchdog_s, clock)
        self._delivery = Delivery(deliver)
        self._telemetry = Telemetry(self._scheduler, pool, self._speed, clock, observers)
        self._thread = threading.Thread(target=self._main, name="chairlift-engine", daemon=True)
        self._cancelled: list[Request] = []  # to be ended before the next step
        self._life = _Life()

    # -- any thread ---------------------------------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Generates a few tokens on the calling thread, before `start`: pages in weights, teaches how fast it is."""
        for _ in range(2):
            request = warm_up_request(self._plan)
            self._scheduler.add(request)
            while (step := self._scheduler.schedule()) is not None:
                start_s = self._clock()
                self._scheduler.commit(step, self._timed_run(step))
                if step.num_rows == 1:
                    self._speed.add_gaps([self._clock() - start_s])
            if request.finish_reason is not FinishReason.LENGTH:
                raise EngineError(f"the warm-up request ended with {request.finish_reason}: {request.error}")

    def start(self) -> None:
        """Starts the engine thread; requests may be submitted from now on."""
        self._life.is_started = True
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests, all or none (the choices of one prompt come together).

        Raises RequestError, QueueFull, Draining, or EngineError when the engine is dead. It never waits for a step.
        """
        for request in requests:
            self._scheduler.validate(request)
        self._telemetry.arrived(requests)
        with self._lock:
            self._refuse_if_closed()
            self._admission.require_room([request.key_name for request in requests])
            if not self._scheduler.has_work:
                self._watchdog.progress()
            for request in requests:
                self._scheduler.add(request)
            self._lock.notify()

    def require_room(self, key_name: str) -> None:
        """Raises what `submit` would raise now for one more request of that key, whatever its prompt."""
        with self._lock:
            self._refuse_if_closed()
            self._admission.require_room([key_name])

    def cancel(self, requests: Iterable[Request]) -> None:
        """Ends requests before the next step, in whatever phase they are. Those that have ended are left alone."""
        with self._lock:
            self._cancelled.extend(requests)
            self._lock.notify()

    def drain(self) -> None:
        """Refuses new requests; those taken in go on to their end."""
        self._life.is_draining = True

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the step that is running. Requests that have not finished are cancelled."""
        with self._lock:
            self._life.is_stopping = True
            self._lock.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def watch(self) -> None:
        """Call it about once a second, from a thread other than the engine's.

        Ends requests that have waited too long, since a long step may keep the engine thread from it. In a stall it
        logs, once, what every thread is doing, and tells observers.
        """
        self._expire()
        if not self._scheduler.has_work or self.state != "stalled":
            return
        work = f"{self._scheduler.num_running} running and {self._scheduler.num_waiting} waiting"
        if self._watchdog.tell_once(work, self._thread):
            self._telemetry.stalled()

    @property
    def state(self) -> State:
        """Readiness, as /health shows it."""
        if self._life.is_dead:
            return "dead"
        if not self._life.is_started:
            return "loading"
        if self._scheduler.has_work and self._watchdog.is_over:
            return "stalled"
        return "draining" if self._life.is_draining else "ready"

    def snapshot(self) -> EngineSnapshot:
        """Where the engine stands now."""
        return self._telemetry.snapshot(self._watchdog.age_s)

    def queue(self, key_name: str = "") -> QueueView:
        """The waiting requests, and how long one more request of that key would wait."""
        with self._lock:
            return self._admission.view(key_name, self._clock())

    def _refuse_if_closed(self) -> None:
        if self._life.is_dead:
            raise EngineError("the engine has died; the server must be restarted")
        if self._life.is_draining or self._life.is_stopping:
            raise Draining("the server is shutting down")

    def _expire(self) -> None:
        if not self._scheduler.waiting:
            return
        try:
            with self._lock:
                outputs = self._admission.expire(self._clock())
        except Exception:
            # It has ended no request: they will run, if late.
            if not self._life.has_expiry_failed:
                log.error("ending requests that have waited too long failed: this is said once", exc_info=True)
            self._life.has_expiry_failed = True
            return
        self._send_ends(outputs)

    # -- the engine thread --------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._life.is_stopping:
                self._end_cancelled()
                self._expire()
                step = self._schedule()
                if step is None:
                    self._wait_for_work()
                else:
                    self._run(step)
            self._end_all(FinishReason.CANCELLED, None)
        except BaseException as error:
            log.critical("the engine thread died", exc_info=True)
            try:
                self._delivery.flush()  # before the state says dead: some answers ended well
            finally:
                self._life.is_dead = True
            self._end_all(FinishReason.ERROR, EngineError(f"the engine has died: {_name(error)}"))

    def _end_cancelled(self) -> None:
        if not self._cancelled:  # a request cancelled at this moment ends one step later
            return
        with self._lock:
            cancelled, self._cancelled = self._cancelled, []
            outputs = [output for r in cancelled for output in self._scheduler.end(r, FinishReason.CANCELLED)]
        self._delivery.flush()
        self._send_ends(outputs)

    def _schedule(self) -> Step | None:
        try:
            only = self._faults.next
            with self._lock:
                preempted = self._scheduler.admit(only)
            step = self._scheduler.make_step(preempted, only)
        except Exception as error:
            return self._recover(error)
        self._life.is_recovering = False
        return step

    def _recover(self, error: Exception) -> Step | None:
        """The scheduler itself failed: running requests end. When it fails again at once, the engine dies."""
        self._delivery.flush()
        if self._life.is_recovering:
            raise error
        self._life.is_recovering = True
        log.error("scheduling failed", exc_info=error)
        self._faults.clear()
        with self._lock:
            outputs = self._scheduler.recover(EngineError(f"scheduling failed: {_name(error)}"))
        try:
            self._check()
            return self._schedule()
        except BaseException:
            self._life.is_dead = True  # before the last answers go out: a drain that waits for them must see it
            raise
        finally:
            self._send_ends(outputs)

    def _wait_for_work(self) -> None:
        self._delivery.flush()
        self._telemetry.idle()
        with self._lock:
            if self._lock.wait_for(self._is_called, _CHECK_AFTER_IDLE_S):
                return
            self._scheduler.check()
            self._lock.wait_for(self._is_called)

    def _is_called(self) -> bool:
        return bool(self._scheduler.has_work or self._cancelled or self._life.is_stopping)

    def _run(self, step: Step) -> None:
        start = self._telemetry.step_started(step)
        try:
            result = self._timed_run(step)
        except Exception as error:
            self._roll_back(step, error)
            return
        end_s = self._watchdog.progress()
        outputs = self._commit(step, result)
        self._telemetry.step_done(step, start, end_s, result.seconds)
        self._telemetry.finished(outputs)
        self._delivery.hold(outputs)

    def _timed_run(self, step: Step) -> StepResult:
        """Runs a step; what the step before brought goes out right before the kernels start."""
        start_s = self._clock()
        result = self._runner.run(step, self._delivery.flush)
        self._predictor.observe(step.work, self._clock() - start_s)
        return result

    def _roll_back(self, step: Step, error: Exception) -> None:
        """A step failed. Its requests start over, as if nothing had happened, except one that fails alone."""
        self._delivery.flush()  # it may have failed before that
        log.error("a step of %d rows for %d requests failed", step.num_rows, len(step.chunks), exc_info=True)
        alone, together = "it failed again by itself", "its step failed time and again, with no single request to blame"
        what = together if self._faults.next is None else alone
        blamed = self._faults.failed(step)
        self._telemetry.step_failed()
        self._abort(step, blamed, EngineError(f"the request could not be computed: {what}: {_name(error)}"))

    def _commit(self, step: Step, result: StepResult) -> list[Output]:
        """Applies a step's result. If that fails, the step's requests end, because their outputs are lost."""
        unfinished = [request for request, _, _ in step.chunks if request.finish_reason is None]
        try:
            outputs = self._scheduler.commit(step, result)
        except Exception as error:
            log.error("taking in the result of a step failed", exc_info=True)
            self._telemetry.step_failed()
            self._abort(step, unfinished, EngineError(f"the result of the step could not be taken in: {_name(error)}"))
            self._check()
            outputs = []
        self._faults.passed(step)
        return outputs

    def _abort(self, step: Step, end: Sequence[Request], error: EngineError) -> None:
        with self._lock:
            outputs = self._scheduler.abort(step, end=end, error=error)
        self._send_ends(outputs)

    def _check(self) -> None:
        with self._lock:
            self._scheduler.check()

    def _end_all(self, reason: FinishReason, error: EngineError | None) -> None:
        self._delivery.flush()
        with self._lock:
            unfinished = [request for request in self._scheduler.requests if not request.is_finished]
            try:
                outputs = self._scheduler.end_all(reason, error)
            except Exception:
                # Its books are broken. What counts now is that no client waits for ever.
                log.error("ending all requests failed", exc_info=True)
                outputs = [finish(request, reason, error) for request in unfinished]
        self._send_ends(outputs)

    def _send_ends(self, outputs: list[Output]) -> None:
        """Delivers outputs that did not come from a step, most of them last events."""
        self._telemetry.finished(outputs)
        self._delivery.send(outputs)


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _scheduler_config(plan: Plan) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        max_gap_s=plan.max_gap_s,
        prefix_caching=plan.prefix_caching,
        batching=plan.batching,
        max_running_per_key=plan.max_running_per_key,
    )
