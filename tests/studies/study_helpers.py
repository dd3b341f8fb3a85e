"""Helpers for tests of studies: runs trained or made up, and the error line of a command."""

import types

import pytest

from efx import main, run_dir
from efx.logging import MetricsWriter


class RunHere:
    """Replaces a process of `efx.main`: runs the command in this one."""

    def __init__(self, command, **options):
        self.returncode = main.main(["efx", *command[3:]])

    def poll(self):
        return self.returncode


def make_runs_here(patch):
    """Let studies make their runs in this process; returns the list of Runs that were made."""
    from efx.studies import runs

    made, start = [], runs.start

    def start_and_record(run, cpus):
        made.append(run)
        return start(run, cpus)

    patch.setattr(runs, "start", start_and_record)
    patch.setattr(runs, "_split_cpus", lambda jobs: [set()] * jobs)
    processes = types.SimpleNamespace(Popen=RunHere, STDOUT=None)
    patch.setattr(runs, "subprocess", processes)
    return made


def train(root, workdir, config, *settings):
    """Trains `configs/<config>` with settings such as "steps=2"; returns `workdir`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        flags = (f"--config.{setting}" for setting in settings)
        main.run(["x", f"--config=configs/{config}", f"--workdir={workdir}", *flags])
    return workdir


def error_line(capsys, *names):
    """Checks that a command printed one error line in which each of `names` occurs."""
    line = capsys.readouterr().err
    assert line.startswith("efx: error: ") and line.count("\n") == 1, line
    assert all(name in line for name in names), line


def logged_run(folder, config, rows, source="s", held_out="h"):
    """The folder of a run with these rows of metrics: [(step, row)]."""
    folder.mkdir(parents=True)
    text = {"source": source, "eval_source": None, "held_out": held_out}
    tokenizer = f"hash of {config['data']['tokenizer']}"
    run_dir.open_run(folder, config, command_line=[]).commit({}, text=text, tokenizer=tokenizer)
    with MetricsWriter(folder, tensorboard=False, resume_step=None) as writer:
        for step, row in rows:
            writer.write(step, row)
    return folder
