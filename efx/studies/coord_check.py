"""Coordinate check: sizes of activations over the width, with and without muP.

    python -m efx.studies.coord_check --config configs/gpt2.py:smoke --widths 64,128,256,512 \\
        --steps 4 --out runs/coord_check

Trains the same model at several widths for a few steps on one batch of random tokens, then prints
and plots the mean |x| of every block's output, of the scores of every router, predictor and gate,
and of the logits (Yang et al. 2022, arXiv 2203.03466, appendix D.1). Flat lines mean that the
learning rate of one width serves all. The smallest width is the base width of muP.

Sizes that the config states, such as `mlp.hidden` and the level widths of the latent family, keep
their proportion to the width. The number of heads stays the same, so wider models have wider heads;
with a stated `attention.head_dim` they have more heads. The compression and upsampling between
levels are measured too. `--set` changes any setting, in Python's notation: `--set model.depth=2`.
"""

import ast
import pathlib
import sys

import jax
from flax import traverse_util

from efx.config.load import apply, load_config
from efx.errors import UsageError
from efx.layers.stack import Layer
from efx.logging import tables
from efx.models.latent import Compress, Upsample
from efx.studies import cli
from efx.studies.step_time import Stepper, random_tokens
from efx.train.step import evaluation_keys

MEASURED = (Layer, Compress, Upsample)
# Settings of config.model in proportion to the width, 0 and () apart.
SIZES = ("level_widths", "mlp.hidden", "mlp.moe.expert_hidden", "depth_routing.predictor_hidden")
HEADS = ("attention.num_heads", "attention.num_kv_heads", "level_heads")


def main(argv=None):
    return parser().run(study, argv)


def parser():
    """The command line."""
    parser = cli.Parser("efx.studies.coord_check", __doc__)
    parser.add_argument("--config", default="gpt2:smoke", help="of a family with muP")
    parser.add_argument("--widths", default="64,128,256,512", help="the smallest is muP's base")
    parser.add_argument("--steps", type=int, default=4, help="of training before the measurement")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="at the base width")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", default="runs/coord_check", help="folder for table and figure")
    return parser


def study(args):
    """Measure, and write the table and the figure."""
    widths = sorted(cli.numbers("--widths", args.widths))
    if widths[0] < 1 or len(widths) < 2:
        raise UsageError(f"--widths={args.widths}: expected two or more different widths")
    if args.steps < 1:
        raise UsageError(f"--steps={args.steps}: must be at least 1")
    if args.batch < 1 or args.batch % jax.device_count():
        raise UsageError(
            f"--batch={args.batch}: must be a multiple of the {jax.device_count()} devices"
        )
    bases = {"muP": widths[0], "standard": 0}
    # All configs come first, so that no training precedes an error in one.
    configs = {
        name: [config_at_width(args, width, base) for width in widths]
        for name, base in bases.items()
    }
    table = {}
    for name, by_width in configs.items():
        sizes = [activation_sizes(config, args) for config in by_width]
        table[name] = {module: [size[module] for size in sizes] for module in sizes[0]}
    tables.save(args.out, "coord_check", markdown(table, widths) + "\n", table)
    draw(table, widths, pathlib.Path(args.out) / "coord_check.png")


def config_at_width(args, width, base_width):
    """The config with another width and muP's base width (0: without muP)."""
    config = load_config(args.config)
    if "mup" not in config.model:
        raise UsageError(
            f"--config={args.config}: its family has no setting config.model.mup; "
            "use a family with muP"
        )
    changes = {
        "steps": args.steps,
        "train_flops": 0.0,
        "data.seq_len": args.context,
        "data.batch_size": args.batch,
        "model.scan_layers": False,
        "optim.learning_rate": args.learning_rate,
        "optim.schedule.kind": "constant",
        "optim.schedule.warmup_steps": 0,
    }
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text}: expected key=value")
        try:
            changes[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            changes[key] = value
    apply(config, changes, "--set: ")
    model = traverse_util.flatten_dict(config.model.to_dict(), sep=".")
    changes = {"model.width": width, "model.mup.base_width": base_width}
    for key in SIZES + HEADS if model["attention.head_dim"] else SIZES:
        if model.get(key):
            changes[f"model.{key}"] = _scaled(key, model[key], width, model["width"])
    apply(config, changes, "--widths: ")
    return config


def _scaled(key, size, width, old_width):
    """A size, or a tuple of sizes, in proportion to the width."""
    if isinstance(size, tuple):
        return tuple(_scaled(key, each, width, old_width) for each in size)
    if old_width < 1 or size * width % old_width:
        raise UsageError(
            f"--widths: at {width}, config.model.{key} would not be a whole number: it is {size} "
            f"in a model {old_width} wide"
        )
    return size * width // old_width


def activation_sizes(config, args):
    """{module: mean |x|} after training."""
    step = Stepper(config, args.vocab)
    tokens_BT = random_tokens(config, args.vocab, 1)[0]
    for _ in range(args.steps):
        step(tokens_BT)

    def is_measured(module, method):
        return isinstance(module, MEASURED) and method == "__call__"

    @jax.jit
    def measure(variables, tokens_BT):
        logits_BTV, state = step.model.apply(
            variables,
            tokens_BT,
            rngs=evaluation_keys(config.seed, 0),
            capture_intermediates=is_measured,
            mutable=["intermediates"],
        )
        leaves = jax.tree_util.tree_leaves_with_path(state["intermediates"])
        sizes = {_module_name(path): abs(x).mean() for path, x in leaves}
        return sizes | {"logits": abs(logits_BTV).mean()}

    sizes = measure({"params": step.state.params, **step.state.variables}, tokens_BT[:, :-1])
    return {module: float(size) for module, size in sizes.items()}


def _module_name(path):
    """layers/block_1/__call__/0 -> layers/block_1"""
    *keys, _ = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return "/".join(key for key in keys if key != "__call__")


def markdown(table, widths):
    """The table: a row for each module, a column for each parametrisation and width."""
    titles = ["mean of absolute values"]
    titles += [f"{name} {width}" for name in table for width in widths]
    titles += [f"{name}: last / first" for name in table]
    rows = []
    for module in next(iter(table.values())):
        by_name = [table[name][module] for name in table]
        cells = [f"{size:.4g}" for sizes in by_name for size in sizes]
        rows.append([module, *cells, *(f"{sizes[-1] / sizes[0]:.2f}" for sizes in by_name)])
    return tables.markdown(titles, rows)


def draw(table, widths, path):
    """A PNG: one panel a parametrisation, one line a module."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(table), figsize=(9, 4), sharey=True)
    for axes, (name, modules) in zip(panels, table.items(), strict=True):
        for module, sizes in modules.items():
            axes.plot(widths, sizes, marker="o", label=module)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.set_title(name)
        axes.set_xlabel("width")
    panels[0].set_ylabel("mean |activation|")
    panels[-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
