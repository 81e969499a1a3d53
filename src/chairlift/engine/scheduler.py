"""Which tokens of which requests run now: one counter per request catches up with another, and there are no phases.

    waiting ──admit──> running ──finish──> gone          each step gives every running request some of the tokens
       resuming <──preempt──┘                            between `num_computed` and `num_tokens`
       └──admit──> running

A chunk of a prompt, the end of one, a decode, a prefix hit and the replay after a preemption are all the same.
`running` is in order of age: when blocks run out the last one loses its own, so the first one always gets on.

Owns queues and block tables; who shares which block is sharing.py's. Pure: no clock, no arrays; one thread.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from chairlift.engine.blocks import BlockPool
from chairlift.engine.budget import Budget, Predictor
from chairlift.engine.ending import accept, accept_prompt_logprobs, finish
from chairlift.engine.line import Line
from chairlift.engine.policies import policy_for
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.engine.sharing import Sharing
from chairlift.engine.step import Piece, Step, StepResult
from chairlift.errors import ContextLengthExceeded, EngineError, RequestError
from chairlift.plan import Batching

_LEAST_GAP_S = 0.1
_DECODES_PER_GAP = 2.0  # unless told otherwise, prompts may double the time of a step that is slow without them
_DECODES_PER_LATE_STEP = 1.25  # where decodes alone pass the gap, prompts still have a fifth of the time


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler keeps to; see Plan."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_gap_s: float | None = None  # None: the larger of 0.1 s and twice the decode-only step
    idle_step_s: float = 0.5  # the same while nobody is streamed to, so that cancelling and admission stay quick
    prefix_caching: bool = True
    batching: Batching = "continuous"
    max_running_per_key: int | None = None

    @property
    def num_slots(self) -> int:
        """Requests that may run at once: each must get its token in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


class Scheduler:
    """`schedule()`, then `commit()` or `abort()` of the same step, in turn; `add` and `cancel` at any time."""

    def __init__(
        self,
        limits: Limits,
        pool: BlockPool,
        predictor: Predictor,
        guard: AbstractContextManager[object] | None = None,
    ) -> None:
        """`guard` is held while requests change between line and slots, so that another thread can count both.

        Who calls `add` or `cancel` from that other thread, or looks at `line`, holds it too.
        """
        self.line: Line[Request] = Line(limits.max_running_per_key)
        """Those that have never run."""
        self._guard = guard or nullcontext()
        self._limits = limits
        self._pool = pool
        self._sharing = Sharing(pool, prefix_caching=limits.prefix_caching)
        self._predictor = predictor
        self._policy = policy_for(limits.batching)
        self._resuming: deque[Request] = deque()  # have run and lost their blocks; come before those that wait
        self._running: list[Request] = []
        self._in_flight: Step | None = None
        self._displaced: set[Request] = set()  # lost their blocks once: hits are no longer a saving to report
        self._is_turn_of_oldest = False
        self._held_finals: list[Output] = []
        self.memory_blocked = False
        """Whether, at the last schedule(), a slot was free and the first in line lacked blocks."""

    # -- what it looks like from outside ------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, preempted ones included."""
        return len(self.line) + len(self._resuming)

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._running) + len(self._held_finals)

    @property
    def num_preempted(self) -> int:
        """Requests that have lost their blocks and come back before anybody in line starts."""
        return len(self._resuming)

    @property
    def members(self) -> list[Request]:
        """Requests that have begun and not ended: with a slot, or coming back to one."""
        return [*self._running, *self._resuming]

    def num_seats(self, num_members: int) -> int:
        """How many of the line could start now beside so many members; where memory is full there are no more slots."""
        num_now = len(self._running) + len(self._resuming)
        num_slots = num_now if self.memory_blocked and num_now else self._limits.num_slots
        return self._policy.seats(num_members, num_slots)

    @property
    def has_work(self) -> bool:
        """Whether schedule() has anything to do."""
        return bool(self._running or self._resuming or self.line)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Everybody that it knows, in no order that matters."""
        return (*self._running, *self._resuming, *self.line)

    @property
    def max_tokens_per_request(self) -> int:
        """Most tokens, prompt and output, that one request may have."""
        return min(self._limits.max_model_len, self._pool.num_tokens)

    def validate(self, request: Request) -> None:
        """Raises ContextLengthExceeded, or RequestError, for a prompt that can never run. Safe from any thread."""
        if not request.prompt:
            raise RequestError("the prompt has no tokens", param="prompt")
        limit = self.max_tokens_per_request
        if request.num_prompt + 1 > limit:
            what = "the context length" if limit == self._limits.max_model_len else "the KV pool's size"
            raise ContextLengthExceeded(request.num_prompt, limit, what=what)

    def check(self) -> None:
        """Raises AssertionError unless blocks, tables and queues agree."""
        self._pool.check(request.block_table for request in self._running)
        assert len(self._running) <= self._limits.num_slots, "more requests run than there are slots"
        for request in (*self.line, *self._resuming):
            assert not request.block_table, f"{request.id} waits and holds blocks"
            assert request.num_computed == 0, f"{request.id} waits and has computed tokens"
        for request in self._running:
            room = len(request.block_table) * self._pool.block_size
            assert request.num_computed <= room, f"{request.id} has computed more than its blocks hold"
        assert self._displaced <= {*self._running, *self._resuming}, "a request that has left is remembered"

    # -- in and out ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request; raises as `validate` does."""
        self.validate(request)
        self.line.add(request.key_name, request)

    def cancel(self, request: Request, error: EngineError | None = None) -> list[Output]:
        """Ends a request in whatever phase it is: its last event, and those that waited for it. Again: nothing."""
        return self._end(request, FinishReason.CANCELLED if error is None else FinishReason.ERROR, error)

    def end_all(self, reason: FinishReason, error: EngineError | None) -> list[Output]:
        """Ends everything, the step in flight too."""
        outputs = self.abort(self._in_flight) if self._in_flight else []
        for request in self.requests:
            outputs += self._end(request, reason, error)
        return outputs

    # -- the step -----------------------------------------------------------------------------------------------------

    def schedule(self, only: Request | None = None) -> Step | None:
        """The next step, or None when there is nothing to do.

        Decodes come first: every running request that lacks exactly one token gets it. Prompts share what is left.
        With `only`, a running request, the step is its alone: the others keep their seats, and nobody joins.
        """
        if self._in_flight is not None:
            raise RuntimeError("the last step was neither committed nor aborted")
        preempted: list[Request] = []
        if only is None:
            with self._guard:
                preempted = self._make_room()
                self._admit()
        else:
            self._make_room_for(only)
        members = self._running if only is None else [only]
        if not members:
            return None
        budget = Budget(self._predictor, self._limits.max_num_batched_tokens)
        pieces = {r: self._give(r, 1, budget) for r in members if r.num_uncomputed == 1}
        pieces |= self._share([r for r in members if r not in pieces], budget)
        in_order = tuple(pieces[r] for r in self._running if r in pieces)
        self._in_flight = Step(in_order, budget.predicted_s, budget.work, tuple(preempted))
        return self._in_flight

    def commit(self, step: Step, result: StepResult) -> list[Output]:
        """Takes in what the step computed and sampled; ends what is at its end and frees its blocks and slot."""
        assert step is self._in_flight, "not the step in flight"
        outputs: list[Output] = []
        max_tokens = self.max_tokens_per_request
        for i, (request, start, num_tokens) in enumerate(step.pieces):
            if request.finish_reason is None:
                stop = request.num_computed = start + num_tokens
                if request.params.prompt_logprobs is not None:
                    accept_prompt_logprobs(request, stop, result.prompt_logprobs.get(i, ()))
                sampled = result.sampled.get(i)
                if stop == request.num_tokens or (sampled and not sampled.ok):
                    output = accept(request, sampled, max_tokens)
                    if output is not None:
                        outputs.append(output)
            if request.finish_reason is FinishReason.ERROR:
                self._sharing.withdraw(request)
            if request.finish_reason is not None:
                self._leave(request)
        self._in_flight = None  # not before: a commit that fails leaves its step to abort
        self._sharing.settle()
        return self._hold_back(outputs)

    def abort(self, step: Step, *, end: Collection[Request] = (), error: EngineError | None = None) -> list[Output]:
        """Undoes a step that failed, or whose commit did: nothing that it was to compute can be found.

        Its requests keep their seats and start over; so does whoever had already shared a block of it. Those in `end`
        end with `error` instead, also those that the failed commit had ended.
        """
        assert step is self._in_flight, "not the step in flight"
        self._in_flight = None
        return self._undo({piece.request for piece in step.pieces}, end, error)

    def recover(self, error: EngineError) -> list[Output]:
        """Ends all that runs, after schedule() itself has failed half way."""
        running = [request for request in self._running if not request.is_finished]
        return self._undo(set(running), running, error)

    def _undo(self, members: Collection[Request], end: Collection[Request], error: EngineError | None) -> list[Output]:
        for request in self._running.copy():
            if request in end or request.is_finished:
                self._leave(request)
            elif request in members or self._sharing.has_promised(request):
                self._start_over(request)
        self._sharing.undo()
        return self._hold_back([finish(request, FinishReason.ERROR, error) for request in end])

    # -- memory -------------------------------------------------------------------------------------------------------

    def _make_room(self) -> list[Request]:
        """Gives every running request a slot for its next token, oldest first; the youngest pay, and are returned."""
        preempted: list[Request] = []
        num_ready = 0
        while num_ready < len(self._running):
            request = self._running[num_ready]
            if self._has_slot(request):
                num_ready += 1
            elif self._pool.num_available:
                request.block_table.append(self._pool.take())
            else:
                victim = self._running[-1]
                victim.num_preemptions += 1
                self._displace(victim)
                preempted.append(victim)
        return preempted

    def _has_slot(self, request: Request) -> bool:
        """Whether its next token has a place, once all hits are taken."""
        if request.num_computed % self._pool.block_size:
            return True  # in the block of the token before
        self._sharing.take_hits(request, is_saving=request not in self._displaced)
        return request.num_computed < len(request.block_table) * self._pool.block_size

    def _make_room_for(self, only: Request) -> None:
        """Gives one running request a slot for its next token, at the cost of the others, the youngest first."""
        others = (request for request in reversed(self._running.copy()) if request is not only)
        while not self._has_slot(only):
            if self._pool.num_available:
                only.block_table.append(self._pool.take())
            else:
                self._start_over(next(others))

    def _displace(self, request: Request) -> None:
        """Takes a running request's blocks and slot; it will be recomputed, ahead of all that wait now."""
        self._running.remove(request)
        self._start_over(request)
        self._resuming.appendleft(request)

    def _start_over(self, request: Request) -> None:
        """Takes a running request's blocks; it will be recomputed."""
        self._release(request)
        self._displaced.add(request)

    def _release(self, request: Request) -> None:
        self._pool.release(request.block_table)
        del request.block_table[:]
        request.num_computed = 0

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Lets in whose turn it is while there are seats and blocks; first those that resume, who have their seat."""
        if not self._resuming and not self.line:
            self.memory_blocked = False
            return
        num_begun = Counter(request.key_name for request in self.members)
        seats = self._policy.seats(num_begun.total(), self._limits.num_slots)
        while self._resuming and self._fits(self._resuming[0]):
            self._join(self._resuming.popleft())
        while not self._resuming and seats > 0:
            first = self.line.turn(num_begun)
            if first is None or not self._fits(first[1]):
                break
            self._join(self.line.pop(first[0]))
            num_begun[first[0]] += 1
            seats -= 1
        self.memory_blocked = bool(self._resuming) or (seats > 0 and self.line.turn(num_begun) is not None)

    def _join(self, request: Request) -> None:
        """Gives a request a slot and a place for its next token."""
        request.num_cached = request.num_cached or 0
        self._running.append(request)
        if not self._has_slot(request):
            request.block_table.append(self._pool.take())

    def _fits(self, request: Request) -> bool:
        """Whether all its tokens, less its hits, plus one block for each running request, find a place.

        What running requests still need for the tokens they have is taken already.
        """
        hits = self._sharing.hits(request)
        num_new = self._pool.blocks_for(request.num_tokens) - sum(map(self._pool.is_held, hits))
        num_promised = sum(self._pool.blocks_for(r.num_tokens) - len(r.block_table) for r in self._running)
        return num_new + num_promised + len(self._running) <= self._pool.num_available

    # -- sharing a step -----------------------------------------------------------------------------------------------

    def _share(self, prompts: list[Request], budget: Budget) -> dict[Request, Piece]:
        """Divides what is left of a step among requests that lack more than one token, given by age.

        Half may go to those that are sooner done than the oldest, the shortest first; then the oldest takes all it can,
        so that it never starves; then the rest. Where half is less than a block of the oldest, it and the shortest take
        turns at the whole. Whose turn it is comes first there, and is sure of a token everywhere.
        """
        pieces: dict[Request, Piece] = {}
        if not prompts:
            return pieces
        oldest = prompts[0]
        by_length = sorted(prompts[1:], key=lambda r: r.num_uncomputed)
        sooner = [r for r in by_length if r.num_uncomputed < oldest.num_uncomputed]
        self._is_turn_of_oldest = not (self._is_turn_of_oldest and sooner)
        sure = oldest if self._is_turn_of_oldest else sooner[0]
        target_s = self._target_s(budget, sure)
        half_s, half_rows = (budget.predicted_s + target_s) / 2, budget.rows_left // 2
        if budget.most(oldest, half_s, half_rows) >= min(self._pool.block_size, oldest.num_uncomputed):
            rows_kept = budget.rows_left - half_rows
            for request in sooner:
                self._advance(request, budget, half_s, budget.rows_left - rows_kept, pieces)
        for request in (sure, oldest, *by_length):
            if request not in pieces:
                self._advance(request, budget, target_s, budget.rows_left, pieces)
        return pieces

    def _target_s(self, budget: Budget, sure: Request) -> float:
        """How long the step may take; `budget` holds its decodes and nothing else. A token of `sure` always fits."""
        decodes_s, sure_s = budget.predicted_s, budget.seconds_with(sure, 1)
        if not any(request.output for request in self._running):
            target_s = max(self._limits.idle_step_s, _DECODES_PER_GAP * decodes_s)
        elif self._limits.max_gap_s is None:
            target_s = max(_LEAST_GAP_S, _DECODES_PER_GAP * decodes_s)
        else:
            target_s = self._limits.max_gap_s
        return target_s if sure_s <= target_s else max(sure_s, _DECODES_PER_LATE_STEP * decodes_s)

    def _advance(
        self, request: Request, budget: Budget, target_s: float, max_rows: int, pieces: dict[Request, Piece]
    ) -> None:
        """Gives a request as many tokens as seconds, rows and blocks allow; short of its end, up to a block's edge.

        Only the first may stop within a block, when no edge is in reach. The others wait at an edge, where they may
        come to share the block that the first computes.
        """
        self._sharing.take_hits(request, is_saving=request not in self._displaced)
        size = self._pool.block_size
        start = request.num_computed
        room = (len(request.block_table) + self._pool.num_available) * size - start
        num_tokens = budget.most(request, target_s, min(max_rows, room))
        edge = (start + num_tokens) // size * size
        if start + num_tokens < request.num_tokens and (edge > start or pieces):
            num_tokens = edge - start
        if num_tokens > 0:
            pieces[request] = self._give(request, num_tokens, budget)

    def _give(self, request: Request, num_tokens: int, budget: Budget) -> Piece:
        """Makes the next tokens of a request part of the step: blocks, registration, budget."""
        size = self._pool.block_size
        start, stop = request.num_computed, request.num_computed + num_tokens
        while len(request.block_table) * size < stop:
            request.block_table.append(self._pool.take())
        for index in range(start // size, stop // size):
            self._sharing.register(request, index)
        piece = Piece(request, start, num_tokens)
        budget.spend(piece)
        return piece

    # -- endings ------------------------------------------------------------------------------------------------------

    def _end(self, request: Request, reason: FinishReason, error: EngineError | None) -> list[Output]:
        """Ends a request from outside. In flight it keeps its blocks until the step is over, since they are written."""
        if request.is_finished:
            return []
        output = finish(request, reason, error)
        if self._in_flight is None or request not in {piece.request for piece in self._in_flight.pieces}:
            self._leave(request)
        return [output, *self._hold_back([])]

    def _leave(self, request: Request) -> None:
        """The one way out: blocks, slot and place in line go back, wherever it was."""
        self._release(request)
        self._displaced.discard(request)
        for members in (self._running, self._resuming):
            if request in members:
                members.remove(request)
                return
        self.line.remove(request.key_name, request)

    def _hold_back(self, outputs: list[Output]) -> list[Output]:
        """Under a policy that ends batches as one, keeps last events until the slowest member has ended."""
        if not self._policy.holds_finals:
            return outputs
        self._held_finals += [output for output in outputs if output.finish_reason]
        outputs = [output for output in outputs if not output.finish_reason]
        if all(request.is_finished for request in self._running) and not self._resuming:
            outputs += self._held_finals
            self._held_finals = []
        return outputs
