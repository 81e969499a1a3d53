"""Scores how well a model predicts a text: the mean negative log-likelihood, which shows a loss of precision.

Protocol: the text's tokens (with BOS only where the model's prompts begin with it) are cut into windows of 1,024, with
no overlap. In each window, tokens 1 .. n-1 are predicted from those before them. The scores are the engine's own prompt
logprobs, so what is measured is what is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chairlift.boot import Loaded
from chairlift.engine.sampling_params import SamplingParams
from chairlift.errors import RequestError
from chairlift.session import Session

WINDOW = 1024


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome. `mean_nll` is in nats per predicted token; `perplexity` is e to that."""

    model: str
    num_tokens: int
    num_predicted: int  # all but the first of each window
    mean_nll: float
    perplexity: float
    window: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def windows(ids: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Consecutive windows of at most `size` tokens. A window of one token predicts nothing and is left out."""
    for start in range(0, len(ids), size):
        window = ids[start : start + size]
        if len(window) > 1:
            yield window


def evaluate(loaded: Loaded, text: str, *, progress: Callable[[int, int], None] | None = None) -> Evaluation:
    """Scores a text. `progress` gets (windows done, windows in all). RequestError for a text of under two tokens."""
    size = min(WINDOW, loaded.plan.max_model_len - 1)  # the engine wants room for one token of answer
    ids = loaded.encode(text)
    parts = list(windows(ids, size))
    if not parts:
        raise RequestError("the text has fewer than two tokens: there is nothing to predict")
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    losses: list[float] = []
    with Session(loaded) as session:
        for done, part in enumerate(parts, start=1):
            request = [output.request for output in session.stream(part, params)][-1]
            losses.extend(-scored.logprob for scored in request.prompt_logprobs if scored is not None)
            if progress is not None:
                progress(done, len(parts))
    mean = math.fsum(losses) / len(losses)
    return Evaluation(loaded.plan.model_name, len(ids), len(losses), mean, math.exp(mean), size)
