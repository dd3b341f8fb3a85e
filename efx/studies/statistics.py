"""Comparisons of losses over seeds (SPEC section 8)."""

import math

from scipy import stats

MARGIN = 0.02  # nats within which two models are equivalent


def difference(a, b):
    """Return {name: value} of a's mean minus b's: Welch's 95% interval and p values.

    All but the difference are NaN unless both have repeated seeds.

    Args:
      a, b: (mean, standard deviation, number of seeds).
    """
    (mean_a, std_a, n_a), (mean_b, std_b, n_b) = a, b
    mean, error, freedom = mean_a - mean_b, math.nan, math.nan
    if min(n_a, n_b) > 1:
        square_a, square_b = std_a**2 / n_a, std_b**2 / n_b
        error = math.sqrt(square_a + square_b)
        per_freedom = square_a**2 / (n_a - 1) + square_b**2 / (n_b - 1)
        freedom = error**4 / per_freedom if per_freedom else math.inf
    return intervals(mean, error, freedom)


def intervals(mean, error, freedom):
    """Return `difference` of a mean with this standard error and degrees of freedom."""
    half = stats.t.ppf(0.975, freedom) * error
    if error:
        p = 2 * stats.t.sf(abs(mean) / error, freedom)
        equivalence_p = stats.t.sf((MARGIN - abs(mean)) / error, freedom)
    else:
        p, equivalence_p = mean == 0, abs(mean) > MARGIN
    values = mean, mean - half, mean + half, p, equivalence_p
    names = "difference", "low", "high", "p", "equivalence_p"
    return dict(zip(names, map(float, values), strict=True))


def recovered_share(half, full, other):
    """Return {"recovered", "low", "high"}: the share of the gain of depth that a model recovers.

    R = (L_half - L_other) / (L_half - L_full), with its 95% interval by the delta method. All NaN
    unless the model of full depth is significantly ahead of the one of half its depth.

    Args:
      half, full, other: (mean, standard deviation, number of seeds) of losses.
    """
    names = "recovered", "low", "high"
    depth = difference(half, full)
    if not (depth["p"] < 0.05 and depth["difference"] > 0 and other[2] > 1):
        return dict.fromkeys(names, math.nan)
    share = (half[0] - other[0]) / depth["difference"]
    weighted = (other, 1.0), (half, 1.0 - share), (full, share)
    squares = [((weight * std) ** 2 / n, n - 1) for (_, std, n), weight in weighted]
    total = sum(square for square, _ in squares)
    per_freedom = sum(square**2 / freedom for square, freedom in squares)
    freedom = total**2 / per_freedom if per_freedom else math.inf
    margin = stats.t.ppf(0.975, freedom) * math.sqrt(total) / depth["difference"]
    return dict(zip(names, (share, share - margin, share + margin), strict=True))
