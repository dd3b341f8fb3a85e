"""Approach 2: a parabola through the losses of one budget, and the size at its vertex.

    loss = l + c (log N - v)^2        (Hoffmann et al. 2022, arXiv 2203.15556, approach 2)

Kept since it is what others report, and as a look at each budget by itself. It is biased even
without noise (arXiv 2603.22339): the curve that the law L(N, D) gives at a budget is no parabola,
so sizes far from the optimum bend the fit. Where a and b differ the curve is steeper on one side,
and where the sizes lie off the centre one side has more of them; the vertex moves, by more at some
budgets than at others, and with it the exponent of its growth. `law` has none of this.
"""

import numpy as np

LEAST_SIZES = 3  # that a parabola is fitted to


def fit_draws(parameters, losses_RP, weights):
    """(sizes [R] at the vertex, losses [R] there, fitted losses [R, P]) for each row of losses.

    The vertex is NaN where the parabola opens downwards or the sizes do not enclose it, and where
    there are fewer than three sizes, which any number of parabolas go through.
    """
    x_P = np.log(np.asarray(parameters, float))
    centre = x_P.mean()
    design_P3 = np.stack([np.ones_like(x_P), x_P - centre, (x_P - centre) ** 2], axis=1)
    scale_P = np.sqrt(np.asarray(weights, float))
    solve_3P = np.linalg.pinv(scale_P[:, None] * design_P3) * scale_P
    coefficients_R3 = np.asarray(losses_RP, float) @ solve_3P.T
    offset_R, slope_R, bend_R = coefficients_R3.T
    with np.errstate(divide="ignore", invalid="ignore"):
        vertex_R = centre - slope_R / (2 * bend_R)
        loss_R = offset_R - slope_R**2 / (4 * bend_R)
    is_minimum = (bend_R > 0) & (vertex_R >= x_P.min()) & (vertex_R <= x_P.max())
    is_minimum &= len(np.unique(x_P)) >= LEAST_SIZES
    size_R = np.where(is_minimum, np.exp(np.where(is_minimum, vertex_R, 0)), np.nan)
    return size_R, np.where(is_minimum, loss_R, np.nan), coefficients_R3 @ design_P3.T
