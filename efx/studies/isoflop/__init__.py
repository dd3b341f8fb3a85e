"""isoFLOP curves: families of models, each at several sizes and several budgets of training FLOPs.

    python -m efx.studies.isoflop --grid configs/sweeps/isoflop.py --workdir runs/isoflop --jobs 2

Comparing two models at equal FLOPs says little if one of them is far from the best size for the
budget. So every family is trained at every size and budget, and two fits say what its best size
would reach: a parabola for each budget (Hoffmann et al. 2022, arXiv 2203.15556, approach 2; Raposo
et al. 2024, arXiv 2404.02258, figure 4), biased even without noise, and beside it a law of
parameters and tokens through all points, L = E + A / N^a + B / D^b (approach 3, by variable
projection as in arXiv 2603.22339), which also extrapolates and says how many times the FLOPs and
the seconds the first family, the baseline, needs for the same loss. Every number has its bootstrap
interval over points and seeds.

A grid file is plain data: `get_grid()` returns

    dict(config="configs/mod.py",                # the config every run starts from
         seeds=(0, 1, 2),                        # or for each family: {"dense": (0, 1, 2), ...}
         budgets=(5e11, 1e12),                   # training FLOPs; two or more for the law
         families={"dense": {"model.depth_routing.kind": "none"}, ...},  # the first: the baseline
         sizes={"4 blocks": {"model.depth": 4}, ...},                    # three or more
         learning_rates=(1e-3, 2e-3, 4e-3),      # perhaps: see below
         rates_budget=5e11,                      # perhaps; default: the smallest
         timed_budgets=(5e11,),                  # perhaps: whose seconds count; default: all
         against=("dense",),                     # perhaps: families to compare all others with
         fit_within=5.0,                         # perhaps: see below; default: fit all sizes
         sizes_at={1e12: ("4 blocks", ...)},     # perhaps: budgets with some of the sizes alone
         seeds_at={1e12: (0,)},                  # perhaps: budgets with seeds of their own
         without=("MoDE",))                      # perhaps: families that --from leaves out

`--grid FILE:VARIANT` calls `get_grid(VARIANT)`. A setting of a family may be a dict, with a value
for each size: {"model.depth": {"4 blocks": 2, ...}}; so may its seeds, where () is a size at which
the family is not trained. With learning_rates, which may be a dict of sizes too, the
first seed of each family tries all of them at each size, at one budget, and all other runs of that
size take the best; a table shows the best rate over the sizes, which muP
(config.model.mup.base_width) should keep constant over widths. The best size grows with the budget:
sizes far from it can be left out of a budget (sizes_at), three remaining. What is measured far from
it bends parabolas and does not follow the law: with fit_within the sizes within that factor of the
best measured one are fitted, and the others only shown. Runs beside other work take other times
than they need: leave their budgets out of timed_budgets. `--time-steps N` times training steps of
all families and sizes in turns, and takes the seconds of all runs from these.

Each run is a separate `python -m efx.main` in WORKDIR. An interrupted study continues where it
stopped; runs that have ended are reused, also when the grid has grown. Arguments after `--` go to
every run. WORKDIR/isoflop.md has the tables, isoflop.png the curves, isoflop.json all points and
fits. `--from` takes points from such a file, of another machine perhaps, or from a file of
results/ (`python -m efx.studies.results` copies a study there), or from several: what they have is
not trained again, and what does not belong to the grid is refused, but for families that it says
it is without. `--save-points` writes such a file of a
study that is not finished. `--print-commands` prints the commands of the missing runs, for
other machines.
"""

import dataclasses
import json
import math
import pathlib
import shlex

from efx import io, run_dir
from efx.config.load import to_config
from efx.errors import UsageError
from efx.logging import portion, tables
from efx.studies import cli, rehearsal
from efx.studies import jobs as jobs_lib
from efx.studies import sweep as sweep_lib
from efx.studies.isoflop import grid as grid_lib
from efx.studies.isoflop import picture, report
from efx.studies.isoflop import points as points_lib
from efx.studies.isoflop.analysis import analyse
from efx.studies.isoflop.grid import load_grid
from efx.studies.isoflop.points import from_data as points_of

__all__ = ["analysis_of", "load_grid", "main", "points_of"]
DRAWS, FURTHER = 1000, (10.0,)
_TRAIN_NOTHING = ("--print-commands", "--save-points", "--table-only")


def main(argv=None):
    parser = cli.Parser("efx.studies.isoflop", __doc__)
    parser.add_argument("--grid", required=True, help="grid file, or the name of a grid of efx")
    parser.add_runs(jobs="runs")
    parser.add_argument("--table-only", action="store_true", help="only read finished runs")
    help = (
        "points to use instead of training: isoflop.json of a study, or a file of results/; "
        "can be repeated"
    )
    parser.add_argument("--from", dest="points", action="append", default=[], metavar="FILE",
                        help=help)  # fmt: skip
    help = "leave out the grid's larger budgets; rerun without this flag to add them"
    parser.add_argument("--up-to", type=float, default=math.inf, metavar="FLOPS", help=help)
    help = "time N training steps of all models, alternating, and use these for the runs' seconds"
    parser.add_argument("--time-steps", type=int, default=0, metavar="N", help=help)
    help = f"bootstrap draws (default: {DRAWS})"
    parser.add_argument("--draws", type=int, default=DRAWS, metavar="N", help=help)
    help = "extrapolate to this many times the largest budget (default: 10)"
    parser.add_argument("--further", type=float, nargs="*", default=list(FURTHER), metavar="X",
                        help=help)  # fmt: skip
    help = "train nothing; write the points of the finished runs to PATH, for --from"
    parser.add_argument("--save-points", metavar="PATH", help=help)
    help = (
        "train nothing; print the command of each missing run, one per line; runs that need the"
        " best learning rate are printed once the runs that find it have ended"
    )
    parser.add_argument("--print-commands", action="store_true", help=help)
    return parser.run(study, argv)


def study(arguments):
    """Makes the runs, then tables, picture and numbers; or prints their commands."""
    _check(arguments)
    grid = grid_lib.up_to(load_grid(arguments.grid), arguments.up_to)
    workdir = pathlib.Path(arguments.workdir)
    runs = Runs(grid, workdir, arguments.extra, arguments.points)
    if arguments.print_commands:
        _print_commands(runs)
        return
    if arguments.save_points:
        _save_points(runs, arguments.save_points)
        return
    points = collect(runs, 0 if arguments.table_only else arguments.jobs)
    if arguments.time_steps:
        points = runs.timed(points, arguments.time_steps)
    study = points_lib.as_data(points)
    study |= {"draws": arguments.draws, "further": arguments.further, "config": grid["config"]}
    study |= {"fit_within": grid["fit_within"], "against": grid["against"]}
    analysis = analysis_of(points, study)
    scored = portion([point.split for point in points])
    facts = f"`{grid['config']}`; {scored}; FLOPs of training. Command: `{arguments.command}`"
    text = report.markdown(analysis, points, study, facts)
    fits = report.as_data(analysis, arguments.further)
    tables.save(workdir, "isoflop", text, study | {"fits": fits})
    with io.report_write_errors(workdir):
        picture.draw(analysis, workdir / "isoflop.png", arguments.further)


def _check(arguments):
    if not 0 <= arguments.time_steps < 10**6:
        raise UsageError(f"--time-steps={arguments.time_steps}: expected a number of steps")
    if arguments.draws < 20:
        raise UsageError(f"--draws={arguments.draws}: must be at least 20")
    if not all(1 < factor < float("inf") for factor in arguments.further):
        raise UsageError(f"--further={arguments.further}: expected numbers above 1")
    given = [flag for flag in _TRAIN_NOTHING if getattr(arguments, flag[2:].replace("-", "_"))]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: use only one of them")


def analysis_of(points, study):
    """The Analysis of finished points; study: a dict with `draws`, perhaps `fit_within`."""
    return analyse(points_lib.families(points), study["draws"], study.get("fit_within"))


class Runs:
    """The runs of a grid: which have ended, here or in files of points, and how to make others."""

    def __init__(self, grid, workdir, extra, files):
        self.grid, self.workdir, self.extra = grid, workdir, extra
        self._expected, self._found = {}, []  # points that were there before
        self.check([*grid_lib.rate_runs(grid), *self._first_runs()])
        self._given = {}
        for path in files:
            self._take(path)

    def check(self, runs):
        """UsageError for runs that `efx.main` would refuse."""
        new = [run for run in dict.fromkeys(map(_any_seed, runs)) if run not in self._expected]
        configs = grid_lib.configs(self.grid, self.workdir, new, self.extra)
        self._expected |= {run: points_lib.expected_settings(c) for run, c in configs.items()}

    def expected(self, run):
        """The settings that a run of the grid has, without its seed."""
        self.check([run])
        return self._expected[_any_seed(run)]

    def _take(self, path):
        """Takes the points of a file, all of which have to be of this grid, or of families that it
        is `without`."""
        known = {run: run for run in grid_lib.all_runs(self.grid)}
        for point in points_lib.read_points(path):
            if point.run.family in self.grid["without"]:
                continue
            if point.run not in known:
                raise UsageError(
                    f"{path}: {point.run.name}, seed {point.run.seed}, is not a run of the "
                    "grid; add its family, size, budget, seed or learning rate to the grid, "
                    "or remove it from the file"
                )
            where = f"{path}: {point.run.name}"
            points_lib.check_settings(where, point.settings, self.expected(point.run))
            self._given[point.run] = point

    def point(self, run, fitted):
        """The Point of a run; points_lib.Unfinished if there is none."""
        folder = grid_lib.folder(self.workdir, run)
        try:
            point = points_lib.measured_point(run, folder, self.expected(run), fitted)
        except points_lib.Unfinished:
            if run not in self._given:
                raise
            point = dataclasses.replace(self._given[run], fitted=fitted)
        timed = run.budget in self.grid["timed_budgets"]
        return point if timed else dataclasses.replace(point, seconds=None)

    def missing(self, runs):
        """Those of the runs that have no point."""
        return [run for run in runs if self._is_missing(run)]

    def _is_missing(self, run):
        try:
            self._found.append(self.point(run, True))
        except points_lib.Unfinished:
            return True
        return False

    def rehearse(self):
        """UsageError, before anything trains, for a run whose model cannot be or be trained so: of
        each model and budget one of those that are missing, and have not begun, is looked at."""
        runs = {}
        for run in self.missing([*grid_lib.rate_runs(self.grid), *self._first_runs()]):
            if not run_dir.holds_result(grid_lib.folder(self.workdir, run)):
                runs.setdefault((run.family, run.size, run.budget), run)
        rehearsal.check(
            [
                (run.name, grid_lib.command(self.grid, self.workdir, run, self.extra), False)
                for run in runs.values()
            ]
        )

    def _first_runs(self):
        """The runs to fit, each with the first of the learning rates."""
        rates = self.grid["learning_rates"]
        first = {
            (family, size): rates[size][0] if rates else None
            for family in self.grid["families"]
            for size in self.grid["sizes"]
        }
        return grid_lib.runs_of(self.grid, first)

    def train(self, runs, jobs):
        """Makes the runs, `jobs` at a time. Where points that were there before are of another text
        or tokenizer, perhaps another machine's, the first run to end says so and not the last."""
        if runs and self._found:
            points_lib.check_together(self._found)

        def train_one(run, cpus):
            sweep_lib.run_one(
                f"{run.name}, seed {run.seed}",
                grid_lib.command(self.grid, self.workdir, run, self.extra),
                grid_lib.folder(self.workdir, run),
                cpus,
            )
            points_lib.check_together([*self._found[:1], self.point(run, True)])

        jobs_lib.run_all(train_one, runs, jobs)

    def timed(self, points, steps):
        """The points with other seconds: their steps times the median of so many, timed in turns in
        this process."""
        from efx.studies import step_time
        from efx.train import setup

        models = {}
        for point in points:
            models.setdefault((point.run.family, point.run.size), point.run)
        steppers = {
            model: step_time.Stepper(config, setup.setup(to_config(config)).tokenizer.vocab_size)
            for model, run in models.items()
            for config in grid_lib.configs(self.grid, self.workdir, [run], self.extra).values()
        }
        times = step_time.time_steps(steppers, steps)

        def seconds(point):
            model = point.run.family, point.run.size
            rows = steppers[model].config.data
            taken = point.tokens / (rows.batch_size * rows.seq_len)
            return taken * times[model].median

        return [dataclasses.replace(point, seconds=seconds(point)) for point in points]


def _any_seed(run):
    """Settings do not depend on the seed."""
    return run._replace(seed=0)


def collect(runs, jobs):
    """[Point] of all runs of the study, of which the missing ones are made first, `jobs` at a time
    (0: none is made)."""
    rate_runs = grid_lib.rate_runs(runs.grid)
    if jobs:
        runs.rehearse()
        runs.train(runs.missing(rate_runs), jobs)
    tried = [runs.point(run, False) for run in rate_runs]
    fitted_runs = grid_lib.runs_of(runs.grid, points_lib.best_rates(tried))
    if jobs:
        runs.train(runs.missing(fitted_runs), jobs)
    return _together([runs.point(run, True) for run in fitted_runs], tried)


def _together(fitted, tried):
    """[Point] of both, a learning rate's run that is fitted too once; checked."""
    runs = {point.run for point in fitted}
    points = fitted + [point for point in tried if point.run not in runs]
    if points:
        points_lib.check_together(points)
    return points


def _save_points(runs, path):
    """Writes the points of the runs that have ended, whatever is missing."""
    stage = grid_lib.rate_runs(runs.grid)
    missing = {*runs.missing(stage)}
    tried = [runs.point(run, False) for run in stage if run not in missing]
    fitted = []
    if not missing:
        fitted_runs = grid_lib.runs_of(runs.grid, points_lib.best_rates(tried))
        missing = {*runs.missing(fitted_runs)}
        fitted = [runs.point(run, True) for run in fitted_runs if run not in missing]
    points = _together(fitted, tried)
    if not points:
        raise UsageError(
            "--save-points: no run of the grid has finished, so there are no points to write"
        )
    path = pathlib.Path(path)
    with io.report_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    io.write_atomic(path, json.dumps(points_lib.as_data(points)))
    print(f"{path}: {len(points)} points")


def _print_commands(runs):
    """Prints a shell command for each missing run, those that find learning rates first."""
    rate_runs = grid_lib.rate_runs(runs.grid)
    missing = runs.missing(rate_runs)
    if not missing:
        tried = [runs.point(run, False) for run in rate_runs]
        missing = runs.missing(grid_lib.runs_of(runs.grid, points_lib.best_rates(tried)))
    for run in missing:
        arguments = grid_lib.command(runs.grid, runs.workdir, run, runs.extra)
        print(f"python -m efx.main {shlex.join(arguments)}")
