"""Fits of loss over model size: the best size of a budget and its loss.

Two fits of Hoffmann et al. 2022 (arXiv 2203.15556). Approach 2 is a parabola in log parameters for
each budget. Approach 3 is a law of parameters N and tokens D through all points,

    L(N, D) = E + A / N^a + B / D^b,

linear in E, A and B for given exponents, so that only two exponents are searched (variable
projection; arXiv 2603.22339 shows that parabolas are biased and this is not). N counts all
parameters. The fit is by least squares in nats; a point counts as often as it has seeds.

Intervals of the law are bootstrap percentiles. A draw adds to each fitted loss a resampled misfit
of the family's points and resampled deviations of seeds, each with a variance drawn for its degrees
of freedom: else intervals from few points would be too narrow. A law through fewer than two points
more than its parameters has no interval, as its misfit is unknown.
"""

import dataclasses

import numpy as np
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

    Columns: budget, size, parameters, tokens, flops_per_token, loss, std, n, and `deviations`, the
    seeds' losses minus their mean.
    """
    points = points.assign(flops_per_token=points.flops / points.tokens)
    groups = points.groupby(["budget", "size"], sort=False)
    means = groups[["parameters", "tokens", "flops_per_token", "loss"]].mean()
    means["std"], means["n"] = groups.loss.std(), groups.size()
    means["deviations"] = [loss.to_numpy() - loss.mean() for _, loss in groups.loss]
    return means.reset_index().sort_values(["budget", "parameters"], ignore_index=True)


def within(means, factor):
    """Keep the sizes within a factor of the best measured one of their budget."""
    best = means.loc[means.groupby("budget").loss.idxmin()].set_index("budget").parameters
    ratio = means.parameters / means.budget.map(best)
    return means[(ratio <= factor) & (ratio >= 1 / factor)].reset_index(drop=True)


# ---- approach 2 --------------------------------------------------------------------------------


def parabola(means):
    """Return the Polynomial of loss over log parameters through the points of one budget."""
    x = np.log(means.parameters)
    return np.polynomial.Polynomial.fit(x, means.loss, 2, w=np.sqrt(means.n))


def parabola_optimum(means):
    """Return (size, loss) of one budget; NaN where the sizes enclose no minimum."""
    if means.parameters.nunique() < MIN_SIZES:
        return np.nan, np.nan
    curve = parabola(means)
    if curve.deriv(2)(0) <= 0:
        return np.nan, np.nan
    (best,) = curve.deriv().roots()
    low, high = np.log(means.parameters.min()), np.log(means.parameters.max())
    return (np.exp(best), curve(best)) if low <= best <= high else (np.nan, np.nan)


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


def flops_per_token(means):
    """Return a function of parameters that interpolates FLOPs a token, both in logarithms.

    6 N FLOPs a token would be wrong for routed and for small models. Beyond the measured sizes the
    end slopes continue.
    """
    table = means.groupby("parameters").flops_per_token.mean()
    x, y = np.log(table.index.to_numpy()), np.log(table.to_numpy())
    inside, slopes = PchipInterpolator(x, y), np.diff(y) / np.diff(x)

    def values(parameters):
        log = np.log(parameters)
        beyond = slopes[0] * np.minimum(log - x[0], 0) + slopes[-1] * np.maximum(log - x[-1], 0)
        return np.exp(inside(np.clip(log, x[0], x[-1])) + beyond)

    return values


# ---- the law of a family, with draws -----------------------------------------------------------


class LawFit:
    """The law of one family, of the measured losses and of bootstrap draws.

    Attributes:
      means: the fitted points. law: of the measured losses.
      sizes, losses: {budget: [1 + draws]} of the optima, the measured first; NaN without one.
    """

    def __init__(self, means, draws, rng):
        self.means, self._flops_per_token = means, flops_per_token(means)
        self.law, fitted = fit_law(means, means.loss.to_numpy())
        start = self.law.a, self.law.b
        drawn = [fit_law(means, losses, start)[0] for losses in _draws(means, fitted, draws, rng)]
        self._laws = [self.law, *drawn, *[None] * (draws - len(drawn))]
        optima = {
            budget: np.array([self.optimum(law, budget) for law in self._laws])
            for budget in sorted({*means.budget})
        }
        self.sizes = {budget: pairs[:, 0] for budget, pairs in optima.items()}
        self.losses = {budget: pairs[:, 1] for budget, pairs in optima.items()}

    def optimum(self, law, budget):
        """Return (size, loss) of the lowest loss of a budget; NaN far from the measured sizes."""
        if law is None:
            return np.nan, np.nan
        smallest, largest = self.means.parameters.min(), self.means.parameters.max()
        sizes = np.geomspace(smallest / 100, largest * 100, 4000)
        losses = law.loss(sizes, budget / self._flops_per_token(sizes))
        size = sizes[losses.argmin()]
        is_near = smallest / _REACH <= size <= largest * _REACH
        return (size, losses.min()) if is_near else (np.nan, np.nan)

    def budgets_for(self, losses_R):
        """Return the budgets [R] at which the optimum has these losses, by the law of each row.

        Interpolated in logarithms between close budgets; NaN beyond the measured ones.
        """
        budgets = np.geomspace(min(self.losses), max(self.losses), 9)
        found_R = np.full(len(losses_R), np.nan)
        for row, (law, target) in enumerate(zip(self._laws, losses_R, strict=True)):
            curve = np.array([self.optimum(law, budget)[1] for budget in budgets])
            if np.all(np.diff(curve) < 0) and curve[-1] <= target <= curve[0]:
                found_R[row] = np.exp(np.interp(-target, -curve, np.log(budgets)))
        return found_R


def _draws(means, fitted, count, rng):
    """Yield `count` arrays of losses as other seeds and points might have given them.

    Nothing is drawn with fewer than MIN_FREEDOM points beyond the parameters of the law.
    """
    residuals = means.loss.to_numpy() - fitted
    deviations = np.concatenate([*means.deviations[means.n > 1], np.zeros(0)])
    points_left, seeds_left = len(means) - LAW_PARAMETERS, (means.n - 1).sum()
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
    """Return the FLOPs that the baseline needs for a fit's loss, over the budget, [1 + draws]."""
    return base.budgets_for(fit.losses[budget]) / budget
