"""The bootstrap: losses and seconds as other seeds might have given them, and intervals of what is
fitted to them.

The loss at a point (a size at a budget) differs from the fitted one by what the fit misses, the
same for all its seeds, and by the seed. A draw of the losses has both anew:

    fitted loss + a residual of some point + the mean of the deviations of as many seeds as it has

with residuals drawn from all points of the family, and deviations from those of all seeds from the
mean of their point. Where every point has one seed this is the residual bootstrap, where there is
no misfit it resamples seeds, and points may differ in their seeds.

How far the draws scatter is itself estimated, of few degrees of freedom: of the residuals as many
as the points exceed the parameters of the fit, of the seeds as many as they exceed the points. So
each draw has variances of its own, those estimated times degrees / chi2(degrees): a sum of squares
divided by draws of what it would be at variance 1 (generalised intervals of Weerahandi 1993, JASA
88). With one seed a point, draws then scatter as Student's t does, not as the normal distribution
with its quantiles too narrow; and what the misfit adds to the seeds is the variance of residuals
less that of seeds, draw by draw, so that it counts too where the two estimates happen to be alike.
One degree of freedom tells of no scale. Where residuals have fewer than two there is no interval,
however many seeds there are: these do not say what the fit misses.

Points differ in their scatter. A deviation is drawn in units of the deviation of its own point, and
counts in those of the point it is drawn for, whose variance is the mean of its own and of the
pooled one, weighted by their degrees of freedom with two for the pooled (of three seeds: half and
half). Own variances alone would be of too few seeds, and the pooled one wrong for most points.

Draws are paired: which points and seeds a draw of a point takes, and how its variances differ from
those estimated, is decided by the point's name, its size and budget, and is the same in all
families. Families share the text, its order and the seeds, and what a law misses is much the same
at a size of each, so that a difference between two is surer than each of them. Where families
differ in their points they share less, and the intervals of differences are wider for it.
"""

import zlib
from typing import NamedTuple

import numpy as np
import scipy.stats

LEVELS = (80, 95)  # percent
_SEED = 0  # of all draws
_LEAST = 2  # degrees of freedom that a scale is estimated of
_OF_POOLED = 2  # degrees of freedom that the pooled variance counts as, beside a point's own


class Degrees(NamedTuple):
    """The degrees of freedom that the scatter of a fit is estimated with.

    points: of the means of points about the fit. seeds: of seeds about the mean of their point.
    """

    points: int
    seeds: int

    @property
    def suffice(self):
        """Whether they allow an interval: they tell what the fit misses."""
        return self.points >= _LEAST


def degrees(losses, free):
    """The Degrees of a fit of `free` parameters to points of these losses of seeds."""
    return Degrees(max(len(losses) - free, 0), sum(len(point) - 1 for point in losses))


def draw_losses(names, fitted_P, losses, free, count):
    """[count, P] draws of the mean loss at each point; NaN where the degrees of freedom do not
    suffice.

    Args:
      names: [P] of the points: the same in other families whose draws are to be paired with these.
      fitted_P: the losses of the fit. losses: for each point those of its seeds.
      free: how many parameters the fit has.
    """
    left, count_P = degrees(losses, free), np.array([len(point) for point in losses])
    if not left.suffice:
        return np.full((count, len(names)), np.nan)
    # What is drawn from is in the order of the names, so that one number means one point.
    order = np.argsort(names)
    draws_PR = np.repeat(np.asarray(fitted_P, float)[:, None], count, axis=1)
    of_means_R = np.zeros(count)  # the variance of a mean over seeds
    if left.seeds >= _LEAST:
        variance_P = _variances(losses, left.seeds)
        units = [(losses[i] - np.mean(losses[i])) / np.sqrt(variance_P[i]) for i in order]
        units = _scaled(np.concatenate([unit for unit in units if len(unit) > 1]))
        times_R = _times(left.seeds, count, "variance of seeds")
        of_means_R = (variance_P / count_P).mean() * times_R
        for i, name in enumerate(names):
            deviation_R = np.sqrt(variance_P[i] * times_R)
            for seed in range(count_P[i]):
                unit_R = _chosen(units, count, f"{name}: seed {seed}")
                draws_PR[i] += unit_R * deviation_R / count_P[i]
    residuals_P = np.array([np.mean(point) for point in losses]) - fitted_P
    variance_R = (residuals_P**2).sum() / left.points
    variance_R = variance_R * _times(left.points, count, "variance of points")
    misfit_R = np.sqrt(np.maximum(variance_R - of_means_R, 0.0))
    units = _scaled(residuals_P[order])
    for i, name in enumerate(names):
        draws_PR[i] += _chosen(units, count, f"{name}: misfit") * misfit_R
    return draws_PR.T


def draw_seconds(names, logs, count):
    """[count, K] draws of the logarithm of the seconds of each of K sizes; NaN where no size has
    the runs that tell of their scatter.

    What all runs of a size take a FLOP is alike but for what the machine did meanwhile.

    Args:
      names: [K] of the sizes. logs: for each of them the logarithms of the seconds of its runs.
    """
    left = degrees(logs, 0).seeds
    if left < _LEAST:
        return np.full((count, len(names)), np.nan)
    order = [i for i in np.argsort(names) if len(logs[i]) > 1]
    deviations = np.concatenate([logs[i] - np.mean(logs[i]) for i in order])
    scale_R = np.sqrt((deviations**2).sum() / left * _times(left, count, "variance of seconds"))
    units, draws_KR = _scaled(deviations), []
    for name, of_size in zip(names, logs, strict=True):
        drawn = [_chosen(units, count, f"{name}: seconds {run}") for run in range(len(of_size))]
        draws_KR.append(np.median(of_size) + np.median(drawn, axis=0) * scale_R)
    return np.stack(draws_KR, axis=1)


def _variances(losses, left):
    """[P] the variance of seeds at each point: its own drawn towards the pooled one."""
    of_points = [((point - np.mean(point)) ** 2).sum() for point in losses]
    pooled = sum(of_points) / left
    own = [len(point) - 1 for point in losses]
    weighted = np.array(of_points) + _OF_POOLED * pooled
    return np.maximum(weighted / (np.array(own) + _OF_POOLED), 1e-300)


def _scaled(values):
    """The values, of mean square 1 unless all are 0."""
    return values / np.sqrt(max((values**2).mean(), 1e-300))


def _times(left, count, name):
    """[count] by how much a variance may differ from its estimate of so many degrees of freedom."""
    return left / scipy.stats.chi2.ppf(_uniform(count, name), left)


def _uniform(count, name):
    """`count` numbers between 0 and 1, as the name decides."""
    return np.random.default_rng([_SEED, zlib.crc32(name.encode())]).random(count)


def _chosen(values, count, name):
    """`count` of the values, as the name decides: the same places of all arrays of a length."""
    return values[(_uniform(count, name) * len(values)).astype(int)]


def with_draws(values):
    """The Estimate of an array [1 + R]: what the fit itself gives, then what each draw gives."""
    return Estimate(float(values[0]), values[1:])


class Estimate(NamedTuple):
    """A number and its bootstrap draws [R]; NaN where there is none, in either."""

    value: float
    draws: np.ndarray

    @property
    def share(self):
        """Of the draws in which there is such a number."""
        return float(np.mean(~np.isnan(self.draws))) if len(self.draws) else 0.0

    def interval(self, level):
        """(low, high) percentiles of the draws that have a number; None without any.

        What is infinite in some draws may be infinite here: nothing is interpolated.
        """
        draws = self.draws[~np.isnan(self.draws)]
        if not len(draws):
            return None
        tail = (1 - level / 100) / 2
        low, high = np.quantile(draws, [tail, 1 - tail], method="inverted_cdf")
        return float(low), float(high)

    def as_data(self):
        """{value, share, "80": [low, high], "95": [low, high]}; null for what is not finite."""

        def plain(number):
            return float(number) if np.isfinite(number) else None

        ends = {str(level): self.interval(level) for level in LEVELS}
        return {"value": plain(self.value), "share": self.share} | {
            level: found and [plain(end) for end in found] for level, found in ends.items()
        }
