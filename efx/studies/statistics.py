"""Comparisons of losses over seeds (SPEC section 8)."""

import math

from scipy import stats

MARGIN = 0.02  # nats within which two models are equivalent


def difference(a, b):
    """Return (mean, low, high, p of equivalence) of a's loss minus b's: unpaired, 95%.

    The interval is Student's with a pooled deviation. p is that of two one-sided tests of a
    difference within MARGIN. All but the mean are NaN without repeated seeds.

    Args:
      a, b: (mean, standard deviation, number of seeds).
    """
    (mean_a, std_a, n_a), (mean_b, std_b, n_b) = a, b
    mean, freedom = mean_a - mean_b, n_a + n_b - 2
    if freedom < 1:
        return mean, math.nan, math.nan, math.nan
    squares = sum((n - 1) * std**2 for std, n in ((std_a, n_a), (std_b, n_b)) if n > 1)
    error = math.sqrt(squares / freedom * (1 / n_a + 1 / n_b))
    half = stats.t.ppf(0.975, freedom) * error
    p = stats.t.sf((MARGIN - abs(mean)) / error, freedom) if error else float(abs(mean) > MARGIN)
    return mean, mean - half, mean + half, float(p)
