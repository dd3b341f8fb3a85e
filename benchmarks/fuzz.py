"""Hostile input: random settings, texts, tokenizers and damaged files of runs.

    python -m benchmarks.fuzz --examples=1000

Each case either works or is one line of a UsageError. Anything else is printed by hypothesis with
the smallest case that shows it, and the exit status is 1.
"""

import argparse
import json
import pathlib
import shutil
import sys
import tempfile

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from efx import main as efx_main
from efx import run_dir
from efx.config import flags
from efx.config.load import config_of_run, to_config
from efx.config.run import default_config
from efx.data import load_tokenizer
from efx.data.sources import open_source
from efx.errors import UsageError
from efx.models import FAMILIES

SMALL = {
    "steps": 1,
    "model.depth": 2,
    "data.seq_len": 16,
    "data.max_bytes": 20_000,
    "evaluate.max_batches": 1,
}
VALUES = st.one_of(
    st.integers(-3, 2**40),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
    st.none(),
)


def works_or_one_line(call):
    """Call a function; a UsageError must be one line."""
    try:
        return call()
    except UsageError as error:
        line = str(error)
        assert line and "\n" not in line, repr(line)


def damaged(data, draw):
    """Return bytes with a part replaced, removed or repeated."""
    start = draw(st.integers(0, max(0, len(data) - 1)))
    end = start + draw(st.integers(0, 64))
    return data[:start] + draw(st.binary(max_size=16)) + data[end:]


def check_settings(data, run):
    """Any value of any setting of any family, from the command line."""
    family = data.draw(st.sampled_from([*FAMILIES]))
    keys = [*run_dir.dotted(default_config(family).to_dict())]
    words = [f"--config.model.family={family}"]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=4)):
        words.append(f"--config.{key}={data.draw(VALUES)}")

    def parse():
        try:
            return to_config(flags.parse(["efx", "--config=mod", "--workdir=x", *words]).config)
        except SystemExit as error:
            assert error.code == 2

    works_or_one_line(parse)


def check_run_files(data, run):
    """A damaged file of a run directory."""
    names = ["config.json", "run.json", "metrics.jsonl", "tokenizer.json"]
    name = data.draw(st.sampled_from(names))
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "run"
        shutil.copytree(run, copy)
        path = copy / name
        path.write_bytes(damaged(path.read_bytes(), data.draw))
        works_or_one_line(lambda: to_config(config_of_run(copy)))
        works_or_one_line(lambda: run_dir.RunDir(copy).record)
        works_or_one_line(lambda: load_tokenizer(copy / "tokenizer.json").encode("a b"))


def check_text(data, run):
    """Files of text and of JSON lines with any bytes."""
    with tempfile.TemporaryDirectory() as folder:
        kind = data.draw(st.sampled_from(["text", "jsonl"]))
        path = pathlib.Path(folder) / f"a.{kind}"
        line = json.dumps({"text": "a word"}).encode() + b"\n"
        path.write_bytes(damaged(line * 20, data.draw) if kind == "jsonl" else
                         data.draw(st.binary(max_size=4096)))  # fmt: skip

        def read():
            config = default_config("decoder")
            config.data.source = f"{kind}:{path}"
            spec, c = config.data.source, to_config(config).data
            source = open_source(spec, "config.data.source", c, pathlib.Path(folder))
            return sum(len(document.data) for document in source.documents())

        works_or_one_line(read)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=1000, help="of each kind")
    args = parser.parse_args(argv)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder) / "run"
        settings_of_run = [f"--config.{key}={value}" for key, value in SMALL.items()]
        if status := efx_main.main(
            ["efx", "--config=mod:smoke", f"--workdir={run}", *settings_of_run]
        ):
            return status
        for check in (check_settings, check_run_files, check_text):

            @settings(
                max_examples=args.examples, deadline=None, suppress_health_check=[*HealthCheck]
            )
            @given(st.data())
            def fuzz(data):
                check(data, run)  # noqa: B023

            name = check.__name__.removeprefix("check_")
            try:
                fuzz()
                print(f"{name}: {args.examples} cases, nothing found", flush=True)
            except Exception as error:
                failed = True
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                print(*getattr(error, "__notes__", ()), sep="\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
