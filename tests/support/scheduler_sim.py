"""A virtual clock, a runner of known cost, a model that is a pure function of the tokens: scheduling in no time.

The fake runner writes what each block holds into a fake cache and reads it back, so that a block shared, evicted or
reused by mistake changes the text, as it would with real keys and values.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from chairlift.engine.blocks import BlockPool
from chairlift.engine.detok import Detokenizer
from chairlift.engine.predictor import StepTime
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.engine.sampling_params import SamplingParams, TokenLogprob
from chairlift.engine.scheduler import Scheduler, SchedulerConfig
from chairlift.engine.step import Chunk, Sampled, Step, StepResult, Work
from chairlift.engine.stops import StopMatcher

VOCAB = [bytes([i]) for i in range(256)]
EOS = 256
LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4096, max_model_len=4096)


def make_request(
    id: str, prompt: Sequence[int], *, salt: str = "", group: str = "", stop: tuple[str, ...] = (), **params: object
) -> Request:
    """A greedy request; `params` as SamplingParams has them."""
    chosen = SamplingParams(temperature=0.0, stop=stop)
    return Request(
        id=id,
        prompt=tuple(prompt),
        params=replace(chosen, **params),  # type: ignore[arg-type]
        eos_ids=frozenset({EOS}),
        detok=Detokenizer(VOCAB, frozenset({EOS})),
        stops=StopMatcher(stop),
        salt=salt,
        group=group,
    )


def letters(seed: int, num_tokens: int) -> tuple[int, ...]:
    """A prompt of lower-case letters, different for every seed."""
    choose = random.Random(seed).randrange
    return tuple(97 + choose(26) for _ in range(num_tokens))


def next_token(history: Sequence[int]) -> int:
    """What the fake model says after `history`: depends on every token and its place."""
    state = 17
    for token in history:
        state = (state * 31 + token + 1) % 1_000_003
    return 97 + state % 26


def alone(request: Request, num_tokens: int) -> tuple[int, ...]:
    """The output that a request must have, whoever else is served."""
    history = list(request.prompt)
    for _ in range(num_tokens):
        history.append(next_token(history))
    return tuple(history[request.num_prompt :])


@dataclass(frozen=True)
class Cost:
    """The truth about step times, linear; `predict` makes it a perfect predictor."""

    base_s: float = 2e-3
    per_row_s: float = 5e-4
    per_kv_token_s: float = 2e-7
    per_context_token_s: float = 6e-7
    per_logit_row_s: float = 1e-4

    def predict(self, work: Work) -> float:
        """Seconds of a step."""
        return self.bound(work)

    def bound(self, work: Work) -> float:
        """The same: nothing ever takes longer."""
        attention_s = self.per_kv_token_s * work.kv_tokens + self.per_context_token_s * work.context_tokens
        return self.base_s + self.per_row_s * work.rows + attention_s + self.per_logit_row_s * work.logit_rows


class FakeRunner:
    """Runs a step on a fake cache of tokens: first every row is written, then every row reads its whole history."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._cache: dict[int, int] = {}  # slot -> token
        self.num_rows = 0
        self.bad: set[Request] = set()  # whose logits are not finite

    def run(self, step: Step) -> StepResult:
        """The result of a step; asserts that no row reads what was never written for it."""
        for piece in step.chunks:
            for position in range(piece.start, piece.stop):
                self._cache[self._slot(piece.request, position)] = piece.request.token_at(position)
        self.num_rows += step.num_rows
        sampled = {i: self._sample(p) for i, p in enumerate(step.chunks) if p.samples}
        scored = {i: self._score(p) for i, p in enumerate(step.chunks) if p.request.params.prompt_logprobs is not None}
        return StepResult(sampled, scored)

    def _slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self._size] * self._size + position % self._size

    def _sample(self, piece: Chunk) -> Sampled:
        request = piece.request
        history = [self._cache.get(self._slot(request, p), -1) for p in range(piece.stop)]
        assert tuple(history) == request.tokens_between(0, piece.stop), f"{request.id} reads another's cache"
        token = next_token(history)
        logprob = None if request.params.logprobs is None else TokenLogprob(token, -1.0)
        return Sampled(token, logprob, ok=request not in self.bad)

    def _score(self, piece: Chunk) -> list[TokenLogprob]:
        positions = range(piece.start, min(piece.stop, piece.request.num_prompt - 1))
        return [TokenLogprob(piece.request.prompt[p + 1], -float(p + 1)) for p in positions]


@dataclass
class Sim:
    """The engine's loop on a virtual clock. Every step is checked: laws of the schedule, and the pool's books."""

    limits: SchedulerConfig = LIMITS
    num_blocks: int = 1024
    block_size: int = 16
    cost: Cost = field(default_factory=Cost)
    predictor: StepTime | None = None  # None: perfect
    slowness: Callable[[float], float] = lambda now_s: 1.0  # what a neighbour makes of a step's seconds
    now_s: float = 0.0
    steps: list[Step] = field(default_factory=list)
    texts: dict[Request, str] = field(default_factory=dict)
    token_times_s: dict[Request, list[float]] = field(default_factory=dict)
    finals: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, self.block_size)
        self.scheduler = Scheduler(self.limits, self.pool, self.predictor or self.cost)
        self.runner = FakeRunner(self.block_size)

    def add(self, *requests: Request) -> None:
        """Queues requests now."""
        for request in requests:
            self.scheduler.add(request)
            request.timing.arrival_s = self.now_s
            self.token_times_s[request] = []

    def cancel(self, request: Request) -> None:
        """Cancels a request now."""
        self.deliver(self.scheduler.end(request, FinishReason.CANCELLED))
        self.scheduler.check()

    def schedule(self) -> Step | None:
        """The next step, checked."""
        step = self.scheduler.schedule()
        self.scheduler.check()
        assert (step is None) == (not self.scheduler.has_work), "work exists and none of it is scheduled"
        if step is not None:
            check_step(step, self.scheduler, self.limits)
        return step

    def commit(self, step: Step) -> None:
        """Runs a scheduled step and takes in its result."""
        counts = [(p.request, len(p.request.output)) for p in step.chunks]
        seconds = self.cost.predict(step.work) * self.slowness(self.now_s)
        self.now_s += seconds
        if self.predictor:
            self.predictor.observe(step.work, seconds)
        result = self.runner.run(step)
        self.deliver(self.scheduler.commit(step, result))
        self.scheduler.check()
        self.steps.append(step)
        for request, num_before in counts:
            if len(request.output) > num_before:
                self.token_times_s[request].append(self.now_s)

    def step(self) -> Step | None:
        """One turn of the loop."""
        step = self.schedule()
        if step is not None:
            self.commit(step)
        return step

    def run(self, max_steps: int = 100_000) -> None:
        """Until nothing is left to do."""
        while self.step() is not None:
            max_steps -= 1
            assert max_steps, "it never ends"

    def run_until(self, condition: Callable[[], bool]) -> int:
        """Until `condition` holds; the number of steps that took."""
        for num_steps in range(100_000):
            if condition():
                return num_steps
            assert self.step() is not None, "no work left, and it never came true"
        raise AssertionError("it never came true")

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Collects texts; asserts that nothing comes after a last event and that no event is empty."""
        for output in outputs:
            assert output.request not in self.finals, "an event after the last one"
            assert output.text or output.logprobs or output.finish_reason, "an empty event"
            self.texts[output.request] = self.texts.get(output.request, "") + output.text
            if output.finish_reason:
                self.finals.append(output.request)

    def gaps_s(self, request: Request) -> Iterator[float]:
        """Times between the tokens of a request."""
        times = self.token_times_s[request]
        return (b - a for a, b in itertools.pairwise(times))


def check_step(step: Step, scheduler: Scheduler, limits: SchedulerConfig) -> None:
    """Laws of every step: not empty, within the rows, one piece a request, each continuing where its request stands."""
    assert 0 < step.num_rows <= limits.max_num_batched_tokens
    assert len({p.request for p in step.chunks}) == len(step.chunks)
    for piece in step.chunks:
        assert piece.start == piece.request.num_computed
        assert 0 < piece.num_tokens <= piece.request.num_uncomputed
        assert piece.request.finish_reason is None


def run_alone(request: Request, limits: SchedulerConfig = LIMITS) -> tuple[str, FinishReason | None]:
    """Text and end of a fresh request served by itself with room to spare."""
    sim = Sim(limits)
    sim.add(request)
    sim.run()
    return sim.texts[request], request.finish_reason
