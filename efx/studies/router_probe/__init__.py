"""What a router has learnt: what predicts which tokens the blocks of a finished run compute.

    python -m efx.studies.router_probe --workdir runs/mod
    python -m efx.studies.router_probe --workdir runs/mod_0 runs/mod_1 runs/mod_2 --out probe.json

Of a run with depth routing (Mixture-of-Depths, recursion, threshold, or a control, which has no
router but chooses all the same) over many held-out tokens, for each routed block: how well
position, token, previous token, bigram, token frequency, the model's own output entropy and its
loss at the token predict whether the token is computed, and the router's score; what entropy and
loss tell beyond token and position; correlations with entropy and loss; the histogram of router
weights; how often blocks compute the same tokens. Predictors are fitted to a part of the rows and
scored on the other part; intervals are of 95%, by a bootstrap over rows. Several runs are seeds of
one config: their mean and standard deviation. --together adds gradient boosting of all that is
known of a token, which takes scikit-learn.

The tokens are chosen by the causal decision, which evaluation and sampling take, or with
--selection train as in training. Writes the tables beside --out as Markdown and a picture; --out is
the data, which `python -m efx.studies.results` takes.
"""

import importlib.util
import json
import pathlib

from efx import io, run_dir
from efx.errors import UsageError, extra
from efx.logging import tables
from efx.studies import cli, logged
from efx.studies.router_probe import analysis, picture, report
from efx.studies.router_probe.report import combined

__all__ = ["FILE", "combined", "main"]
FILE = "router_probe.json"  # in the folder of the first run, by default
TOKENS = 1 << 16
# Settings that seeds of one config may have otherwise.
_OF_A_SEED = {"seed", "init.run"}


def main(argv=None):
    parser = cli.Parser("efx.studies.router_probe", __doc__)
    help = "run directory; several: seeds of one config"
    parser.add_argument(
        "--workdir", dest="runs", nargs="+", required=True, metavar="RUN", help=help
    )
    help = f"held-out tokens to probe (default: {TOKENS})"
    parser.add_argument("--tokens", type=int, default=TOKENS, metavar="N", help=help)
    help = "probe the causal decision (default), or training's selection"
    parser.add_argument("--selection", choices=("causal", "train"), default="causal", help=help)
    help = "also predict from all properties of a token together"
    parser.add_argument("--together", action="store_true", help=help)
    parser.add_argument("--out", help=f"data (default: {FILE} in the run directory)")
    parser.add_argument("--step", type=int, help="checkpoint (default: the newest)")
    return parser.run(run, argv)


def run(arguments):
    for workdir in arguments.runs:
        io.local_path(workdir)
    out = pathlib.Path(arguments.out or pathlib.Path(arguments.runs[0]) / FILE)
    if arguments.out or out.parent.is_dir():
        cli.new_file(out, (".json",), "probe.json")
    if arguments.tokens < analysis.LEAST_TOKENS:
        raise UsageError(
            f"--tokens={arguments.tokens}: too few to probe a router; use at least "
            f"{analysis.LEAST_TOKENS}"
        )
    if arguments.together and importlib.util.find_spec("sklearn") is None:
        raise UsageError(f"--together needs {extra('studies')}: sklearn is not installed")
    check_seeds(arguments.runs)
    data = probe(arguments)
    with io.report_write_errors(out):
        picture.draw(data, out.with_suffix(".png"))
    tables.write(out.parent, out.stem, report.markdown(data) + "\n", data)
    print(report.markdown(data))
    print(f"written: {out}, {out.with_suffix('.md')}, {out.with_suffix('.png')}")


def check_seeds(workdirs):
    """UsageError for runs that are not seeds of one config."""
    configs = [run_dir.recorded_config(workdir) for workdir in workdirs]
    for workdir, config, settings in zip(workdirs, configs, logged.differing(configs), strict=True):
        others = {key for key in settings if key not in _OF_A_SEED}
        if others:
            key = min(others)
            here, first = (run_dir.dotted(of).get(key) for of in (config, configs[0]))
            if here != first:
                raise UsageError(
                    f"--workdir={workdir}: config.{key}={here!r}, but {first!r} in "
                    f"{workdirs[0]}: only seeds of one config can be averaged; probe other "
                    "runs separately"
                )
    seeds = [config["seed"] for config in configs]
    if len(set(seeds)) < len(seeds):
        raise UsageError(
            f"--workdir: the seeds are {', '.join(map(str, seeds))}; use each seed once"
        )


def probe(arguments):
    """The data of --out."""
    from efx.studies.router_probe import tokens as tokens_lib  # which takes the devices

    runs, probes, first = [], [], None
    for workdir in arguments.runs:
        tokens, blocks, about = tokens_lib.measure(
            workdir, arguments.tokens, arguments.selection, arguments.step
        )
        first = first or about
        for what, key in about["of"].items():
            if key != first["of"][what]:
                raise UsageError(
                    f"--workdir={workdir}: {what} differs from that of {arguments.runs[0]}; "
                    "seeds are compared on the same tokens"
                )
        runs.append(about)
        probes.append(analysis.probe(tokens, blocks, arguments.together))
    data = {
        "command": arguments.command,
        "selection": arguments.selection,
        "runs": runs,
        "probes": probes,
    }
    return json.loads(json.dumps(data), parse_float=lambda text: float(f"{float(text):.6g}"))
