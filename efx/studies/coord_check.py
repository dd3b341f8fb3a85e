"""Coordinate check: how activations depend on the width, with and without muP.

    python -m efx.studies.coord_check --config configs/gpt2.py:smoke --widths 64,128,256,512 \\
        --steps 4 --out runs/coord_check

The same model is built at several widths and trained for a few steps, on one batch of random
tokens, at a constant rate; then the mean |x| of every block's output, of the scores of every
router, predictor and gate, and of the logits is printed, and drawn over the width (Yang et al.
2022, arXiv 2203.03466, appendix D.1). If these lines are flat, all widths can use the learning rate
of one. The smallest width is the base width of muP.

`--set` changes any key of the config, in Python's notation: `--set model.depth=2`. The number of
heads stays that of the config, so heads grow wider. Levels of the latent family keep their fraction
of the width (a level of constant width would be flat under any parametrisation); the compression
and upsampling between levels are measured too.
"""

import ast
import pathlib
import sys

import jax

from efx import tables
from efx.config import load_config, override
from efx.errors import UsageError
from efx.layers.stack import Layer
from efx.models.latent import Compress, Upsample
from efx.step import evaluation_keys
from efx.studies import cli
from efx.studies.step_time import Stepper, random_tokens

LOGITS = "logits"
MEASURED = (Layer, Compress, Upsample)


def _parser():
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


def main(argv=None):
    return _parser().run(study, argv)


def study(args):
    """Measures, then writes table and figure."""
    args.widths = sorted(cli.numbers("--widths", args.widths))
    table = measure(args)
    tables.save(args.out, "coord_check", markdown(table, args) + "\n", table)
    draw(table, args.widths, pathlib.Path(args.out) / "coord_check.png")


def measure(args):
    """{"muP" or "standard": {module: [mean |x| after the steps, one for each width]}}."""
    if min(args.widths) < 1 or len(args.widths) < 2:
        raise UsageError(f"--widths={args.widths}: expected two or more different widths")
    if args.steps < 1:
        raise UsageError(f"--steps={args.steps}: must be at least 1")
    if args.batch < 1 or args.batch % jax.device_count():
        raise UsageError(
            f"--batch={args.batch}: must be a multiple of the {jax.device_count()} devices"
        )
    bases = {"muP": min(args.widths), "standard": 0}
    # All configs are made first, so that an error in one comes before anything trains.
    configs = {
        name: [_config(args, width, base) for width in args.widths] for name, base in bases.items()
    }
    table = {}
    for name, widths in configs.items():
        rows = [activations(config, args) for config in widths]
        table[name] = {module: [row[module] for row in rows] for module in rows[0]}
    return table


def activations(config, args):
    """{module: mean |x|} of a model of this config after the steps."""
    step = Stepper(config, args.vocab)
    batch = random_tokens(config, args.vocab, 1)[0]
    for _ in range(args.steps):
        step(batch)

    @jax.jit
    def run(variables, tokens_BT):
        logits_BTV, state = step.model.apply(
            variables,
            tokens_BT,
            rngs=evaluation_keys(config.seed, 0),
            capture_intermediates=lambda module, method: (
                isinstance(module, MEASURED) and method == "__call__"
            ),
            mutable=["intermediates"],
        )
        leaves = jax.tree_util.tree_leaves_with_path(state["intermediates"])
        sizes = {_module_name(path): abs(x).mean() for path, x in leaves}
        return sizes | {LOGITS: abs(logits_BTV).mean()}

    sizes = run({"params": step.state.params, **step.state.variables}, batch[:, :-1])
    return {module: float(size) for module, size in sizes.items()}


def growth(values):
    """The last over the first: how much larger activations are at the largest width."""
    return values[-1] / values[0]


def markdown(table, args):
    """The table: a row for each module, a column for each width and mup."""
    head = [f"{name} {width}" for name in table for width in args.widths]
    titles = ["mean of absolute values", *head, *(f"{name}: last / first" for name in table)]
    rows = []
    for module in next(iter(table.values())):
        values = [table[name][module] for name in table]
        cells = [f"{value:.4g}" for row in values for value in row]
        rows.append([module, *cells, *(f"{growth(row):.2f}" for row in values)])
    return tables.markdown(titles, rows)


def draw(table, widths, path):
    """A PNG: one panel a parametrisation, one line a module."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(table), figsize=(9, 4), sharey=True)
    for axes, (name, modules) in zip(panels, table.items(), strict=True):
        for module, values in modules.items():
            axes.plot(widths, values, marker="o", label=module)
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


def _module_name(path):
    """layers/block_1/__call__/0 -> layers/block_1; a value that a router sows keeps its name."""
    *keys, _ = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    return "/".join(key for key in keys if key != "__call__")


def _config(args, width, base):
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
    override(config, changes, "--set")
    model = config.model
    if "level_widths" in model:
        model.level_widths = _level_widths(model, width)
    model.width, model.mup.base_width = width, base
    return config


def _level_widths(model, width):
    """`config.model.level_widths`, scaled to another `config.model.width`."""
    if model.width < 1 or any(level * width % model.width for level in model.level_widths):
        raise UsageError(
            f"--widths: at {width}, config.model.level_widths={model.level_widths} of a model "
            f"{model.width} wide would not be whole numbers"
        )
    return tuple(level * width // model.width for level in model.level_widths)


if __name__ == "__main__":
    sys.exit(main())
