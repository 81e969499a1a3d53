"""The request that an engine runs before it says that it is ready."""

from __future__ import annotations

from chairlift.engine.detok import Detokenizer
from chairlift.engine.request import Request
from chairlift.engine.sampling_params import SamplingParams
from chairlift.engine.stops import StopMatcher
from chairlift.plan import Plan

_WARM_UP_PROMPT = 64
_WARM_UP_OUTPUT = 4


def warm_up_request(plan: Plan) -> Request:
    """A short prompt of arbitrary tokens with a short answer, within the plan's context."""
    vocab_size = plan.spec.vocab_size
    num_prompt = max(1, min(_WARM_UP_PROMPT, plan.max_model_len - _WARM_UP_OUTPUT))
    return Request(
        id="warm-up",
        prompt=tuple(i % vocab_size for i in range(num_prompt)),
        params=SamplingParams(temperature=0.0, max_tokens=_WARM_UP_OUTPUT, ignore_eos=True),
        eos_ids=frozenset(),
        detok=Detokenizer([b""] * vocab_size, frozenset()),
        stops=StopMatcher(()),
        salt="warm-up",
    )
