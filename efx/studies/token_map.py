"""A picture of a model's decisions for each token of a text: tokens across, layers down.

    python -m efx.studies.token_map --workdir runs/learned_dropout --text 'def f(x):' --out map.png

A row for each mask of learned dropout, whose value is the fraction of the token that the mask
keeps, and one for each routed block: 1 if it computes the token under the causal decision, else 0.
The same numbers go to a CSV file next to the picture, a line for each token.
"""

import csv
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from efx import build, models
from efx.config import config_of_run
from efx.errors import UsageError
from efx.layers.routing.depth import DepthRouted
from efx.layers.stack import RecursionStep
from efx.step import evaluation_keys
from efx.studies import cli

LINE = 64  # tokens in a line of the picture


def token_map(model, variables, ids, keys=None):
    """{row: [T] in [0, 1]} for one text.

    Args:
      variables: all collections of the model. ids: [T] tokens, at most `model.context` of them.
      keys: `rngs` of the model, which a stochastic control needs.

    Raises UsageError if the model has neither learned masks nor routed blocks.
    """
    model, variables = (
        models.unroll(model, variables["params"])[0],
        models.unroll_variables(model, variables),
    )
    _, state = model.apply(
        variables,
        jnp.asarray(ids, jnp.int32)[None],
        rngs=keys,
        mutable=("masks", "intermediates"),
        capture_intermediates=lambda module, method: (
            isinstance(module, DepthRouted) and method == "route"
        ),
    )
    rows = {}
    routed = _routed(model)
    for path, mask in jax.tree_util.tree_leaves_with_path(state.get("masks", {})):
        if not jax.tree_util.keystr(path, simple=True, separator="/").startswith(routed):
            rows[_row_name(path)] = _mask_row(np.asarray(mask), len(ids))
    for path, value in jax.tree_util.tree_leaves_with_path(state.get("intermediates", {})):
        if value.dtype == bool:
            rows[_row_name(path)] = np.asarray(value)[0].astype(np.float64)
    if not rows:
        raise UsageError(
            "this model decides nothing token by token: config.model.dropout.kind is not learned "
            "and config.model.depth_routing.kind='none'"
        )
    return dict(sorted(rows.items(), key=lambda item: _order(item[0])))


def _routed(model):
    """Paths of the blocks that do not compute every token: their masks have slots, not tokens."""
    routed = {path: spec for path, spec in model.blocks().items() if spec.routing is not None}
    if any(isinstance(spec, RecursionStep) for spec in routed.values()):
        return ("layers/",)  # the blocks that recursion steps share
    return tuple(f"{path}/" for path in routed)


def _mask_row(mask, length):
    """The fraction of each token's entries of a mask that are 1, of those that count (0 or 1)."""
    axis = 1 if mask.ndim == 3 else 3  # [B, T, D] or, of probabilities, [B, K, G, T, S]
    mask_TX = np.moveaxis(mask, axis, 0).reshape(length, -1)
    return (mask_TX == 1).sum(axis=1) / np.maximum((mask_TX >= 0).sum(axis=1), 1)


def _row_name(path):
    """`block_3 mlp_output`, `embedding`, `block_1 routed`."""
    keys = [str(key.key) for key in path if hasattr(key, "key")]
    keys = [key for key in keys if key not in ("layers", "attention", "dropout/changed")]
    if keys[-1] == "route":
        keys[-1] = "routed"
    return " ".join(key.removeprefix("dropout_") for key in keys)


def _order(name):
    """A sort key: layers in their order, the embedding first and what is no number last."""
    words = name.replace("_", " ").split()[1:]
    return [(0, int(word)) if word.isdigit() else (1, word) for word in words]


def draw(rows, tokens, path):
    """A picture of `token_map`'s rows over the tokens' texts."""
    import matplotlib.figure  # takes half a second

    lines = [slice(start, start + LINE) for start in range(0, len(tokens), LINE)]
    height = 0.22 * len(rows) + 0.5
    figure = matplotlib.figure.Figure((14, height * len(lines) + 0.6), layout="constrained")
    axes = figure.subplots(len(lines), 1, squeeze=False)[:, 0]
    values = np.stack(list(rows.values()))
    for axis, line in zip(axes, lines, strict=True):
        image = axis.imshow(values[:, line], vmin=0, vmax=1, cmap="viridis", aspect="auto")
        shown = [_visible(token) for token in tokens[line]]
        axis.set_xticks(range(len(shown)), shown, fontsize=8, family="monospace")
        axis.set_xlim(-0.5, LINE - 0.5 if len(lines) > 1 else len(shown) - 0.5)
        axis.set_yticks(range(len(rows)), list(rows), fontsize=7)
        axis.tick_params(length=0)
    figure.colorbar(image, ax=list(axes), label="kept or computed", shrink=0.5, pad=0.01)
    figure.savefig(path, dpi=110)


def _visible(text):
    return repr(text)[1:-1].replace("$", r"\$").replace(" ", "·")


def main(argv=None):
    parser = cli.Parser("efx.studies.token_map", __doc__)
    parser.add_argument("--workdir", required=True, help="run folder")
    parser.add_argument("--text", help="the text (default: the start of the held-out split)")
    parser.add_argument("--out", help="picture to write (default: WORKDIR/token_map.png)")
    parser.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    return parser.run(run, argv)


def run(arguments):
    picture = arguments.out is not None and cli.picture(arguments.out)
    config = config_of_run(arguments.workdir)
    splits = ("eval",) if arguments.text is None else ()
    experiment, step, params, variables = build.finished(
        config, arguments.workdir, arguments.step, splits
    )
    tokenizer = experiment.tokenizer
    if arguments.text is None:
        ids = next(iter(experiment.data.eval_batches(1, 1)))["inputs"][0][: 4 * LINE].tolist()
    else:
        ids = tokenizer.encode(arguments.text)
    if not 1 <= len(ids) <= experiment.model.context:
        raise UsageError(
            f"--text: {len(ids)} tokens; the model takes 1 to {experiment.model.context}"
        )
    picture = picture or pathlib.Path(arguments.workdir) / "token_map.png"
    keys = evaluation_keys(config.seed, 0)
    rows = token_map(experiment.model, {"params": params, **variables}, ids, keys)
    tokens = [tokenizer.decode([token]) for token in ids]
    try:
        with open(picture.with_suffix(".csv"), "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["token", *rows])
            values = zip(*rows.values(), strict=True)
            for token, row in zip(tokens, values, strict=True):
                writer.writerow([token, *(f"{value:.4f}" for value in row)])
        draw(rows, tokens, picture)
    except (OSError, ValueError) as error:
        raise UsageError(f"--out={picture}: {error}") from error
    print(f"step {step}, {len(ids)} tokens: {picture} and {picture.with_suffix('.csv')}")
    for name, row in rows.items():
        print(f"  {name:<32} {row.mean():.1%}")


if __name__ == "__main__":
    sys.exit(main())
