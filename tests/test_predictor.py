"""The predictor: learns a machine from noisy steps, and is not fooled by one hiccup."""

from __future__ import annotations

import random

import pytest

from chairlift.engine import predictor as predictor_module
from chairlift.engine.predictor import StepTime
from sim import Cost

Features = tuple[int, int, int]
SLOW = Cost(base_s=40e-3, per_row_s=6e-3, per_kv_token_s=1.5e-6, per_logit_row_s=1e-3)
FAST = Cost(base_s=5e-4, per_row_s=4e-5, per_kv_token_s=2e-8, per_logit_row_s=2e-5)
LIKE_PRIOR = Cost(base_s=2e-3, per_row_s=5e-4, per_kv_token_s=2e-7, per_logit_row_s=1e-4)


def draw(rng: random.Random) -> Features:
    """A step as they come: some decodes, and now and then a chunk of a prompt."""
    decodes, context = rng.randint(0, 20), rng.randint(50, 2000)
    chunk = 16 * rng.randint(1, 12) if not decodes or rng.random() < 0.3 else 0
    start = rng.randint(0, 4000)
    return decodes + chunk, decodes * context + chunk * start + chunk * (chunk + 1) // 2, max(1, decodes)


def worst_error(predictor: StepTime, cost: Cost, rng: random.Random, factor: float = 1.0) -> float:
    """Largest relative error over many steps."""
    steps = [draw(rng) for _ in range(200)]
    return max(abs(predictor.predict(*step) / (factor * cost.predict(*step)) - 1.0) for step in steps)


def learn(predictor: StepTime, cost: Cost, rng: random.Random, num_steps: int) -> None:
    """Observes steps with 5 % of noise."""
    for _ in range(num_steps):
        step = draw(rng)
        predictor.observe(*step, cost.predict(*step) * rng.gauss(1.0, 0.05))


@pytest.mark.parametrize("cost", [SLOW, FAST, LIKE_PRIOR])
@pytest.mark.parametrize("seed", range(3))
def test_converges_to_the_truth(cost: Cost, seed: int) -> None:
    """Guards against budgets that are wrong for good on a machine ten times faster or slower than the prior."""
    rng = random.Random(seed)
    predictor = StepTime()
    learn(predictor, cost, rng, 600)
    assert worst_error(predictor, cost, rng) < 0.08


@pytest.mark.parametrize("factor", [100.0, 0.0])
def test_one_outlier_moves_little(factor: float) -> None:
    """Guards against prompts starved, or gaps broken, by one step that was swapped out or measured as nothing."""
    rng = random.Random(1)
    predictor = StepTime()
    learn(predictor, SLOW, rng, 400)
    step = draw(rng)
    predictor.observe(*step, factor * SLOW.predict(*step))
    assert worst_error(predictor, SLOW, rng) < 0.1


def test_a_slower_machine_is_believed_and_expected_of_prompts_too() -> None:
    """Guards against gaps broken by the first prompt after a neighbour took half of the core during decodes."""
    rng = random.Random(2)
    predictor = StepTime()
    learn(predictor, SLOW, rng, 400)
    for i in range(100):
        step = (5, 5 * (300 + i), 5)
        predictor.observe(*step, 2.0 * SLOW.predict(*step) * rng.gauss(1.0, 0.05))
    assert worst_error(predictor, SLOW, rng, factor=2.0) < 0.1


def test_long_sameness_is_not_forgetting() -> None:
    """Guards against coefficients that run away while only one kind of step is seen (covariance wind-up)."""
    rng = random.Random(3)
    predictor = StepTime()
    learn(predictor, SLOW, rng, 400)
    for _ in range(5000):
        predictor.observe(1, 500, 1, SLOW.predict(1, 500, 1) * rng.gauss(1.0, 0.05))
    assert worst_error(predictor, SLOW, rng) < 0.1
    learn(predictor, SLOW, rng, 200)
    assert worst_error(predictor, SLOW, rng) < 0.08


def test_what_is_never_seen_is_not_endlessly_unsure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one bad measurement being believed whole after days of steps that were all alike."""
    monkeypatch.setattr(predictor_module, "_DRIFT_EACH", 0.5)  # days in a second
    rng = random.Random(5)
    predictor = StepTime()
    learn(predictor, SLOW, rng, 400)
    for _ in range(5000):
        predictor.observe(1, 500, 1, SLOW.predict(1, 500, 1))
    before_s = predictor.predict(200, 200_000, 1)
    predictor.observe(200, 200_000, 1, 100 * before_s)
    assert predictor.predict(200, 200_000, 1) < 15 * before_s


def test_predictions_never_fall_when_a_step_grows() -> None:
    """Guards against a search for the largest chunk that finds nonsense: no coefficient is ever negative."""
    rng = random.Random(4)
    predictor = StepTime()
    for _ in range(500):
        predictor.observe(*draw(rng), rng.random() * 0.1)
        assert min(predictor.coefficients) >= 0.0
        assert predictor.predict(1, 1, 0) > 0.0


def test_sane_before_any_step() -> None:
    """Guards against a first step of nothing, or of everything: the prior speaks until something was seen."""
    predictor = StepTime(base_s=1.0, per_row_s=0.1, per_kv_token_s=0.01, per_logit_row_s=0.001)
    assert predictor.predict(2, 3, 4) == pytest.approx(1.234)
    with pytest.raises(ValueError, match="above zero"):
        StepTime(per_row_s=0.0)
