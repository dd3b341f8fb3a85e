"""Shared by the studies of PHATGOOSE and CALM: domains, runs of several stages, a table.

Finished runs and evaluations are not repeated.
"""

import json
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


def main(name, description, run, argv=None):
    """Run the command line of a study; returns the exit status.

    Args:
      run: function of a SeedStudy that makes the runs of one seed and returns {row: {column:
        loss}}.
    """
    parser = cli.Parser(f"efx.composition.{name}", description)
    parser.add_argument("--config", default=name, help="config file or name, and variants")
    parser.add_argument("--workdir", required=True, help="directory of all runs and the table")
    parser.set_defaults(extra=[])
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated")
    parser.add_argument("--base", default=BASE, help="config.data.source of the base or anchor")
    help = "a domain and its config.data.source, once for each; default: parts of Python's library"
    parser.add_argument("--domain", action="append", metavar="NAME=SOURCE", help=help)
    return parser.run(lambda arguments: _all_seeds(arguments, run), argv)


def _all_seeds(arguments, run):
    domains, seeds = _domains(arguments.domain), cli.numbers("--seeds", arguments.seeds)
    planned = SeedStudy(arguments, domains, seeds[0], only_plan=True)
    run(planned)
    planned.check(arguments.extra)
    rows = []
    for seed in seeds:
        for name, losses in run(SeedStudy(arguments, domains, seed)).items():
            rows.append({"name": name, "seed": seed} | losses)
    rows, folder = pd.DataFrame(rows), io.folder(arguments.workdir)
    rows.to_csv(folder / "table.csv", index=False)
    text = tables.means_markdown(rows)
    text += f"\nHeld-out loss (nats). `{arguments.config}`. Command: `{arguments.command}`\n"
    io.write_atomic(folder / "table.md", text)
    print(text)


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


class SeedStudy:
    """The runs of one seed, in WORKDIR/seed<n>/<name>.

    Attributes:
      domains: {name: config.data.source}. base: source of the base model.
      only_plan: make no run; `check` then checks the command lines of all.
    """

    def __init__(self, arguments, domains, seed, only_plan=False):
        self.domains, self.base, self.seed = domains, arguments.base, seed
        self.folder = pathlib.Path(arguments.workdir) / f"seed{seed}"
        self.only_plan, self._planned = only_plan, []
        self._config, self._extra = arguments.config, arguments.extra

    def run(self, name, variant, source, mode="train", **changes):
        """Make a run of the config's variant; returns its directory, as text.

        Args:
          changes: {dotted key: value}.
        """
        folder = self.folder / name
        arguments = [
            f"--config={with_variants(self._config, variant)}",
            f"--mode={mode}",
            f"--workdir={folder}",
            f"--config.seed={self.seed}",
            f"--config.data.source={source}",
            *(f"--config.{key}={value}" for key, value in changes.items()),
        ]
        for extra in self._extra:
            # "stage:--config.x=1" is for the runs whose name begins with the stage.
            stage, colon, setting = extra.partition(":--")
            if not colon:
                arguments.append(extra)
            elif name.startswith(stage):
                arguments.append(f"--{setting}")
        run = runs_lib.Run(f"{name}, seed {self.seed}", folder, tuple(arguments))
        if self.only_plan:
            self._planned.append((name, run))
        else:
            runs_lib.run_all([run])
        return str(folder)

    def check(self, extra):
        """Raise UsageError for a planned run that would be refused, or a stage without runs."""
        names = [name for name, _ in self._planned]
        runs_lib.check([run for _, run in self._planned], extra, made=[self._mixture_source()])
        for argument in extra:
            stage, colon, _ = argument.partition(":--")
            if colon and not any(name.startswith(stage) for name in names):
                raise UsageError(f"{argument}: no run's name begins with {stage!r}")

    def row(self, name):
        """Return {domain: held-out loss} of a run's newest checkpoint, and their mean."""
        if self.only_plan:
            return losses(dict.fromkeys(self.domains, 0.0))
        from efx.checkpoint import manifest
        from efx.config.load import config_of_run
        from efx.data.disk_cache import content_key
        from efx.data.opened import OpenedTexts
        from efx.run_dir import CHECKPOINTS
        from efx.train import finished_run

        store = self.folder / "evaluations.json"
        stored = json.loads(store.read_text()) if store.exists() else {}
        root, found = manifest.as_root(self.folder / name / CHECKPOINTS), {}
        newest = manifest.finished_steps(root)[-1]
        weights = content_key(manifest.read_manifest(root / str(newest))["files"])
        for domain, source in self.domains.items():
            config = config_of_run(self.folder / name)
            config.data.source = source
            # Keyed by contents: a run or a text that was replaced is evaluated again.
            key = f"{name} step {newest} on {domain}: {weights} {OpenedTexts(config.data).key()}"
            if key not in stored:
                stored[key] = finished_run.evaluate(config, self.folder / name)
                io.write_atomic(store, json.dumps(stored, indent=1) + "\n")
            found[domain] = stored[key]
        row = losses({domain: one["eval/loss"] for domain, one in found.items()})
        experts = [one.get("eval/adapter/experts_per_token") for one in found.values()]
        return row | ({} if None in experts else {"experts a token": statistics.fmean(experts)})

    def _mixture_source(self):
        return f"text:{self.folder / 'mixture.txt'}"

    def mixture(self, runs):
        """Write the training splits of all domains, in turns, to a file; returns its source.

        Args:
          runs: {domain: name of a run}, whose config decides what is read and held out.
        """
        if self.only_plan:
            return self._mixture_source()
        from efx.config.load import config_of_run
        from efx.data.opened import OpenedTexts

        path, texts = self.folder / "mixture.txt", []
        for domain in self.domains:
            opened = OpenedTexts(config_of_run(self.folder / runs[domain]).data)
            texts.append(b"".join(text for split, _, text in opened.pieces() if split == "train"))
        text = interleaved(texts).decode(errors="replace")
        # Computed every time, so that a file of other domains or of older texts is replaced.
        if not path.exists() or path.read_bytes() != text.encode():
            io.write_atomic(path, text)
        return self._mixture_source()


def interleaved(texts, piece_bytes=_PIECE):
    """Return pieces of the texts in turns, cut at line ends, as long as the shortest lasts."""
    pieces, starts = [], [0] * len(texts)
    while all(start < len(text) for start, text in zip(starts, texts, strict=True)):
        for i, text in enumerate(texts):
            end = text.find(b"\n", starts[i] + piece_bytes) + 1 or len(text)
            pieces.append(text[starts[i] : end])
            starts[i] = end
    return b"".join(pieces)


def losses(by_domain):
    """Return {domain: loss} with the mean over domains first."""
    return {"mean": statistics.fmean(by_domain.values()), **by_domain}
