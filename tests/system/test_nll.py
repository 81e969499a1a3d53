"""The default model against an independent float32 run of it: what rounding activations and the cache costs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from chairlift.kernels.backend import KVDtype, KVLayout, LoadSpec
from chairlift.models.checkpoint import open_checkpoint
from chairlift.models.registry import forward_for, model_tensors
from support.backends import BACKENDS, make_backend
from support.paths import FIXTURES
from support.step_arrays import Part, make_step

NUM_TOKENS = 64
TOLERANCE = 0.04
"""int8 activations move a logit of this model by about 0.1, so the mean of 63 losses by about 0.0125."""


CASES = [
    pytest.param("reference", "bf16", marks=pytest.mark.long),  # numpy takes half a minute
    *((backend, "bf16") for backend in BACKENDS if backend != "reference"),
    (BACKENDS[-1], "int8"),
]


@pytest.mark.parametrize(("backend", "kv"), CASES)
def test_rounding_costs_little(smollm2_path: Path, backend: str, kv: KVDtype) -> None:
    """A rope, norm, scale or tokenizer that is subtly wrong: fluent text, but a loss that is too high."""
    expected = json.loads((FIXTURES / "nll.json").read_text(encoding="utf-8"))
    text = (FIXTURES / "english.txt").read_text(encoding="utf-8")
    with open_checkpoint(smollm2_path) as file:
        ids = file.tokenizer().encode(text, add_bos=False, parse_special=False)
        assert len(ids) == expected["num_tokens"]
        assert ids[:32] == expected["first_tokens"]
        spec = file.spec
        tensors, layout = model_tensors(spec, file.tensors), KVLayout(NUM_TOKENS // 16, dtype=kv)
        forward = forward_for(spec.architecture)
        model = make_backend(backend).load(LoadSpec(spec, forward, tensors, layout, NUM_TOKENS))

        step = make_step([Part(ids[:NUM_TOKENS], 0, range(NUM_TOKENS // 16), NUM_TOKENS)])
        step.sample["target"] = ids[1 : NUM_TOKENS + 1]
        nll = -np.mean(model.run(step).logprobs[:-1].astype(np.float64))
    assert nll == pytest.approx(expected["windows"][0]["mean_nll_of_first"][str(NUM_TOKENS)], abs=TOLERANCE)
