"""Fits of isoFLOP studies on losses that come from a known law: what is recovered, what is biased,
and how often intervals cover the truth."""

import dataclasses

import numpy as np
import pytest
from scipy.optimize import minimize_scalar, nnls

from efx.errors import UsageError
from efx.studies.isoflop import analysis, law, parabola
from efx.studies.isoflop.bootstrap import Estimate, draw_losses, with_draws

BUDGETS = np.geomspace(1e17, 1e21, 5)
SYMMETRIC = law.Law(1.69, 400.0, 400.0, 0.31, 0.31)
ASYMMETRIC = law.Law(1.69, 400.0, 400.0, 0.465, 0.155)


def best_size(truth, budget):
    """The N of least loss where a token costs 6 N FLOPs."""
    ratio = (truth.a * truth.A / (truth.b * truth.B)) ** (1 / (truth.a + truth.b))
    return ratio * (budget / 6) ** (truth.b / (truth.a + truth.b))


def around_the_best(truth, span, sizes=7, centre=lambda number: 1.0):
    """Noise-free points at `sizes` sizes from 1/span to span times the best of each budget, which
    is off by the factor centre(number of the budget)."""
    rows = [
        (f"{i}", budget, size, budget / 6 / size, 6 * size, 1e-12)
        for number, budget in enumerate(BUDGETS)
        for i, size in enumerate(
            best_size(truth, budget) * centre(number) * np.geomspace(1 / span, span, sizes)
        )
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


SMALL = law.Law(1.2, 6.0, 8.0, 0.3, 0.2)  # with optima among the fixed sizes


# ---- recovery ----------------------------------------------------------------------------------


@pytest.mark.parametrize("truth", [SYMMETRIC, ASYMMETRIC])
@pytest.mark.parametrize("span", [2, 16])
@pytest.mark.parametrize(
    "centre",
    [lambda i: 1.0, lambda i: 3.0, lambda i: 3 ** (i / 4)],
    ids=["centred", "off", "drift"],
)
def test_variable_projection_recovers_what_parabolas_bias(truth, span, centre):
    """The three sources of bias of arXiv 2603.22339, without noise: a wide grid, one off its
    centre or ever more so, and exponents that differ."""
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
    """Only where the grid is narrow, centred and symmetric are they not."""

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
    size, growth, _ = errors(ASYMMETRIC, 16, lambda number: 3 ** (number / 4))
    assert growth < -0.01  # sizes off by more at each budget
    assert abs(errors(SYMMETRIC, 16)[2]) > 1e-3


def test_draws_are_fitted_as_one_is():
    random = np.random.default_rng(0)
    points = fixed_sizes(SMALL, 6.5)
    losses = points.means + random.normal(0, 0.01, (6, len(points.means)))
    weights = random.integers(1, 4, len(points.means))
    many = law.fit_draws(points.parameters, points.tokens, losses, weights)
    for row in range(len(losses)):
        one = law.fit(points.parameters, points.tokens, losses[row], weights)
        assert (many.a[row], many.b[row]) == pytest.approx((one.a, one.b), rel=1e-3)
        assert many.E[row] == pytest.approx(one.E, rel=1e-3)
        seen = (law.Law(*(x[row] for x in (many.E, many.A, many.B, many.a, many.b))), one)
        losses_of = [found.loss(points.parameters, points.tokens) for found in seen]
        assert losses_of[0] == pytest.approx(losses_of[1], abs=1e-5)


def test_elimination_is_nonnegative_least_squares():
    """Against scipy, where every set of the three is the one that is zero."""
    random, zeros = np.random.default_rng(1), set()
    p, q = np.exp(random.normal(0, 0.5, (2, 1, 12)))
    weights = random.uniform(0.5, 2, 12)
    weights /= weights.sum()
    y = random.normal(0, 1, (300, 3)) @ np.stack([np.ones(12), p[0], q[0]])
    y += random.normal(0, 0.3, y.shape)
    E, A, B, error = (found[:, 0, 0] for found in law._linear(p, q, y, weights))
    for row in range(len(y)):
        scale = np.sqrt(weights)
        wanted, rest = nnls(scale[:, None] * np.stack([np.ones(12), p[0], q[0]], 1), scale * y[row])
        assert (E[row], A[row], B[row]) == pytest.approx(tuple(wanted), abs=1e-8)
        assert error[row] == pytest.approx(rest**2, abs=1e-10)
        zeros.add(tuple(wanted > 0))
    assert len(zeros) == 8


def test_an_exponent_at_the_end_of_its_range_is_told():
    assert law.Law(1.0, 2.0, 3.0, 0.3, law.GREATEST_EXPONENT).at_the_edge()
    assert law.Law(1.0, 2.0, 3.0, law.LEAST_EXPONENT, 0.3).at_the_edge()
    assert not SMALL.at_the_edge()


def test_the_law_has_no_optimum_far_from_what_was_measured():
    """Sizes far above the best, as where the smallest model measured is the best: though the fit is
    exact, all that it says of the best ones is extrapolation."""
    far, near = (
        analysis.LawFit(around_the_best(SYMMETRIC, 4, centre=centre), draws=2)
        for centre in (lambda number: 16.0, lambda number: 10.0)
    )
    best = [best_size(SYMMETRIC, budget) for budget in BUDGETS]
    assert [near.parameters[budget][0] for budget in BUDGETS] == pytest.approx(best, rel=1e-3)
    nothing = np.concatenate([*far.parameters.values(), *far.losses.values()])
    assert np.isnan(nothing).all() and np.isnan(far.optimum(10 * BUDGETS[-1])).all()
    found = analysis.speedup(near, far, BUDGETS[0]), analysis.speedup(far, near, BUDGETS[0])
    assert all(np.isnan(one.flops.value) for one in found)
    assert np.isnan(analysis.growth(far).value)


def test_the_law_says_nothing_of_budgets_without_an_optimum():
    """Sizes that leave the best ones behind as the budget grows: the last budgets have none, nor
    have those beyond them."""
    fit = analysis.LawFit(around_the_best(SYMMETRIC, 2, centre=lambda i: 4.0**i), draws=2)
    seen = [bool(np.isfinite(fit.losses[budget][0])) for budget in BUDGETS]
    assert seen == [True, True, False, False, False]
    assert np.isnan(fit.optimum(2 * BUDGETS[-1])).all()


def test_too_few_points_for_five_parameters():
    points = fixed_sizes(SMALL, 6.5, budgets=(1e11,))
    with pytest.raises(UsageError, match="needs 6 points, 2 budgets and 3 sizes; there are 6, 1"):
        analysis.LawFit(points, 20)
    found = analysis.analyse({"dense": points}, 20)
    assert not found.laws and "2 budgets" in found.refusals["dense"]
    assert found.parabolas["dense"].losses


# ---- FLOPs and optima --------------------------------------------------------------------------


def test_the_optimum_goes_by_the_ledger():
    """With FLOPs a token that are no multiple of the parameters, inside and outside the sizes."""
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
    """A family of the same law that costs half the FLOPs a token needs half the budget; a FLOP of
    it takes half as long again."""
    base = fixed_sizes(SMALL, 8.0, budgets=(1e11, 1e12, 1e13))
    half = fixed_sizes(SMALL, 4.0, seconds=1.5e-12, budgets=(1e11, 1e12))
    found = analysis.analyse({"base": base, "half": half}, 20)
    by_law = found.speedups(found.laws)
    assert list(by_law) == [(1e11, "half"), (1e12, "half")]
    for speedup in by_law.values():
        assert speedup.flops.value == pytest.approx(2, rel=1e-2)
        assert speedup.seconds.value == pytest.approx(2 / 1.5, rel=1e-2)
    by_parabolas = found.speedups(found.parabolas)
    assert by_parabolas[1e12, "half"].flops.value == pytest.approx(2, rel=0.15)
    # The other way round its curve ends, or begins, where the other is.
    turned = analysis.analyse({"half": half, "base": base}, 20)
    turned = turned.speedups(turned.parabolas)
    assert turned[1e13, "base"].flops.value == np.inf
    assert turned[1e11, "base"].flops.value == 0


# ---- intervals ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [1, 3])
def test_intervals_cover(seeds):
    random, trials = np.random.default_rng(seeds), 60
    truth = {"a": SMALL.a, "b": SMALL.b, "E": SMALL.E}
    inside = {(name, level): 0 for name in (*truth, "loss") for level in (80, 95)}
    budget = 1e13  # ten times the greatest
    best = best_size_at(6.5, budget)
    for _ in range(trials):
        points = fixed_sizes(SMALL, 6.5, noise=0.01, seeds=seeds, random=random)
        fit = analysis.LawFit(points, draws=100)
        estimates = {name: with_draws(getattr(fit.law, name)) for name in truth}
        estimates["loss"] = with_draws(fit.optimum(budget)[1])
        for name, level in inside:
            low, high = estimates[name].interval(level)
            inside[name, level] += low <= (truth | {"loss": best})[name] <= high
    shares = {key: number / trials for key, number in inside.items()}
    for (name, level), share in shares.items():
        # Four standard deviations of a share of so many trials, for the wider one about 0.11.
        spread = 4 * np.sqrt(level / 100 * (1 - level / 100) / trials)
        assert abs(share - level / 100) < max(spread, 0.11), (name, level, shares)


def best_size_at(cost, budget):
    """The least loss of SMALL at a budget where a token costs `cost` FLOPs a parameter."""
    sizes = np.geomspace(1e3, 1e8, 20_000)
    return SMALL.loss(sizes, budget / cost / sizes).min()


def test_draws_have_the_scatter_of_seeds_and_of_what_the_fit_misses():
    random = np.random.default_rng(3)
    fitted, count, names = np.linspace(3, 2, 40), 3000, [f"{i}" for i in range(40)]
    for seeds, misfit in ((4, 0.0), (4, 0.05), (1, 0.05)):
        means = fitted + random.normal(0, misfit, 40) if misfit else fitted
        losses = [mean + random.normal(0, 0.02, seeds) for mean in means]
        draws = draw_losses(names, fitted, losses, 0, count)
        assert draws.shape == (count, 40)
        assert draws.mean(0) == pytest.approx(fitted, abs=0.02)
        expected = np.sqrt(misfit**2 + 0.02**2 / seeds)
        assert draws.std(0).mean() == pytest.approx(expected, rel=0.25)
    # A fit through all points.
    assert np.isnan(draw_losses(names[:6], fitted[:6], losses[:6], 6, 5)).all()
    # Of points with one seed beside others with four.
    losses = [fitted[i] + random.normal(0, 0.02, 4 if i % 2 else 1) for i in range(40)]
    spread = draw_losses(names, fitted, losses, 0, count).std(0)
    assert spread[1::2].mean() == pytest.approx(0.01, rel=0.3)
    assert spread[::2].mean() == pytest.approx(0.02, rel=0.3)


def test_draws_of_families_are_paired():
    """What is the same in two families at a size, seed by seed, is so in each draw, whatever the
    order of the points; where one has other points, draws are paired by name as far as they go."""
    random = np.random.default_rng(4)
    names, fitted = [f"{i}" for i in range(12)], np.linspace(3, 2, 12)
    misfit = random.normal(0, 0.05, 12)
    losses = [mean + random.normal(0, 0.02, 3) for mean in fitted + misfit]
    draws = draw_losses(names, fitted, losses, 5, 500)
    further = draw_losses(names, fitted + 0.1, [point + 0.1 for point in losses], 5, 500)
    assert further - draws == pytest.approx(np.full(draws.shape, 0.1))
    turned = draw_losses(names[::-1], fitted[::-1], losses[::-1], 5, 500)
    assert turned[:, ::-1] == pytest.approx(draws)
    noise = random.normal(0, 0.01, (12, 3))
    other = draw_losses(
        names, fitted, [point + n for point, n in zip(losses, noise, strict=True)], 5, 500
    )
    alone = draw_losses([f"x{name}" for name in names], fitted, losses, 5, 500)
    assert (other - draws).std() < 0.5 * (alone - draws).std()
    # Points of one budget more change neither which points nor which seeds the others draw much.
    assert abs(np.corrcoef(draws[:, 0], alone[:, 0])[0, 1]) < 0.2


def test_a_law_that_misses_its_points_is_told():
    """Against the scatter of seeds, which decides what counts as a miss."""
    random = np.random.default_rng(5)
    follows = fixed_sizes(SMALL, 6.5, noise=0.01, seeds=3, random=random)
    assert analysis.LawFit(follows, 20).p > 0.01
    bent = [loss + 0.05 * (i % 2) for i, loss in enumerate(follows.losses)]
    misses = dataclasses.replace(follows, losses=bent)
    assert analysis.LawFit(misses, 20).p < 1e-6
    alone = dataclasses.replace(follows, losses=[loss[:1] for loss in bent])
    assert np.isnan(analysis.LawFit(alone, 20).p)


def test_sizes_far_from_the_best_measured_are_left_out():
    """Sizes from a sixteenth to sixteen times the best, of which the parabola of the near ones is
    less biased; a law that only far sizes break is found."""
    points = around_the_best(ASYMMETRIC, 16)
    near = points.within(4)
    for budget in BUDGETS:
        sizes = near.parameters[near.at(budget)] / best_size(ASYMMETRIC, budget)
        assert sizes == pytest.approx([16 ** (-1 / 3), 1, 16 ** (1 / 3)])
    wide, narrow = (analysis.Parabolas(of, 1).parameters[BUDGETS[0]][0] for of in (points, near))
    best = best_size(ASYMMETRIC, BUDGETS[0])
    assert abs(narrow / best - 1) < 0.3 * abs(wide / best - 1)
    off = [best_size(ASYMMETRIC, budget) for budget in points.budgets] / points.parameters
    broken = dataclasses.replace(
        points, losses=list(np.array(points.losses) + (np.abs(np.log(off)) > np.log(4))[:, None])
    )
    found = analysis.analyse({"dense": broken}, 2, within=4).laws["dense"].law
    assert (found.a[0], found.b[0]) == pytest.approx((ASYMMETRIC.a, ASYMMETRIC.b), rel=1e-4)
    assert analysis.analyse({"dense": broken}, 2).families["dense"] is broken


def test_a_law_at_the_end_of_its_range_says_nothing():
    """Losses that fall with the tokens more steeply than any exponent of the search."""
    points = fixed_sizes(SMALL, 6.5)
    tokens = points.tokens / np.exp(np.log(points.tokens).mean())
    steep = [np.array([loss]) for loss in 2 + 6 * points.parameters**-0.3 + 0.01 * tokens**-5.0]
    found = analysis.analyse({"dense": dataclasses.replace(points, losses=steep)}, 5)
    assert "dense" not in found.laws and "the points do not say" in found.refusals["dense"]


def test_an_estimate_says_what_share_of_draws_has_it():
    draws = np.array([np.nan, *np.arange(99.0)])
    estimate = Estimate(50.0, draws)
    assert estimate.share == 0.99 and estimate.interval(80) == (9.0, 89.0)
    assert Estimate(1.0, np.array([np.nan])).interval(95) is None
    assert Estimate(1.0, np.array([1.0, np.inf])).as_data()["95"] == [1.0, None]


def test_a_parabola_has_no_vertex_outside_its_sizes():
    sizes, weights = np.array([1e3, 1e4, 1e5]), np.ones(3)
    x = np.log(sizes)
    rows = [0.3 * (x - np.log(best)) ** 2 + 1.7 for best in (8e3, 500, 2e5)]
    rows.append(-rows[0])
    size, loss, fitted = parabola.fit_draws(sizes, rows, weights)
    assert (size[0], loss[0]) == pytest.approx((8e3, 1.7))
    assert np.isnan(size[1:]).all() and np.isnan(loss[1:]).all()
    assert fitted == pytest.approx(np.array(rows))
