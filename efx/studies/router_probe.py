"""What a router has learnt: what predicts which held-out tokens its blocks compute.

    python -m efx.studies.router_probe --workdir runs/mod_0 runs/mod_1 --out runs/probe

For each routed block of runs with depth routing (several runs are seeds of one config):

- selected_fraction: how many of the tokens the block computes, by the causal decision;
- position, token, previous_token, bigram, frequency, entropy, loss: the fraction of the entropy of
  the selection that the feature explains, 1 - (log loss of its prediction) / (log loss of the base
  rate). 1: it determines the selection; 0: it explains nothing. Entropy and loss are those of the
  model's own prediction at the token. `all` is gradient boosting of all features;
- entropy_beyond_bigram, loss_beyond_bigram: what they add to the bigram;
- score_*: the same for the router's score, as R^2;
- entropy_correlation: Spearman's, of the selection with the entropy.

Predictors are fitted to one half of the rows and scored on the other, both ways, so an
uninformative feature gets 0 or slightly less. Controls have no score, but their selection is
probed. --out gets probe.csv (a row for each run and block), probe.md (means, without score_*) and
probe.png.
"""

import pathlib
import sys

import numpy as np
import pandas as pd

from efx import run_dir
from efx.config.load import config_of_run
from efx.errors import UsageError
from efx.logging import tables
from efx.parallel import sharding
from efx.studies import cli, token_choices
from efx.studies.metrics import read_runs
from efx.train import inference
from efx.train.eval_step import evaluation_keys

MIN_TOKENS = 1000
BINS = 32  # of equally many tokens, for numeric features
FEATURES = {
    "position": ["position"],
    "token": ["token"],
    "previous_token": ["previous"],
    "bigram": ["token", "bigram"],
    "frequency": ["frequency_bin"],
    "entropy": ["entropy_bin"],
    "loss": ["loss_bin"],
}
NUMERIC = ("frequency", "entropy", "loss")
ALL = ["position", "token", "previous", "bigram", *(f"{name}_bin" for name in NUMERIC)]


def measure(workdir, num_tokens, step=None):
    """Return (tokens, {block: (computed [N], score [N] or None)}) of held-out rows of a run.

    tokens has columns row, position, token, previous, frequency (bits), entropy, loss (nats).
    Computed is NaN for tokens without a decision: those that left a recursion earlier.
    """
    config = config_of_run(workdir)
    built, step, params, variables = inference.restore(config, workdir, step, ("train", "eval"))
    length, size = built.config.data.seq_len, built.config.evaluate.batch_size
    variables = sharding.gather({"params": params, **variables})
    map_tokens = token_choices.TokenMapper(built.model, variables)
    bits_V = token_bits(built)
    tokens, blocks = [], {}
    for index, batch in enumerate(built.data.eval_batches(size, -(-num_tokens // (length * size)))):
        for b in range(len(batch["inputs"])):
            ids, scored_T = batch["inputs"][b], batch["weights"][b] > 0
            packing = {
                f"{name}_BT": batch[name][b][None]
                for name in ("positions", "segment_ids")
                if name in batch
            }
            keys = evaluation_keys(config.seed, index)
            token_map = map_tokens(ids, keys, next_id=batch["targets"][b, -1], **packing)
            position_T = batch["positions"][b] if "positions" in batch else np.arange(length)
            row = {"row": index * size + b, "position": position_T, "token": ids}
            row |= {"previous": np.where(position_T > 0, np.roll(ids, 1), -1)}
            row |= {
                "frequency": bits_V[ids],
                "entropy": token_map.entropy_T,
                "loss": token_map.loss_T,
            }
            tokens.append(pd.DataFrame(row)[scored_T])
            scores = token_map.values("score")
            for name, computed_T in token_map.values("computed").items():
                parts = blocks.setdefault(name, ([], []))
                parts[0].append(computed_T[scored_T])
                if name in scores:
                    parts[1].append(scores[name][scored_T])
    if not blocks:
        raise UsageError(f"--workdir={workdir} has no routed blocks; use a run with depth routing")
    joined = {
        name: (np.concatenate(computed), np.concatenate(scores) if scores else None)
        for name, (computed, scores) in blocks.items()
    }
    return pd.concat(tokens, ignore_index=True), joined


def token_bits(built, count=1 << 19):
    """Return -log2 of each token's frequency in the first training tokens, [V]."""
    batches, count_V = built.data.train_iterator(), np.zeros(built.tokenizer.vocab_size)
    rows = built.config.data
    for _ in range(-(-count // (rows.batch_size * rows.seq_len))):
        batch = next(batches)
        real = batch["segment_ids"] > 0 if "segment_ids" in batch else slice(None)
        count_V += np.bincount(batch["inputs"][real].ravel(), minlength=len(count_V))
    return -np.log2(np.maximum(count_V, 0.5) / count_V.sum())


def with_bins(tokens):
    """Return the tokens with bigrams, and numeric features in bins."""
    tokens = tokens.copy()
    tokens["bigram"] = tokens.previous * (tokens.token.max() + 1) + tokens.token
    for name in NUMERIC:
        ranks = tokens[name].rank(method="first", pct=True)
        distinct = tokens[name].nunique()
        tokens[f"{name}_bin"] = (
            tokens[name].rank(method="dense") if distinct <= BINS else (ranks * BINS).astype(int)
        )
    return tokens


def explained(tokens, y, columns, is_choice):
    """Return the fraction of y's entropy or variance that the columns explain on the other half.

    Args:
      y: [N] 0 and 1 (is_choice) or numbers. columns: categories.
    """
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.model_selection import KFold
    from sklearn.preprocessing import TargetEncoder

    # Neighbouring rows are often of one document, so the halves consist of stretches of rows.
    rows = tokens.row.rank(method="dense").to_numpy()
    half = (rows * 10 // (rows.max() + 1)).astype(int) % 2
    loss = base = 0.0
    for part in (0, 1):
        fit, score = half != part, half == part
        # "binary" would encode a half of ones as zeros.
        encoder = TargetEncoder(target_type="continuous", cv=KFold(5, shuffle=True, random_state=0))
        fitted = encoder.fit_transform(tokens.loc[fit, columns].to_numpy(), y[fit])
        encoded = encoder.transform(tokens.loc[score, columns].to_numpy())
        if len(columns) == 1:
            predicted = encoded[:, 0]
        elif y[fit].std() == 0:
            predicted = np.full(score.sum(), y[fit].mean())
        elif is_choice:
            model = HistGradientBoostingClassifier(random_state=0).fit(fitted, y[fit])
            predicted = model.predict_proba(encoded)[:, 1]
        else:
            model = HistGradientBoostingRegressor(random_state=0).fit(fitted, y[fit])
            predicted = model.predict(encoded)
        certain = 0.5 / fit.sum()  # no prediction is more certain than the data
        loss += prediction_loss(y[score], predicted, is_choice, certain)
        base += prediction_loss(y[score], np.full(score.sum(), y[fit].mean()), is_choice, certain)
    return 1 - loss / base


def prediction_loss(y, predicted, is_choice, certain):
    """Return the log loss, in nats, of predicted probabilities, or the squared error of numbers."""
    if not is_choice:
        return np.square(y - predicted).sum()
    p = np.clip(predicted, certain, 1 - certain)
    return -np.log(np.where(y > 0, p, 1 - p)).sum()


def probe(tokens, computed_N, score_N=None):
    """Return {figure: value} of one block."""
    from scipy.stats import spearmanr
    from threadpoolctl import threadpool_limits

    decided = ~np.isnan(computed_N)
    tokens = with_bins(tokens[decided].reset_index(drop=True))
    figures = {"selected_fraction": computed_N[decided].mean()}
    if computed_N[decided].std() == 0:
        return figures  # all tokens alike: nothing to explain
    targets = {"": (computed_N[decided], True)}
    if score_N is not None:
        targets["score_"] = (score_N[decided], False)
    # Threads would wait for each other: the trees are small.
    with threadpool_limits(1):
        for prefix, (y, is_choice) in targets.items():
            for name, columns in FEATURES.items():
                figures[prefix + name] = explained(tokens, y, columns, is_choice)
            bigram = figures[f"{prefix}bigram"]
            for name in ("entropy", "loss"):
                both = explained(tokens, y, [*FEATURES["bigram"], f"{name}_bin"], is_choice)
                figures[f"{prefix}{name}_beyond_bigram"] = both - bigram
            figures[f"{prefix}all"] = explained(tokens, y, ALL, is_choice)
    figures["entropy_correlation"] = spearmanr(computed_N[decided], tokens.entropy).statistic
    return figures


def draw(table, path):
    """Draw the fraction of the selection that each feature explains, for each block."""
    import seaborn as sns

    long = table.melt(["run", "block"], [*FEATURES, "all"], "feature", "explained fraction")
    plot = sns.catplot(long, x="feature", y="explained fraction", hue="block", kind="bar",
                       errorbar="sd", height=4, aspect=2)  # fmt: skip
    plot.savefig(path, dpi=110)


def study(arguments):
    if arguments.tokens < MIN_TOKENS:
        raise UsageError(f"--tokens={arguments.tokens}: must be at least {MIN_TOKENS}")
    folder = cli.output_folder(arguments.out)
    _, runs = read_runs(arguments.runs)
    for name in sorted({*runs.settings[0]} - {"init.run"}):
        raise UsageError(f"--workdir: the runs differ in config.{name}; use seeds of one config")
    rows = []
    for workdir in arguments.runs:
        tokens, blocks = measure(workdir, arguments.tokens, arguments.step)
        if len(tokens) < MIN_TOKENS:
            raise UsageError(
                f"--workdir={workdir}: {len(tokens)} held-out tokens; use {MIN_TOKENS}"
            )
        for block, (computed_N, score_N) in blocks.items():
            row = {"run": pathlib.Path(workdir).name, "block": block}
            row |= {"seed": run_dir.RunDir(workdir).setting("seed")}
            rows.append(row | probe(tokens, computed_N, score_N))
    table = pd.DataFrame(rows)
    folder.mkdir(parents=True, exist_ok=True)
    draw(table, folder / "probe.png")
    means = table.filter(regex="^(?!run$|score_)").rename(columns={"block": "name"})
    text = f"{tables.means_markdown(means)}\nCommand: `{arguments.command}`\n"
    tables.save(folder, "probe", table.round(4), text)


def main(argv=None):
    parser = cli.Parser("efx.studies.router_probe", __doc__)
    help = "run directories, seeds of one config"
    parser.add_argument("--workdir", dest="runs", nargs="+", required=True, help=help)
    parser.add_argument("--tokens", type=int, default=1 << 16, help="held-out tokens")
    parser.add_argument("--out", default="runs/probe", help="directory (default: %(default)s)")
    parser.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    return parser.run(study, argv)


if __name__ == "__main__":
    sys.exit(main())
