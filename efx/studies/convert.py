"""What it costs to make a dense model a Mixture-of-Depths.

    python -m efx.studies.convert --workdir runs/convert --jobs 2

For each seed: a dense parent; its conversion by --mode=convert, trained with 1%, 5% and 20% of the
parent's training FLOPs (`--fractions`), once by the loss alone and once following the parent's
distribution, whose forward passes count; the same without every second block (--to layer_drop); and
a Mixture-of-Depths from scratch with the parent's FLOPs. Each run is a separate
`python -m efx.main`, so an interrupted study continues where it stopped. Then all models of the
first seed sample in turns. The table goes to WORKDIR/table.md, its numbers to WORKDIR/table.json.
Arguments after `--` go to every run that is made; those that begin with a stage, as in
`parent:--config.train_flops=1e12`, go to the runs whose name begins with it (parent, scratch, mod,
distilled, drop).

The config has the variants parent and scratch for what is trained from scratch, and distill.
"""

import math
import pathlib
import statistics
import sys

from efx import run_dir
from efx.config.load import with_variants
from efx.errors import UsageError
from efx.logging import portion, tables
from efx.studies import cli, rehearsal, sweep
from efx.studies import jobs as jobs_lib

PARENT, SCRATCH = "dense parent", "MoD from scratch"
# What a parent is made into: {stage: (title, --to, variants of the config)}.
CONVERSIONS = {
    "mod": ("converted to MoD", "mod", ()),
    "distilled": ("converted to MoD, distilled", "mod", ("distill",)),
    "drop": ("every second block left out", "layer_drop", ()),
}
SPEED, COST, DIFFERENCE = "decoding over the parent's", "FLOPs a token", "loss over the parent's"
METRICS = {
    "loss under training's selection": "eval/loss_topk",
    "fraction routed": "eval/router/routed_fraction",
    "training FLOPs": "flops",
    "tokens": "tokens",
}
_ROUNDS = 5  # of sampling from all models


class Study:
    """The runs of a study, each in WORKDIR/seed<n>/<name>.

    Attributes:
      conversions: {name: (title, stage, fraction)}.
    """

    def __init__(self, flags):
        self.config, self.extra = flags.config, flags.extra
        self.workdir, self.jobs = pathlib.Path(flags.workdir), flags.jobs
        self.seeds = cli.numbers("--seeds", flags.seeds)
        self.conversions = {
            f"{stage}_{percent(fraction).strip('%')}": (
                f"{title}, {percent(fraction)} of its FLOPs",
                stage,
                fraction,
            )
            for stage, (title, *_) in CONVERSIONS.items()
            for fraction in _fractions(flags.fractions)
        }

    @property
    def titles(self):
        """{name of a run: that of its row}"""
        converted = {name: title for name, (title, *_) in self.conversions.items()}
        return {"parent": PARENT, "scratch": SCRATCH, **converted}

    def folder(self, name, seed):
        return self.workdir / f"seed{seed}" / name

    def command(self, name, seed, budget):
        """Arguments of `efx.main` that make the run; a conversion is trained by another command.

        budget: training FLOPs; 0: as the config says.
        """
        _, to, variants = CONVERSIONS.get(name.partition("_")[0], ("", "", (name,)))
        command = [
            f"--config={with_variants(self.config, *variants)}",
            f"--workdir={self.folder(name, seed)}",
            f"--config.seed={seed}",
        ]
        if to:
            command += ["--mode=convert", f"--from={self.folder('parent', seed)}", f"--to={to}"]
        command += ["--config.evaluate.every=0", "--config.sample.every=0"]
        command += cli.extra_of_run(self.extra, name)
        if budget:
            command += ["--config.steps=0", f"--config.train_flops={budget}"]
        return command

    def check(self):
        """UsageError, before anything trains, for a run whose command `efx.main` would refuse, and
        for a model that cannot be of those that no parent decides."""
        cli.check_extra(self.extra)
        cli.check_stages(self.extra, self.titles, ("parent", "scratch", *CONVERSIONS))
        commands = {name: self.command(name, self.seeds[0], 0) for name in self.titles}
        for name, command in commands.items():
            # The parent, which decides the model of a conversion, is still to be made.
            own = [a for a in command if not a.startswith(("--mode=", "--from=", "--to="))]
            cli.check_command(name, own)
        alone = [
            (name, commands[name], name == "scratch")
            for name in ("parent", "scratch")
            if not run_dir.holds_result(self.folder(name, self.seeds[0]))
        ]
        rehearsal.check(alone)

    def run_all(self):
        """All runs, `jobs` at a time: parents first, then what needs them, the longest first."""
        jobs_lib.run_all(self._run, [("parent", seed) for seed in self.seeds], self.jobs)
        longest = sorted(self.conversions, key=lambda name: -self.conversions[name][2])
        names = ("scratch", *longest)
        items = [(name, seed) for name in names for seed in self.seeds]
        jobs_lib.run_all(self._run, items, self.jobs)

    def _run(self, item, cpus):
        name, seed = item
        folder, budget = self.folder(name, seed), 0
        if name != "parent":
            parent = sweep.final_row(self.folder("parent", seed))
            _, _, fraction = self.conversions.get(name, ("", "", 1.0))
            budget = fraction * parent["flops"]
        command = self.command(name, seed, budget)
        if name in self.conversions:
            if not run_dir.holds_result(folder):
                self._main(name, seed, command, cpus)
            command = [f"--workdir={folder}"]
        self._main(name, seed, command, cpus)

    def _main(self, name, seed, command, cpus):
        log = f"{self.folder(name, seed)}.log"
        status, where = jobs_lib.run_main(f"seed {seed}, {name}", command, log, cpus)
        if status:
            raise UsageError(
                f"the run {name!r} with seed {seed} ended with status {status}; see {where}. "
                "Rerun the study to resume"
            )

    def table(self):
        """{row: {column: [value of each seed]}}; decoding of the first seed alone."""
        losses, rows = {}, {}
        costs, speeds = self._costs_and_speeds()
        for name, title in self.titles.items():
            last = [sweep.final_row(self.folder(name, seed)) for seed in self.seeds]
            losses[name] = [row["eval/loss"] for row in last]
            values = {
                "held-out loss (nats)": losses[name],
                DIFFERENCE: [a - b for a, b in zip(losses[name], losses["parent"], strict=True)],
                COST: [row.get("eval/router/flops_per_token", costs[name]) for row in last],
                SPEED: [speeds[name] / speeds["parent"]],
            }
            rows[title] = values | {
                column: [row.get(metric) for row in last] for column, metric in METRICS.items()
            }
        return rows

    def _costs_and_speeds(self):
        """({name: nominal FLOPs of a token}, {name: tokens a second}) of the first seed's models,
        which sample a context full in turns, alone, at temperature 1."""
        from efx.config.load import config_of_run
        from efx.sampling import Sampler
        from efx.train import setup

        costs, rates, samplers = {}, {}, {}
        for name in self.titles:
            folder = self.folder(name, self.seeds[0])
            e, _, params, averages = setup.finished(config_of_run(folder), folder)
            length = e.config.data.seq_len
            costs[name] = e.model.ledger(length, "causal").nominal_per_token
            samplers[name] = Sampler(e.model), {"params": params, **averages}, e
            rates[name] = []
        for turn in range(_ROUNDS):
            for name, (sampler, variables, e) in samplers.items():
                prompt = e.tokenizer.encode(e.config.sample.prompt)
                count = sampler.cache_size - len(prompt)
                for _ in sampler.tokens(variables, [prompt], max_new_tokens=count, seeds=[turn]):
                    pass
                rates[name].append(sampler.stats["tokens_per_second"])
        return costs, {name: statistics.median(values) for name, values in rates.items()}

    def markdown(self, rows, command):
        titles = list(next(iter(rows.values())))
        lines = [
            [
                row,
                *(
                    tables.text(sweep.cell(title, values[title]), sweep.form(title))
                    for title in titles
                ),
            ]
            for row, values in rows.items()
        ]
        runs = [self.folder(name, seed) for name in self.titles for seed in self.seeds]
        split = portion([sweep.final_row(run).get("eval/split_fraction") for run in runs])
        seeds = ", ".join(map(str, self.seeds))
        return (
            f"{tables.markdown(['run', *titles], lines)}\n\n"
            f"`{self.config}`; seeds {seeds}: mean ± standard deviation; {split}. Training FLOPs "
            "are those of the run itself, for a converted one after its parent's. Decoding: one "
            f"sequence, the first seed's models taking turns. Command: `{command}`\n"
        )


def percent(fraction):
    return f"{100 * fraction:g}%"


def _fractions(text):
    try:
        fractions = [float(number) for number in text.split(",")]
    except ValueError:
        fractions = []
    if (
        not fractions
        or not all(0 < fraction < math.inf for fraction in fractions)
        or len({percent(fraction) for fraction in fractions}) < len(fractions)  # in names of runs
    ):
        raise UsageError(
            f"--fractions={text}: expected numbers above 0 that differ in their first six "
            "digits, e.g. 0.01,0.2"
        )
    return fractions


def main(argv=None):
    parser = cli.Parser("efx.studies.convert", __doc__)
    parser.add_argument("--config", default="convert_mod", help="config file or name, and variants")
    parser.add_runs(jobs="runs")
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--fractions", default="0.01,0.05,0.2", help="of the parent's FLOPs")
    return parser.run(run, argv)


def run(flags):
    """Makes the runs, then the table."""
    study = Study(flags)
    study.check()
    study.run_all()
    rows = study.table()
    tables.save(study.workdir, "table", study.markdown(rows, flags.command), rows)


if __name__ == "__main__":
    sys.exit(main())
