"""Comparisons of losses over seeds (SPEC section 8): tests, power, and verdicts at several looks.

A difference is a's mean minus b's, so below 0 the model a is better. Where a comparison has several
looks, each tests at the `Levels` of all of them.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import stats

MARGIN = 0.02  # nats within which two models are equivalent
DRAWS = 40_000
# Comparisons with a larger deviation than this many margins end at their second look: no affordable
# number of seeds decides them.
FUTILE = 1.25


# ---- one comparison ------------------------------------------------------------------------------


def difference(a, b, margin=MARGIN):
    """Return {name: value} of a's mean minus b's: Welch's 95% interval and p values.

    All but the difference are NaN unless both have repeated seeds.

    Args:
      a, b: (mean, standard deviation, number of seeds); the first two may be arrays.
      margin: nats within which the two are equivalent.

    Returns:
      "difference"; "low", "high": its interval; "p": two-sided, of no difference; "equivalence_p":
      of two one-sided tests that the difference is at least the margin.
    """
    (mean_a, std_a, n_a), (mean_b, std_b, n_b) = a, b
    if min(n_a, n_b) < 2:
        return intervals(mean_a - mean_b, math.nan, math.nan, margin)
    square_a, square_b = np.square(std_a) / n_a, np.square(std_b) / n_b
    square = square_a + square_b
    per_freedom = np.square(square_a) / (n_a - 1) + np.square(square_b) / (n_b - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        freedom = np.where(per_freedom > 0, np.square(square) / per_freedom, math.inf)
    return intervals(mean_a - mean_b, np.sqrt(square), freedom, margin)


def paired_difference(a, b, margin=MARGIN):
    """Return `difference` of values of the same seeds, in the same order: Student's, paired."""
    deltas = np.asarray(a) - np.asarray(b)
    n = deltas.shape[-1]
    error = deltas.std(-1, ddof=1) / math.sqrt(n) if n > 1 else math.nan
    return intervals(deltas.mean(-1), error, n - 1, margin)


def intervals(mean, error, freedom, margin=MARGIN):
    """Return `difference` of a mean with this standard error and degrees of freedom."""
    mean, error = np.asarray(mean, float), np.asarray(error, float)
    half = stats.t.ppf(0.975, freedom) * error
    with np.errstate(invalid="ignore", divide="ignore"):
        p = 2 * stats.t.sf(np.abs(mean) / error, freedom)
        equivalence_p = stats.t.sf((margin - np.abs(mean)) / error, freedom)
    p = np.where(error == 0, mean == 0, p)
    equivalence_p = np.where(error == 0, np.abs(mean) > margin, equivalence_p)
    values = mean, mean - half, mean + half, p, equivalence_p
    names = "difference", "low", "high", "p", "equivalence_p"
    return {name: float(x) if np.ndim(x) == 0 else x for name, x in zip(names, values, strict=True)}


def holm(p):
    """Return Holm's adjusted p values of a set of comparisons, in the order of `p`."""
    p = np.asarray(p, float)
    order = np.argsort(p)
    steps = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.maximum.accumulate(steps).clip(max=1)
    return adjusted


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


# ---- several looks -------------------------------------------------------------------------------


class Levels(NamedTuple):
    """One-sided nominal levels of each look: claims that are false in 5% of all comparisons.

    Attributes:
      equivalence: of both one-sided tests against the margin. difference: of each direction.
    """

    equivalence: float
    difference: float


@functools.cache
def levels(looks):
    """Return the Levels for looks at these numbers of seeds an arm, a tuple.

    Those of three looks are constants, slightly conservative; others are found by simulation.
    """
    if len(looks) == 3:
        return Levels(0.025, 0.01)
    rows = _draw(0.0, 1.0, looks, False, MARGIN, 5 * DRAWS, np.random.default_rng(0))
    above = [np.where(row["difference"] > 0, row["p"] / 2, 1 - row["p"] / 2) for row in rows]
    one_sided = np.min(above, axis=0)
    two_sided = np.min([np.minimum(p, 1 - p) for p in above], axis=0)
    found = (math.floor(1000 * np.quantile(p, 0.05)) / 1000 for p in (one_sided, two_sided))
    return Levels(*map(min, found, (0.05, 0.025)))


def verdict(row, at):
    """Return what a look says of a `difference`, or an array of it: "better" or "worse",
    "equivalent", "equivalent and different", or "undecided", such as of one that is not finite.

    Args:
      at: Levels.
    """
    is_equivalent = np.asarray(row["equivalence_p"] < at.equivalence)
    is_different = np.asarray(row["p"] / 2 < at.difference)
    is_better = is_different & (row["difference"] < 0)
    outcomes = {
        "equivalent and different": is_equivalent & is_different,
        "equivalent": is_equivalent,
        "better": is_better,
        "worse": is_different,
    }
    found = np.select(list(outcomes.values()), list(outcomes), "undecided")
    return found if found.ndim else str(found)


def is_futile(std_a, std_b, look, margin=MARGIN):
    """Whether a comparison ends undecided at look number `look`, from 0 on."""
    pooled = np.sqrt((np.square(std_a) + np.square(std_b)) / 2)
    return (look == 1) & (pooled > FUTILE * margin)


def power(std, looks, *, true=0.0, margin=MARGIN, paired=False, draws=DRAWS, seed=0):
    """Return how comparisons with this true difference end, by simulation of normal losses.

    Args:
      std: deviation of a loss over seeds, the same and independent in both arms.
      looks: numbers of seeds an arm.

    Returns:
      {"better", "worse", "equivalent", "undecided": fractions; "equivalent" includes "equivalent
      and different"; "seeds": mean number of seeds an arm}.
    """
    looks, rng = tuple(looks), np.random.default_rng(seed)
    at, rows = levels(looks), _draw(true, std, looks, paired, margin, draws, rng)
    ended, is_running = np.full(draws, "undecided", object), np.ones(draws, bool)
    seeds = np.full(draws, looks[-1])
    for look, (n, row) in enumerate(zip(looks, rows, strict=True)):
        found = verdict(row, at)
        ends = (found != "undecided") | is_futile(row["std_a"], row["std_b"], look, margin)
        ended[is_running], seeds[is_running & ends] = found[is_running], n
        is_running &= ~ends
    ended[ended == "equivalent and different"] = "equivalent"
    outcomes = "better", "worse", "equivalent", "undecided"
    fractions = {name: float(np.mean(ended == name)) for name in outcomes}
    return fractions | {"seeds": float(seeds.mean())}


def _draw(true, std, looks, paired, margin, draws, rng):
    """[{column: array of `draws`} of each look]: `difference` and both deviations."""
    a, b = rng.normal(0.0, std, (2, draws, looks[-1]))
    a, rows = a + true, []
    for n in looks:
        x, y = a[:, :n], b[:, :n]
        moments = [(z.mean(-1), z.std(-1, ddof=1), n) for z in (x, y)]
        row = paired_difference(x, y, margin) if paired else difference(*moments, margin)
        rows.append(row | {"std_a": moments[0][1], "std_b": moments[1][1]})
    return rows


def upper_deviation(std, freedom, level=0.8):
    """Return the upper bound of a deviation that was estimated with `freedom` degrees."""
    return std * math.sqrt(freedom / stats.chi2.ppf(1 - level, freedom))
