"""From measured points to optima, the law, what it extrapolates to, and effective speedups.

Arrays over draws have the axis R: row 0 is of the losses as they were measured, the others are of
the bootstrap. Nothing here trains, reads or writes.
"""

import dataclasses
import functools

import numpy as np
import scipy.stats

from efx.errors import UsageError
from efx.studies.isoflop import law as law_lib
from efx.studies.isoflop import parabola
from efx.studies.isoflop.bootstrap import degrees, draw_losses, draw_seconds, with_draws

_AROUND = 1e3  # how far around the budgets one of equal loss is looked for
_AT_A_BOUND = 0.25  # share of the draws of a law from which on nothing is extrapolated by it
_REACH = 3  # times the largest size measured, or the smallest divided by it: the law says no more


@dataclasses.dataclass(frozen=True)
class Measured:
    """One family: arrays [P] over its points, a size at a budget each.

    Attributes:
      sizes: [P] names. budgets: training FLOPs. parameters, tokens: the mean over seeds.
      flops: training FLOPs a token by the ledger.
      seconds: for each point those of training a FLOP of its seeds; NaN if not known.
      losses: for each point the held-out losses of its seeds, in nats.
      numbers: for each point which seeds these are.
    """

    sizes: list
    budgets: np.ndarray
    parameters: np.ndarray
    tokens: np.ndarray
    flops: np.ndarray
    seconds: list
    losses: list
    numbers: list

    @functools.cached_property
    def means(self):
        return np.array([np.mean(point) for point in self.losses])

    @functools.cached_property
    def seeds(self):
        """[P] how many."""
        return np.array([len(point) for point in self.losses])

    @functools.cached_property
    def flops_per_token(self):
        return law_lib.FlopsPerToken(self.parameters, self.flops)

    @functools.cached_property
    def timed(self):
        """[P] whether seconds of the point are known."""
        return np.array([bool(np.isfinite(seconds).any()) for seconds in self.seconds])

    def seconds_per_flop(self, parameters_R):
        """[R] at these sizes, of which the first is that of the fit and the others are of draws:
        the median of the runs of the nearest sizes whose seconds are known, as the draws have it,
        interpolated in logarithms."""
        runs_of_size = {}
        for i in np.flatnonzero(self.timed):
            known = self.seconds[i][np.isfinite(self.seconds[i])]
            runs_of_size.setdefault((self.parameters[i], self.sizes[i]), []).append(np.log(known))
        sizes = sorted(runs_of_size)
        logs = [np.concatenate(runs_of_size[size]) for size in sizes]
        drawn = draw_seconds([name for _, name in sizes], logs, len(parameters_R) - 1)
        logs_RK = np.concatenate([[[np.median(of_size) for of_size in logs]], drawn])
        x_K = np.log([parameters for parameters, _ in sizes])
        x_R = np.log(parameters_R)
        rows = zip(x_R, logs_RK, strict=True)
        return np.exp(np.array([np.interp(x, x_K, logs_K) for x, logs_K in rows]))

    def at(self, budget):
        """Indices of the points of a budget, by size."""
        here = np.flatnonzero(self.budgets == budget)
        return here[np.argsort(self.parameters[here])]

    def within(self, times):
        """The Measured of those points whose size is at most so many times, and at least that
        fraction of, the size of the least loss at their budget."""
        kept = []
        for budget in np.unique(self.budgets):
            here = self.at(budget)
            ratios = self.parameters[here] / self.parameters[here[self.means[here].argmin()]]
            kept += here[(ratios <= times) & (ratios >= 1 / times)].tolist()
        kept.sort()
        arrays = {field: getattr(self, field)[kept] for field in _ARRAYS}
        lists = {field: [getattr(self, field)[i] for i in kept] for field in ("sizes", *_OF_SEEDS)}
        return Measured(**arrays, **lists)

    def common_with(self, other):
        """The Measured of those seeds of each point that the other family has there too; itself if
        these are all. Points that the other does not have, or with other seeds, stay whole."""
        theirs = {
            place: {*numbers}
            for *place, numbers in zip(other.budgets, other.sizes, other.numbers, strict=True)
            for place in [tuple(place)]
        }
        kept = []
        for budget, size, own in zip(self.budgets, self.sizes, self.numbers, strict=True):
            common = [i for i, number in enumerate(own) if number in theirs.get((budget, size), ())]
            kept.append(common or [*range(len(own))])
        if all(len(common) == len(own) for common, own in zip(kept, self.numbers, strict=True)):
            return self
        fields = {
            field: [np.asarray(of)[i] for of, i in zip(getattr(self, field), kept, strict=True)]
            for field in _OF_SEEDS
        }
        return dataclasses.replace(self, **fields)


_ARRAYS = ("budgets", "parameters", "tokens", "flops")
_OF_SEEDS = ("seconds", "losses", "numbers")


class Parabolas:
    """Approach 2 of one family.

    Attributes:
      parameters, losses: {budget: [R]} of the optimum, NaN where the sizes enclose none or are
        fewer than three.
      residual: {budget: root mean square deviation from the parabola, in nats}; NaN of fewer.
      degrees: `bootstrap.Degrees` of the scatter.
    """

    def __init__(self, measured, draws):
        self.measured, budgets = measured, sorted({*measured.budgets})
        fitted_P, self.residual = np.empty(len(measured.means)), {}
        for budget in budgets:
            here = measured.at(budget)
            *_, fitted_RP = self._fit(budget, measured.means[None])
            fitted_P[here] = fitted_RP[0]
            few = self._sizes(budget) < parabola.LEAST_SIZES
            self.residual[budget] = np.nan if few else _rms(fitted_P[here] - measured.means[here])
        free = sum(min(self._sizes(budget), parabola.LEAST_SIZES) for budget in budgets)
        self.degrees = degrees(measured.losses, free)
        drawn_RP = _with_measured(measured, fitted_P, free, draws)
        self.parameters, self.losses = {}, {}
        for budget in budgets:
            self.parameters[budget], self.losses[budget], _ = self._fit(budget, drawn_RP)

    def _sizes(self, budget):
        """How many different ones were measured at the budget."""
        return len(np.unique(self.measured.parameters[self.measured.at(budget)]))

    def _fit(self, budget, losses_RP):
        here, measured = self.measured.at(budget), self.measured
        return parabola.fit_draws(
            measured.parameters[here], losses_RP[:, here], measured.seeds[here]
        )

    def curve(self, budget, parameters):
        """The losses of the parabola at a budget, at these sizes; NaN where there is none."""
        if self._sizes(budget) < parabola.LEAST_SIZES:
            return np.full(len(parameters), np.nan)
        here, measured = self.measured.at(budget), self.measured
        x, weights = np.log(measured.parameters[here]), np.sqrt(measured.seeds[here])
        coefficients = np.polyfit(x - x.mean(), measured.means[here], 2, w=weights)
        return np.polyval(coefficients, np.log(parameters) - x.mean())

    def reaching(self, losses_R):
        """(budgets [R], sizes [R]) where the optimum has these losses, interpolated between the
        budgets in logarithms; inf and 0 for the budget where that lies beyond them."""
        budgets = [budget for budget, losses in self.losses.items() if np.isfinite(losses[0])]
        if len(budgets) < 2:
            return np.full((2, len(losses_R)), np.nan)
        losses_CR, sizes_CR = (
            np.stack([optima[budget] for budget in budgets])
            for optima in (self.losses, self.parameters)
        )
        return _reaching(budgets, losses_CR, sizes_CR, losses_R)


class LawFit:
    """Approach 3 of one family.

    Attributes:
      law: `law.Law` with arrays [R].
      residual: root mean square deviation of the points from the law, in nats.
      p: how likely so large a deviation of the means of points would be if the law were right and
        they scattered as their seeds do (F test of the lack of fit); NaN without repeated seeds.
      degrees: `bootstrap.Degrees` of the scatter.
      at_a_bound: the share of draws in which a parameter is at a bound (`law.Law.at_a_bound`).
      extrapolates: whether it says anything of budgets beyond those measured: not where a parameter
        is at a bound, or is so in more than a quarter of the draws.
      parameters, losses: {budget: [R]} of the optimum, NaN as of `optimum`.
    """

    def __init__(self, measured, draws):
        law_lib.check_points(measured.parameters, measured.budgets)
        self.measured = measured
        points = measured.parameters, measured.tokens
        best = law_lib.fit(*points, measured.means, measured.seeds)
        fitted_P = best.loss(*points)
        self.residual = _rms(fitted_P - measured.means)
        self.p = _lack_of_fit(measured, fitted_P, law_lib.PARAMETERS)
        self.degrees = degrees(measured.losses, law_lib.PARAMETERS)
        drawn_RP = _with_measured(measured, fitted_P, law_lib.PARAMETERS, draws)
        drawn = law_lib.fit_draws(*points, drawn_RP[1:], measured.seeds)
        pairs = zip(dataclasses.astuple(best), dataclasses.astuple(drawn), strict=True)
        self.law = law_lib.Law(*(np.concatenate([[one], many]) for one, many in pairs))
        self.at_a_bound = float(np.mean(drawn.at_a_bound()))
        self.extrapolates = not best.at_a_bound() and self.at_a_bound <= _AT_A_BOUND
        self._optima = law_lib.Optima(self.law, measured.parameters, measured.flops_per_token)
        optima = {budget: self.optimum(budget) for budget in sorted({*measured.budgets})}
        self.parameters = {budget: sizes for budget, (sizes, _) in optima.items()}
        self.losses = {budget: losses for budget, (_, losses) in optima.items()}

    def optimum(self, budget):
        """(sizes [R], losses [R]) at any budget; NaN where the law's best size at the nearest
        measured budget lies far beyond all sizes measured there: that is not seen but made up; and
        beyond the budgets measured unless the law `extrapolates`."""
        budgets = np.unique(self.measured.budgets)
        nearest = budgets[np.argmin(np.abs(np.log(budgets / budget)))]
        here = self.measured.parameters[self.measured.at(nearest)]
        sizes_R, _ = self._optima(nearest)
        seen_R = (sizes_R >= here[0] / _REACH) & (sizes_R <= here[-1] * _REACH)
        seen_R &= self.extrapolates or budgets[0] <= budget <= budgets[-1]
        return tuple(np.where(seen_R, of_R, np.nan) for of_R in self._optima(budget))

    def loss_at(self, budget, parameters):
        """[R] the loss of this size at a budget."""
        tokens = budget / self.measured.flops_per_token(parameters)
        return self.law.loss(parameters, tokens)

    @functools.cached_property
    def _curve(self):
        """(budgets [C], losses [C, R], sizes [C, R]) of the optimum: far around the budgets if the
        law `extrapolates`, else between them."""
        around = _AROUND if self.extrapolates else 1.0
        low, high = min(self.losses) / around, max(self.losses) * around
        budgets = np.geomspace(low, high, max(2, int(8 * np.log10(high / low)) + 1))
        budgets[[0, -1]] = low, high  # not a rounding beyond them
        optima = [self.optimum(budget) for budget in budgets]
        sizes, losses = (np.stack(arrays) for arrays in zip(*optima, strict=True))
        return budgets, losses, sizes

    def reaching(self, losses_R):
        """As `Parabolas.reaching`, up to a thousand times beyond the budgets if the law
        `extrapolates`."""
        return _reaching(*self._curve[:2], self._curve[2], losses_R)


def _rms(errors):
    return float(np.sqrt(np.mean(np.square(errors))))


def _lack_of_fit(measured, fitted_P, free):
    """The p of an F test: the misfit of the means against the scatter of seeds."""
    within = sum(((losses - losses.mean()) ** 2).sum() for losses in measured.losses)
    left, points = int((measured.seeds - 1).sum()), len(fitted_P) - free
    if not within or points < 1:
        return float("nan")
    misfit = (measured.seeds * (measured.means - fitted_P) ** 2).sum()
    return float(scipy.stats.f.sf(misfit / points / (within / left), points, left))


def _with_measured(measured, fitted_P, free, draws):
    """[1 + draws, P]: the measured means, then bootstrap draws of them."""
    places = zip(measured.budgets, measured.sizes, strict=True)
    names = [f"{budget:g} FLOPs, {size}" for budget, size in places]
    drawn_RP = draw_losses(names, fitted_P, measured.losses, free, draws)
    return np.concatenate([measured.means[None], drawn_RP])


def _reaching(budgets, losses_CR, sizes_CR, losses_R):
    """(budgets [R], sizes [R]) where curves of losses over budgets have the losses [R].

    A budget is inf where the curve ends above that loss, 0 where it begins below it, NaN where the
    curve or the loss has a gap or the curve does not fall.
    """
    found_R, found_sizes_R = np.full((2, len(losses_R)), np.nan)
    falls_R = np.isfinite(losses_R) & (np.diff(losses_CR, axis=0) < 0).all(axis=0)
    losses_CR, sizes_CR, losses_R = losses_CR[:, falls_R], sizes_CR[:, falls_R], losses_R[falls_R]
    # The last point of the curve that has more loss, or the first, and how far behind it, in the
    # logarithm of budgets, the loss is reached.
    point_R = np.clip((losses_CR > losses_R).sum(axis=0) - 1, 0, len(budgets) - 2)

    def between(values_CR, share_R):
        here_R, next_R = (
            np.take_along_axis(values_CR, point_R[None] + i, axis=0)[0] for i in (0, 1)
        )
        return here_R + share_R * (next_R - here_R)

    here_R = between(losses_CR, 0.0)
    share_R = np.clip((here_R - losses_R) / (here_R - between(losses_CR, 1.0)), 0.0, 1.0)
    logs_CR = np.broadcast_to(np.log(budgets)[:, None], losses_CR.shape)
    reached_R = np.exp(between(logs_CR, share_R))
    reached_R = np.where(losses_R > losses_CR[0], 0.0, reached_R)
    found_R[falls_R] = np.where(losses_R < losses_CR[-1], np.inf, reached_R)
    found_sizes_R[falls_R] = np.exp(between(np.log(sizes_CR), share_R))
    return found_R, found_sizes_R


@dataclasses.dataclass(frozen=True)
class Speedup:
    """How many times the FLOPs, and the seconds, the baseline needs for the loss that a family
    reaches at its best size: Estimates, NaN without such a number; seconds: None if not known."""

    flops: object
    seconds: object


def speedup(base, fit, budget):
    """The Speedup of `fit` over `base` at a budget of `fit`; both Parabolas or both LawFits."""
    base_budget_R, base_size_R = base.reaching(fit.losses[budget])
    flops = with_draws(base_budget_R / budget)
    if not (base.measured.timed.any() and fit.measured.timed.any()):
        return Speedup(flops, None)
    base_seconds_R = base_budget_R * base.measured.seconds_per_flop(base_size_R)
    own_seconds_R = budget * fit.measured.seconds_per_flop(fit.parameters[budget])
    return Speedup(flops, with_draws(base_seconds_R / own_seconds_R))


def growth(fit):
    """The Estimate of x in "the best size grows as C^x", between the first and last budget."""
    first, last = min(fit.parameters), max(fit.parameters)
    if first == last:
        return None
    return with_draws(np.log(fit.parameters[last] / fit.parameters[first]) / np.log(last / first))


@dataclasses.dataclass(frozen=True)
class Analysis:
    """All fits of a study.

    Attributes:
      families: {name: Measured}, the baseline first. budgets: of all of them, ascending.
      parabolas: {family: Parabolas}. laws: {family: LawFit}, of those that allow one.
      refusals: {family: why there is no law}. draws: of the bootstrap.
      within: how many times larger or smaller than the best of its budget a size may be that is
        fitted; None: all are.

    What compares two families (`compared`, `speedups`) is fitted to the seeds that both have.
    """

    families: dict
    budgets: list
    parabolas: dict
    laws: dict
    refusals: dict
    draws: int
    within: float | None = None
    _refitted: dict = dataclasses.field(default_factory=dict, repr=False)

    @property
    def base(self):
        return next(iter(self.families))

    def speedups(self, fits):
        """{(budget, family): Speedup} of `parabolas` or `laws`, the baseline's left out."""
        pairs = {family: self.compared(fits, family, self.base) for family in fits}
        return {
            (budget, family): speedup(pair[1], pair[0], budget)
            for budget in self.budgets
            for family, pair in pairs.items()
            if family != self.base and pair and budget in pair[0].losses
        }

    def compared(self, fits, family, other):
        """The fits of both families, of `parabolas` or `laws`, to the seeds that both have at each
        point, (0) where one has (0, 1, 2) and the other (0); None where one has no such fit."""
        if family not in fits or other not in fits:
            return None
        mine, its = fits[family].measured, fits[other].measured
        common = mine.common_with(its), its.common_with(mine)
        pair = [
            self._of_seeds(fits[name], name, measured)
            for name, measured in zip((family, other), common, strict=True)
        ]
        return None if None in pair else tuple(pair)

    def _of_seeds(self, fit, family, measured):
        """That fit to fewer seeds, of which it is made once; None for a law that they do not give,
        an exponent being at the end of its range."""
        if measured is fit.measured:
            return fit
        key = type(fit), family, tuple(tuple(numbers) for numbers in measured.numbers)
        if key not in self._refitted:
            again = type(fit)(measured, self.draws)
            lost = isinstance(again, LawFit) and again.law.one(0).at_the_edge()
            self._refitted[key] = None if lost else again
        return self._refitted[key]


def analyse(families, draws, within=None):
    """The Analysis of {family: Measured}; within: see there."""
    laws, refusals = {}, {}
    fitted = {
        family: measured.within(within) if within else measured
        for family, measured in families.items()
    }
    for family, measured in fitted.items():
        try:
            fit = LawFit(measured, draws)
        except UsageError as error:
            refusals[family] = str(error)
            continue
        if fit.law.one(0).at_the_edge():
            refusals[family] = (
                f"an exponent is at the end of the search range, {law_lib.LEAST_EXPONENT:g} to "
                f"{law_lib.GREATEST_EXPONENT:g}: the points do not determine it"
            )
        else:
            laws[family] = fit
    return Analysis(
        families=families,
        budgets=sorted({budget for measured in families.values() for budget in measured.budgets}),
        parabolas={family: Parabolas(measured, draws) for family, measured in fitted.items()},
        laws=laws,
        refusals=refusals,
        draws=draws,
        within=within,
    )
