"""How long a step will take, learnt from the steps that ran.

    prediction = base + per_row * rows + per_kv_token * kv_tokens + per_context_token * context_tokens
                 + per_logit_row * logit_rows
    bound      = margin * prediction

The prediction comes from a Kalman filter whose state are the five coefficients (recursive least squares that forgets:
Haykin, Adaptive Filter Theory, chapters 10 and 14). Between two steps each coefficient may drift a little, and all of
them together a little more, as when a neighbour takes the core: so a slow-down seen only in decodes also raises the
prediction for prompts, and a coefficient without recent data keeps its value. No coefficient is ever negative:
predictions grow with every part of the work.

The margin is 1 where steps take about what they usually take. Where many take far longer it grows, until only one in
two hundred passes 1.3 times its bound: a quantile found by unequal steps up and down (Robbins and Monro, 1951).

Pure arithmetic on floats, about 10 us an observation; knows no clock.
"""

from __future__ import annotations

from math import sqrt
from operator import mul

from chairlift.engine.step import Work

_NOISE = 0.1  # one standard deviation of a measured step, as a share of its prediction
_DRIFT_EACH = 0.002  # of one coefficient, per step
_DRIFT_ALL = 0.01  # of all coefficients together, per step
_UNSURE_EACH = 2.0  # standard deviation of the prior, as a share of it: one coefficient against the others,
_UNSURE_ALL = 5.0  # and the speed of the machine, which the first steps tell
_MAX_UNSURE = 4.0  # of one coefficient, as a share of itself: bounds what drift adds up to while steps are alike
_MAX_SURPRISE = 3.0  # in standard deviations: larger surprises are cut to this, so that one outlier changes little
_SMALLEST = 1e-3  # of its prior: a coefficient that was driven to zero can still drift away from it

_LATE = 1.3  # times its bound: a step that takes longer is late
_LATE_SHARE = 1 / 200  # of all steps that may be late
_MARGIN_UP = 1.1  # factor that a late step applies to the margin
_MARGIN_DOWN = _MARGIN_UP ** (-_LATE_SHARE / (1.0 - _LATE_SHARE))  # factor that any other step applies
_MAX_MARGIN = 2.0


class StepTime:
    """Predicts seconds; all coefficients in seconds per unit of their part of the work."""

    def __init__(
        self,
        *,
        base_s: float = 3.7e-3,
        per_row_s: float = 4.3e-4,
        per_kv_token_s: float = 3.6e-7,
        per_context_token_s: float = 1.1e-6,
        per_logit_row_s: float = 3e-4,
    ) -> None:
        """The prior: coefficients assumed before the first step, all above 0. Defaults: a 135M model on two cores."""
        self._prior = (base_s, per_row_s, per_kv_token_s, per_context_token_s, per_logit_row_s)
        if min(self._prior) <= 0.0:
            raise ValueError(f"every coefficient of the prior must be above zero: {self._prior}")
        self._weights = list(self._prior)
        self._cov = [[_UNSURE_ALL**2 * v * w for w in self._prior] for v in self._prior]
        for i, w in enumerate(self._prior):
            self._cov[i][i] += (_UNSURE_EACH * w) ** 2
        self._margin = 1.0

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The current base_s, per_row_s, per_kv_token_s, per_context_token_s and per_logit_row_s."""
        return tuple(self._weights)

    @property
    def margin(self) -> float:
        """The bound as a multiple of the prediction; at least 1."""
        return self._margin

    def predict(self, work: Work) -> float:
        """Seconds that such a step usually takes."""
        return self._predict(_features(work))

    def bound(self, work: Work) -> float:
        """Seconds that hardly any such step exceeds by much: the prediction times the margin."""
        return self._margin * self.predict(work)

    def observe(self, work: Work, seconds: float) -> None:
        """Learns from one step that took `seconds`."""
        x = _features(work)
        predicted_s = self._predict(x)
        self._watch(is_late=seconds > _LATE * self._margin * predicted_s)
        self._learn(x, predicted_s, seconds)

    def _predict(self, x: tuple[float, ...]) -> float:
        return float(sum(map(mul, self._weights, x)))

    def _watch(self, *, is_late: bool) -> None:
        """Raises the margin after a late step, and lowers it a little after any other."""
        factor = _MARGIN_UP if is_late else _MARGIN_DOWN
        self._margin = min(_MAX_MARGIN, max(1.0, factor * self._margin))

    def _learn(self, x: tuple[float, ...], predicted_s: float, seconds: float) -> None:
        """One update of the Kalman filter: drift since the last step, then the new measurement."""
        sizes = self._drift_each()
        drift_x = _DRIFT_ALL**2 * sum(map(mul, sizes, x))
        cov_x = [sum(map(mul, row, x)) + drift_x * size for row, size in zip(self._cov, sizes, strict=True)]
        variance = sum(map(mul, x, cov_x)) + (_NOISE * predicted_s) ** 2
        most = _MAX_SURPRISE * sqrt(variance)
        error = max(-most, min(most, seconds - predicted_s))
        self._weights = [max(0.0, w + c * error / variance) for w, c in zip(self._weights, cov_x, strict=True)]
        drifts, gains = [_DRIFT_ALL**2 * size for size in sizes], [c / variance for c in cov_x]
        self._cov = [
            [c + drift * size - gain * other for c, size, other in zip(row, sizes, cov_x, strict=True)]
            for row, drift, gain in zip(self._cov, drifts, gains, strict=True)
        ]

    def _drift_each(self) -> list[float]:
        """Widens the uncertainty of each coefficient by a step's drift. Returns their sizes."""
        sizes = [max(w, _SMALLEST * p) for w, p in zip(self._weights, self._prior, strict=True)]
        for i, size in enumerate(sizes):
            if self._cov[i][i] < (_MAX_UNSURE * size) ** 2:
                self._cov[i][i] += (_DRIFT_EACH * size) ** 2
        return sizes


def _features(work: Work) -> tuple[float, ...]:
    """What the coefficients multiply, in their order."""
    return (1.0, float(work.rows), float(work.kv_tokens), float(work.context_tokens), float(work.logit_rows))
