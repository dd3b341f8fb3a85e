"""Fits of isoFLOP studies to losses of a known law: recovery, bias, coverage of intervals."""

import dataclasses
import itertools

import numpy as np
import pytest
from refusals import refused
from scipy import stats
from scipy.optimize import minimize_scalar, nnls

from efx.studies.isoflop import analysis, grid, law, parabola, report
from efx.studies.isoflop.bootstrap import (
    Degrees,
    Estimate,
    degrees,
    draw_losses,
    with_draws,
)
from efx.studies.isoflop.points import Point, families

BUDGETS = np.geomspace(1e17, 1e21, 5)
SYMMETRIC = law.Law(1.69, 400.0, 400.0, 0.31, 0.31)
ASYMMETRIC = law.Law(1.69, 400.0, 400.0, 0.465, 0.155)


def best_size(truth, budget):
    """The N of least loss where a token costs 6 N FLOPs."""
    ratio = (truth.a * truth.A / (truth.b * truth.B)) ** (1 / (truth.a + truth.b))
    return ratio * (budget / 6) ** (truth.b / (truth.a + truth.b))


def around_the_best(truth, span, centre=lambda number: 1.0):
    """Noise-free points at seven sizes from 1/span to span times the best of each budget, which
    is off by the factor centre(number of the budget)."""
    rows = []
    for number, budget in enumerate(BUDGETS):
        sizes = best_size(truth, budget) * centre(number) * np.geomspace(1 / span, span, 7)
        rows += [
            (f"{i}", budget, size, budget / 6 / size, 6 * size, 1e-12)
            for i, size in enumerate(sizes)
        ]
    return measured(truth, rows)


def measured(truth, rows, noise=0.0, seeds=1, random=None):
    """rows: [(size's name, budget, parameters, tokens, FLOPs a token, seconds a FLOP)]."""
    names, *columns = zip(*rows, strict=True)
    columns = [np.array(column) for column in columns]
    losses = truth.loss(columns[1], columns[2])
    if noise:
        losses = losses[:, None] + random.normal(0, noise, (len(losses), seeds))
    *columns, seconds = columns
    losses = [np.atleast_1d(loss) for loss in losses]
    seconds = [np.full(len(loss), of) for loss, of in zip(losses, seconds, strict=True)]
    numbers = [np.arange(len(loss)) for loss in losses]
    return analysis.Measured(list(names), *columns, seconds, losses, numbers)


def fixed_sizes(truth, cost, seconds=1e-12, budgets=(1e10, 1e11, 1e12), **noise):
    """Six sizes, the same at each budget; a token costs `cost` FLOPs a parameter."""
    rows = [
        (f"{size:g}", budget, size, budget / cost / size, cost * size, seconds)
        for budget in budgets
        for size in 1e4 * 2.0 ** np.arange(6)
    ]
    return measured(truth, rows, **noise)


def with_seeds(points, chosen):
    """The seeds `chosen[i]` of each point i."""
    fields = {
        name: [of[some] for of, some in zip(getattr(points, name), chosen, strict=True)]
        for name in ("losses", "seconds", "numbers")
    }
    return dataclasses.replace(points, **fields)


SMALL = law.Law(1.2, 6.0, 8.0, 0.3, 0.2)  # with optima among the fixed sizes


# ---- recovery ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "truth, span, centre",
    [(SYMMETRIC, 2, lambda i: 1.0), (ASYMMETRIC, 16, lambda i: 3 ** (i / 4))],
    ids=["centred", "drift"],
)
def test_variable_projection_recovers_the_law(truth, span, centre):
    """Without noise, also where parabolas are biased (arXiv 2603.22339)."""
    points = around_the_best(truth, span, centre=centre)
    found = law.fit(points.parameters, points.tokens, points.means)
    assert (found.a, found.b, found.E) == pytest.approx((truth.a, truth.b, truth.E), rel=1e-6)
    assert (found.A, found.B) == pytest.approx((truth.A, truth.B), rel=1e-5)
    optimum = law.Optima(found, points.parameters, points.flops_per_token)
    for budget in BUDGETS[[0, -1]]:
        (size,), (loss,) = optimum(budget)
        best = best_size(truth, budget)
        assert size == pytest.approx(best, rel=1e-3)
        assert loss == pytest.approx(truth.loss(best, budget / 6 / best), abs=1e-5)


def test_parabolas_are_biased_without_noise():
    """Except where the grid is narrow, centred and symmetric."""

    def errors(truth, span, centre=lambda number: 1.0):
        """(relative error of the first size, error of the growth exponent, of the last loss)."""
        fit = analysis.Parabolas(around_the_best(truth, span, centre=centre), draws=1)
        best = [best_size(truth, budget) for budget in BUDGETS]
        size = fit.parameters[BUDGETS[0]][0] / best[0] - 1
        loss = fit.losses[BUDGETS[-1]][0] - truth.loss(best[-1], BUDGETS[-1] / 6 / best[-1])
        return size, analysis.growth(fit).value - truth.b / (truth.a + truth.b), loss

    assert errors(SYMMETRIC, 2) == pytest.approx((0, 0, 0), abs=1e-5)
    size, growth, loss = errors(ASYMMETRIC, 16)
    assert size > 0.3 and abs(growth) < 1e-9 and loss < -0.02
    assert errors(ASYMMETRIC, 16, lambda number: 3 ** (number / 4))[1] < -0.01


def test_the_law_is_the_least_squares_fit_with_nonnegative_parameters():
    """Against scipy at the exponents found and at others; each of E, A and B is 0 in some fits."""
    random, zeros = np.random.default_rng(1), set()
    points = fixed_sizes(SMALL, 6.5)
    N, D = points.parameters, points.tokens
    scale = np.sqrt(random.integers(1, 5, len(N)))
    basis = np.stack([np.ones(len(N)), 10 * N**-0.3, 10 * D**-0.2], 1)

    def squares(a, b, losses):
        columns = np.stack([np.ones(len(N)), N**-a, D**-b], 1)
        solved, norm = nnls(scale[:, None] * columns, scale * losses)
        return solved, norm**2

    for _ in range(12):
        losses = basis @ random.normal(0.5, 1, 3) + random.normal(0, 0.1, len(N))
        found = law.fit(N, D, losses, scale**2)
        solved, least = squares(found.a, found.b, losses)
        assert (found.E, found.A, found.B) == pytest.approx(tuple(solved), rel=1e-5, abs=1e-9)
        for a, b in itertools.product(np.geomspace(0.05, 2, 6), repeat=2):
            assert least <= squares(a, b, losses)[1] * (1 + 1e-6)
        zeros |= {i for i in range(3) if solved[i] == 0}
    assert zeros == {0, 1, 2}


def test_the_law_has_no_optimum_at_budgets_beyond_its_sizes():
    """The best sizes outgrow the measured ones: the last budgets and larger ones have none."""
    points = around_the_best(SYMMETRIC, 2, centre=lambda i: 4.0**i)
    fit = analysis.LawFit(points, draws=2)
    seen = [bool(np.isfinite(fit.losses[budget][0])) for budget in BUDGETS]
    assert seen == [True, True, False, False, False]
    assert np.isnan(fit.optimum(2 * BUDGETS[-1])).all()
    assert np.isnan(analysis.speedup(fit, fit, BUDGETS[-1]).flops.value)


def test_families_without_a_law_are_named():
    """Too few points; losses that fall with the tokens more steeply than any exponent searched."""
    few = fixed_sizes(SMALL, 6.5, budgets=(1e11,))
    refused(lambda: analysis.LawFit(few, 20), "2 budgets")
    points = fixed_sizes(SMALL, 6.5)
    tokens = points.tokens / np.exp(np.log(points.tokens).mean())
    steep = [np.array([loss]) for loss in 2 + 6 * points.parameters**-0.3 + 0.01 * tokens**-5.0]
    steep = dataclasses.replace(points, losses=steep)
    found = analysis.analyse({"few": few, "steep": steep}, 5)
    assert not found.laws and found.refusals.keys() == {"few", "steep"}
    assert found.parabolas["few"].losses


# ---- FLOPs and optima --------------------------------------------------------------------------


def test_the_optimum_goes_by_the_ledger():
    """FLOPs a token that are no multiple of the parameters, inside and outside the sizes."""
    sizes = np.geomspace(1e4, 1e6, 12)

    def cost(size):  # an output layer that weighs on small models
        return 3e5 + 6.0 * size

    flops = law.FlopsPerToken(sizes, cost(sizes))
    assert flops(3.3e5) == pytest.approx(cost(3.3e5), rel=1e-3)
    slope = np.log(cost(sizes[-1]) / cost(sizes[-2])) / np.log(sizes[-1] / sizes[-2])
    assert flops(1e8) == pytest.approx(cost(1e6) * 100**slope)
    optimum = law.Optima(SMALL, sizes, flops)
    for budget in (1e11, 1e13, 1e17):
        (size,), (loss,) = optimum(budget)
        best = minimize_scalar(
            lambda x, budget=budget: SMALL.loss(np.exp(x), budget / flops(np.exp(x))),
            bounds=np.log([1e2, 1e9]), method="bounded", options={"xatol": 1e-8},
        )  # fmt: skip
        assert (size, loss) == pytest.approx((np.exp(best.x), best.fun), rel=2e-3)
        assert loss == pytest.approx(best.fun, abs=1e-5)


def test_speedups_at_equal_loss():
    """A family of the same law at half the FLOPs a token needs half the budget; its FLOPs take 1.5
    times the seconds."""
    base = fixed_sizes(SMALL, 8.0, budgets=(1e11, 1e12, 1e13))
    half = fixed_sizes(SMALL, 4.0, seconds=1.5e-12, budgets=(1e11, 1e12))
    found = analysis.analyse({"base": base, "half": half}, 20)
    by_law = found.speedups(found.laws)
    assert list(by_law) == [(1e11, "half"), (1e12, "half")]
    for speedup in by_law.values():
        assert speedup.flops.value == pytest.approx(2, rel=1e-2)
        assert speedup.seconds.value == pytest.approx(2 / 1.5, rel=1e-2)
    assert found.speedups(found.parabolas)[1e12, "half"].flops.value == pytest.approx(2, rel=0.15)
    # With the baseline exchanged, its curve does not reach the other's losses.
    families = {"half": half, "base": base}
    parabolas = {name: analysis.Parabolas(points, 2) for name, points in families.items()}
    for budget, value in ((1e13, np.inf), (1e11, 0)):
        turned = analysis.speedup(parabolas["half"], parabolas["base"], budget)
        assert turned.flops.value == value


# ---- intervals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_intervals_cover(seeds):
    """Intervals hold the truth as often as they claim, and are not wider than estimates scatter."""
    random, trials = np.random.default_rng(seeds), 40
    sizes = np.geomspace(1e3, 1e8, 20_000)
    truth = {"a": SMALL.a, "b": SMALL.b, "E": SMALL.E}
    truth["loss"] = SMALL.loss(sizes, 1e13 / 6.5 / sizes).min()
    exact = analysis.Parabolas(fixed_sizes(SMALL, 6.5), 1)
    truth["parabola"] = exact.losses[1e11][0]
    inside = {(name, level): 0 for name in truth for level in (80, 95)}
    found = {name: [] for name in truth}
    for _ in range(trials):
        points = fixed_sizes(SMALL, 6.5, noise=0.01, seeds=seeds, random=random)
        fit = analysis.LawFit(points, draws=100)
        estimates = {name: with_draws(getattr(fit.law, name)) for name in ("a", "b", "E")}
        estimates["loss"] = with_draws(fit.optimum(1e13)[1])  # ten times the greatest budget
        estimates["parabola"] = with_draws(analysis.Parabolas(points, 100).losses[1e11])
        for name, level in inside:
            low, high = estimates[name].interval(level)
            inside[name, level] += low <= truth[name] <= high
        for name, estimate in estimates.items():
            low, high = estimate.interval(80)
            found[name].append((estimate.value, high - low))
    shares = {key: number / trials for key, number in inside.items()}
    for (name, level), share in shares.items():
        # Four standard deviations of a share of so many trials.
        spread = 4 * np.sqrt(level / 100 * (1 - level / 100) / trials)
        assert abs(share - level / 100) < spread, (name, level, shares)
    for name, pairs in found.items():
        values, widths = np.array(pairs).T
        scatter = np.subtract(*np.nanquantile(values, [0.9, 0.1]))
        assert 0.75 < np.median(widths) / scatter < 1.5, name


def test_draws_follow_student_t_for_few_degrees_of_freedom():
    """Six points about a fit of two parameters: the t distribution of four degrees of freedom."""
    residuals = 0.01 * np.array([1, -1, 1, -1, 1, -1.0])
    alone = [np.array([residual]) for residual in residuals]
    draws = draw_losses(list("abcdef"), np.zeros(6), alone, 2, 20_000)
    scale = np.sqrt((residuals**2).sum() / 4)
    for share in (0.9, 0.98):
        expected = scale / np.sqrt(stats.chi2.ppf(1 - share, 4) / 4)
        assert np.quantile(np.abs(draws), share) == pytest.approx(expected, rel=0.05)


def test_draws_of_a_point_scatter_as_its_seeds_and_its_misfit():
    """By half, with three seeds: of the mean of its own variance and of the pooled one."""
    random = np.random.default_rng(9)
    names, spread = [f"{i}" for i in range(40)], np.where(np.arange(40) % 2, 0.05, 0.005)
    losses = [random.normal(3, of, 3) for of in spread]
    fitted = np.array([loss.mean() for loss in losses])
    deviations = draw_losses(names, fitted, losses, 0, 4000).std(0)
    own = np.array([loss.var(ddof=1) for loss in losses])
    assert deviations == pytest.approx(np.sqrt((own + own.mean()) / 2 / 3), rel=0.08)
    # Off the fit by a misfit of their own.
    means = np.full(40, 3.0) + random.normal(0, 0.05, 40)
    losses = [random.normal(mean, 0.02, 4) for mean in means]
    spread = draw_losses(names, np.full(40, 3.0), losses, 0, 1000).std(0)
    assert spread.mean() == pytest.approx(np.hypot(0.05, 0.02 / 2), rel=0.25)
    # Of points with one seed beside others with four.
    losses = [random.normal(3, 0.02, 4 if i % 2 else 1) for i in range(40)]
    spread = draw_losses(names, np.full(40, 3.0), losses, 0, 1000).std(0)
    assert spread[1::2].mean() == pytest.approx(0.01, rel=0.3)
    assert spread[::2].mean() == pytest.approx(0.02, rel=0.3)


def test_one_degree_of_freedom_gives_no_interval():
    alone = [np.array([3.0 - i]) for i in range(6)]
    fitted, names = np.array([3.0, 2.1, 0.9, 0.1, -1.0, -2.0]), list("abcdef")
    # The scatter of seeds does not include the misfit of the points.
    seeds = [np.array([-0.01, 0, 0.01]) + loss for loss in alone]
    for losses, of_seeds in ((alone, 0), (seeds, 12)):
        assert degrees(losses, 5) == Degrees(1, of_seeds)
        assert np.isnan(draw_losses(names, fitted, losses, 5, 30)).all()
        assert np.isfinite(draw_losses(names, fitted, losses, 4, 30)).all()


def test_points_are_weighted_by_their_number_of_seeds():
    random = np.random.default_rng(10)
    points = fixed_sizes(SMALL, 6.5, noise=0.05, seeds=4, random=random)
    counts = [1 + 3 * (i % 2) for i in range(len(points.losses))]
    points = with_seeds(points, [slice(count) for count in counts])
    budget, here = 1e11, points.at(1e11)
    x = np.log(points.parameters[here])
    c, b, a = np.polyfit(x - x.mean(), points.means[here], 2, w=np.sqrt(np.array(counts)[here]))
    parabolas = analysis.Parabolas(points, 30)
    assert parabolas.losses[budget][0] == pytest.approx(a - b**2 / (4 * c), abs=1e-9)
    place = points.parameters, points.tokens
    fit = analysis.LawFit(points, 30)
    weighted, unweighted = law.fit(*place, points.means, counts), law.fit(*place, points.means)
    assert fit.law.a[0] == pytest.approx(weighted.a, rel=1e-6)
    assert fit.law.a[0] != pytest.approx(unweighted.a, rel=1e-3)


def test_the_lack_of_fit_is_uniform_for_points_that_follow_the_law():
    """The p of the F test; it is tiny for points that the law misses."""
    random, found = np.random.default_rng(11), []
    seeds = np.tile([1, 2, 4], 6)
    exact = fixed_sizes(SMALL, 6.5)
    for _ in range(50):
        losses = [random.normal(of, 0.01, n) for of, n in zip(exact.means, seeds, strict=True)]
        numbers = [np.arange(n) for n in seeds]
        seconds = [np.full(n, 1e-12) for n in seeds]
        points = dataclasses.replace(exact, losses=losses, numbers=numbers, seconds=seconds)
        found.append(analysis.LawFit(points, 2).p)
    assert stats.kstest(found, "uniform").pvalue > 1e-3
    bent = [loss + 0.05 * (i % 2) for i, loss in enumerate(points.losses)]
    assert analysis.LawFit(dataclasses.replace(points, losses=bent), 2).p < 1e-6
    assert np.isnan(analysis.LawFit(exact, 2).p)


def test_families_are_compared_at_the_seeds_that_both_have():
    random = np.random.default_rng(12)
    three = fixed_sizes(SMALL, 6.5, noise=0.02, seeds=3, random=random)
    one = with_seeds(three, [[1]] * len(three.losses))
    one = dataclasses.replace(one, losses=[loss + 0.1 for loss in one.losses])
    found = analysis.analyse({"three": three, "one": one}, 50)
    for fits in (found.parabolas, found.laws):
        own, base = found.compared(fits, "one", "three")
        difference = own.losses[1e11] - base.losses[1e11]
        difference = difference[np.isfinite(difference)]
        assert len(difference) > 40 and np.allclose(difference, 0.1, atol=1e-4)
    cells = report.optima_table(found)[1e11, "one"]["loss over the baseline's"]
    assert cells["mean"] == pytest.approx(0.1, abs=1e-4)
    # A point that the other family lacks keeps all seeds.
    fewer = dataclasses.replace(one, budgets=one.budgets * 2)
    assert three.common_with(fewer).numbers[-1].tolist() == [0, 1, 2]


def test_intervals_of_speedups_in_seconds_include_the_scatter_of_seconds():
    random = np.random.default_rng(13)
    base = fixed_sizes(SMALL, 8.0, noise=0.001, seeds=3, random=random)
    half = fixed_sizes(SMALL, 4.0, noise=0.001, seeds=3, random=random)

    def with_noise(points, noise):
        seconds = [1e-12 * np.exp(random.normal(0, noise, 3)) for _ in points.losses]
        return dataclasses.replace(points, seconds=seconds)

    widths = []
    for noise in (0.0, 0.3):
        families = {"base": with_noise(base, noise), "half": with_noise(half, noise)}
        found = analysis.analyse(families, 400)
        one = found.speedups(found.parabolas)[1e11, "half"]
        widths.append(np.diff(np.log(one.seconds.interval(95)))[0])
    # The median of nine runs a size, between two sizes or at one, for each family.
    assert widths[1] > 3.92 * 0.3 / 3 > 4 * widths[0]


def test_a_law_at_a_bound_is_not_extrapolated():
    """E = 0 at the fit, or a bound in more than a quarter of the draws."""
    random = np.random.default_rng(14)
    nothing = dataclasses.replace(SMALL, E=0.0, A=12.0, a=0.1)
    points = fixed_sizes(nothing, 6.5)
    curved = [
        loss - 0.002 * np.log(tokens / 1e6) ** 2
        for loss, tokens in zip(points.losses, points.tokens, strict=True)
    ]
    at_zero = analysis.LawFit(dataclasses.replace(points, losses=curved), 30)
    assert at_zero.law.E[0] == 0 and not at_zero.extrapolates
    noisy = fixed_sizes(dataclasses.replace(SMALL, E=0.15), 6.5, noise=0.1, seeds=2, random=random)
    unsure = analysis.LawFit(noisy, 100)
    assert 0.25 < unsure.at_a_bound < 1 and not unsure.extrapolates
    sure = analysis.LawFit(fixed_sizes(SMALL, 6.5, noise=0.002, seeds=3, random=random), 30)
    assert sure.extrapolates and np.isfinite(sure.optimum(1e13)[1][0])
    assert np.isnan(at_zero.optimum(1e13)[1]).all() and np.isnan(unsure.optimum(1e13)[1]).all()
    assert np.isfinite(unsure.losses[1e12][0])


def test_draws_are_paired_whatever_the_order_of_points_and_seeds():
    random, made = np.random.default_rng(5), {"dense": [], "other": []}
    for size, parameters in enumerate(np.geomspace(1e4, 1e5, 5)):
        losses = 2 + 0.1 * (size - 2) ** 2 + random.normal(0, 0.01, 3)
        for family, ahead, seeds in (("dense", 0.0, (0, 1, 2)), ("other", 0.5, (2, 0, 1))):
            for seed in seeds:
                run = grid.Run(family, f"{size}", 1e10, seed, None)
                numbers = dict(tokens=10**6, flops=1e10, seconds=None, loss=losses[seed] - ahead)
                fixed = dict.fromkeys(("machine", "revision", "text", "tokenizer", "source"), "")
                fixed |= {"split": 1.0, "settings": {}}
                made[family].append(Point(run, True, int(parameters), **numbers, **fixed))
    found = analysis.analyse(families(made["dense"] + made["other"][::-1]), 200)
    other, dense = found.compared(found.parabolas, "other", "dense")
    difference = with_draws(other.losses[1e10] - dense.losses[1e10])
    assert difference.interval(95) == pytest.approx((-0.5, -0.5))


def test_sizes_far_from_the_best_measured_are_left_out():
    """Of those from a sixteenth to sixteen times the best the parabola is more biased; a law that
    only far sizes break is found."""
    points = around_the_best(ASYMMETRIC, 16)
    near = points.within(4)
    best = best_size(ASYMMETRIC, BUDGETS[0])
    sizes = near.parameters[near.at(BUDGETS[0])] / best
    assert sizes == pytest.approx([16 ** (-1 / 3), 1, 16 ** (1 / 3)])
    wide, narrow = (analysis.Parabolas(of, 1).parameters[BUDGETS[0]][0] for of in (points, near))
    assert abs(narrow / best - 1) < 0.3 * abs(wide / best - 1)
    off = [best_size(ASYMMETRIC, budget) for budget in points.budgets] / points.parameters
    broken = dataclasses.replace(
        points, losses=list(np.array(points.losses) + (np.abs(np.log(off)) > np.log(4))[:, None])
    )
    found = analysis.analyse({"dense": broken}, 2, within=4).laws["dense"].law
    assert (found.a[0], found.b[0]) == pytest.approx((ASYMMETRIC.a, ASYMMETRIC.b), rel=1e-4)


def test_an_interval_of_an_estimate_ignores_draws_without_it():
    draws = np.array([np.nan, *np.arange(99.0)])
    estimate = Estimate(50.0, draws)
    assert estimate.share == 0.99 and estimate.interval(80) == (9.0, 89.0)
    assert Estimate(1.0, np.array([np.nan])).interval(95) is None
    assert Estimate(1.0, np.array([1.0, np.inf])).as_data()["95"] == [1.0, None]


def test_a_parabola_has_no_vertex_outside_its_sizes_or_of_two():
    sizes, weights = np.array([1e3, 1e4, 1e5]), np.ones(3)
    x = np.log(sizes)
    rows = [0.3 * (x - np.log(best)) ** 2 + 1.7 for best in (8e3, 500, 2e5)]
    rows.append(-rows[0])
    size, loss, fitted = parabola.fit_draws(sizes, rows, weights)
    assert (size[0], loss[0]) == pytest.approx((8e3, 1.7))
    assert np.isnan(size[1:]).all() and np.isnan(loss[1:]).all()
    assert fitted == pytest.approx(np.array(rows))
    size, loss, _ = parabola.fit_draws(sizes[:2], np.array([[2.0, 3.0]]), weights[:2])
    assert np.isnan(size).all() and np.isnan(loss).all()
