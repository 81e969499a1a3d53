"""The engine thread: `step = schedule(); result = run(step); commit(step, result)`, for ever.

Owns the scheduler, the runner, the clock, and the lock on the line. Other threads only submit, cancel and look; a
step's outputs leave in one call of `deliver`. Knows no HTTP and no asyncio.

    any thread     submit ──> line ──┐                 ┌──> deliver(outputs), once a step
    engine thread                    └─ schedule, run, commit

What fails ends whom it concerns: a step that fails is undone and tried request by request (suspects.py), a commit that
fails ends its step's requests, observers are shielded. When the scheduler's books do not agree after all, it dies:
everybody gets an error and nothing more is taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from chairlift.engine.blocks import BlockPool
from chairlift.engine.door import Door, QueueView
from chairlift.engine.ending import finish
from chairlift.engine.forecast import Speed
from chairlift.engine.observer import Observer, Observers, StepStats
from chairlift.engine.predictor import StepTime
from chairlift.engine.preemptions import Preemptions
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.engine.runner import Runner
from chairlift.engine.scheduler import Limits, Scheduler
from chairlift.engine.step import Step, StepResult
from chairlift.engine.suspects import Suspects
from chairlift.engine.warm_up import warm_up_request
from chairlift.engine.watchdog import Watchdog
from chairlift.errors import Draining, EngineError
from chairlift.kernels.backend import Model
from chairlift.plan import Plan

log = logging.getLogger(__name__)

State = Literal["loading", "ready", "stalled", "draining", "dead"]

_CHECK_AFTER_IDLE_S = 1.0


class _TextLost(BaseException):
    """Handing out failed beyond repair. Not an Exception: no step is to blame, and the engine cannot go on."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Where the engine stands; plain numbers that any thread may read."""

    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_blocks: int
    num_steps: int
    num_preemptions: int
    last_step_age_s: float | None  # None before the first step


class Engine:
    """Runs requests to their end.

    `deliver` is called on the engine thread, once a step, with all that it brought, and by `watch`. When it raises, it
    must have taken nothing: it is called again, with each output by itself.
    """

    def __init__(
        self,
        plan: Plan,
        model: Model,
        *,
        deliver: Callable[[list[Output]], None],
        observers: Sequence[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan = plan
        self._deliver = deliver
        self._observer = Observers(*observers, on_error=_log_observer)
        self._clock = clock
        self._runner = Runner(model, plan.block_size)
        self._pool = BlockPool(plan.num_blocks, plan.block_size)
        self._predictor = StepTime()
        limits = _limits(plan)
        self._wake = threading.Condition()
        self._scheduler = Scheduler(limits, self._pool, self._predictor, self._wake)
        self._speed = Speed(self._predictor, limits.num_slots, limits.max_num_batched_tokens)
        self._door = Door(plan, self._scheduler, self._speed)
        self._suspects = Suspects()
        self._watchdog = Watchdog(plan.watchdog_s, clock)
        self._preemptions = Preemptions()
        self._thread = threading.Thread(target=self._main, name="chairlift-engine", daemon=True)
        # Below: written under _wake by other threads, or by the engine thread alone and read by others as they are.
        self._cancelled: list[Request] = []
        self._stopping = False
        self._draining = False
        self._ready = False
        self._dead = False
        self._num_steps = 0
        self._has_recovered = False  # since a schedule() last succeeded
        self._has_door_failed = False
        self._held: list[Output] = []  # of the last step; handed out when the kernels of the next one are about to run
        self._step_end_s: float | None = None  # end of the step before, while there was no wait for work

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
                    self._speed.saw_next_tokens([self._clock() - start_s])
            if request.finish_reason is not FinishReason.LENGTH:
                raise EngineError(f"the warm-up request ended with {request.finish_reason}: {request.error}")

    def start(self) -> None:
        """Starts the engine thread; requests may be submitted from now on."""
        self._ready = True
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests, all or none (the choices of one request come together).

        Raises RequestError, QueueFull, Draining or EngineError (when the engine is dead) at once.
        """
        for request in requests:
            self._scheduler.validate(request)
            request.timing.arrival_s = self._clock()
        with self._wake:
            self._refuse_if_closed()
            self._door.require_room([request.key_name for request in requests])
            if not self._scheduler.has_work:
                self._watchdog.progress()
            for request in requests:
                self._scheduler.add(request)
            self._wake.notify()

    def require_room(self, key_name: str) -> None:
        """Raises what `submit` would raise now for one more request of that key, whatever its prompt."""
        with self._wake:
            self._refuse_if_closed()
            self._door.require_room([key_name])

    def cancel(self, requests: Iterable[Request]) -> None:
        """Ends requests before the next step, in whatever phase they are; those that have ended already are left."""
        with self._wake:
            self._cancelled.extend(requests)
            self._wake.notify()

    def drain(self) -> None:
        """Refuses new requests; those taken in go on to their end."""
        self._draining = True

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after the step it is in. What has not finished is cancelled."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def state(self) -> State:
        """Readiness: what /health tells."""
        if self._dead:
            return "dead"
        if not self._ready:
            return "loading"
        if self._scheduler.has_work and self._watchdog.is_over:
            return "stalled"
        return "draining" if self._draining else "ready"

    def watch(self) -> None:
        """Call it about once a second.

        Gives up who has waited for too long, since a long step may keep the engine from it. In a stall it logs, once,
        what every thread is doing, and tells observers.
        """
        self._give_up_late()
        if not self._scheduler.has_work or self.state != "stalled":
            return
        work = f"{self._scheduler.num_running} running and {self._scheduler.num_waiting} waiting"
        if self._watchdog.tell_once(work, self._thread):
            self._observer.stalled()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running or waiting; the last outputs may be on their way still."""
        return not self._scheduler.has_work and not self._held

    def snapshot(self) -> EngineSnapshot:
        """Where the engine stands now."""
        return EngineSnapshot(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_used_blocks=self._pool.num_held,
            num_blocks=self._pool.num_blocks,
            num_steps=self._num_steps,
            num_preemptions=self._preemptions.num,
            last_step_age_s=self._watchdog.age_s if self._num_steps else None,
        )

    def queue(self, key_name: str = "") -> QueueView:
        """The line as it stands, and what one more request of that key would have to expect."""
        with self._wake:
            return self._door.view(key_name, self._clock())

    def _refuse_if_closed(self) -> None:
        if self._dead:
            raise EngineError("the engine has died; the server must be restarted")
        if self._draining or self._stopping:
            raise Draining("the server is shutting down")

    def _give_up_late(self) -> None:
        if not self._scheduler.line:
            return
        try:
            with self._wake:
                outputs = self._door.give_up(self._clock())
        except Exception:
            # It has taken nobody out of the line; they will run, if late.
            if not self._has_door_failed:
                log.error("giving up who waits for too long failed: this is said once", exc_info=True)
            self._has_door_failed = True
            return
        self._send(outputs)

    # -- the engine thread --------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._take_cancelled()
                self._give_up_late()
                step = self._schedule()
                if step is None:
                    self._wait_for_work()
                else:
                    self._run(step)
            self._hand_out_at_last()
            self._end_all(FinishReason.CANCELLED, None)
        except BaseException as error:
            log.critical("the engine thread died", exc_info=True)
            self._hand_out_at_last()  # before anybody sees that it is dead: some answers ended well
            self._dead = True
            self._end_all(FinishReason.ERROR, EngineError(f"the engine has died: {_name(error)}"))

    def _take_cancelled(self) -> None:
        if not self._cancelled:  # what comes this very moment is taken before the step after, as if it came later
            return
        with self._wake:
            cancelled, self._cancelled = self._cancelled, []
            outputs = [output for request in cancelled for output in self._scheduler.cancel(request)]
        self._hand_out()  # the end of a request comes last
        self._send(outputs)

    def _schedule(self) -> Step | None:
        """The next step. When the scheduler itself fails, what runs ends; a second time in a row, the engine dies."""
        try:
            step = self._scheduler.schedule(self._suspects.next)
        except Exception as error:
            self._hand_out()
            if self._has_recovered:
                raise
            self._has_recovered = True
            log.error("scheduling failed", exc_info=True)
            self._suspects.clear()
            outputs = self._scheduler.recover(EngineError(f"scheduling failed: {_name(error)}"))
            try:
                self._check()
                return self._schedule()
            except BaseException:
                self._dead = True  # before the last answers go out: a drain that waits for them must see it
                raise
            finally:
                self._send(outputs)
        self._has_recovered = False
        return step

    def _wait_for_work(self) -> None:
        self._hand_out()
        self._step_end_s = None
        self._preemptions.warn(self._clock())
        with self._wake:
            if self._wake.wait_for(self._is_called, _CHECK_AFTER_IDLE_S):
                return
            self._scheduler.check()
            self._wake.wait_for(self._is_called)

    def _is_called(self) -> bool:
        return bool(self._scheduler.has_work or self._cancelled or self._stopping)

    def _run(self, step: Step) -> None:
        start_s, last_end_s = self._clock(), self._step_end_s
        self._note_scheduled(step, start_s)
        try:
            result = self._timed_run(step)
        except Exception as error:
            self._step_end_s = None
            self._undo(step, error)
            return
        end_s = self._step_end_s = self._watchdog.progress()
        seconds = end_s - start_s
        in_kernels_s = seconds if result.seconds is None else result.seconds
        overhead_s = 0.0 if last_end_s is None else end_s - last_end_s - in_kernels_s
        before = [len(piece.request.output) for piece in step.pieces]
        outputs = self._commit(step, result)
        self._note_tokens(step, before, end_s)
        self._num_steps += 1
        self._observer.step_done(self._stats(step, seconds, overhead_s))
        self._note_ends(outputs)
        self._held = outputs

    def _undo(self, step: Step, error: Exception) -> None:
        """A step failed. Whoever is to blame ends; the others start over, as if nothing had been."""
        self._hand_out()  # perhaps it failed before that
        log.error("a step of %d rows for %d requests failed", step.num_rows, len(step.pieces), exc_info=True)
        is_trial = self._suspects.next is not None
        blamed = self._suspects.failed(step)
        what = (
            "it failed again by itself"
            if is_trial
            else "its step failed time and again, with no single request to blame"
        )
        failure = EngineError(f"the request could not be computed: {what}: {_name(error)}")
        self._observer.step_failed()
        self._send(self._scheduler.abort(step, end=blamed, error=failure))

    def _commit(self, step: Step, result: StepResult) -> list[Output]:
        """Takes in a step's result. When that fails, its requests end: what they were to be sent is lost."""
        unfinished = [request for request, _, _ in step.pieces if request.finish_reason is None]
        try:
            outputs = self._scheduler.commit(step, result)
        except Exception as error:
            log.error("taking in the result of a step failed", exc_info=True)
            failure = EngineError(f"the result of the step could not be taken in: {_name(error)}")
            self._observer.step_failed()
            self._send(self._scheduler.abort(step, end=unfinished, error=failure))
            self._check()
            outputs = []
        self._suspects.passed(step)
        return outputs

    def _check(self) -> None:
        with self._wake:
            self._scheduler.check()

    def _timed_run(self, step: Step) -> StepResult:
        start_s = self._clock()
        result = self._runner.run(step, self._hand_out)
        self._predictor.observe(step.work, self._clock() - start_s)
        return result

    def _note_scheduled(self, step: Step, now_s: float) -> None:
        for request in step.preempted:
            self._preemptions.add(request)
            self._observer.preempted(request)
        self._preemptions.warn(now_s)
        for piece in step.pieces:
            if piece.request.timing.scheduled_s == 0.0:
                piece.request.timing.scheduled_s = now_s
                self._observer.admitted(piece.request)

    def _note_tokens(self, step: Step, before: Sequence[int], now_s: float) -> None:
        gaps: list[tuple[Request, float]] = []
        for (request, _, _), num_before in zip(step.pieces, before, strict=True):
            if len(request.output) == num_before:
                continue
            timing = request.timing
            if timing.first_token_s == 0.0:
                timing.first_token_s = now_s
                self._speed.saw_first_token(request)
                self._observer.first_token(request)
            else:
                gaps.append((request, now_s - timing.last_token_s))
            timing.last_token_s = now_s
        self._speed.saw_next_tokens([gap_s for _, gap_s in gaps])
        self._observer.next_tokens(gaps)

    def _stats(self, step: Step, seconds: float, overhead_s: float) -> StepStats:
        in_prompt = [p for p in step.pieces if p.start < p.request.num_prompt]
        return StepStats(
            seconds=seconds,
            overhead_s=overhead_s,
            num_rows=step.work.rows,
            num_prompt_tokens=sum(min(p.stop, p.request.num_prompt) - p.start for p in in_prompt),
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_used_blocks=self._pool.num_held,
            num_blocks=self._pool.num_blocks,
            predicted_s=step.predicted_s,
        )

    def _hand_out(self) -> None:
        """Delivers what the last step brought.

        Who gets it cannot use the interpreter before the kernels run; woken earlier, it would only be in the way.
        """
        held, self._held = self._held, []
        try:
            self._deliver_all(held)
        except Exception as error:
            raise _TextLost from error

    def _hand_out_at_last(self) -> None:
        """As the engine ends: what cannot be delivered does not keep others from their end."""
        try:
            self._hand_out()
        except _TextLost:
            log.error("the last outputs could not be handed out", exc_info=True)

    def _send(self, outputs: list[Output]) -> None:
        self._note_ends(outputs)
        self._deliver_all(outputs)

    def _note_ends(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._note_finished(output.request)

    def _deliver_all(self, outputs: list[Output]) -> None:
        if not outputs:
            return
        try:
            self._deliver(outputs)
        except Exception:
            log.error("delivering %d outputs failed: each is tried by itself", len(outputs), exc_info=True)
            for output in outputs:
                self._deliver_one(output)

    def _deliver_one(self, output: Output) -> None:
        """Delivers one output; ends its request when that fails, since its reader would miss text."""
        try:
            self._deliver([output])
        except Exception as error:
            log.error("request %s: an output could not be delivered", output.request.id, exc_info=True)
            failure = EngineError(f"a part of the answer could not be delivered: {_name(error)}")
            if output.finish_reason is None:
                with self._wake:
                    ended = self._scheduler.cancel(output.request, failure)
                self._send(ended)
            elif output.error is None:
                # The end itself was lost: the reader must hear of one.
                self._deliver_one(finish(output.request, FinishReason.ERROR, failure))

    def _note_finished(self, request: Request) -> None:
        request.timing.finished_s = self._clock()
        self._speed.saw_end(request)
        self._observer.finished(request)

    def _end_all(self, reason: FinishReason, error: EngineError | None) -> None:
        with self._wake:
            unfinished = [request for request in self._scheduler.requests if not request.is_finished]
            try:
                outputs = self._scheduler.end_all(reason, error)
            except Exception:
                # Its books are broken; what counts now is that nobody waits for ever.
                log.error("ending all requests failed", exc_info=True)
                outputs = [finish(request, reason, error) for request in unfinished]
        self._send(outputs)


def _name(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _log_observer(observer: Observer, error: Exception) -> None:
    log.error("%s failed, and goes on unless it fails again: this is said once", observer, exc_info=error)


def _limits(plan: Plan) -> Limits:
    return Limits(
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        max_gap_s=plan.max_gap_s,
        prefix_caching=plan.prefix_caching,
        batching=plan.batching,
        max_running_per_key=plan.max_running_per_key,
    )
