"""How long a step will take, learnt from the steps that ran.

    seconds = base + per_row * rows + per_kv_token * kv_tokens_read + per_logit_row * logit_rows

A Kalman filter whose state are the four coefficients (recursive least squares that forgets: Haykin, Adaptive Filter
Theory, chapters 10 and 14). Between two steps each coefficient may drift a little, and all of them together a little
more, as when a neighbour takes the core: so a slow-down seen in decodes alone is expected of prompts too, and what has
not been seen for long is kept rather than forgotten. No coefficient is ever negative: predictions grow with every
feature.

Pure arithmetic on floats, about 10 us an observation; knows neither steps nor clocks.
"""

from __future__ import annotations

from math import sqrt

_NOISE = 0.1  # one standard deviation of a measured step, as a share of its prediction
_DRIFT_EACH = 0.002  # of one coefficient, per step
_DRIFT_ALL = 0.01  # of all coefficients together, per step
_UNSURE_EACH = 2.0  # standard deviation of the prior, as a share of it: one coefficient against the others,
_UNSURE_ALL = 5.0  # and the speed of the machine, which the first steps tell
_MAX_UNSURE = 4.0  # of one coefficient, as a share of itself: bounds what drift adds up to while steps are alike
_MAX_SURPRISE = 3.0  # in standard deviations: what lies beyond counts no more, so that one hiccup teaches little
_SMALLEST = 1e-3  # of its prior: a coefficient that was driven to zero can still drift away from it


class StepTime:
    """Predicts seconds; all coefficients in seconds per unit of their feature."""

    def __init__(
        self,
        *,
        base_s: float = 2.5e-3,
        per_row_s: float = 4e-4,
        per_kv_token_s: float = 3e-7,
        per_logit_row_s: float = 1e-4,
    ) -> None:
        """The prior, all above zero: what is believed before the first step. Defaults: a 135M model on two cores."""
        self._prior = (base_s, per_row_s, per_kv_token_s, per_logit_row_s)
        if min(self._prior) <= 0.0:
            raise ValueError(f"every coefficient of the prior must be above zero: {self._prior}")
        self._weights = list(self._prior)
        self._cov = [[_UNSURE_ALL**2 * v * w for w in self._prior] for v in self._prior]
        for i, w in enumerate(self._prior):
            self._cov[i][i] += (_UNSURE_EACH * w) ** 2

    @property
    def coefficients(self) -> tuple[float, float, float, float]:
        """base_s, per_row_s, per_kv_token_s, per_logit_row_s as believed now."""
        base, per_row, per_kv_token, per_logit_row = self._weights
        return base, per_row, per_kv_token, per_logit_row

    def predict(self, rows: int, kv_tokens: int, logit_rows: int) -> float:
        """Seconds that a step of `rows` tokens takes when they read `kv_tokens` cached tokens in all."""
        base, per_row, per_kv_token, per_logit_row = self._weights
        return base + per_row * rows + per_kv_token * kv_tokens + per_logit_row * logit_rows

    def observe(self, rows: int, kv_tokens: int, logit_rows: int, seconds: float) -> None:
        """Learns from one step that took `seconds`."""
        self._drift()
        x = (1.0, float(rows), float(kv_tokens), float(logit_rows))
        expected = self.predict(rows, kv_tokens, logit_rows)
        cov_x = [sum(c * v for c, v in zip(row, x, strict=True)) for row in self._cov]
        variance = sum(v * c for v, c in zip(x, cov_x, strict=True)) + (_NOISE * expected) ** 2
        most = _MAX_SURPRISE * sqrt(variance)
        error = max(-most, min(most, seconds - expected))
        self._weights = [max(0.0, w + c * error / variance) for w, c in zip(self._weights, cov_x, strict=True)]
        for row, c in zip(self._cov, cov_x, strict=True):
            gain = c / variance
            for j in range(4):
                row[j] -= gain * cov_x[j]

    def _drift(self) -> None:
        """A step has passed: less is sure than before."""
        sizes = [max(w, _SMALLEST * p) for w, p in zip(self._weights, self._prior, strict=True)]
        for i, (row, size) in enumerate(zip(self._cov, sizes, strict=True)):
            if row[i] < (_MAX_UNSURE * size) ** 2:
                row[i] += (_DRIFT_EACH * size) ** 2
            for j in range(4):
                row[j] += _DRIFT_ALL**2 * size * sizes[j]
