"""Approach 3: the loss of a family as a law of parameters and tokens, and the optima that follow.

    L(N, D) = E + A / N^a + B / D^b        (Hoffmann et al. 2022, arXiv 2203.15556, approach 3)

N counts all parameters, embeddings included, which is what a run logs as `parameters`; D counts the
tokens trained on. For given exponents the law is linear in E, A and B, so these are eliminated
exactly, under the constraint that none is negative, and a search remains over the two exponents
(variable projection; arXiv 2603.22339 shows that it recovers what parabolas bias).

The fit is by plain least squares in nats: a run that went wrong should be looked at and not be
given less weight, and only with squares is the elimination exact. A point counts as often as it has
seeds. Runs far from the best size, wide ones of few steps most of all, scatter more than others and
fit the law less; `Measured.within` leaves them out.

Nothing here imports JAX, and all that is computed for bootstrap draws is computed for all draws at
once: arrays have the axes R (draws), P (points), S (sizes on a fine grid).
"""

import dataclasses

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import least_squares, nnls

from efx.errors import UsageError

LEAST_EXPONENT, GREATEST_EXPONENT = 0.02, 3.0
PARAMETERS = 5  # of the law
_TOLERANCE = 1e-6  # of the logarithm of an exponent
_MOVES = 400  # of the search at most


@dataclasses.dataclass(frozen=True)
class Law:
    """The law, or one for each of R draws: every attribute is an array of shape [R] or []."""

    E: np.ndarray
    A: np.ndarray
    B: np.ndarray
    a: np.ndarray
    b: np.ndarray

    def loss(self, parameters, tokens):
        """The loss of models of these sizes on so many tokens; shapes broadcast against [R]."""
        return self.E + self.A * np.power(parameters, -self.a) + self.B * np.power(tokens, -self.b)

    def one(self, row):
        """The Law of one draw."""
        return Law(*(values[row] for values in dataclasses.astuple(self)))

    def at_the_edge(self):
        """[R] or [] whether an exponent lies at the end of the range that was searched."""
        exponents = np.log(np.stack([self.a, self.b]))
        ends = np.log([LEAST_EXPONENT, GREATEST_EXPONENT])
        return (np.abs(exponents[..., None] - ends) < 1e-3).any((0, -1))

    def at_a_bound(self):
        """[R] or [] whether any parameter lies at a bound: E, A or B at 0, or an exponent at the
        end of its range. What such a law says of other budgets, the bound decides."""
        return self.at_the_edge() | (np.stack([self.E, self.A, self.B]) <= 0).any(0)


# ---- the fit -----------------------------------------------------------------------------------


def check_points(parameters, budgets):
    """UsageError unless so many points (their sizes and budgets) can say five parameters."""
    points, sizes, levels = len(budgets), len({*parameters}), len({*budgets})
    if points <= PARAMETERS or levels < 2 or sizes < 3:
        raise UsageError(
            f"the law L(N, D) has {PARAMETERS} parameters and needs {PARAMETERS + 1} points, 2 "
            f"budgets and 3 sizes; there are {points}, {levels} and {sizes}"
        )


def fit(parameters, tokens, losses, weights=None):
    """The Law of these points [P]: a search over a grid of exponents, then a local one.

    weights: how much each point counts (default: equally).
    """
    law = fit_draws(parameters, tokens, np.asarray(losses, float)[None], weights, cells=64)
    weights = np.ones(len(losses)) if weights is None else np.asarray(weights, float)
    scale = np.sqrt(weights / weights.sum())
    x, z = np.log(parameters), np.log(tokens)

    def projected(log_exponents):
        a, b = np.exp(log_exponents)
        columns = np.stack([np.ones_like(x), np.exp(-a * (x - x.mean())),
                            np.exp(-b * (z - z.mean()))], axis=1)  # fmt: skip
        linear, _ = nnls(scale[:, None] * columns, scale * losses)
        return linear, scale * (columns @ linear - losses)

    bounds = np.log([LEAST_EXPONENT, GREATEST_EXPONENT])
    start = np.clip(np.log([law.a[0], law.b[0]]), bounds[0] + 1e-9, bounds[1] - 1e-9)
    found = least_squares(lambda exponents: projected(exponents)[1], start, bounds=bounds,
                          xtol=1e-12, ftol=1e-14, gtol=1e-14)  # fmt: skip
    (E, A, B), _ = projected(found.x)
    a, b = np.exp(found.x)
    return Law(E, A * np.exp(a * x.mean()), B * np.exp(b * z.mean()), a, b)


def fit_draws(parameters, tokens, losses_RP, weights=None, cells=16):
    """A Law for each row of losses, all at the same points; `fit` is more exact and much slower.

    The exponents are the best of a grid (of so many cells for each of them), from where each row
    goes to the best of its eight neighbours until there is no better one, and on with half the
    distance. A row with a NaN has a law of NaN.
    """
    x_P, z_P = np.log(parameters), np.log(tokens)
    x_P, z_P = x_P - x_P.mean(), z_P - z_P.mean()  # or columns would differ by powers of ten
    weights_P = np.ones(len(x_P)) if weights is None else np.asarray(weights, float)
    weights_P = weights_P / weights_P.sum()
    y_RP = np.asarray(losses_RP, float)
    known_R = ~np.isnan(y_RP).any(1)
    if not known_R.all():
        if not known_R.any():
            return Law(*np.full((5, len(y_RP)), np.nan))
        law = fit_draws(parameters, tokens, y_RP[known_R], weights, cells)
        rows = np.full((5, len(y_RP)), np.nan)
        rows[:, known_R] = dataclasses.astuple(law)
        return Law(*rows)

    grid = np.geomspace(LEAST_EXPONENT, GREATEST_EXPONENT, cells)
    log_grid = np.log(grid)
    p_GP, q_GP = np.exp(-grid[:, None] * x_P), np.exp(-grid[:, None] * z_P)
    best_R = np.empty((len(y_RP), 2))
    for rows in np.array_split(np.arange(len(y_RP)), max(1, len(y_RP) // 64)):  # of memory's sake
        *_, error_RGG = _linear(p_GP, q_GP, y_RP[rows], weights_P)
        best = error_RGG.reshape(len(rows), -1).argmin(1)
        best_R[rows] = np.stack([log_grid[best // cells], log_grid[best % cells]], axis=1)

    step_R = np.full(len(y_RP), log_grid[1] - log_grid[0])
    active = np.arange(len(y_RP))
    for _ in range(_MOVES):
        around = best_R[active, :, None] + step_R[active, None, None] * np.array([-1.0, 0.0, 1.0])
        around = np.clip(around, log_grid[0], log_grid[-1])
        exponents_R23 = np.exp(around)
        p_R3P = np.exp(-exponents_R23[:, 0, :, None] * x_P)
        q_R3P = np.exp(-exponents_R23[:, 1, :, None] * z_P)
        *_, error_R33 = _linear(p_R3P, q_R3P, y_RP[active], weights_P)
        best = error_R33.reshape(len(active), 9).argmin(1)
        # A neighbour that is no better within rounding is no reason to go there.
        own = error_R33[:, 1, 1]
        stays = error_R33.reshape(len(active), 9).min(1) >= own * (1 - 1e-12)
        rows = np.arange(len(active))
        moved = np.stack([around[rows, 0, best // 3], around[rows, 1, best % 3]], axis=1)
        best_R[active] = np.where(stays[:, None], best_R[active], moved)
        step_R[active] = np.where(stays, step_R[active] / 2, step_R[active])
        active = active[step_R[active] > _TOLERANCE]
        if not len(active):
            break

    a_R, b_R = np.exp(best_R.T)
    p_R1P, q_R1P = np.exp(-a_R[:, None, None] * x_P), np.exp(-b_R[:, None, None] * z_P)
    E, A, B, _ = (array[:, 0, 0] for array in _linear(p_R1P, q_R1P, y_RP, weights_P))
    log_N, log_D = np.log(parameters).mean(), np.log(tokens).mean()
    return Law(E, A * np.exp(a_R * log_N), B * np.exp(b_R * log_D), a_R, b_R)


def _linear(p, q, y_RP, weights_P):
    """(E, A, B, mean squared error), each [R, I, J], of y = E + A p + B q, none of them negative.

    p, q: [I, P] and [J, P], the same for all rows, or [R, I, P] and [R, J, P]. With three unknowns
    every choice of those that are zero can be tried: the constrained optimum is the best of the
    unconstrained ones that have nothing negative in them.
    """
    p_w, q_w = p * weights_P, q * weights_P
    p_1, q_1 = p_w.sum(-1)[..., :, None], q_w.sum(-1)[..., None, :]
    pp, qq = (p_w * p).sum(-1)[..., :, None], (q_w * q).sum(-1)[..., None, :]
    pq = p_w @ np.swapaxes(q, -1, -2)
    y_1 = (y_RP @ weights_P)[:, None, None]
    yy = (y_RP**2 @ weights_P)[:, None, None]
    by_row = "rip,rp->ri" if p.ndim == 3 else "ip,rp->ri"
    py = np.einsum(by_row, p_w, y_RP)[:, :, None]
    qy = np.einsum(by_row, q_w, y_RP)[:, None, :]

    # With E free everything is centred first; the sums of squares of centred losses are small
    # numbers of their own, not differences of large ones.
    centred_RP = y_RP - y_1[:, 0]
    cyy = (centred_RP**2 @ weights_P)[:, None, None]
    cpy = np.einsum(by_row, p_w, centred_RP)[:, :, None]
    cqy = np.einsum(by_row, q_w, centred_RP)[:, None, :]
    cpp, cqq, cpq = pp - p_1**2, qq - q_1**2, pq - p_1 * q_1

    shape = np.broadcast_shapes(pq.shape, py.shape, qy.shape)
    best = [np.zeros(shape) for _ in range(3)] + [np.full(shape, np.inf)]
    with np.errstate(divide="ignore", invalid="ignore"):
        for has_E, (p2, q2, cross, py2, qy2, yy2) in (
            (True, (cpp, cqq, cpq, cpy, cqy, cyy)),
            (False, (pp, qq, pq, py, qy, yy)),
        ):
            determinant = p2 * q2 - cross**2
            both = (py2 * q2 - qy2 * cross) / determinant, (qy2 * p2 - py2 * cross) / determinant
            for A, B in (both, (py2 / p2, 0.0), (0.0, qy2 / q2), (0.0, 0.0)):
                E = y_1 - A * p_1 - B * q_1 if has_E else 0.0
                error = np.broadcast_to(yy2 - A * py2 - B * qy2, shape)
                better = (error < best[3]) & (A >= 0) & (B >= 0) & (E >= 0)
                for i, value in enumerate((E, A, B, error)):
                    best[i] = np.where(better, value, best[i])
    return best


# ---- FLOPs, and the optimum of a budget --------------------------------------------------------


class FlopsPerToken:
    """Training FLOPs a token as a function of the parameters, from those of the measured sizes.

    6 N would be wrong for families that route, and for small models. In logarithms of both:
    a smooth monotone curve through the sizes, and beyond them the line through the last two.
    """

    def __init__(self, parameters, flops):
        order = np.argsort(parameters)
        x, first = np.unique(np.log(np.asarray(parameters, float))[order], return_index=True)
        y = np.log(np.asarray(flops, float))[order][first]
        self._x, self._y, self._inside = x, y, PchipInterpolator(x, y)
        slopes = np.diff(y) / np.diff(x)
        self._slopes = slopes[0], slopes[-1]

    def __call__(self, parameters):
        x, (first, last) = np.log(parameters), self._slopes
        y = self._inside(np.clip(x, self._x[0], self._x[-1]))
        y = y + first * np.minimum(x - self._x[0], 0) + last * np.maximum(x - self._x[-1], 0)
        return np.exp(y)


class Optima:
    """The best size of every budget under a Law (or under each of R): the size N whose loss
    L(N, C / F(N)) is least, F the FLOPs a token.

    Sizes are looked for from a thousandth of the smallest measured to a thousand times the largest.
    """

    def __init__(self, law, parameters, flops_per_token):
        self._log_S = np.linspace(np.log(min(parameters) / 1e3), np.log(max(parameters) * 1e3), 400)
        E, A, B, a, self._b = (np.reshape(value, (-1, 1)) for value in dataclasses.astuple(law))
        sizes_S = np.exp(self._log_S)
        self._of_sizes_RS = E + A * np.exp(-a * self._log_S)
        self._of_tokens_RS = B * np.exp(self._b * np.log(flops_per_token(sizes_S)))

    def __call__(self, budget):
        """(sizes [R], losses [R]) at so many training FLOPs."""
        loss_RS = self._of_sizes_RS + budget**-self._b * self._of_tokens_RS
        last, rows = loss_RS.shape[1] - 1, np.arange(len(loss_RS))
        best_R = loss_RS.argmin(1)
        middle_R = np.clip(best_R, 1, last - 1)
        left, least, right = (loss_RS[rows, middle_R + i] for i in (-1, 0, 1))
        # The vertex of the parabola through three neighbours, unless the least is at an end.
        bend = np.maximum(left + right - 2 * least, 1e-300)
        shift_R = np.where(best_R == middle_R, (left - right) / (2 * bend), best_R - middle_R)
        shift_R = np.clip(shift_R, -1, 1)
        step = self._log_S[1] - self._log_S[0]
        loss_R = least + shift_R * (right - left) / 2 + shift_R**2 * bend / 2
        return np.exp(self._log_S[middle_R] + shift_R * step), loss_R
