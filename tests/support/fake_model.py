"""A model without arithmetic whose answer depends on every token it can see through its KV pool.

Its "KV cache" keeps the token written to each slot. The logits of a row are a function of all tokens read back through
the row's block table, so that one wrong block, one stale slot or one missing token changes the text. Cheap enough for
thousands of requests, strict enough to be the oracle of the engine's laws.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from chairlift.engine.detok import Detokenizer
from chairlift.engine.request import Request
from chairlift.engine.sampling_params import SamplingParams
from chairlift.engine.stops import StopMatcher
from chairlift.kernels.backend import BLOCK_SIZE
from chairlift.kernels.ops import F32, MAX_TOP, LogitResult, StepArrays
from chairlift.models.spec import LayerSpec, ModelSpec, RopeSpec
from chairlift.plan import Plan

VOCAB = 256
VOCAB_BYTES = tuple(bytes([i]) for i in range(VOCAB))


def fake_spec() -> ModelSpec:
    """A spec with just enough truth for a Plan."""
    return ModelSpec("fake", "fake", 8, 8, VOCAB, 4096, 1e-5, (LayerSpec(1, 1, 8, 8, RopeSpec(8)),))


def fake_plan(**changes: object) -> Plan:
    """A small plan; any field can be set."""
    fields: dict[str, object] = {
        "spec": fake_spec(),
        "model_name": "fake",
        "model_format": "F32",
        "weight_bytes": 0,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_queue": 16,
        "block_size": BLOCK_SIZE,
        "num_blocks": 64,
        "kv_dtype": "bf16",
        "kv_bytes_per_token": 1,
        "prefix_caching": True,
        "batching": "continuous",
        "max_gap_s": 10.0,
        "watchdog_s": 30.0,
    }
    return Plan(**{**fields, **changes})  # type: ignore[arg-type]


def fake_logits(tokens: Sequence[int]) -> F32:
    """Logits that follow these tokens: printable ASCII only, decided by all of them."""
    digest = hashlib.blake2b(np.asarray(tokens, dtype=np.int32).tobytes(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    logits = rng.standard_normal(VOCAB, dtype=np.float32)
    logits[:32] -= 100.0
    logits[127:] -= 100.0
    return logits


def alone(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy answer computed without any engine."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(np.argmax(fake_logits(tokens))))
    return tokens[len(prompt) :]


class FakeModel:
    """Implements kernels.backend.Model. `before_run` may raise, sleep or count."""

    def __init__(
        self, num_blocks: int, block_size: int = BLOCK_SIZE, before_run: Callable[[StepArrays], None] | None = None
    ):
        self.cache = np.full(num_blocks * block_size, -1, dtype=np.int32)
        self.block_size = block_size
        self.before_run = before_run
        self.rows_run: list[int] = []

    @property
    def load_s(self) -> Mapping[str, float]:
        return {}

    @property
    def weight_bytes(self) -> int:
        return 0

    @property
    def kv_bytes(self) -> int:
        return int(self.cache.nbytes)

    def run(self, step: StepArrays) -> LogitResult:
        if self.before_run is not None:
            self.before_run(step)
        self.rows_run.append(len(step.tokens))
        self.cache[step.slots] = step.tokens
        seq_of_row = np.searchsorted(step.seq_starts, step.logit_rows, side="right") - 1
        num_rows = len(step.logit_rows)
        result = LogitResult(
            tokens=np.zeros(num_rows, np.int32),
            logprobs=np.zeros(num_rows, np.float32),
            top_ids=np.full((num_rows, MAX_TOP), -1, np.int32),
            top_logprobs=np.zeros((num_rows, MAX_TOP), np.float32),
            finite=np.ones(num_rows, np.bool_),
        )
        for i, (row, seq) in enumerate(zip(step.logit_rows, seq_of_row, strict=True)):
            self._reduce(step, result, i, self._visible(step, int(row), int(seq)))
        return result

    def _visible(self, step: StepArrays, row: int, seq: int) -> list[int]:
        positions = np.arange(step.positions[row] + 1)
        table = step.block_tables[step.table_starts[seq] : step.table_starts[seq + 1]]
        tokens = self.cache[table[positions // self.block_size] * self.block_size + positions % self.block_size]
        assert (tokens >= 0).all(), "attention read a slot that was never written"
        return [int(t) for t in tokens]

    def _reduce(self, step: StepArrays, result: LogitResult, i: int, visible: Sequence[int]) -> None:
        raw = fake_logits(visible)
        logprobs = raw - np.log(np.exp(raw.astype(np.float64)).sum()).astype(np.float32)
        record = step.sample[i]
        biased = raw.copy()
        lo, hi = step.bias_starts[i], step.bias_starts[i + 1]
        np.add.at(biased, step.bias_ids[lo:hi], step.bias_values[lo:hi])
        if record["temperature"] > 0:
            rng = np.random.default_rng([int(record["seed"]), int(record["choice"]), int(record["index"])])
            biased = biased / record["temperature"] + rng.gumbel(size=VOCAB)
        token = int(record["target"]) if record["target"] >= 0 else int(np.argmax(biased))
        result.tokens[i], result.logprobs[i] = token, logprobs[token]
        num_top = max(0, int(record["num_top"]))
        best = np.argsort(-raw, kind="stable")[:num_top]
        result.top_ids[i, :num_top], result.top_logprobs[i, :num_top] = best, logprobs[best]


def fake_request(request_id: str, prompt: Sequence[int], **params: object) -> Request:
    """A greedy request over the byte vocabulary that ends by length unless told otherwise."""
    fields: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 16}
    sampling = SamplingParams(**{**fields, **params})  # type: ignore[arg-type]
    return Request(
        id=request_id,
        prompt=tuple(prompt),
        params=sampling,
        eos_ids=frozenset({0}),
        detok=Detokenizer(VOCAB_BYTES, frozenset()),
        stops=StopMatcher(sampling.stop),
    )


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Polls a condition that another thread brings about; fails loudly when it does not."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("the condition did not come true in time")
        time.sleep(0.001)
