"""The command line: training, evaluating and sampling a run, and overriding its settings."""

import contextlib
import errno
import io
import json
import os
import shutil
import subprocess
import sys

import devices
import numpy as np
import pytest

from efx import main
from efx.config.load import config_of_run, load_config
from efx.data.tokenizers import CharTokenizer
from efx.logging import writer

SETTINGS = {
    "steps": 2,
    "data.seq_len": 16,
    "data.batch_size": 8,
    "model.width": 16,
    "model.depth": 2,
    "model.attention.num_heads": 2,
    "optim.schedule.warmup_steps": 1,
    "evaluate.every": 0,
    "evaluate.batch_size": 8,
    "evaluate.max_batches": 1,
    "sample.every": 0,
    "log.every": 1,
    "log.tensorboard": False,
}


@pytest.fixture(autouse=True)
def here(root, monkeypatch, tmp_path):
    monkeypatch.chdir(root)
    monkeypatch.setenv("EFX_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def one_of_eight():
    """`one_device` for a test alone; bad input here is about all eight."""
    with devices.only(1):
        yield


def call(*arguments, config="configs/mod.py", **settings):
    given = [f"--config.{key}={value}" for key, value in settings.items()]
    first = [f"--config={config}"] if config else []
    return main.main(["efx", *first, *arguments, *given])


def error_line(capsys):
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("efx: error: ")]
    assert len(lines) == 1 and "Traceback" not in captured.err + captured.out, captured.err
    return lines[0]


def test_help(capsys):
    assert main.main(["efx", "--help"]) == 0
    assert "--workdir" in capsys.readouterr().out


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_silently():
    """As with `| head`."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "efx.main", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, root):
    """(directory of a run of two steps, what it printed, its settings)."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    settings = {**SETTINGS, "data.source": f"text:{folder / 'text.txt'}", "log.profile_at": 1}
    settings |= {"data.tokenizer": "chars", "data.eval_fraction": 0.5}
    settings |= {"data.cache_dir": folder / "cache"}
    out = io.StringIO()
    with devices.only(1), contextlib.chdir(root), contextlib.redirect_stdout(out):
        assert call(f"--workdir={folder / 'run'}", **settings) == 0
    return folder / "run", out.getvalue(), settings


@pytest.fixture
def run(trained, one_of_eight):
    return trained[0]


def test_a_run_reports_the_fraction_of_the_held_out_split_that_it_scores(trained):
    run, printed, _ = trained
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fraction = rows[-1]["eval/split_fraction"]
    assert fraction == rows[-1]["eval/tokens"] / 1349 == 128 / 1349
    assert f"{100 * fraction:.3g}% of the held-out split" in printed


def test_a_profile_is_written_also_where_the_run_ends_in_its_window(trained):
    assert list((trained[0] / "profile").rglob("*.xplane.pb"))


def test_evaluating_and_sampling_change_nothing_of_a_run(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert call(f"--workdir={run}", "--mode=evaluate", config=None) == 0
    assert "bits per byte" in capsys.readouterr().out
    options = {"sample.max_new_tokens": 5, "sample.temperature": 0.0}
    sample = f"--workdir={run}", "--mode=sample"
    assert call(*sample, "--prompt=the ", config=None, **options) == 0
    assert capsys.readouterr().out.startswith("the ")
    changed = {path.name for path in before if before[path] != path.stat().st_mtime_ns}
    assert changed <= {run.name, "run.json"}


def test_evaluating_and_sampling_with_other_settings_say_so(run, capsys):
    changed = {"model.norm_eps": 0.5, "seed": 3}
    assert call(f"--workdir={run}", "--mode=evaluate", config=None, **changed) == 0
    out = capsys.readouterr().out
    assert "config.model.norm_eps=0.5" in out and "config.seed=3" in out
    options = {"model.norm_eps": 0.5, "sample.max_new_tokens": 1}
    arguments = f"--workdir={run}", "--mode=sample", "--prompt=the "
    assert call(*arguments, config=None, **options) == 0
    captured = capsys.readouterr()
    assert "config.model.norm_eps=0.5" in captured.err and "norm_eps" not in captured.out


@pytest.mark.parametrize("arguments, settings, name", [
    (["--mode=evaluate"], {"data.tokenizer": "bytes"}, "config.data.tokenizer='bytes'"),
    (["--mode=sample"], {"data.tokenizer": "bytes"}, "config.data.tokenizer='bytes'"),
    (["--mode=sample", "--prompt=" + "the quick " * 9], {}, "prompt"),
    (["--mode=sample", "--prompt=Zürich"], {}, "config.sample.prompt"),
    (["--mode=evaluate", "--step=77"], {}, "77"),
    (["--mode=evaluate"], {"model.attention.bias": "nope"}, "config.model.attention.bias='nope'"),
])  # fmt: skip
def test_bad_requests_to_a_run_are_refused(run, capsys, arguments, settings, name):
    assert call(f"--workdir={run}", *arguments, config=None, **settings) == 2
    assert name in error_line(capsys)


def test_training_on_with_another_model_is_refused(run, trained, capsys):
    assert call(f"--workdir={run}", **trained[2], **{"model.norm_eps": 0.5}) == 2
    assert "config.model.norm_eps" in error_line(capsys)


def test_a_tokenizer_that_does_not_match_the_checkpoint_is_refused(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "run")
    for text in ("{}", CharTokenizer("ABCDEFGH the quick brown fox jumps.").to_json()):
        (copy / "tokenizer.json").write_text(text)
        assert call(f"--workdir={copy}", "--mode=sample", config=None) == 2
        assert "tokenizer" in error_line(capsys)


def test_a_full_disk_is_one_line(trained, capsys, tmp_path, monkeypatch, one_of_eight):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_write_at", full)
    assert call(f"--workdir={tmp_path / 'run'}", **trained[2]) == 2
    assert "run/metrics.jsonl: No space" in error_line(capsys)


def test_overrides_change_what_a_run_recorded(run):
    """A recorded config has the types of a config file's, although JSON has fewer."""
    recorded = config_of_run(run)
    assert recorded.to_dict() == load_config(f"{run}").to_dict() and recorded.model.norm is None
    schedule = "{'schedule':'linear','c_start':0.0,'c_end':1.0,'steps':3}"
    for start in ([], [f"--config={run}"]):
        flags = ["--config.model.norm=layernorm", "--config.losses.load_balance=0.5",
                 "--config.model.depth_routing.capacity=0.5,0.5",
                 f"--config.losses.z_loss={schedule}"]  # fmt: skip
        c = main.parse(["efx", *start, "--mode=evaluate", f"--workdir={run}", *flags]).config
        assert c.model.norm == "layernorm" and c.losses.load_balance == 0.5
        assert c.losses.z_loss["c_end"] == 1.0
        assert tuple(c.model.depth_routing.capacity) == (0.5, 0.5)


def test_overrides_change_tuples_and_settings_without_a_value():
    values = main.parse(
        [
            "efx",
            "--config=configs/mod.py:smoke,dense",
            "--workdir=x",
            "--config.model.norm=layernorm",
            "--config.model.use_bias=True",
            "--config.model.depth_routing.blocks=(1,3)",
            "--config.losses.router_bce=0.5",
        ]
    )
    c = values.config
    assert c.model.norm == "layernorm" and c.model.use_bias is True
    assert tuple(c.model.depth_routing.blocks) == (1, 3)
    assert c.losses.router_bce == 0.5 and c.model.depth_routing.kind == "none"
    assert np.isclose(c.model.depth_routing.capacity, 0.125)
