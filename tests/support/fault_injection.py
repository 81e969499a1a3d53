"""Things that break where they are told to, and a campaign of many at once: for tests and for `scripts/soak --faults`.

    report = campaign(seed=1, num_requests=300)   one run of the real engine over the fake model; some 10 ms a request
    report.lost                                   [] when only those concerned noticed anything; else what went wrong
    report.as_dict()                              JSON: what was tried, and `lost`

Every request of a campaign is one of `KINDS`: healthy, or with a fault of its own at a random token of its answer.
Beside that the model fails now and then through no request's fault, and so do observers. Seeded, and on a clock
of its own: equal seeds are equal runs. For longer runs call it again with other seeds; it keeps nothing between calls.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from chairlift.engine.detok import Detokenizer
from chairlift.engine.engine import Engine
from chairlift.engine.observer import Observer, StepStats
from chairlift.engine.request import FinishReason, Output, Request
from chairlift.engine.sampling_params import SamplingParams
from chairlift.engine.stops import StopMatcher
from chairlift.errors import EngineError
from chairlift.kernels.ops import LogitResult, StepArrays
from chairlift.plan import Plan
from support.engine_probe import is_idle
from support.fake_model import VOCAB_BYTES, FakeModel, fake_plan, fake_request, wait_until

KINDS = ("healthy", "kernel", "nan", "batch", "detok", "stops", "leaves")
"""What happens to a request at some token of its answer: nothing; every step with it fails; its logits are not finite;
it cannot be made into arrays; the decoder, or the stop matcher, of its text fails; it is cancelled.
"""
KERNEL, NAN = 250, 251
"""Tokens that no answer holds. In a prompt, followed by `AT + k`: from `k` tokens after that on, it fails."""
AT = 3
MAX_AT = 28
ERRORS = (RuntimeError("injected"), MemoryError("injected"), ValueError("injected"), EngineError("injected"))
CALM_RUNS = 60
"""Runs without a failure, before there is one for no reason: long enough for every suspect to be tried."""


def is_due(tokens: Sequence[int], marker: int) -> bool:
    """Whether what follows these tokens is to fail."""
    if marker not in tokens:
        return False
    start = list(tokens).index(marker) + 2
    return len(tokens) >= start and len(tokens) - start >= tokens[start - 1] - AT


class FaultyModel(FakeModel):
    """Fails for requests whose prompts say so, and `fail_next` times, or at random, through nobody's fault.

    A run that fails leaves garbage in every slot of its step.
    """

    def __init__(self, num_blocks: int, chance: random.Random | None = None) -> None:
        super().__init__(num_blocks)
        self.before_step: Callable[[StepArrays], None] = lambda _: None
        self.fail_next = 0
        self._chance = chance
        self.num_failed = 0
        self.num_calm = 0  # runs since the last failure of any kind

    def run(self, step: StepArrays) -> LogitResult:
        """One step."""
        self.before_step(step)
        self.cache[step.slots] = step.tokens
        visible = [self._visible(step, stop - 1, s) for s, stop in enumerate(step.seq_starts[1:].tolist())]
        if self._strikes() or any(is_due(tokens, KERNEL) for tokens in visible):
            self.cache[step.slots] = ord("?")
            self.num_failed += 1
            raise ERRORS[self.num_failed % len(ERRORS)]
        self.num_calm += 1
        result = super().run(step)
        owners = np.searchsorted(step.seq_starts, step.logit_rows, side="right") - 1
        result.finite[:] = [not is_due(visible[owner], NAN) for owner in owners]
        return result

    def _strikes(self) -> bool:
        if self.fail_next:
            self.fail_next -= 1
            return True
        return self._chance is not None and self.num_calm > CALM_RUNS and self._chance.random() < 0.05


class BrokenBias(dict[int, float]):
    """A logit bias that cannot be read once its request has `at` tokens."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at
        self.request: Request | None = None

    def __len__(self) -> int:
        if self.request is not None and len(self.request.output) >= self._at:
            raise ERRORS[0]
        return super().__len__()


class BrokenDetok(Detokenizer):
    """Fails at its token `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(VOCAB_BYTES, frozenset())
        self._left = at

    def push(self, token: int) -> str:
        """The text, or the failure."""
        self._left -= 1
        if self._left < 0:
            raise ERRORS[0]
        return super().push(token)


class BrokenStops(StopMatcher):
    """Fails at its text `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(())
        self._left = at

    def push(self, text: str) -> str:
        """The text, or the failure."""
        self._left -= 1
        if self._left < 0:
            raise ERRORS[0]
        return super().push(text)


class BrokenObserver(Observer):
    """Fails at every third event; tells the model of each step that failed, wherever it did."""

    def __init__(self, model: FaultyModel) -> None:
        self._model = model
        self.num_events = 0
        self.num_failed_steps = 0

    def _event(self) -> None:
        self.num_events += 1
        if self.num_events % 3 == 0:
            raise ERRORS[0]

    def step_done(self, stats: StepStats) -> None:
        """Perhaps."""
        self._event()

    def admitted(self, request: Request) -> None:
        """Perhaps."""
        self._event()

    def first_token(self, request: Request) -> None:
        """Perhaps."""
        self._event()

    def next_tokens(self, gaps: Sequence[tuple[Request, float]]) -> None:
        """Perhaps."""
        self._event()

    def preempted(self, request: Request) -> None:
        """Perhaps."""
        self._event()

    def finished(self, request: Request) -> None:
        """Perhaps."""
        self._event()

    def step_failed(self) -> None:
        """Counts, and perhaps."""
        self.num_failed_steps += 1
        self._model.num_calm = 0
        self._event()


def faulty_request(kind: str, name: str, prompt: Sequence[int], at: int, **params: Any) -> Request:
    """A request of one of KINDS, whose fault comes with token `at` of its answer (the first is 0)."""
    marker = {"kernel": (KERNEL, AT + at), "nan": (NAN, AT + at)}.get(kind, ())
    bias = BrokenBias(at) if kind == "batch" else {}
    request = fake_request(name, (*prompt, *marker), logit_bias=bias, **params)
    if isinstance(bias, BrokenBias):
        bias.request = request
    if kind == "detok":
        request.detok = BrokenDetok(at)
    if kind == "stops":
        request.stops = BrokenStops(at)
    return request


def healthy_copy(request: Request) -> Request:
    """The same request before anything happened to it, without the faults that are not in its prompt."""
    params = {name: getattr(request.params, name) for name in SamplingParams.__slots__}
    return fake_request(request.id, request.prompt, **{**params, "logit_bias": {}})


@dataclass
class Report:
    """What a campaign tried, and what it lost."""

    seed: int
    num_requests: int
    kinds: dict[str, int]
    failed_steps: int = 0
    steps: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    lost: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    def expect(self, is_so: bool, otherwise: str) -> None:
        """Notes what went wrong."""
        if not is_so:
            self.lost.append(otherwise)


class Readers:
    """Everybody's reader: an engine's `deliver`."""

    def __init__(self, requests: dict[Request, tuple[str, int]], num_at_once: int) -> None:
        self.engine: Engine | None = None
        self.texts: dict[Request, str] = dict.fromkeys(requests, "")
        self.finals: list[Output] = []
        self.done = threading.Event()
        self._requests = requests
        self._next = deque(requests)
        self._num_at_once = num_at_once

    def begin(self, engine: Engine) -> None:
        """Submits the first requests."""
        self.engine = engine
        for _ in range(self._num_at_once):
            self._submit_next()

    def __call__(self, outputs: list[Output]) -> None:
        """One step's outputs."""
        for output in outputs:
            self._take(output)

    def _take(self, output: Output) -> None:
        assert self.engine is not None
        assert output.request not in {final.request for final in self.finals}, "text after the end"
        kind, at = self._requests[output.request]
        self.texts[output.request] += output.text
        if kind == "leaves" and output.num_tokens > at:
            self.engine.cancel([output.request])
        if output.finish_reason is None:
            return
        self.finals.append(output)
        self._submit_next()
        if len(self.finals) == len(self._requests):
            self.done.set()

    def _submit_next(self) -> None:
        if self._next and self.engine is not None:
            self.engine.submit([self._next.popleft()])


def campaign(seed: int, num_requests: int = 150, *, patience_s: float = 60.0) -> Report:
    """Random requests with random faults through one engine with a tight pool; see the module."""
    start_s = time.monotonic()
    chance = random.Random(seed)
    requests = _random_requests(chance, num_requests)
    report = Report(seed, num_requests, dict(Counter(kind for kind, _ in requests.values())))
    plan = fake_plan(max_num_seqs=6, num_blocks=14, max_queue=num_requests)
    model = FaultyModel(plan.num_blocks, chance)
    readers = Readers(requests, 20)
    observer = BrokenObserver(model)
    engine = _engine(plan, model, readers, [observer])
    readers.begin(engine)
    engine.start()
    report.expect(readers.done.wait(patience_s), "somebody waits for ever")
    wait_until(lambda: is_idle(engine) or engine.state == "dead")
    report.expect(engine.state == "ready", f"the engine is {engine.state}")
    engine.stop()
    for problem in leftovers(engine):
        report.lost.append(problem)
    _check_answers(report, requests, readers)
    now = engine.snapshot()
    report.steps, report.preemptions, report.failed_steps = (
        now.num_steps,
        now.num_preemptions,
        observer.num_failed_steps,
    )
    report.seconds = round(time.monotonic() - start_s, 3)
    return report


def leftovers(engine: Engine) -> list[str]:
    """What an idle, stopped engine still holds, or has wrong in its books; [] when nothing."""
    found = []
    scheduler = engine._scheduler
    try:
        scheduler.check()
    except AssertionError as error:
        found.append(f"the scheduler's books: {error}")
    if held := engine.snapshot().num_used_blocks:
        found.append(f"{held} blocks are held")
    # What is told to readers and observers is theirs to keep; everything else must forget.
    parts = [
        scheduler,
        engine._admission,
        engine._speed,
        engine._faults,
        engine._cancelled,
        engine._telemetry.preemptions,
        engine._delivery._held,
    ]
    if remembered := _reachable_requests(parts):
        found.append(f"remembered: {sorted(request.id for request in remembered)[:5]}")
    return found


def alone_texts(requests: Collection[Request]) -> list[tuple[str, list[int]]]:
    """Text and tokens of healthy copies, each served by itself on a model that never fails."""
    copies = [healthy_copy(request) for request in requests]
    texts = dict.fromkeys(copies, "")
    left = set(copies)

    def deliver(outputs: list[Output]) -> None:
        for output in outputs:
            texts[output.request] += output.text
            if output.finish_reason is not None:
                left.discard(output.request)

    plan = fake_plan(max_queue=len(copies), batching="serial")
    engine = _engine(plan, FakeModel(plan.num_blocks), deliver, [])
    engine.submit(copies)
    engine.start()
    wait_until(lambda: not left, 60)
    engine.stop()
    return [(texts[copy], copy.output) for copy in copies]


def _engine(plan: Plan, model: FakeModel, deliver: Any, observers: Sequence[Observer]) -> Engine:
    ticks = itertools.count()
    return Engine(plan, model, deliver=deliver, observers=observers, clock=lambda: next(ticks) * 1e-3)


def _random_requests(chance: random.Random, num_requests: int) -> dict[Request, tuple[str, int]]:
    """Requests with their kind and where it shows. Some share a beginning; some are sampled, scored or penalised."""
    prefixes = [[chance.randrange(97, 123) for _ in range(size)] for size in (16, 33, 64)]
    made = {}
    for i in range(num_requests):
        kind = chance.choice(KINDS[1:]) if chance.random() < 0.35 else "healthy"
        own = [chance.randrange(97, 123) for _ in range(chance.randrange(1, 60))]
        max_tokens = chance.randrange(1, 50)
        at = chance.randrange(min(max_tokens, MAX_AT))
        request = faulty_request(
            kind,
            f"{kind}-{i}#0",
            [*(chance.choice(prefixes) if chance.random() < 0.5 else []), *own],
            at,
            max_tokens=max_tokens,
            temperature=chance.choice([0.0, 0.0, 1.0]),
            seed=i,
            presence_penalty=chance.choice([0.0, 0.0, 0.5]),
            prompt_logprobs=chance.choice([None, None, None, 0]),
        )
        made[request] = (kind, at)
    return made


def _check_answers(report: Report, requests: dict[Request, tuple[str, int]], readers: Readers) -> None:
    times = Counter(output.request for output in readers.finals)
    finals = {output.request: output for output in readers.finals}
    for (request, (kind, at)), (text, tokens) in zip(requests.items(), alone_texts(requests), strict=True):
        report.expect(times[request] == 1, f"{request.id} ended {times[request]} times")
        if request not in finals:
            continue
        got, end, error = readers.texts[request], finals[request].finish_reason, finals[request].error
        what = f"{request.id} ended with {end} ({error}) after {len(request.output)} tokens"
        report.expect(text.startswith(got) and request.output == tokens[: len(request.output)], f"{what}: other text")
        if kind == "healthy":
            report.expect((end, got) == (FinishReason.LENGTH, text), what)
        elif kind == "leaves":
            report.expect(end in (FinishReason.CANCELLED, FinishReason.LENGTH) and len(got) > at, what)
        else:
            report.expect(end is FinishReason.ERROR and isinstance(error, EngineError), what)
            report.expect(got == text[:at], f"{what}, instead of {at}")


def _reachable_requests(roots: Sequence[object]) -> list[Request]:
    """Requests that can be reached from these objects, other than through code."""
    seen: dict[int, object] = {}
    line: deque[object] = deque(roots)
    while line:
        thing = line.popleft()
        if id(thing) in seen or isinstance(thing, type | ModuleType | FunctionType):
            continue
        seen[id(thing)] = thing
        line.extend(gc.get_referents(thing))
    return [thing for thing in seen.values() if isinstance(thing, Request)]
