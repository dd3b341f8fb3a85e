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
from efx.studies.isoflop.bootstrap import draw_losses, with_draws

_AROUND = 1e3  # how far around the budgets one of equal loss is looked for
_REACH = 3  # times the largest size measured, or the smallest divided by it: the law says no more


@dataclasses.dataclass(frozen=True)
class Measured:
    """One family: arrays [P] over its points, a size at a budget each.

    Attributes:
      sizes: [P] names. budgets: training FLOPs. parameters, tokens: the mean over seeds.
      flops: training FLOPs a token by the ledger. seconds: of training a FLOP; NaN if not known.
      losses: for each point the held-out losses of its seeds, in nats.
    """

    sizes: list
    budgets: np.ndarray
    parameters: np.ndarray
    tokens: np.ndarray
    flops: np.ndarray
    seconds: np.ndarray
    losses: list

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

    def seconds_per_flop(self, parameters):
        """At these sizes: of the runs of the nearest sizes whose seconds are known, interpolated in
        logarithms."""
        known_P = ~np.isnan(self.seconds)
        seconds_K = self.seconds[known_P]
        logs, size_K = np.unique(np.log(self.parameters[known_P]), return_inverse=True)
        medians = [np.median(np.log(seconds_K[size_K == i])) for i in range(len(logs))]
        return np.exp(np.interp(np.log(parameters), logs, medians))

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
        lists = {field: [getattr(self, field)[i] for i in kept] for field in ("sizes", "losses")}
        return Measured(**arrays, **lists)


_ARRAYS = ("budgets", "parameters", "tokens", "flops", "seconds")


class Parabolas:
    """Approach 2 of one family.

    Attributes:
      parameters, losses: {budget: [R]} of the optimum, NaN where the sizes enclose none.
      residual: {budget: root mean square deviation from the parabola, in nats}.
    """

    def __init__(self, measured, draws):
        self.measured, budgets = measured, sorted({*measured.budgets})
        fitted_P, self.residual = np.empty(len(measured.means)), {}
        for budget in budgets:
            here = measured.at(budget)
            *_, fitted_RP = self._fit(budget, measured.means[None])
            fitted_P[here] = fitted_RP[0]
            self.residual[budget] = _rms(fitted_P[here] - measured.means[here])
        free = 3 * len(budgets)
        drawn_RP = _with_measured(measured, fitted_P, free, draws)
        self.parameters, self.losses = {}, {}
        for budget in budgets:
            self.parameters[budget], self.losses[budget], _ = self._fit(budget, drawn_RP)

    def _fit(self, budget, losses_RP):
        here, measured = self.measured.at(budget), self.measured
        return parabola.fit_draws(
            measured.parameters[here], losses_RP[:, here], measured.seeds[here]
        )

    def curve(self, budget, parameters):
        """The losses of the parabola at a budget, at these sizes."""
        here, measured = self.measured.at(budget), self.measured
        x, weights = np.log(measured.parameters[here]), np.sqrt(measured.seeds[here])
        parabola = np.polyfit(x - x.mean(), measured.means[here], 2, w=weights)
        return np.polyval(parabola, np.log(parameters) - x.mean())

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
        drawn_RP = _with_measured(measured, fitted_P, law_lib.PARAMETERS, draws)
        drawn = law_lib.fit_draws(*points, drawn_RP[1:], measured.seeds)
        pairs = zip(dataclasses.astuple(best), dataclasses.astuple(drawn), strict=True)
        self.law = law_lib.Law(*(np.concatenate([[one], many]) for one, many in pairs))
        self._optima = law_lib.Optima(self.law, measured.parameters, measured.flops_per_token)
        optima = {budget: self.optimum(budget) for budget in sorted({*measured.budgets})}
        self.parameters = {budget: sizes for budget, (sizes, _) in optima.items()}
        self.losses = {budget: losses for budget, (_, losses) in optima.items()}

    def optimum(self, budget):
        """(sizes [R], losses [R]) at any budget; NaN where the law's best size at the nearest
        measured budget lies far beyond all sizes measured there: that is not seen but made up."""
        budgets = np.unique(self.measured.budgets)
        nearest = budgets[np.argmin(np.abs(np.log(budgets / budget)))]
        here = self.measured.parameters[self.measured.at(nearest)]
        sizes_R, _ = self._optima(nearest)
        seen_R = (sizes_R >= here[0] / _REACH) & (sizes_R <= here[-1] * _REACH)
        return tuple(np.where(seen_R, of_R, np.nan) for of_R in self._optima(budget))

    def loss_at(self, budget, parameters):
        """[R] the loss of this size at a budget."""
        tokens = budget / self.measured.flops_per_token(parameters)
        return self.law.loss(parameters, tokens)

    @functools.cached_property
    def _curve(self):
        """(budgets [C], losses [C, R], sizes [C, R]) of the optimum, far around the budgets."""
        low, high = min(self.losses) / _AROUND, max(self.losses) * _AROUND
        budgets = np.geomspace(low, high, int(8 * np.log10(high / low)) + 1)
        optima = [self.optimum(budget) for budget in budgets]
        sizes, losses = (np.stack(arrays) for arrays in zip(*optima, strict=True))
        return budgets, losses, sizes

    def reaching(self, losses_R):
        """As `Parabolas.reaching`, up to a thousand times beyond the budgets."""
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
    logs = np.log(budgets)
    found_R, found_sizes_R = np.full(len(losses_R), np.nan), np.full(len(losses_R), np.nan)
    for i, (wanted, losses, sizes) in enumerate(
        zip(losses_R, losses_CR.T, sizes_CR.T, strict=True)
    ):
        if np.isfinite(wanted) and (np.diff(losses) < 0).all():
            place = np.interp(wanted, losses[::-1], logs[::-1], left=np.inf, right=-np.inf)
            found_R[i] = np.exp(place)
            found_sizes_R[i] = np.exp(np.interp(place, logs, np.log(sizes)))
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
    if np.isnan(base.measured.seconds).all() or np.isnan(fit.measured.seconds).all():
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
    """

    families: dict
    budgets: list
    parabolas: dict
    laws: dict
    refusals: dict
    draws: int
    within: float | None = None

    @property
    def base(self):
        return next(iter(self.families))

    def speedups(self, fits):
        """{(budget, family): Speedup} of `parabolas` or `laws`, the baseline's left out."""
        if self.base not in fits:
            return {}
        return {
            (budget, family): speedup(fits[self.base], fit, budget)
            for budget in self.budgets
            for family, fit in fits.items()
            if family != self.base and budget in fit.losses
        }


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
                "an exponent is at the end of the range that was searched,"
                f" {law_lib.LEAST_EXPONENT:g} to {law_lib.GREATEST_EXPONENT:g}: the points do not"
                " say what it is"
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
