"""Statistics of a probe: which properties of tokens predict the decisions of a router.

A predictor (position, token id, ...) is fitted to one half of the rows and scored on the other, and
vice versa, so no token is scored by a fit that has seen its row. "Explained" is, for decisions, the
fraction of their entropy by which the predictor lowers the log loss of the base rate; for scores,
R^2. A useless predictor gets 0, one that fits noise slightly less. Intervals are 95%, by a
bootstrap over rows.
"""

import dataclasses
import itertools

import numpy as np
from scipy.special import expit
from scipy.stats import rankdata

from efx.errors import UsageError, extra

DRAWS, LEVEL = 1000, 95
LEAST_ROWS, LEAST_TOKENS = 8, 1000
# Neighbouring rows are often of one document, so the two halves consist of stretches of rows.
STRETCHES = 10
BINS = 32  # of equally many tokens, for numeric predictors
COARSE = 8  # bins of a numeric predictor that is combined with a category
RANKS = 256  # of predictions, for an AUC
WEIGHT_BINS = 40  # of the histogram of router weights
# How many tokens without error a cell has beside its own.
WEIGHTS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Properties of N tokens.

    Attributes:
      row_N: number of the row, in the order of the text.
      position_N: position in the document. token_N, previous_N: ids; -1: no previous token.
      rarity_N: -log2 of the token's frequency in the training text, in bits.
      entropy_N, loss_N: of the model's prediction at the token, in nats.
    """

    row_N: np.ndarray
    position_N: np.ndarray
    token_N: np.ndarray
    previous_N: np.ndarray
    rarity_N: np.ndarray
    entropy_N: np.ndarray
    loss_N: np.ndarray

    def at(self, there_N):
        """The tokens of a mask."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Tokens(**{name: values_N[there_N] for name, values_N in fields.items()})


@dataclasses.dataclass(frozen=True)
class Block:
    """Decisions of a block about N tokens.

    Attributes:
      routed_N: 1.0 computed, 0.0 skipped, NaN: no decision about the token.
      selected_N: the same before the causal limit; None under training's selection.
      score_N: the router's score; None without a router.
      threshold: the causal decision selects tokens with a score above it; None if it does not use
        the score.
    """

    routed_N: np.ndarray
    selected_N: np.ndarray | None = None
    score_N: np.ndarray | None = None
    threshold: float | None = None


# ---- rows ----------------------------------------------------------------------------------------


class Rows:
    """The rows of N tokens: two parts of them, and draws of a bootstrap."""

    def __init__(self, row_N):
        names_R, self.row_N = np.unique(row_N, return_inverse=True)
        self.count = len(names_R)
        part_R = np.arange(self.count) * min(STRETCHES, self.count) // self.count % 2
        self.part_N = part_R[self.row_N]
        drawn = np.random.default_rng(0).multinomial
        self.draws_DR = drawn(self.count, np.full(self.count, 1 / self.count), DRAWS).astype(float)

    def folds(self):
        """[(tokens to fit to, tokens to score)] as masks."""
        return [(self.part_N != part, self.part_N == part) for part in (0, 1)]

    def sums(self, *values_N):
        """[R, number of values]: the sums over the tokens of each row."""
        sums = [np.bincount(self.row_N, values, self.count) for values in values_N]
        return np.stack(sums, axis=-1)

    def estimate(self, figure, sums_RX):
        """{mean, interval} of a figure of sums over rows, or None where there is none.

        Args:
          figure: [..., X] sums over all rows -> [...].
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            value, draws_D = figure(sums_RX.sum(axis=0)), figure(self.draws_DR @ sums_RX)
        draws_D = draws_D[np.isfinite(draws_D)]
        if not np.isfinite(value) or not len(draws_D):
            return None
        tail = (100 - LEVEL) / 2
        ends = np.percentile(draws_D, [tail, 100 - tail])
        return {"mean": float(value), "interval": [float(end) for end in ends]}

    def mean(self, values_N):
        """`estimate` of the mean of these; tokens with NaN do not count."""
        there_N = ~np.isnan(values_N)
        return self.estimate(
            lambda s: s[..., 0] / s[..., 1], self.sums(np.where(there_N, values_N, 0.0), there_N)
        )


# ---- predictors ----------------------------------------------------------------------------------


def binned(values_N, fit_N, count=BINS):
    """Codes of bins with equally many of the tokens that are fitted to."""
    edges = np.quantile(values_N[fit_N], np.arange(1, count) / count)
    return np.searchsorted(np.unique(edges), values_N, side="right")


def pairs(first_N, second_N):
    """Codes of the pairs that occur; -1 where one of the two is."""
    _, codes_N = np.unique(np.stack([first_N, second_N]), axis=1, return_inverse=True)
    return np.where((first_N < 0) | (second_N < 0), -1, codes_N.ravel())


# What each predictor knows of a token, from the coarse to the fine: (tokens, those to fit to) ->
# codes of cells, -1 where it knows nothing. A level corrects what the levels before it predict, as
# far as its cells have tokens enough.
LEVELS = {
    "position": lambda t, fit: [binned(t.position_N, fit), t.position_N],
    "token": lambda t, fit: [t.token_N],
    "previous token": lambda t, fit: [t.previous_N],
    "bigram": lambda t, fit: [t.token_N, pairs(t.previous_N, t.token_N)],
    "token frequency": lambda t, fit: [binned(t.rarity_N, fit)],
    "entropy": lambda t, fit: [binned(t.entropy_N, fit)],
    "loss": lambda t, fit: [binned(t.loss_N, fit)],
}
TOGETHER = "all together"
# {name: (more, the predictor that it is compared with)}: what one knows beyond the other.
BEYOND = {
    f"{more} beyond {base}": (more, base)
    for base in ("token", "bigram", "position")
    for more in ("entropy", "loss")
}


def levels_beyond(tokens, fit_N, more, base):
    """The levels of `base` and, after them, of `more`: by itself, then for each cell of base."""
    levels = LEVELS[base](tokens, fit_N)
    values_N = {"entropy": tokens.entropy_N, "loss": tokens.loss_N}[more]
    coarse_N = binned(values_N, fit_N, COARSE)
    return [*levels, *LEVELS[more](tokens, fit_N), pairs(levels[0], coarse_N)]


class _Choice:
    """How good predictions of a choice are: bits, by the log loss."""

    def base(self, y_N):
        return (y_N.sum() + 0.5) / (len(y_N) + 1)

    def limit(self, p_N, count):
        """Predictions of a fit to so many tokens: none is certain."""
        return np.clip(p_N, 0.5 / (count + 1), 1 - 0.5 / (count + 1))

    def loss(self, y_N, p_N):
        return -np.log2(np.where(y_N > 0, p_N, 1 - p_N))


class _Score:
    """How good predictions of a number are: by the squared error."""

    def base(self, y_N):
        return y_N.mean()

    def limit(self, p_N, count):
        return p_N

    def loss(self, y_N, p_N):
        return (y_N - p_N) ** 2


CHOICE, SCORE = _Choice(), _Score()


def predict(levels, y_N, fit_N, kind):
    """Predictions of y for all N tokens by what the tokens of `fit_N` have.

    A level adds to the prediction of the levels before it the mean error of these in the token's
    cell, drawn to 0 as if the cell had some more tokens without error. How many is chosen by the
    loss of the tokens that are fitted to, each predicted from the others; a level whose gain there
    is within two standard errors of nothing adds nothing.
    """
    fitted_N, count = y_N[fit_N], int(fit_N.sum())
    # Of a token that is fitted to, what the others make of it.
    prediction_N = np.full(len(y_N), kind.base(fitted_N))
    for codes_N in levels:
        _, cell_N = np.unique(codes_N, return_inverse=True)
        known_N = codes_N >= 0
        error_N = np.where(fit_N & known_N, y_N - prediction_N, 0.0)
        others_N = np.bincount(cell_N, fit_N & known_N)[cell_N] - fit_N
        total_N = np.where(known_N, np.bincount(cell_N, error_N)[cell_N] - error_N, 0.0)
        others_N = np.where(known_N, others_N, 0)
        before_N, best, most = kind.loss(fitted_N, prediction_N[fit_N]), prediction_N, 0.0
        for weight in WEIGHTS:
            corrected_N = kind.limit(prediction_N + total_N / (others_N + weight), count)
            gain_N = before_N - kind.loss(fitted_N, corrected_N[fit_N])
            if gain_N.sum() > max(most, 2 * np.sqrt(count) * gain_N.std()):
                best, most = corrected_N, gain_N.sum()
        prediction_N = best
    return prediction_N


def predict_together(tokens, y_N, fit_N, kind):
    """The same by gradient boosting of all that is known of a token."""
    try:
        from sklearn.compose import ColumnTransformer
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
        from sklearn.model_selection import KFold
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import TargetEncoder
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise UsageError(f"--together needs {extra('studies')}: {error.name} is missing") from error
    numbers = [tokens.position_N, tokens.rarity_N, tokens.entropy_N, tokens.loss_N]
    codes = [
        tokens.position_N,
        tokens.token_N,
        tokens.previous_N,
        pairs(tokens.previous_N, tokens.token_N),
    ]
    x_NX = np.stack([*codes, *numbers], axis=-1).astype(float)
    choice = kind is CHOICE
    if choice and len(np.unique(y_N[fit_N])) < 2:
        return np.full(len(y_N), kind.base(y_N[fit_N]))
    # Categories are encoded by the target of other tokens, numbers stay as they are.
    others = KFold(5, shuffle=True, random_state=0)
    encode = TargetEncoder(target_type="binary" if choice else "continuous", cv=others)
    columns = ColumnTransformer(
        [("codes", encode, list(range(len(codes))))], remainder="passthrough"
    )
    boosting = HistGradientBoostingClassifier if choice else HistGradientBoostingRegressor
    model = make_pipeline(columns, boosting(max_iter=60, random_state=0))
    # Threads wait for each other longer than so little takes.
    with threadpool_limits(1, user_api="openmp"):
        model.fit(x_NX[fit_N], y_N[fit_N])
        predicted_N = model.predict_proba(x_NX)[:, 1] if choice else model.predict(x_NX)
    return kind.limit(predicted_N, int(fit_N.sum()))


def explained(tokens, rows, y_N, kind, boosting):
    """{predictor: {name: {mean, interval} or None}} of a choice or of scores.

    Names are "explained" and, of a choice, "bits" and "auc"; of what one knows beyond another,
    "explained" alone.
    """
    made = {name: np.zeros(len(y_N)) for name in LEVELS}
    if boosting:
        made[TOGETHER] = np.zeros(len(y_N))
    beyond = {name: np.zeros(len(y_N)) for name in BEYOND}
    base_N = np.zeros(len(y_N))
    for fit_N, score_N in rows.folds():

        def keep(into_N, predicted_N, score_N=score_N):
            into_N[score_N] = predicted_N[score_N]

        keep(base_N, np.full(len(y_N), kind.base(y_N[fit_N])))
        for name, levels in LEVELS.items():
            keep(made[name], predict(levels(tokens, fit_N), y_N, fit_N, kind))
        for name, (more, base) in BEYOND.items():
            levels = levels_beyond(tokens, fit_N, more, base)
            keep(beyond[name], predict(levels, y_N, fit_N, kind))
        if boosting:
            keep(made[TOGETHER], predict_together(tokens, y_N, fit_N, kind))
    losses = {name: kind.loss(y_N, p_N) for name, p_N in made.items()}
    base_loss_N, one_N = kind.loss(y_N, base_N), np.ones(len(y_N))
    varies = np.ptp(y_N) > 0

    def share(less_N, more_N):
        sums = rows.sums(less_N - more_N, base_loss_N)
        return rows.estimate(lambda s: s[..., 0] / s[..., 1], sums) if varies else None

    result = {}
    for name, p_N in made.items():
        result[name] = {"explained": share(base_loss_N, losses[name])}
        if kind is CHOICE:
            gain = rows.sums(base_loss_N - losses[name], one_N)
            bits = rows.estimate(lambda s: s[..., 0] / s[..., 1], gain)
            result[name] |= {"bits": bits, "auc": auc(rows, y_N, p_N)}
    for name, (_, base) in BEYOND.items():
        more_N = kind.loss(y_N, beyond[name])
        result[name] = {"explained": share(losses[base], more_N)}
    return result


def auc(rows, y_N, p_N):
    """{mean, interval}: how often a token that is chosen has the higher prediction than one that is
    not, the mean of the two parts of the rows, whose predictions are of different fits."""
    sums_RPCX = np.zeros((rows.count, 2, 2, RANKS))
    for part in (0, 1):
        here_N = rows.part_N == part
        values = np.unique(p_N[here_N])
        if len(values) > RANKS:
            values = np.unique(np.quantile(p_N[here_N], np.arange(RANKS) / RANKS))
        rank_N = np.clip(np.searchsorted(values, p_N, side="right") - 1, 0, RANKS - 1)
        for chosen in (0, 1):
            of_N = here_N & (y_N == chosen)
            cell_N = rows.row_N[of_N] * RANKS + rank_N[of_N]
            counted = np.bincount(cell_N, minlength=rows.count * RANKS)
            sums_RPCX[:, part, chosen] = counted.reshape(rows.count, RANKS)

    def figure(sums_Y):
        sums_PCX = sums_Y.reshape(*sums_Y.shape[:-1], 2, 2, RANKS)
        others_PX, chosen_PX = sums_PCX[..., 0, :], sums_PCX[..., 1, :]
        # Of equal predictions half count as in order.
        below_PX = np.cumsum(others_PX, axis=-1) - others_PX / 2
        total_P = others_PX.sum(axis=-1) * chosen_PX.sum(axis=-1)
        return ((chosen_PX * below_PX).sum(axis=-1) / total_P).mean(axis=-1)

    return rows.estimate(figure, sums_RPCX.reshape(rows.count, -1))


# ---- correlations --------------------------------------------------------------------------------


def correlation(rows, x_N, y_N):
    """{mean, interval} of Pearson's r, or None where one of them does not vary."""
    if np.ptp(x_N) == 0 or np.ptp(y_N) == 0:
        return None
    x_N, y_N = ((values - values.mean()) / values.std() for values in (x_N, y_N))
    sums = rows.sums(np.ones(len(x_N)), x_N, y_N, x_N**2, y_N**2, x_N * y_N)

    def figure(s):
        count, x, y, xx, yy, xy = np.moveaxis(s, -1, 0)
        return (xy - x * y / count) / np.sqrt((xx - x**2 / count) * (yy - y**2 / count))

    return rows.estimate(figure, sums)


def within(values_N, group_N):
    """Values less the mean of their group."""
    _, group_N = np.unique(group_N, return_inverse=True)
    mean_G = np.bincount(group_N, values_N) / np.bincount(group_N)
    residual_N = values_N - mean_G[group_N]
    # What is left by rounding is nothing.
    return np.where(np.abs(residual_N) < 1e-9 * np.ptp(values_N), 0.0, residual_N)


def correlations(tokens, rows, y_N):
    """{"entropy" or "loss": {kind: {mean, interval} or None}} with a choice or a score.

    Those within tokens and positions are of ranks, of what differs from the mean of all tokens of
    that identity, or at that position.
    """
    rank_N, result = rankdata(y_N), {}
    for name, values_N in (("entropy", tokens.entropy_N), ("loss", tokens.loss_N)):
        other_N = rankdata(values_N)
        result[name] = {
            "pearson": correlation(rows, y_N, values_N),
            "spearman": correlation(rows, rank_N, other_N),
        }
        for group, group_N in (("token", tokens.token_N), ("position", tokens.position_N)):
            two = (within(ranks_N, group_N) for ranks_N in (rank_N, other_N))
            result[name][f"spearman within {group}"] = correlation(rows, *two)
    return result


# ---- weights, blocks together --------------------------------------------------------------------


def weights(rows, block):
    """The histogram of the sigmoids of the scores, as shares of all tokens, and of which of them
    are computed; the share above 0.5; the sigmoid of the threshold, or None."""
    weight_N = expit(block.score_N)
    edges = np.linspace(0, 1, WEIGHT_BINS + 1)
    counts = {
        "all": np.histogram(weight_N, edges)[0],
        "routed": np.histogram(weight_N[block.routed_N > 0], edges)[0],
    }
    shares = {name: (count / len(weight_N)).tolist() for name, count in counts.items()}
    threshold = None if block.threshold is None else float(expit(block.threshold))
    return {**shares, "above_half": rows.mean(1.0 * (weight_N > 0.5)), "threshold": threshold}


def together(tokens, blocks):
    """Of all blocks: by how many a token is computed, against what independent choices would give;
    entropy and loss of the tokens by that number; pairs of blocks. A block computes no token that
    it has nothing to decide about; tokens about which no block decides do not count."""
    routed_KN = np.stack([block.routed_N for block in blocks.values()])
    there_N = ~np.isnan(routed_KN).all(axis=0)
    tokens, routed_KN = tokens.at(there_N), np.nan_to_num(routed_KN[:, there_N])
    rows = Rows(tokens.row_N)
    count_N, share_K = routed_KN.sum(axis=0), routed_KN.mean(axis=1)
    expected = np.ones(1)
    for share in share_K:
        expected = np.convolve(expected, [1 - share, share])
    by_count = [
        {
            "share": rows.mean(1.0 * (count_N == k)),
            "independent": float(expected[k]),
            "entropy": rows.mean(np.where(count_N == k, tokens.entropy_N, np.nan)),
            "loss": rows.mean(np.where(count_N == k, tokens.loss_N, np.nan)),
        }
        for k in range(len(blocks) + 1)
    ]
    both = {
        f"{first}, {second}": {
            "both": rows.mean(routed_KN[i] * routed_KN[j]),
            "independent": float(share_K[i] * share_K[j]),
            "correlation": correlation(rows, routed_KN[i], routed_KN[j]),
        }
        for (i, first), (j, second) in itertools.combinations(enumerate(blocks), 2)
    }
    return {
        "by_count": by_count,
        "pairs": both,
        "correlations": correlations(tokens, rows, count_N),
    }


# ---- all of it -----------------------------------------------------------------------------------


def probe(tokens, blocks, boosting=False):
    """All figures of one run, as plain data.

    Args:
      blocks: {name: Block}, in the order in which they compute.
      boosting: whether to predict by all that is known of a token, which takes scikit-learn.
    Raises: UsageError: too few tokens.
    """
    rows, result, left_out = Rows(tokens.row_N), {}, {}
    check_size(rows.count, len(tokens.row_N))
    for name, block in blocks.items():
        there_N = ~np.isnan(block.routed_N)
        here = tokens.at(there_N)
        if there_N.sum() < LEAST_TOKENS or len(np.unique(here.row_N)) < LEAST_ROWS:
            left_out[name] = int(there_N.sum())
            continue
        result[name] = of_block(here, _at(block, there_N), boosting)
    return {
        "tokens": len(tokens.row_N),
        "rows": rows.count,
        "blocks": result,
        "left_out": left_out,
        "together": together(tokens, blocks),
    }


def check_size(rows, tokens):
    if rows < LEAST_ROWS or tokens < LEAST_TOKENS:
        raise UsageError(
            f"{tokens} held-out tokens in {rows} rows are too few to probe a router: it needs "
            f"{LEAST_TOKENS} in {LEAST_ROWS} rows; use a larger --tokens, or a run with a "
            "larger config.data.eval_fraction or an eval_source"
        )


def _at(block, there_N):
    """The decisions about the tokens of a mask."""
    values = {"routed_N": block.routed_N, "selected_N": block.selected_N, "score_N": block.score_N}
    there = {name: of_N[there_N] for name, of_N in values.items() if of_N is not None}
    return dataclasses.replace(block, **there)


def of_block(tokens, block, boosting=False):
    """The figures of one block; those of scores and weights are None without a router."""
    rows, overflow = Rows(tokens.row_N), None
    if block.selected_N is not None:
        overflow = rows.mean(block.selected_N * (1 - block.routed_N))
    result = {
        "tokens": len(tokens.row_N),
        "routed": rows.mean(block.routed_N),
        "overflow": overflow,
        "choice": explained(tokens, rows, block.routed_N, CHOICE, boosting),
        "correlations": correlations(tokens, rows, block.routed_N),
        "score": None,
        "score_correlations": None,
        "weights": None,
    }
    if block.score_N is not None:
        result["score"] = explained(tokens, rows, block.score_N, SCORE, boosting)
        result["score_correlations"] = correlations(tokens, rows, block.score_N)
        result["weights"] = weights(rows, block)
    return result
