"""Which tokens of which requests run now: one counter per request catches up with another, and there are no phases.

    waiting ──admit──> running ──finish──> gone          each step gives every running request some of the tokens
       resuming <──preempt──┘                            between `num_computed` and `num_tokens`
       └──admit──> running

A chunk of a prompt, the end of one, a decode, a prefix hit and the replay after a preemption are all the same.
`running` is in order of age: when blocks run out the youngest loses its own, so the oldest always gets on.

Owns the queues, block tables and counters of requests. Pure: no clock, no lock, no arrays. One thread at a time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass

from chairlift.engine.blocks import BlockPool
from chairlift.engine.budget import Predictor, StepBudget
from chairlift.engine.fair_queue import FairQueue
from chairlift.engine.finish import append_prompt_logprobs, append_token, finish
from chairlift.engine.policies import Batching, policy_for
from chairlift.engine.prefix_cache import PrefixCache
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.engine.step import Chunk, Step, StepResult
from chairlift.errors import ChairliftError, ContextLengthExceeded, EngineError, RequestError

_LEAST_GAP_S = 0.1
_DECODES_PER_GAP = 2.0  # unless told otherwise, prompts may double the time of a step that is slow without them
_DECODES_PER_LATE_STEP = 1.25  # where decodes alone exceed the gap, prompts still get a fifth of the time


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler keeps to; see Plan."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_gap_s: float | None = None  # None: the larger of 0.1 s and twice the decode-only step
    idle_step_s: float = 0.5  # longest step while no request generates, so that cancelling and admission stay quick
    prefix_caching: bool = True
    batching: Batching = "continuous"
    max_running_per_key: int | None = None

    @property
    def num_slots(self) -> int:
        """Requests that may run at once. Each of them must get a token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class Scheduler:
    """Call `schedule`, then `commit` or `abort` of the same step, in turn; `add` and `end` at any time."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, predictor: Predictor) -> None:
        self.waiting: FairQueue[Request] = FairQueue(config.max_running_per_key)
        """Requests that have never run."""
        self.memory_blocked = False
        """Whether, at the last schedule(), a slot was free and the request next in turn lacked blocks."""
        self._config = config
        self._pool = pool
        self._cache = PrefixCache(pool, enabled=config.prefix_caching)
        self._predictor = predictor
        self._policy = policy_for(config.batching)
        self._resuming: deque[Request] = deque()  # preempted; they come before those that wait
        self._running: list[Request] = []
        self._recomputing: set[Request] = set()  # have lost blocks; their later hits are not reported as cached
        self._in_flight: Step | None = None
        self._is_turn_of_oldest = False
        self._held_finals: list[Output] = []

    # -- what others see ----------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, preempted ones included."""
        return len(self.waiting) + len(self._resuming)

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._running) + len(self._held_finals)

    @property
    def num_preempted(self) -> int:
        """Requests that have lost their blocks, and resume before any waiting request starts."""
        return len(self._resuming)

    @property
    def admitted(self) -> list[Request]:
        """Requests that have begun and not ended: running and preempted ones."""
        return [*self._running, *self._resuming]

    @property
    def has_work(self) -> bool:
        """Whether schedule() has anything to do."""
        return bool(self._running or self._resuming or self.waiting)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests, in no particular order."""
        return (*self._running, *self._resuming, *self.waiting)

    @property
    def max_tokens_per_request(self) -> int:
        """Most tokens, prompt and output, that one request may have."""
        return min(self._config.max_model_len, self._pool.num_tokens)

    def free_slots(self, num_admitted: int) -> int:
        """How many waiting requests could start beside `num_admitted`; while memory is full, none beside those now."""
        num_now = len(self._running) + len(self._resuming)
        num_slots = num_now if self.memory_blocked and num_now else self._config.num_slots
        return self._policy.free_slots(num_admitted, num_slots)

    def validate(self, request: Request) -> None:
        """Raises ContextLengthExceeded or RequestError for a prompt that can never run. Any thread may call it."""
        if not request.prompt:
            raise RequestError("the prompt has no tokens", param="prompt")
        limit = self.max_tokens_per_request
        if request.num_prompt + 1 > limit:
            what = "the context length" if limit == self._config.max_model_len else "the KV pool's size"
            raise ContextLengthExceeded(request.num_prompt, limit, what=what)

    def check(self) -> None:
        """Raises AssertionError unless blocks, tables and queues agree."""
        self._pool.check(request.block_table for request in self._running)
        self._cache.check()
        assert len(self._running) <= self._config.num_slots, "more requests run than there are slots"
        for request in (*self.waiting, *self._resuming):
            assert not request.block_table, f"{request.id} waits and holds blocks"
            assert request.num_computed == 0, f"{request.id} waits and has computed tokens"
        for request in self._running:
            room = len(request.block_table) * self._pool.block_size
            assert request.num_computed <= room, f"{request.id} has computed more than its blocks hold"
        assert self._recomputing <= {*self._running, *self._resuming}, "a request that has left is remembered"

    # -- in and out ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request; raises as `validate` does."""
        self.validate(request)
        self.waiting.add(request.key_name, request)

    def end(self, request: Request, reason: FinishReason, error: ChairliftError | None = None) -> list[Output]:
        """Ends a request wherever it is. Returns its last event and any that waited for it; nothing if it has ended.

        A request of the step in flight keeps its blocks until the step is over, since the kernels write them.
        """
        if request.is_finished:
            return []
        output = finish(request, reason, error)
        if self._in_flight is None or all(chunk.request is not request for chunk in self._in_flight.chunks):
            self._leave(request)
        return [output, *self._hold_back([])]

    def expire(self, request: Request, error: ChairliftError) -> Output:
        """Ends a request that has never run. Touches the queue alone, so that a step may run meanwhile."""
        self.waiting.remove(request.key_name, request)
        return finish(request, FinishReason.ERROR, error)

    def end_all(self, reason: FinishReason, error: EngineError | None) -> list[Output]:
        """Ends every request, those of the step in flight too."""
        outputs = self.abort(self._in_flight) if self._in_flight else []
        for request in self.requests:
            outputs += self.end(request, reason, error)
        return outputs

    # -- the step -----------------------------------------------------------------------------------------------------

    def schedule(self, only: Request | None = None) -> Step | None:
        """The next step, or None when there is nothing to do: `admit` and `make_step` in one, for one thread.

        With `only`, the step belongs to that running request: the others keep their slots, and none is admitted.
        """
        return self.make_step(self.admit(only), only)

    def admit(self, only: Request | None = None) -> list[Request]:
        """Preempts and admits for the next step: the part that moves requests between queue and slots.

        Returns the preempted requests. Other threads must not add, expire or look meanwhile.
        """
        if self._in_flight is not None:
            raise RuntimeError("the last step was neither committed nor aborted")
        if only is not None:
            self._make_room_for(only)
            return []
        preempted = self._make_room()
        self._admit()
        return preempted

    def make_step(self, preempted: list[Request], only: Request | None = None) -> Step | None:
        """The step for the requests that run after `admit`; None when none does.

        Decodes come first: every running request that lacks exactly one token gets it. Prompts share what is left.
        """
        requests = self._running if only is None else [only]
        if not requests:
            return None
        budget = StepBudget(self._predictor, self._config.max_num_batched_tokens)
        chunks = {r: self._give(r, 1, budget) for r in requests if r.num_uncomputed == 1}
        chunks |= self._share([r for r in requests if r not in chunks], budget)
        in_order = tuple(chunks[r] for r in self._running if r in chunks)
        self._in_flight = Step(in_order, budget.predicted_s, budget.work, tuple(preempted))
        return self._in_flight

    def commit(self, step: Step, result: StepResult) -> list[Output]:
        """Applies what the step computed and sampled. Requests that are at their end give back blocks and slot."""
        assert step is self._in_flight, "not the step in flight"
        outputs: list[Output] = []
        max_tokens = self.max_tokens_per_request
        for i, (request, start, num_tokens) in enumerate(step.chunks):
            if request.finish_reason is None:
                stop = request.num_computed = start + num_tokens
                if request.params.prompt_logprobs is not None:
                    append_prompt_logprobs(request, stop, result.prompt_logprobs.get(i, ()))
                sampled = result.sampled.get(i)
                if stop == request.num_tokens or (sampled and not sampled.ok):
                    output = append_token(request, sampled, max_tokens)
                    if output is not None:
                        outputs.append(output)
            if request.finish_reason is FinishReason.ERROR:  # what made its logits NaN may lie in its blocks
                for block in request.block_table:
                    self._cache.withdraw(block)
            if request.finish_reason is not None:
                self._leave(request)
        self._in_flight = None  # only now: a commit that fails leaves its step to abort
        self._cache.commit()
        return self._hold_back(outputs)

    def abort(self, step: Step, *, end: Collection[Request] = (), error: EngineError | None = None) -> list[Output]:
        """Undoes a step that failed, or whose commit failed. Nothing finds the blocks that it was to fill.

        Its requests keep their slots and start over, and so does every request that shares one of those blocks. Those
        in `end` end with `error` instead, even if the failed commit had ended them.
        """
        assert step is self._in_flight, "not the step in flight"
        self._in_flight = None
        return self._roll_back({chunk.request for chunk in step.chunks}, end, error)

    def recover(self, error: EngineError) -> list[Output]:
        """Ends all running requests after schedule() itself has failed half way."""
        running = [request for request in self._running if not request.is_finished]
        return self._roll_back(set(running), running, error)

    def _roll_back(
        self, requests: Collection[Request], end: Collection[Request], error: EngineError | None
    ) -> list[Output]:
        for request in self._running.copy():
            if request in end or request.is_finished:
                self._leave(request)
            elif request in requests or self._cache.holds_pending(request):
                self._start_over(request)
        for request, num_blocks in self._cache.rollback().items():
            request.num_cached = (request.num_cached or 0) - num_blocks * self._pool.block_size
        return self._hold_back([finish(request, FinishReason.ERROR, error) for request in end])

    # -- memory -------------------------------------------------------------------------------------------------------

    def _make_room(self) -> list[Request]:
        """Gives every running request a place for its next token, oldest first. Returns those it had to preempt."""
        preempted: list[Request] = []
        num_ready = 0
        while num_ready < len(self._running):
            request = self._running[num_ready]
            if self._has_room_after_hits(request):
                num_ready += 1
            elif self._pool.num_available:
                request.block_table.append(self._pool.take())
            else:
                preempted.append(self._preempt_youngest())
        return preempted

    def _make_room_for(self, only: Request) -> None:
        """Gives one running request a place for its next token, by taking blocks from others, the youngest first."""
        others = (request for request in reversed(self._running.copy()) if request is not only)
        while not self._has_room_after_hits(only):
            if self._pool.num_available:
                only.block_table.append(self._pool.take())
            else:
                self._start_over(next(others))

    def _has_room_after_hits(self, request: Request) -> bool:
        """Takes the request's hits. Returns whether its blocks then have a place for its next token."""
        self._take_hits(request)
        return request.num_computed < len(request.block_table) * self._pool.block_size

    def _take_hits(self, request: Request) -> None:
        """Shares the cached blocks of a request's next tokens; blocks that it had taken for them go back."""
        size = self._pool.block_size
        if request.num_computed % size:
            return  # within a block
        hits = self._cache.find(request)
        if not hits:
            return
        index = request.num_computed // size
        self._pool.release(request.block_table[index:])
        del request.block_table[index:]
        for block in hits:
            self._pool.share(block)
            request.block_table.append(block)
        request.num_computed += len(hits) * size
        if request not in self._recomputing:
            request.num_cached = (request.num_cached or 0) + len(hits) * size
            self._cache.count_hits(request, hits)

    def _preempt_youngest(self) -> Request:
        """Takes blocks and slot of the youngest running request. It resumes before all that wait now."""
        request = self._running.pop()
        request.num_preemptions += 1
        self._start_over(request)
        self._resuming.appendleft(request)
        return request

    def _start_over(self, request: Request) -> None:
        """Takes an admitted request's blocks; it will be recomputed."""
        self._release(request)
        self._recomputing.add(request)

    def _release(self, request: Request) -> None:
        self._pool.release(request.block_table)
        del request.block_table[:]
        request.num_computed = 0

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Starts requests while there are slots and blocks: preempted ones first, then those whose turn it is."""
        if not self._resuming and not self.waiting:
            self.memory_blocked = False
            return
        num_admitted = Counter(request.key_name for request in self.admitted)
        num_free = self._policy.free_slots(num_admitted.total(), self._config.num_slots)
        while self._resuming and self._fits(self._resuming[0]):
            self._start(self._resuming.popleft())
        while not self._resuming and num_free > 0:
            next_in_turn = self.waiting.next(num_admitted)
            if next_in_turn is None or not self._fits(next_in_turn[1]):
                break
            key, request = next_in_turn
            self.waiting.pop(key)
            self._start(request)
            num_admitted[key] += 1
            num_free -= 1
        self.memory_blocked = bool(self._resuming) or (num_free > 0 and self.waiting.next(num_admitted) is not None)

    def _start(self, request: Request) -> None:
        """Gives a request a slot and a place for its next token."""
        request.num_cached = request.num_cached or 0
        self._running.append(request)
        if not self._has_room_after_hits(request):
            request.block_table.append(self._pool.take())

    def _fits(self, request: Request) -> bool:
        """Whether the pool has blocks for all its tokens, less its hits, and one more for each running request.

        Running requests' own known tokens count as taken, whether they hold blocks for them yet or not.
        """
        hits = self._cache.find(request)
        num_new = self._pool.blocks_for(request.num_tokens) - sum(map(self._pool.is_held, hits))
        num_promised = sum(self._pool.blocks_for(r.num_tokens) - len(r.block_table) for r in self._running)
        return num_new + num_promised + len(self._running) <= self._pool.num_available

    # -- sharing a step -----------------------------------------------------------------------------------------------

    def _share(self, prompts: list[Request], budget: StepBudget) -> dict[Request, Chunk]:
        """Divides the rest of a step among requests that need more than one token. `prompts` is in order of age.

        Up to half goes to requests that need fewer tokens than the oldest, the shortest first. Then the oldest takes
        all it can, so that it never starves; then the rest share what is left. Where half of the step is less than a
        block of the oldest, the oldest and the shortest take turns at the whole step. The request whose turn it is gets
        at least one token in every step.
        """
        chunks: dict[Request, Chunk] = {}
        if not prompts:
            return chunks
        oldest = prompts[0]
        by_length = sorted(prompts[1:], key=lambda r: r.num_uncomputed)
        shorter = [r for r in by_length if r.num_uncomputed < oldest.num_uncomputed]
        self._is_turn_of_oldest = not (self._is_turn_of_oldest and shorter)
        first = oldest if self._is_turn_of_oldest else shorter[0]
        target_s = self._target_s(budget, first)
        half_s, half_rows = (budget.predicted_s + target_s) / 2, budget.rows_left // 2
        if budget.most(oldest, half_s, half_rows) >= min(self._pool.block_size, oldest.num_uncomputed):
            rows_kept = budget.rows_left - half_rows
            for request in shorter:
                self._advance(request, budget, half_s, budget.rows_left - rows_kept, chunks)
        for request in (first, oldest, *by_length):
            if request not in chunks:
                self._advance(request, budget, target_s, budget.rows_left, chunks)
        return chunks

    def _target_s(self, budget: StepBudget, first: Request) -> float:
        """How long the step may take, while `budget` holds its decodes alone. One token of `first` always fits."""
        decodes_s, first_s = budget.predicted_s, budget.seconds_with(first, 1)
        if not any(request.output for request in self._running):
            target_s = max(self._config.idle_step_s, _DECODES_PER_GAP * decodes_s)
        elif self._config.max_gap_s is None:
            target_s = max(_LEAST_GAP_S, _DECODES_PER_GAP * decodes_s)
        else:
            target_s = self._config.max_gap_s
        return target_s if first_s <= target_s else max(first_s, _DECODES_PER_LATE_STEP * decodes_s)

    def _advance(
        self, request: Request, budget: StepBudget, target_s: float, max_rows: int, chunks: dict[Request, Chunk]
    ) -> None:
        """Gives a request as many tokens as seconds, rows and blocks allow; short of its end, up to a block's edge.

        Only the step's first chunk may end within a block, when no edge is in reach. The others wait at an edge, where
        they may come to share the block that the first one computes.
        """
        self._take_hits(request)
        size = self._pool.block_size
        start = request.num_computed
        room = (len(request.block_table) + self._pool.num_available) * size - start
        num_tokens = budget.most(request, target_s, min(max_rows, room))
        edge = (start + num_tokens) // size * size
        if start + num_tokens < request.num_tokens and (edge > start or chunks):
            num_tokens = edge - start
        if num_tokens > 0:
            chunks[request] = self._give(request, num_tokens, budget)

    def _give(self, request: Request, num_tokens: int, budget: StepBudget) -> Chunk:
        """Makes the next tokens of a request part of the step: takes blocks, registers full ones, spends budget."""
        size = self._pool.block_size
        start, stop = request.num_computed, request.num_computed + num_tokens
        while len(request.block_table) * size < stop:
            request.block_table.append(self._pool.take())
        for index in range(start // size, stop // size):
            self._cache.register(request, index)
        chunk = Chunk(request, start, num_tokens)
        budget.spend(chunk)
        return chunk

    # -- endings ------------------------------------------------------------------------------------------------------

    def _leave(self, request: Request) -> None:
        """The one way out: blocks, slot and place in the queue go back, wherever the request was."""
        self._release(request)
        self._recomputing.discard(request)
        for requests in (self._running, self._resuming):
            if request in requests:
                requests.remove(request)
                return
        self.waiting.remove(request.key_name, request)

    def _hold_back(self, outputs: list[Output]) -> list[Output]:
        """Under a policy that ends batches as one, keeps last events until the slowest request has ended."""
        if not self._policy.ends_together:
            return outputs
        self._held_finals += [output for output in outputs if output.finish_reason]
        outputs = [output for output in outputs if not output.finish_reason]
        if all(request.is_finished for request in self._running) and not self._resuming:
            outputs += self._held_finals
            self._held_finals = []
        return outputs
