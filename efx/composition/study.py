"""Shared by the studies of PHATGOOSE and CALM: domains, runs of several stages, a table.

Finished runs are not repeated.
"""

import pathlib
import statistics
import sysconfig

import pandas as pd

from efx import io
from efx.config.load import with_variants
from efx.errors import UsageError
from efx.logging import tables
from efx.studies import cli
from efx.studies import runs as runs_lib

_LIBRARY = sysconfig.get_paths()["stdlib"]
# Parts of Python's library, which every machine has: code for the base, other text for the domains.
BASE = f"text:{_LIBRARY}/*.py"
DOMAINS = {
    "prose": f"text:{_LIBRARY}/pydoc_data/topics.py",
    "tables": f"text:{_LIBRARY}/encodings/cp*.py",
    "network": f"text:{_LIBRARY}/asyncio/*.py",
}
_PIECE = 4096  # bytes of one domain in a mixture before the next domain follows


def main(name, description, plan, rows, argv=None):
    """Run the command line of a study; returns the exit status.

    Args:
      plan: function of a Study that calls its `run`.
      rows: function of a Study with finished runs; returns {row: {domain: loss}}.
    """
    parser = cli.Parser(f"efx.composition.{name}", description)
    parser.add_argument("--config", default=name, help="config file or name, and variants")
    parser.add_argument("--workdir", required=True, help="directory of all runs and the table")
    parser.set_defaults(extra=[])
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--base", default=BASE, help="config.data.source of the base or anchor")
    help = "a domain and its config.data.source, once for each; default: parts of Python's library"
    parser.add_argument("--domain", action="append", metavar="NAME=SOURCE", help=help)

    def run(arguments):
        studies = [Study(arguments, seed) for seed in cli.numbers("--seeds", arguments.seeds)]
        for study in studies:
            plan(study)
        studies[0].check()
        for study in studies:
            study.write_mixture()
            runs_lib.run_all(study.runs.values())
        found = [
            {"name": name, "seed": study.seed, "mean": study.mean(row), **row}
            for study in studies
            for name, row in rows(study).items()
        ]
        table = pd.DataFrame(found)
        text = tables.means_markdown(table)
        text += f"\nHeld-out loss (nats). `{arguments.config}`. Command: `{arguments.command}`\n"
        tables.save(arguments.workdir, "table", table, text)

    return parser.run(run, argv)


def _domains(flags):
    """Return {name: config.data.source} of the flags --domain, or the default ones."""
    domains = {}
    for text in flags or ():
        name, _, source = text.partition("=")
        if not (name.isidentifier() and source) or name in domains:
            raise UsageError(f"--domain={text}: expected a new NAME=SOURCE, e.g. plays=text:a.txt")
        domains[name] = source
    if len(domains) == 1:
        raise UsageError(f"--domain={flags[0]}: one domain cannot be composed; use two or more")
    return domains or dict(DOMAINS)


class Study:
    """The runs of one seed, in WORKDIR/seed<n>/<name>.

    Attributes:
      base: source of the base model. domains: {name: source} of the columns of the table.
      runs: {name: Run} in their order.
      mixture: source of the training splits of all domains, in turns.
      mixed: for each domain, the run whose config has its text and held-out split.
    """

    def __init__(self, arguments, seed):
        self.domains, self.base, self.seed = _domains(arguments.domain), arguments.base, seed
        self._config, self._extra = arguments.config, arguments.extra
        self.folder = pathlib.Path(arguments.workdir) / f"seed{seed}"
        self.mixture, self.mixed, self.runs = f"text:{self.folder / 'mixture.txt'}", [], {}

    def run(self, name, variant, source, mode="train", **changes):
        """Add a run of the config's variant; returns its directory, as text.

        Args:
          changes: {dotted key: value}.
        """
        folder = self.folder / name
        changes = {"seed": self.seed, "data.source": source, **changes}
        arguments = [f"--config={with_variants(self._config, variant)}", f"--mode={mode}"]
        arguments += [f"--workdir={folder}"]
        arguments += [f"--config.{key}={value}" for key, value in changes.items()]
        for extra in self._extra:
            # "stage:--config.x=1" is for the runs whose name begins with the stage.
            stage, colon, setting = extra.partition(":--")
            if not colon:
                arguments.append(extra)
            elif name.startswith(stage):
                arguments.append(f"--{setting}")
        self.runs[name] = runs_lib.Run(f"{name}, seed {self.seed}", folder, tuple(arguments))
        return str(folder)

    def check(self):
        """Raise UsageError for a run that would be refused, or a stage without runs."""
        runs_lib.check(self.runs.values(), self._extra, written=[self.mixture])
        for argument in self._extra:
            stage, colon, _ = argument.partition(":--")
            if colon and not any(name.startswith(stage) for name in self.runs):
                raise UsageError(f"{argument}: no run's name begins with {stage!r}")

    def write_mixture(self):
        """Write the file of the mixture, unless it has this text already."""
        from efx.data.texts import Texts

        path, texts = self.folder / "mixture.txt", []
        for name in self.mixed:
            documents = Texts(self.runs[name].config().data).documents()
            texts.append(b"".join(documents["train"]))
        text = interleaved(texts).decode(errors="replace")
        if not path.exists() or path.read_bytes() != text.encode():
            self.folder.mkdir(parents=True, exist_ok=True)
            io.write_atomic(path, text)

    def row(self, name):
        """Return {domain: held-out loss} of a run, and "experts a token" if it has adapters."""
        from efx.config.load import config_of_run
        from efx.train import inference

        found, config = {}, config_of_run(self.folder / name)
        for domain, source in self.domains.items():
            config.data.source = source
            found[domain] = inference.evaluate(config, self.folder / name)
        row = {domain: metrics["eval/loss"] for domain, metrics in found.items()}
        experts = [one.get("eval/adapter/experts_per_token") for one in found.values()]
        return row | ({} if None in experts else {"experts a token": statistics.fmean(experts)})

    def mean(self, row):
        return statistics.fmean(row[domain] for domain in self.domains)


def interleaved(texts, piece_bytes=_PIECE):
    """Return pieces of the texts in turns, cut at line ends, as long as the shortest lasts."""
    pieces, starts = [], [0] * len(texts)
    while all(start < len(text) for start, text in zip(starts, texts, strict=True)):
        for i, text in enumerate(texts):
            end = text.find(b"\n", starts[i] + piece_bytes) + 1 or len(text)
            pieces.append(text[starts[i] : end])
            starts[i] = end
    return b"".join(pieces)
