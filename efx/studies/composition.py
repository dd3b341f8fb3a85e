"""What the studies of composition share: domains, runs of `efx.main`, evaluations, a table.

Nothing here is drawn anew when it is there already: a study that was interrupted goes on.
"""

import json
import pathlib
import statistics
import sysconfig

from efx import command_line, tables
from efx.errors import UsageError, nearest
from efx.metrics import portion
from efx.runfolder import write_atomic
from efx.studies import cli, jobs
from efx.tables import mean_and_spread

_LIBRARY = sysconfig.get_paths()["stdlib"]
# Of Python's own library, so that they are on every machine: code for the base, and what it is not.
BASE = f"text:{_LIBRARY}/*.py"
DOMAINS = {
    "prose": f"text:{_LIBRARY}/pydoc_data/topics.py",
    "tables": f"text:{_LIBRARY}/encodings/cp*.py",
    "network": f"text:{_LIBRARY}/asyncio/*.py",
}
_PIECE = 4096  # bytes of a domain before the next one follows, in a mixture


def main(name, description, run, argv=None):
    """The command line of a study; `run(study)` does one seed. Returns the exit status."""
    parser = cli.Parser(f"efx.studies.{name}", description)
    parser.add_argument("--config", default=name, help="config file or name, and variants")
    parser.add_runs()
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--base", default=BASE, help="config.data.source of the base or anchor")
    parser.add_argument(
        "--domain",
        action="append",
        default=[],
        metavar="NAME=SOURCE",
        help="a domain and its config.data.source; again for each. Default: parts of Python's "
        "library",
    )
    return parser.run(lambda flags: _all_seeds(flags, run), argv)


def _all_seeds(flags, run):
    domains, seeds = _domains(flags.domain), cli.numbers("--seeds", flags.seeds)
    cli.check_extra(flags.extra)
    rehearsal = Rehearsal(flags, domains, seeds[0])
    run(rehearsal)
    rehearsal.check(flags.extra)
    results, fractions = {}, []
    for seed in seeds:
        study = Study(flags, domains, seed)
        for row, values in run(study).items():
            results.setdefault(row, []).append(values)
        fractions += study.fractions
    text = markdown(results, seeds, flags.config, flags.command, portion(fractions))
    tables.save(flags.workdir, "table", text, results)


def _domains(given):
    """{name: config.data.source} of the flags --domain, NAME=SOURCE; the default ones without."""
    pairs = [text.partition("=") for text in given]
    for text, (key, _, source) in zip(given, pairs, strict=True):
        if not (key.isidentifier() and source):
            raise UsageError(f"--domain={text}: expected NAME=SOURCE, e.g. plays=text:a.txt")
    domains = {key: source for key, _, source in pairs} or dict(DOMAINS)
    if len(domains) < len(pairs):
        raise UsageError(f"--domain={given}: a name is given twice")
    if len(domains) < 2:
        raise UsageError(f"--domain: {len(domains)} is too few to compose; give two or more")
    return domains


class Study:
    """One seed: its runs lie in WORKDIR/seed<n>/<name>.

    Attributes:
      domains: {name: config.data.source}. base: source of the base model.
      fractions: of the held-out splits, how much of each was scored, where that was recorded.
    """

    def __init__(self, flags, domains, seed):
        self.domains, self.base, self.seed = domains, flags.base, seed
        self.folder = pathlib.Path(flags.workdir) / f"seed{seed}"
        self._config, self._extra, self.fractions = flags.config, flags.extra, []

    def path(self, name):
        return self.folder / name

    def command(self, name, variant, source, mode="train", **changes):
        """Arguments of `efx.main` for a run; those of `run`."""
        file, _, given = self._config.partition(":")
        variants = ",".join(filter(None, (variant, given)))
        command = [
            f"--config={file}:{variants}" if variants else f"--config={file}",
            f"--mode={mode}",
            f"--workdir={self.path(name)}",
            f"--config.seed={self.seed}",
            f"--config.data.source={source}",
            *(f"--config.{key}={value}" for key, value in changes.items()),
        ]
        for argument in self._extra:
            stage, colon, rest = argument.partition(":--")
            if not colon:
                command.append(argument)
            elif name.startswith(stage):
                command.append(f"--{rest}")
        return command

    def run(self, name, *arguments, **changes):
        """A run of the config's variant. `--` arguments "stage:--config.x=1" go to the runs whose
        name begins so, the others to all. Returns its folder, as text.

        Args:
          name: of its folder. Then the variant, the source, and by its name the mode of `efx.main`.
          changes: dotted keys of the config.
        """
        command = self.command(name, *arguments, **changes)
        status, where = jobs.run_main(f"seed {self.seed}, {name}", command, self.path(name))
        if status:
            raise UsageError(
                f"the run {name!r} with seed {self.seed} ended with status {status}; {where} says "
                "why. Start the study again to go on from here"
            )
        return str(self.path(name))

    def evaluate(self, name):
        """{domain: evaluation} of a run's newest checkpoint, on the held-out part of each."""
        from efx import use
        from efx.checkpoint import files
        from efx.config import config_of_run
        from efx.data.disk_cache import content_key
        from efx.data.opened import OpenedTexts
        from efx.runfolder import CHECKPOINTS

        store = self.folder / "evaluations.json"
        known = json.loads(store.read_text()) if store.exists() else {}
        root, found = files.as_root(self.path(name) / CHECKPOINTS), {}
        newest = files.finished_steps(root)[-1]
        weights = content_key(files.read_manifest(root / str(newest))["files"])
        for domain, source in self.domains.items():
            config = config_of_run(self.path(name))
            config.data.source = source
            # By contents: a run or a text that was replaced under its name is evaluated anew.
            key = f"{name} step {newest} on {domain}: {weights} {OpenedTexts(config.data).key()}"
            if key not in known:
                known[key] = use.evaluate(config, self.path(name))
                write_atomic(store, json.dumps(known, indent=1) + "\n")
            found[domain] = known[key]
        return found

    def row(self, name):
        """One row of the table: held-out loss of each domain, their mean, experts a token."""
        found = self.evaluate(name)
        self.fractions += [each.get("eval/split_fraction") for each in found.values()]
        row = losses({domain: found[domain]["eval/loss"] for domain in self.domains})
        used = [each.get("eval/adapter/experts_per_token") for each in found.values()]
        if None not in used:
            row["experts a token"] = statistics.fmean(used)
        return row

    def mixture(self, runs):
        """Source with the training parts of all domains, in turns, as a text file of the study.

        Args:
          runs: {domain: name of a run on it}, which says how much is read and what is held out.
        """
        from efx.config import config_of_run
        from efx.data.opened import OpenedTexts

        path, texts = self.folder / "mixture.txt", []
        for name in self.domains:
            opened = OpenedTexts(config_of_run(self.path(runs[name])).data)
            texts.append(b"".join(text for part, _, text in opened.pieces() if part == "train"))
        text = interleaved(texts).decode(errors="replace")
        # Drawn up each time: a file of other domains, or of what they once were, is not taken.
        if not path.exists() or path.read_bytes() != text.encode():
            write_atomic(path, text)
        return f"text:{path}"


class Rehearsal(Study):
    """A study that starts nothing: it checks the command line of every run, and all stages."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.names = []

    def run(self, name, *arguments, **changes):
        if name in self.names:
            raise UsageError(f"two runs of the study are called {name!r}: rename a --domain")
        self.names.append(name)
        try:
            command_line.parse(["efx", *self.command(name, *arguments, **changes)])
        except UsageError as error:
            raise UsageError(f"the run {name!r}: {error}") from error
        return str(self.path(name))

    def mixture(self, runs):
        return "text:mixture.txt"

    def row(self, name):
        return losses(dict.fromkeys(self.domains, 0.0))

    def check(self, extra):
        """UsageError for an argument whose stage is that of no run."""
        stages = [*self.names, *(name.partition("_")[0] for name in self.names)]
        for argument in extra:
            stage, colon, _ = argument.partition(":--")
            if colon and not (stage and any(name.startswith(stage) for name in self.names)):
                raise UsageError(
                    f"{argument}: no run's name begins with {stage!r}{nearest(stage, stages)}"
                )


def interleaved(texts, piece=_PIECE):
    """Pieces of the texts in turns, cut at line ends, as long as the shortest lasts."""
    found, starts = [], [0] * len(texts)
    while all(start < len(text) for start, text in zip(starts, texts, strict=True)):
        for i, text in enumerate(texts):
            end = text.find(b"\n", starts[i] + piece) + 1 or len(text)
            found.append(text[starts[i] : end])
            starts[i] = end
    return b"".join(found)


def losses(by_domain):
    """{column: loss} of each domain, and the mean over domains."""
    return {**by_domain, "mean": statistics.fmean(by_domain.values())}


def markdown(results, seeds, config, command, split):
    """The table; {row: [{column: value} of each seed]}. split: what was scored, in words."""
    titles = list(dict.fromkeys(title for rows in results.values() for title in rows[0]))
    lines = []
    for name, rows in results.items():
        cells = [
            mean_and_spread([row[title] for row in rows]) if title in rows[0] else ""
            for title in titles
        ]
        lines.append([name, *cells])
    spread = "mean ± standard deviation" if len(seeds) > 1 else "one seed"
    named = ", ".join(map(str, seeds))
    table = tables.markdown(["held-out loss (nats)", *titles], lines)
    return f"{table}\n\n`{config}`; seeds {named}: {spread}; {split}. Command: `{command}`\n"
