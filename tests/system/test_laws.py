"""The laws of DESIGN §4 through scheduler, batch and a real backend: an answer does not depend on who else is served.

Everything is compared with `==`: ids, text, and the 20 best log-probabilities of every token: the logits' bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from chairlift.engine.blocks import BlockPool
from chairlift.engine.detok import Detokenizer
from chairlift.engine.predictor import StepTime
from chairlift.engine.request import FinishReason, Request
from chairlift.engine.runner import Runner
from chairlift.engine.sampling_params import SamplingParams, TokenLogprob
from chairlift.engine.scheduler import Scheduler, SchedulerConfig
from chairlift.engine.stops import StopMatcher
from chairlift.kernels.backend import KVDtype, KVLayout, LoadSpec, Model
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.registry import forward_for, model_tensors
from support import tiny_gguf as tiny
from support.backends import BACKENDS, make_backend

VOCAB_BYTES = tuple(bytes([i % 256]) for i in range(400))
NUM_BLOCKS = 40
MAX_ROWS = 64
CASES = [("llama", "Q4_1", "bf16"), ("qwen2", "Q8_0", "int8"), ("qwen3", "F16", "bf16")]
LAYOUTS = [("llama", "Q5_0", "int8"), ("qwen2", "Q5_K", "bf16"), ("qwen3", "Q6_K", "int8"), ("llama", "BF16", "bf16")]
NATIVE = [(backend, *case) for backend in BACKENDS[1:] for case in LAYOUTS]
"""Layouts of which the reference knows nothing, or little more: to it they are other numbers, no other code."""

Answer = tuple[list[int], str, list[TokenLogprob], list[TokenLogprob | None], FinishReason | None]


class Law:
    """One loaded model; serves a list of requests in any circumstances and gives back what each one said."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.num_preemptions = 0

    def serve(
        self,
        requests: Sequence[Request],
        *,
        arrivals: Mapping[str, int] | None = None,
        num_blocks: int = NUM_BLOCKS,
        max_rows: int = MAX_ROWS,
        prefix_caching: bool = True,
        slots: int = 8,
    ) -> dict[str, Answer]:
        pool = BlockPool(num_blocks, 16)
        limits = SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=max_rows,
            max_model_len=num_blocks * 16,
            max_gap_s=100.0,
            prefix_caching=prefix_caching,
            batching="continuous",
        )
        scheduler = Scheduler(limits, pool, StepTime())
        runner = Runner(self.model, 16)
        text = {request.id: "" for request in requests}
        todo = sorted(requests, key=lambda r: (arrivals or {}).get(r.id, 0))
        num_steps = 0
        while todo or scheduler.has_work:
            while todo and (arrivals or {}).get(todo[0].id, 0) <= num_steps:
                scheduler.add(todo.pop(0))
            num_steps += 1
            step = scheduler.schedule()
            if step is not None:
                for output in scheduler.commit(step, runner.run(step)):
                    text[output.request.id] += output.text
            scheduler.check()
        self.num_preemptions = sum(r.num_preemptions for r in requests)
        return {r.id: (r.output, text[r.id], r.logprobs, r.prompt_logprobs, r.finish_reason) for r in requests}

    def alone(self, requests: Sequence[Request]) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        for request in requests:
            answers |= self.serve([request], prefix_caching=False)
        return answers


@pytest.fixture(scope="module", params=[(b, *c) for b in BACKENDS for c in CASES] + NATIVE, ids="-".join)
def law(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Law:
    backend, architecture, weight_type, kv_dtype = request.param
    path = tmp_path_factory.mktemp("laws") / "tiny.gguf"
    tiny.tiny_model(path, architecture, weight_type=weight_type)
    return Law(load(path, backend, kv_dtype))


def load(path: Path, backend: str, kv_dtype: KVDtype) -> Model:
    with closing(open_checkpoint(path)) as file:
        spec = file.spec
        layout = KVLayout(NUM_BLOCKS, 16, kv_dtype)
        forward, tensors = forward_for(spec.architecture), model_tensors(spec, file.tensors)
        return make_backend(backend).load(LoadSpec(spec, forward, tensors, layout, MAX_ROWS))


def request_of(name: str, prompt: Sequence[int], **params: object) -> Request:
    fields: dict[str, object] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 20}
    sampling = SamplingParams(**{**fields, **params})  # type: ignore[arg-type]
    detok, stops = Detokenizer(VOCAB_BYTES, frozenset()), StopMatcher(sampling.stop)
    return Request(name, tuple(prompt), sampling, frozenset({257}), detok, stops)


def mixed() -> list[Request]:
    """Every kind of sampling, prompts of many lengths around block edges; made anew at each call."""
    return [
        request_of("greedy-1", [65]),
        request_of("greedy-17", range(17)),
        request_of("greedy-70", [(i * 7) % 250 for i in range(70)], max_tokens=30),
        request_of("sampled", range(40, 73), temperature=1.1, seed=7),
        request_of("filtered", range(31), temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=2**63),
        request_of("penalised", range(60, 92), repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7),
        request_of("biased", range(5, 21), logit_bias={66: 4.0, 67: -100.0}, temperature=0.5, seed=3),
        request_of("scored", range(100, 148), prompt_logprobs=3, max_tokens=4),
    ]


def test_batched_equals_alone(law: Law) -> None:
    """Fault (CASES D9): another request in the batch changes an answer."""
    assert law.serve(mixed()) == law.alone(mixed())


def test_arrival_in_mid_batch_equals_alone(law: Law) -> None:
    """Fault: joining or leaving a running batch changes an answer."""
    arrivals = {request.id: 3 * i for i, request in enumerate(mixed())}
    assert law.serve(mixed(), arrivals=arrivals) == law.alone(mixed())


def test_chunked_equals_whole(law: Law) -> None:
    """Fault: an answer depends on where its prompt was cut."""
    assert law.serve(mixed(), max_rows=16) == law.alone(mixed())


@pytest.mark.parametrize("length", [15, 16, 17, 32, 33, 48])
def test_cached_equals_cold(law: Law, length: int) -> None:
    """Fault (CASES A7): a whole-prompt hit changes the answer, at any block edge."""
    prompt = [(i * 11) % 250 for i in range(length)]
    cold = law.alone([request_of("a", prompt)])
    arrivals = {"b": 20}
    warm = law.serve([request_of("a", prompt), request_of("b", prompt)], arrivals=arrivals)
    assert warm["a"] == cold["a"]
    assert warm["b"] == cold["a"]


def test_identical_prompts_together_equal_alone(law: Law) -> None:
    """Fault: a block shared before it is computed is read too early."""
    prompt = [(i * 13) % 250 for i in range(100)]
    together = law.serve([request_of(str(i), prompt) for i in range(5)], max_rows=48)
    cold = law.alone([request_of("a", prompt)])
    assert all(answer == cold["a"] for answer in together.values())


def test_preempted_equals_undisturbed(law: Law) -> None:
    """Fault (CASES A18): text, seed-sampled text, penalties or log-probabilities differ after a recompute."""
    disturbed = law.serve(mixed(), num_blocks=9)
    assert law.num_preemptions > 0
    assert disturbed == law.alone(mixed())
