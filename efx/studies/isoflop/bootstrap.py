"""Bootstrap: losses as other seeds might have given them, and intervals of what is fitted to them.

The loss at a point (a size at a budget) differs from the fitted one by what the fit misses, the
same for all its seeds, and by the seed. A draw of the losses has both anew:

    fitted loss + a residual of some point + the mean of the deviations of as many seeds as it has

with residuals drawn from all points of the family, and deviations from those of all seeds from the
mean of their point. Residuals are scaled to the variance that is left when that of the seeds is
taken off, and for the parameters of the fit. Where every point has one seed this is the residual
bootstrap, where there is no misfit it resamples seeds, and points may differ in their seeds.

Draws are paired: which points and seeds a draw of a point takes is decided by the point's name, its
size and budget, and is the same in all families. Families share the text, its order and the seeds,
and what a law misses is much the same at a size of each, so that a difference between two is surer
than each of them. Where families differ in their points or seeds they share less, and the intervals
of differences are wider for it.
"""

import zlib
from typing import NamedTuple

import numpy as np

LEVELS = (80, 95)  # percent
_SEED = 0  # of all draws


def draw_losses(names, fitted_P, losses, free, count):
    """[count, P] draws of the mean loss at each point; NaN where nothing tells of any scatter,
    since the fit goes through all points and each has one seed.

    Args:
      names: [P] of the points: the same in other families whose draws are to be paired with these.
      fitted_P: the losses of the fit. losses: for each point those of its seeds.
      free: how many parameters the fit has.
    """
    # What is drawn from is in the order of the names, so that one number means one point.
    order = np.argsort(names)
    seeds_P = np.array([len(point) for point in losses])
    means_P = np.array([np.mean(point) for point in losses])
    residuals_P = means_P - fitted_P
    repeated = [np.asarray(losses[i]) for i in order if len(losses[i]) > 1]
    if not repeated and len(means_P) <= free:
        return np.full((count, len(means_P)), np.nan)
    variance, deviations = 0.0, np.zeros(1)
    if repeated:
        deviations = np.concatenate([point - point.mean() for point in repeated])
        variance = (deviations**2).sum() / sum(len(point) - 1 for point in repeated)
        deviations = deviations * np.sqrt(variance / max((deviations**2).mean(), 1e-300))
    misfit = (residuals_P**2).sum() / max(len(means_P) - free, 1) if len(means_P) > free else 0.0
    misfit = max(misfit - (variance / seeds_P).mean(), 0.0)
    residuals_P = (residuals_P * np.sqrt(misfit / max((residuals_P**2).mean(), 1e-300)))[order]
    draws_PR = np.repeat(np.asarray(fitted_P, float)[:, None], count, axis=1)
    for i, name in enumerate(names):
        draws_PR[i] += _chosen(residuals_P, count, f"{name}: misfit")
        for seed in range(seeds_P[i]):
            draws_PR[i] += _chosen(deviations, count, f"{name}: seed {seed}") / seeds_P[i]
    return draws_PR.T


def _chosen(values, count, name):
    """`count` of the values, as the name decides: the same places of all arrays of a length."""
    random = np.random.default_rng([_SEED, zlib.crc32(name.encode())])
    return values[(random.random(count) * len(values)).astype(int)]


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
