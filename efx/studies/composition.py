"""Shared by the studies of composition: domains, runs of `efx.main`, evaluations, a table.

Finished runs and evaluations are not repeated, so an interrupted study continues.
"""

import json
import pathlib
import statistics
import sysconfig

from efx import io
from efx.config.load import with_variants
from efx.errors import UsageError
from efx.logging import portion, tables
from efx.logging.tables import mean_and_spread
from efx.run_dir import holds_result
from efx.studies import cli, jobs, rehearsal

_LIBRARY = sysconfig.get_paths()["stdlib"]
# Parts of Python's library, which every machine has: code for the base, other text for the domains.
BASE = f"text:{_LIBRARY}/*.py"
DOMAINS = {
    "prose": f"text:{_LIBRARY}/pydoc_data/topics.py",
    "tables": f"text:{_LIBRARY}/encodings/cp*.py",
    "network": f"text:{_LIBRARY}/asyncio/*.py",
}
_PIECE = 4096  # bytes of one domain in a mixture before the next domain follows


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
        help=(
            "a domain and its config.data.source; repeat the flag for each. Default: parts "
            "of Python's library"
        ),
    )
    return parser.run(lambda flags: _all_seeds(flags, run), argv)


def _all_seeds(flags, run):
    domains, seeds = _domains(flags.domain), cli.numbers("--seeds", flags.seeds)
    cli.check_extra(flags.extra)
    without_runs = Rehearsal(flags, domains, seeds[0])
    run(without_runs)
    without_runs.check(flags.extra)
    results, fractions = {}, []
    for seed in seeds:
        study = SeedStudy(flags, domains, seed)
        for row, values in run(study).items():
            results.setdefault(row, []).append(values)
        fractions += study.fractions
    text = markdown(results, seeds, flags.config, flags.command, portion(fractions))
    tables.save(flags.workdir, "table", text, results)


def _domains(flags):
    """{name: config.data.source} of the flags --domain, NAME=SOURCE; the default ones without."""
    parsed = [text.partition("=") for text in flags]
    for text, (key, _, source) in zip(flags, parsed, strict=True):
        if not (key.isidentifier() and source):
            raise UsageError(f"--domain={text}: expected NAME=SOURCE, e.g. plays=text:a.txt")
    domains = {key: source for key, _, source in parsed} or dict(DOMAINS)
    if len(domains) < len(parsed):
        raise UsageError(f"--domain={flags}: a name is used twice")
    if len(domains) < 2:
        raise UsageError(f"--domain: {len(domains)} is too few to compose; use two or more")
    return domains


class SeedStudy:
    """A study of one seed: its runs are in WORKDIR/seed<n>/<name>.

    Attributes:
      domains: {name: config.data.source}. base: source of the base model.
      fractions: the scored fractions of the held-out splits; None where it was not recorded.
    """

    def __init__(self, flags, domains, seed):
        self.domains, self.base, self.seed = domains, flags.base, seed
        self.folder = pathlib.Path(flags.workdir) / f"seed{seed}"
        self._config, self._extra, self.fractions = flags.config, flags.extra, []

    def path(self, name):
        return self.folder / name

    def command(self, name, variant, source, mode="train", **changes):
        """Arguments of `efx.main` for a run, from the arguments of `run`."""
        return [
            f"--config={with_variants(self._config, variant)}",
            f"--mode={mode}",
            f"--workdir={self.path(name)}",
            f"--config.seed={self.seed}",
            f"--config.data.source={source}",
            *(f"--config.{key}={value}" for key, value in changes.items()),
            *cli.extra_of_run(self._extra, name),
        ]

    def run(self, name, *arguments, **changes):
        """Makes a run of the config's variant; returns its folder, as text.

        Args:
          name: of its folder. arguments: variant and source; `mode` of `efx.main` by keyword.
          changes: dotted keys of the config.
        """
        command = self.command(name, *arguments, **changes)
        status, log_name = jobs.run_main(f"seed {self.seed}, {name}", command, self.path(name))
        if status:
            raise UsageError(
                f"the run {name!r} with seed {self.seed} ended with status {status}; see "
                f"{log_name}. Rerun the study to resume"
            )
        return str(self.path(name))

    def evaluate(self, name):
        """{domain: evaluation} of a run's newest checkpoint, on the held-out part of each."""
        from efx.checkpoint import manifest
        from efx.config.load import config_of_run
        from efx.data.disk_cache import content_key
        from efx.data.opened import OpenedTexts
        from efx.run_dir import CHECKPOINTS
        from efx.train import finished_run

        store = self.folder / "evaluations.json"
        stored = json.loads(store.read_text()) if store.exists() else {}
        root, evaluations = manifest.as_root(self.path(name) / CHECKPOINTS), {}
        newest = manifest.finished_steps(root)[-1]
        weights = content_key(manifest.read_manifest(root / str(newest))["files"])
        for domain, source in self.domains.items():
            config = config_of_run(self.path(name))
            config.data.source = source
            # Keyed by contents: a run or a text that was replaced is evaluated again.
            key = f"{name} step {newest} on {domain}: {weights} {OpenedTexts(config.data).key()}"
            if key not in stored:
                stored[key] = finished_run.evaluate(config, self.path(name))
                io.write_atomic(store, json.dumps(stored, indent=1) + "\n")
            evaluations[domain] = stored[key]
        return evaluations

    def row(self, name):
        """One row of the table: held-out loss of each domain, their mean, experts a token."""
        evaluations = self.evaluate(name)
        self.fractions += [
            evaluation.get("eval/split_fraction") for evaluation in evaluations.values()
        ]
        row = losses({domain: evaluations[domain]["eval/loss"] for domain in self.domains})
        experts_per_token = [
            evaluation.get("eval/adapter/experts_per_token") for evaluation in evaluations.values()
        ]
        if None not in experts_per_token:
            row["experts a token"] = statistics.fmean(experts_per_token)
        return row

    def mixture(self, runs):
        """The source of a text file that has the training splits of all domains, in turns.

        Args:
          runs: {domain: name of a run on it}, whose config decides what is read and held out.
        """
        from efx.config.load import config_of_run
        from efx.data.opened import OpenedTexts

        path, texts = self.folder / "mixture.txt", []
        for name in self.domains:
            opened = OpenedTexts(config_of_run(self.path(runs[name])).data)
            texts.append(b"".join(text for split, _, text in opened.pieces() if split == "train"))
        text = interleaved(texts).decode(errors="replace")
        # Computed every time, so that a file of other domains or of older texts is replaced.
        if not path.exists() or path.read_bytes() != text.encode():
            io.write_atomic(path, text)
        return f"text:{path}"


class Rehearsal(SeedStudy):
    """A study that starts no run: it checks the command line of every run, all stages, and that
    the models can be."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.commands = {}  # {name of a run: arguments of `efx.main`}

    @property
    def names(self):
        return list(self.commands)

    def run(self, name, *arguments, **changes):
        if name in self.names:
            raise UsageError(f"two runs of the study are called {name!r}; rename a --domain")
        command = self.commands[name] = self.command(name, *arguments, **changes)
        cli.check_command(name, command, made=[self.mixture({})])
        return str(self.path(name))

    def mixture(self, runs):
        return "text:mixture.txt"

    def row(self, name):
        return losses(dict.fromkeys(self.domains, 0.0))

    def check(self, extra):
        """UsageError for an argument whose stage no run has, and for a model that cannot be."""
        stages = [*self.names, *(name.partition("_")[0] for name in self.names)]
        cli.check_stages(extra, self.names, stages)
        missing = [name for name in self.names if not holds_result(self.path(name))]
        rehearsal.check([(name, self.commands[name], False) for name in missing], in_order=True)


def interleaved(texts, piece_bytes=_PIECE):
    """Pieces of the texts in turns, cut at line ends, as long as the shortest lasts."""
    pieces, starts = [], [0] * len(texts)
    while all(start < len(text) for start, text in zip(starts, texts, strict=True)):
        for i, text in enumerate(texts):
            end = text.find(b"\n", starts[i] + piece_bytes) + 1 or len(text)
            pieces.append(text[starts[i] : end])
            starts[i] = end
    return b"".join(pieces)


def losses(by_domain):
    """{column: loss} of each domain, and the mean over domains."""
    return {**by_domain, "mean": statistics.fmean(by_domain.values())}


def markdown(results, seeds, config, command, split):
    """The table of {row: [{column: value} of each seed]}. split: the scored text, in words."""
    titles = list(dict.fromkeys(title for rows in results.values() for title in rows[0]))
    table_rows = []
    for name, rows in results.items():
        cells = [
            mean_and_spread([row[title] for row in rows]) if title in rows[0] else ""
            for title in titles
        ]
        table_rows.append([name, *cells])
    spread = "mean ± standard deviation" if len(seeds) > 1 else "one seed"
    seed_list = ", ".join(map(str, seeds))
    table = tables.markdown(["held-out loss (nats)", *titles], table_rows)
    return f"{table}\n\n`{config}`; seeds {seed_list}: {spread}; {split}. Command: `{command}`\n"
