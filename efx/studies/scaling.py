"""Fits of loss over model size: the best size of a budget, its loss, and their intervals.

Two fits of Hoffmann et al. 2022 (arXiv 2203.15556). Approach 2 is a parabola in log parameters for
each budget. Approach 3 is a law of parameters N and tokens D through all points,

    L(N, D) = E + A / N^a + B / D^b,

linear in E, A and B for given exponents, so that only two exponents are searched (variable
projection; arXiv 2603.22339 shows that parabolas are biased and this is not). N counts all
parameters. The fit is by least squares in nats; a point counts as often as it has seeds.

Intervals are bootstrap percentiles. A draw adds to each fitted loss a resampled misfit of the
family's points and resampled deviations of seeds, each with a variance drawn for its degrees of
freedom: else intervals from few points would be too narrow. A fit with fewer than two degrees of
freedom left has no interval, as its misfit is unknown.
"""

import dataclasses

import numpy as np
import pandas as pd
from scipy.interpolate import PchipInterpolator
from scipy.optimize import least_squares, nnls

from efx.studies.statistics import MARGIN

MIN_SIZES = 3  # of a parabola
LAW_PARAMETERS = 5
MIN_FREEDOM = 2  # points beyond the free parameters, for an interval
_EXPONENTS = np.log([0.02, 3.0])  # range of the search
_REACH = 3.0  # a law's best size is trusted within this factor of the measured sizes
_LEVELS = [2.5, 97.5]


def mean_points(points):
    """Average runs over seeds: one row for each size and budget of one family.

    Columns: budget, size, parameters, tokens, flops_per_token, seconds_per_flop, loss, n, and
    `deviations`, the seeds' losses minus their mean.
    """
    rows = []
    for (budget, size), group in points.groupby(["budget", "size"], sort=False):
        loss = group.loss.to_numpy()
        rows.append(
            {
                "budget": budget,
                "size": size,
                "parameters": group.parameters.mean(),
                "tokens": group.tokens.mean(),
                "flops_per_token": (group.flops / group.tokens).mean(),
                "seconds_per_flop": (group.seconds / group.flops).median(),
                "loss": loss.mean(),
                "std": loss.std(ddof=1) if len(loss) > 1 else np.nan,
                "n": len(loss),
                "deviations": loss - loss.mean(),
            }
        )
    return pd.DataFrame(rows).sort_values(["budget", "parameters"], ignore_index=True)


def within(means, factor):
    """Keep the sizes within a factor of the best measured one of their budget."""
    best = means.loc[means.groupby("budget").loss.idxmin()].set_index("budget").parameters
    ratio = means.parameters / means.budget.map(best)
    return means[(ratio <= factor) & (ratio >= 1 / factor)].reset_index(drop=True)


# ---- approach 2 --------------------------------------------------------------------------------


def parabola(parameters, losses, seeds):
    """Return (size, loss, fitted losses) of one budget; NaN where the sizes enclose no minimum."""
    if len({*parameters}) < MIN_SIZES:
        return np.nan, np.nan, np.asarray(losses)
    x = np.log(parameters)
    bend, slope, offset = np.polyfit(x - x.mean(), losses, 2, w=np.sqrt(seeds))
    fitted = np.polyval([bend, slope, offset], x - x.mean())
    vertex = x.mean() - slope / (2 * bend)
    if bend <= 0 or not x.min() <= vertex <= x.max():
        return np.nan, np.nan, fitted
    return np.exp(vertex), offset - slope**2 / (4 * bend), fitted


def parabola_optima(means, losses):
    """Return ({budget: (size, loss)}, fitted losses) of all budgets."""
    optima, fitted = {}, np.empty(len(means))
    for budget, rows in means.groupby("budget").indices.items():
        size, loss, fitted[rows] = parabola(
            means.parameters[rows].to_numpy(), losses[rows], means.n[rows].to_numpy()
        )
        optima[budget] = size, loss
    return optima, fitted


# ---- approach 3 --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Law:
    """L(N, D) = E + A / N^a + B / D^b."""

    E: float
    A: float
    B: float
    a: float
    b: float

    def loss(self, parameters, tokens):
        return self.E + self.A * parameters**-self.a + self.B * tokens**-self.b


def can_fit_law(means):
    """Whether the points determine five parameters."""
    return (
        len(means) > LAW_PARAMETERS
        and means.budget.nunique() > 1
        and means.parameters.nunique() >= MIN_SIZES
    )


def fit_law(means, losses, start=None):
    """Return (Law, fitted losses).

    Args:
      start: exponents (a, b) to start from; None: the best of a grid.
    """
    x, z = np.log(means.parameters.to_numpy()), np.log(means.tokens.to_numpy())
    weights = np.sqrt(means.n.to_numpy() / means.n.sum())

    def project(log_exponents):
        a, b = np.exp(log_exponents)
        columns = [np.ones_like(x), np.exp(-a * (x - x.mean())), np.exp(-b * (z - z.mean()))]
        columns = np.stack(columns, axis=1)
        linear, _ = nnls(weights[:, None] * columns, weights * losses)
        return linear, columns @ linear

    def residuals(log_exponents):
        return weights * (project(log_exponents)[1] - losses)

    if start is None:
        grid = np.linspace(*_EXPONENTS, 16)
        starts = [np.array([i, j]) for i in grid for j in grid]
        start = np.exp(min(starts, key=lambda s: np.sum(residuals(s) ** 2)))
    inside = np.clip(np.log(start), _EXPONENTS[0] + 1e-9, _EXPONENTS[1] - 1e-9)
    bounds = tuple(np.repeat(end, 2) for end in _EXPONENTS)
    found = least_squares(residuals, inside, bounds=bounds, xtol=1e-12, ftol=1e-14, gtol=1e-14)
    (E, A, B), fitted = project(found.x)
    a, b = np.exp(found.x)
    return Law(E, A * np.exp(a * x.mean()), B * np.exp(b * z.mean()), a, b), fitted


def interpolate(means, column):
    """Return a function of parameters that interpolates a column, both in logarithms.

    6 N FLOPs a token would be wrong for routed and for small models. Beyond the measured sizes the
    end slopes continue.
    """
    table = means.groupby("parameters")[column].mean()
    x, y = np.log(table.index.to_numpy()), np.log(table.to_numpy())
    inside, slopes = PchipInterpolator(x, y), np.diff(y) / np.diff(x)

    def values(parameters):
        log = np.log(parameters)
        beyond = slopes[0] * np.minimum(log - x[0], 0) + slopes[-1] * np.maximum(log - x[-1], 0)
        return np.exp(inside(np.clip(log, x[0], x[-1])) + beyond)

    return values


def law_optimum(law, means, budget, flops_per_token=None):
    """Return (size, loss) of the lowest loss of a budget; NaN far from the measured sizes."""
    flops_per_token = flops_per_token or interpolate(means, "flops_per_token")
    sizes = np.geomspace(means.parameters.min() / 100, means.parameters.max() * 100, 4000)
    losses = law.loss(sizes, budget / flops_per_token(sizes))
    size, loss = sizes[losses.argmin()], losses.min()
    low, high = means.parameters.min() / _REACH, means.parameters.max() * _REACH
    return (size, loss) if low <= size <= high else (np.nan, np.nan)


# ---- fits with draws ---------------------------------------------------------------------------


class Fit:
    """The optima of one family by one method, for the measured losses and for bootstrap draws.

    Attributes:
      method: "parabola" or "law". means: the fitted points. law: the Law, or None.
      sizes, losses: {budget: [1 + draws]}, the measured value first; NaN without an optimum.
    """

    def __init__(self, method, means, draws, rng):
        self.method, self.means, self.law = method, means, None
        self._flops_per_token = interpolate(means, "flops_per_token")
        self._laws = []  # of the measured losses, then of the draws
        optima, fitted = self._fit(means.loss.to_numpy())
        sizes_a_budget = means.groupby("budget").size()
        free = LAW_PARAMETERS if method == "law" else sizes_a_budget.clip(upper=MIN_SIZES).sum()
        found = [optima] + [
            self._fit(losses)[0] for losses in _draws(means, fitted, free, draws, rng)
        ]
        none = [np.nan] * (1 + draws - len(found))
        self.sizes, self.losses = (
            {budget: np.array([one[budget][i] for one in found] + none) for budget in optima}
            for i in (0, 1)
        )

    def _fit(self, losses):
        if self.method == "parabola":
            return parabola_optima(self.means, losses)
        start = None if self.law is None else (self.law.a, self.law.b)
        law, fitted = fit_law(self.means, losses, start)
        self.law = self.law or law
        self._laws.append(law)
        budgets = sorted({*self.means.budget})
        optima = {
            budget: law_optimum(law, self.means, budget, self._flops_per_token)
            for budget in budgets
        }
        return optima, fitted

    def reaching(self, losses_R):
        """Return (budgets [R], sizes [R]) at which the optimum has these losses.

        Interpolated in logarithms between the measured budgets, or budgets of a law close to each
        other; NaN beyond the measured budgets.
        """
        budgets = np.array(sorted(self.losses))
        known_R = np.isfinite(self.losses[budgets[0]]) & np.isfinite(losses_R)
        if self.method == "law":
            budgets = np.geomspace(budgets[0], budgets[-1], 9)
        found = np.full((2, len(losses_R)), np.nan)
        for row in np.flatnonzero(known_R):
            target, (sizes, curve) = losses_R[row], self._optimum_curve(row, budgets)
            if len(curve) > 1 and np.all(np.diff(curve) < 0) and curve[-1] <= target <= curve[0]:
                found[0, row] = np.exp(np.interp(-target, -curve, np.log(budgets)))
                found[1, row] = np.exp(np.interp(-target, -curve, np.log(sizes)))
        return found

    def _optimum_curve(self, row, budgets):
        """Return (sizes, losses) of the optimum at these budgets, of one row of `losses`."""
        if self.method == "parabola":
            return tuple(
                np.array([of[b][row] for b in budgets]) for of in (self.sizes, self.losses)
            )
        law, flops = self._laws[row], self._flops_per_token
        optima = [law_optimum(law, self.means, budget, flops) for budget in budgets]
        return tuple(np.array(optima).T)


def _draws(means, fitted, free, count, rng):
    """Yield `count` arrays of losses as other seeds and points might have given them.

    Nothing is drawn with fewer than MIN_FREEDOM points beyond the free parameters of the fit.
    """
    residuals = means.loss.to_numpy() - fitted
    deviations = np.concatenate([*means.deviations[means.n > 1], np.zeros(0)])
    points_left, seeds_left = len(means) - free, (means.n - 1).sum()
    if points_left < MIN_FREEDOM:
        return
    for _ in range(count):
        # Variances that these sums of squares may stem from.
        seeds = (deviations**2).sum() / rng.chisquare(seeds_left) if seeds_left else 0.0
        points = (residuals**2).sum() / rng.chisquare(points_left)
        misfit = max(0.0, points - seeds * (1 / means.n).mean())
        losses = fitted + np.sqrt(misfit) * rng.choice(_normalised(residuals), len(means))
        if seeds_left:
            units = [rng.choice(_normalised(deviations), n).mean() for n in means.n]
            losses = losses + np.sqrt(seeds) * np.array(units)
        yield losses


def _normalised(values):
    """Scale to a mean square of 1, unless all are 0."""
    return values / np.sqrt(max(np.mean(values**2), 1e-300))


def interval(draws):
    """Return (low, high): 95% percentiles of the draws that have a value."""
    known = draws[np.isfinite(draws)]
    return tuple(np.percentile(known, _LEVELS)) if len(known) > len(draws) / 2 else (np.nan,) * 2


def equivalence_p(draws):
    """Return the share of draws outside the margin, on the side with more of them.

    NaN where they have no interval.
    """
    if np.isnan(interval(draws)[0]):
        return np.nan
    known = draws[np.isfinite(draws)]
    return max(np.mean(known > MARGIN), np.mean(known < -MARGIN))


def speedup(base, fit, budget):
    """Return [1 + draws] (times FLOPs, times seconds) that the baseline needs for a fit's loss."""
    budgets_R, sizes_R = base.reaching(fit.losses[budget])
    flops_R = budgets_R / budget
    if base.means.seconds_per_flop.isna().any() or fit.means.seconds_per_flop.isna().any():
        return flops_R, np.full_like(flops_R, np.nan)
    base_time = interpolate(base.means, "seconds_per_flop")(sizes_R)
    own_time = interpolate(fit.means, "seconds_per_flop")(fit.sizes[budget])
    return flops_R, flops_R * base_time / own_time
