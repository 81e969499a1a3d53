"""run(step) -> what was sampled: one call into the model a step, its arrays turned back into values."""

from __future__ import annotations

from collections.abc import Callable

from chairlift.engine.batch import build
from chairlift.engine.logit_rows import SAMPLES
from chairlift.engine.sampling_params import TokenLogprob
from chairlift.engine.step import Sampled, Step, StepResult
from chairlift.kernels.backend import Model
from chairlift.kernels.ops import LogitResult


class Runner:
    """Computes steps. Owns the model while the engine runs; knows no clock and no queue."""

    def __init__(self, model: Model, block_size: int) -> None:
        self._model = model
        self._block_size = block_size

    def run(self, step: Step, before_kernels: Callable[[], None] = lambda: None) -> StepResult:
        """Computes a step; `before_kernels` is called right before the kernels start. Raises EngineError on failure."""
        batch = build(step, self._block_size)
        before_kernels()
        logits = self._model.run(batch.arrays)
        sampled: dict[int, Sampled] = {}
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        for i, ((index, target), token) in enumerate(zip(batch.logit_rows, logits.tokens.tolist(), strict=True)):
            params = step.chunks[index].request.params
            if target != SAMPLES:
                entry = _logprob(logits, i, target, params.prompt_logprobs or 0)
                prompt_logprobs.setdefault(index, []).append(entry)
                continue
            logprob = None if params.logprobs is None else _logprob(logits, i, token, params.logprobs)
            sampled[index] = Sampled(token, logprob)
        finite = logits.finite.tolist()
        bad = {index for (index, _), is_finite in zip(batch.logit_rows, finite, strict=True) if not is_finite}
        # A scored prompt may go wrong at any of its rows, also in a step that samples nothing for it.
        sampled |= dict.fromkeys(bad, Sampled(SAMPLES, ok=False))
        return StepResult(sampled, prompt_logprobs, logits.seconds)


def _logprob(logits: LogitResult, i: int, token: int, num_top: int) -> TokenLogprob:
    ids, values = logits.top_ids[i, :num_top].tolist(), logits.top_logprobs[i, :num_top].tolist()
    # A vocabulary smaller than num_top leaves -1 behind.
    top = tuple((token_id, value) for token_id, value in zip(ids, values, strict=True) if token_id >= 0)
    return TokenLogprob(token, float(logits.logprobs[i]), top)
