"""Coordinate check: the size of activations over the width, with and without muP.

    python -m efx.studies.coord_check --config configs/gpt2.py:smoke --widths 64,128,256,512 \\
        --out runs/coord_check

Trains one model at several widths for a few steps on one batch of random tokens, then tabulates and
draws the mean |x| of each block's output and of the logits (Yang et al. 2022, arXiv 2203.03466,
appendix D.1). Flat lines mean that one learning rate serves all widths. The smallest width is
muP's base. Stated sizes, such as `mlp.hidden` and the level widths of the latent family, keep their
proportion to the width. Heads grow wider, or, with a stated `attention.head_dim`, more numerous.
Arguments after `--` are settings, e.g. `-- --config.model.depth=2`.
"""

import sys

import jax
import numpy as np
import pandas as pd
from flax import traverse_util

from efx import io
from efx.config import flags
from efx.config.load import to_config
from efx.config.names import apply
from efx.errors import UsageError
from efx.logging import tables
from efx.models.latent import Compress, Upsample
from efx.models.stack import Layer
from efx.parallel import sharding
from efx.studies import cli
from efx.train import setup
from efx.train.eval_step import evaluation_keys

MEASURED = (Layer, Compress, Upsample)
VOCABULARY = 256
# Settings of config.model in proportion to the width, 0 and () apart.
SIZES = ("level_widths", "mlp.hidden", "mlp.moe.expert_hidden", "depth_routing.predictor_hidden")
HEADS = ("attention.num_heads", "attention.num_kv_heads", "level_heads")


def main(argv=None):
    parser = cli.Parser("efx.studies.coord_check", __doc__)
    parser.set_defaults(extra=[])
    parser.add_argument("--config", default="gpt2:smoke", help="of a family with muP")
    parser.add_argument("--widths", default="64,128,256,512", help="the smallest is muP's base")
    parser.add_argument("--steps", type=int, default=4, help="of training before the measurement")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="at the base width")
    parser.add_argument("--out", default="runs/coord_check", help="directory of table and figure")
    return parser.run(study, argv)


def study(arguments):
    """Measure, and write the table and the figure."""
    widths = sorted(cli.numbers("--widths", arguments.widths))
    if len(widths) < 2 or arguments.steps < 1:
        raise UsageError("--widths, --steps: use two or more widths and one or more steps")
    # All configs come first, so that no training precedes an error in one.
    configs = {
        (name, width): config_at_width(arguments, width, base)
        for name, base in (("muP", widths[0]), ("standard", 0))
        for width in widths
    }
    table = pd.DataFrame({
        f"{name} {width}": activation_sizes(config, arguments.steps)
        for (name, width), config in configs.items()
    })  # fmt: skip
    for name in ("muP", "standard"):
        ratio = table[f"{name} {widths[-1]}"] / table[f"{name} {widths[0]}"]
        table[f"{name} last / first"] = ratio
    rows = [[module, *map("{:.4g}".format, sizes)] for module, *sizes in table.itertuples()]
    text = tables.markdown(["mean of absolute values", *table], rows) + "\n"
    tables.save(arguments.out, "coord_check", table.rename_axis("module").reset_index(), text)
    draw(table, widths, io.folder(arguments.out) / "coord_check.png")


def config_at_width(arguments, width, base_width):
    """Return the config with another width and muP's base width (0: without muP)."""
    settings = [f"--config={arguments.config}", "--workdir=unused", *arguments.extra]
    config = flags.parse(["efx", *settings]).config
    if "mup" not in config.model:
        raise UsageError(f"--config={arguments.config}: its family has no config.model.mup")
    changes = {
        "train_flops": 0.0,
        "steps": arguments.steps,
        "data.seq_len": 64,
        "data.batch_size": 8,
        "data.packing": False,
        "model.scan_layers": False,
        "optim.learning_rate": arguments.learning_rate,
        "optim.schedule.kind": "constant",
        "optim.schedule.warmup_steps": 0,
        "model.width": width,
        "model.mup.base_width": base_width,
    }
    model = traverse_util.flatten_dict(config.model.to_dict(), sep=".")
    for key in SIZES + HEADS if model["attention.head_dim"] else SIZES:
        if model.get(key):
            changes[f"model.{key}"] = _scaled(key, model[key], width, model["width"])
    return apply(config, changes, "--widths: ")


def _scaled(key, size, width, old_width):
    """Return a size, or a tuple of sizes, in proportion to the width."""
    if isinstance(size, tuple):
        return tuple(_scaled(key, each, width, old_width) for each in size)
    if size * width % old_width:
        raise UsageError(f"--widths: at {width}, config.model.{key}={size} is no whole number")
    return size * width // old_width


def activation_sizes(config, steps):
    """Return {module: mean |x|} after training."""
    e = setup.experiment_without_data(to_config(config), VOCABULARY)
    size, length, seed = e.config.data.batch_size, e.config.data.seq_len, np.uint32(e.config.seed)
    tokens_BT1 = np.random.default_rng(0).integers(0, VOCABULARY, (size, length + 1), np.int32)
    batch = {"inputs": tokens_BT1[:, :-1], "targets": tokens_BT1[:, 1:]}
    batch["weights"] = np.ones((size, length), np.float32)
    batch, training = sharding.Placement(e.mesh, e.rules, size)(batch), setup.Training(e)
    with sharding.use(e.mesh, e.rules):
        step = training.compile_step(e.model)
        state = training.new_state(seed)
        for _ in range(steps):
            state, _ = step(state, batch, seed, None)

    @jax.jit
    def measure(variables, tokens_BT):
        logits_BTV, sown = e.model.apply(
            variables,
            tokens_BT,
            rngs=evaluation_keys(config.seed, 0),
            capture_intermediates=lambda m, method: (
                isinstance(m, MEASURED) and method == "__call__"
            ),
            mutable=["intermediates"],
        )
        leaves = jax.tree_util.tree_leaves_with_path(sown["intermediates"])
        return {_module(path): abs(x).mean() for path, x in leaves} | {
            "logits": abs(logits_BTV).mean()
        }

    sizes = measure({"params": state.params, **state.variables}, tokens_BT1[:, :-1])
    return {module: float(size) for module, size in sizes.items()}


def _module(path):
    """layers/block_1/__call__/0 -> layers/block_1"""
    *keys, _ = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return "/".join(key for key in keys if key != "__call__")


def draw(table, widths, path):
    """Draw one panel a parametrisation, one line a module."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2, sharey=True), ("muP", "standard"), strict=True):
        sizes = table[[f"{name} {width}" for width in widths]]
        axes.plot(widths, sizes.T, marker="o", label=list(table.index))
        axes.set(title=name, xlabel="width", ylabel="mean |activation|", yscale="log")
        axes.set_xscale("log", base=2)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
