"""A picture of the experts that each token of a text uses, layer by layer.

    python -m efx.studies.expert_map --workdir runs/both [--text "def f(x):"] [--out map.png]

For a run of composed experts (configs/phatgoose.py: compose, joint, inclusion). Without --text, the
text is the beginning of the held-out split. Above: the number of experts that a token uses at each
adapted linear layer; below: the expert of the largest weight, blank without any. Written to
WORKDIR/report/experts.png.
"""

import pathlib
import sys

import jax
import numpy as np

from efx.errors import UsageError
from efx.runfolder import writing
from efx.studies import cli


def weights_of(model, variables, tokens_BT, keys=None):
    """{site: weights [B, T, E]}, in the order in which the layers are called; `keys` are the
    `rngs` of the model, which a stochastic control needs."""
    from efx import models

    variables = models.unroll_variables(model, variables)
    model = models.unrolled(model)
    _, sown = model.apply(variables, tokens_BT, method="features", rngs=keys, mutable=["choices"])
    weights = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(sown.get("choices", {})):
        names = [str(key.key) for key in path if hasattr(key, "key")]
        if leaf.shape[1] == tokens_BT.shape[1]:  # not the slots of a routed block
            weights["/".join(names[:-2])] = np.asarray(leaf)
    order = [site.path for site in model.sites(tokens_BT.shape[1], "causal")]
    return {path: weights[path] for path in dict.fromkeys(order) if path in weights}


def draw(weights, labels, path):
    """Draws one sequence; weights: {site: [T, E]}, labels: text of each token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    stacked = np.stack(list(weights.values()))  # [sites, T, E]
    count, experts = (stacked > 0).sum(-1), stacked.shape[-1]
    heaviest = np.where(count > 0, stacked.argmax(-1), np.nan)
    size = (max(6.0, 0.16 * len(labels)), max(4.0, 0.3 * len(weights) + 2))
    figure, axes = pyplot.subplots(2, 1, figsize=size, sharex=True, layout="constrained")
    title = f"experts a token: {count.mean():.2f} of {experts} on average"
    for axis, values, colours, top, name in (
        (axes[0], count, pyplot.get_cmap("viridis", experts + 1), experts, title),
        (axes[1], heaviest, "tab20", 19, "the expert of the largest weight"),
    ):
        image = axis.imshow(
            values, aspect="auto", interpolation="nearest", cmap=colours, vmin=-0.5, vmax=top + 0.5
        )
        axis.set_title(name)
        axis.set_yticks(range(len(weights)), list(weights), fontsize=5)
        axis.set_xticks(range(len(labels)), labels, fontsize=6, family="monospace")
        figure.colorbar(image, ax=axis, ticks=range(experts + (axis is axes[0])))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def expert_map(workdir, text=None, picture=None, tokens=96):
    """Draws the picture; returns its path and {site: weights [T, E]}."""
    from efx import build, sharding
    from efx.config import config_of_run
    from efx.step import evaluation_keys

    config = config_of_run(workdir)
    if not config.adapter.experts or config.adapter.routing == "uniform":
        raise UsageError(
            f"--workdir={workdir}: its experts choose nothing (config.adapter.experts="
            f"{config.adapter.experts!r}, routing={config.adapter.routing!r})"
        )
    experiment, _, params, variables = build.finished(
        config, workdir, splits=("eval",) if text is None else ()
    )
    if text is None:
        ids = next(iter(experiment.data.eval_batches(config.evaluate.batch_size, 1)))["inputs"][0]
    else:
        ids = experiment.tokenizer.encode(text)
    ids = np.asarray(ids, np.int32)[: min(tokens, experiment.model.context)]
    if not len(ids):
        raise UsageError("--text is empty: there is nothing to draw")
    variables = sharding.local({"params": params, **variables})
    weights_of_site = weights_of(
        experiment.model, variables, ids[None], evaluation_keys(config.seed, 0)
    )
    labels = [repr(experiment.tokenizer.decode([int(i)]))[1:-1] for i in ids]
    path = pathlib.Path(picture or pathlib.Path(workdir) / "report" / "experts.png")
    weights = {site: weights_BTE[0] for site, weights_BTE in weights_of_site.items()}
    draw(weights, labels, path)
    return path, weights


def main(argv=None):
    parser = cli.Parser("efx.studies.expert_map", __doc__)
    parser.add_argument("--workdir", required=True, help="run folder of composed experts")
    parser.add_argument("--text", help="text to look at")
    parser.add_argument("--out", help="picture to write")
    parser.add_argument("--tokens", type=int, default=96, help="of the text, at most")
    return parser.run(run, argv)


def run(arguments):
    path, weights = expert_map(arguments.workdir, arguments.text, arguments.out, arguments.tokens)
    for site, weights_TE in weights.items():
        print(f"{site:<48} {np.mean(np.sum(weights_TE > 0, axis=-1)):.2f} experts a token")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
