"""The command line: train, evaluate and sample; settings as flags; exit statuses."""

import contextlib
import errno
import io
import json
import os
import re
import subprocess
import sys

import devices
import jax
import pytest
from run_files import TINY

import efx
from efx import main
from efx.config.flags import parse
from efx.config.load import config_of_run, load_config
from efx.logging import writer
from efx.parallel import multihost


def call(*arguments, **settings):
    return main.main(
        ["efx", *arguments, *(f"--config.{key}={value}" for key, value in settings.items())]
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory of a run of two steps, its output, its settings)."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    settings = {**TINY, "model.depth": 2, "data.source": f"text:{folder / 'text.txt'}"}
    settings |= {"data.tokenizer": "chars", "data.eval_fraction": 0.5, "log.profile_at": 1}
    settings |= {"data.cache_dir": folder / "cache", "evaluate.max_batches": 1}
    with devices.only(1), contextlib.redirect_stdout(io.StringIO()) as out:
        assert call("--config=mod", f"--workdir={folder / 'run'}", **settings) == 0
    return folder / "run", out.getvalue(), settings


@pytest.fixture
def run(trained, one_device):
    return trained[0]


def test_a_run_reports_the_fraction_of_the_held_out_split_that_it_scores(trained):
    run, printed, _ = trained
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval/split_fraction"] == rows[-1]["eval/tokens"] / 1349 == 128 / 1349
    assert f"{100 * 128 / 1349:.3g}% of the held-out split" in printed


def test_a_profile_is_written_also_where_the_run_ends_in_its_window(trained):
    assert list((trained[0] / "profile").rglob("*.xplane.pb"))


def test_evaluating_and_sampling_change_nothing_of_a_run(run, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert call(f"--workdir={run}", "--mode=evaluate") == 0
    assert "bits per byte" in capsys.readouterr().out
    options = {"sample.max_new_tokens": 5, "sample.temperature": 0.0}
    assert call(f"--workdir={run}", "--mode=sample", "--prompt=the ", **options) == 0
    assert capsys.readouterr().out.startswith("the ")
    changed = {path.name for path in before if before[path] != path.stat().st_mtime_ns}
    assert changed <= {run.name, "run.json"}


@pytest.mark.parametrize("mode", ["evaluate", "sample"])
def test_other_settings_than_the_run_has_are_reported(run, capsys, mode):
    changed = {"model.norm_eps": 0.5, "sample.max_new_tokens": 1}
    assert call(f"--workdir={run}", f"--mode={mode}", **changed) == 0
    captured = capsys.readouterr()
    # Samples alone are on stdout.
    assert "config.model.norm_eps=0.5" in (captured.err if mode == "sample" else captured.out)
    assert mode == "evaluate" or "norm_eps" not in captured.out


# ---- settings as flags -------------------------------------------------------------------------


def test_flags_change_what_a_run_recorded(run):
    """A recorded config has the types of a config file's, although JSON has fewer."""
    recorded = config_of_run(run)
    assert recorded.to_dict() == load_config(f"{run}").to_dict() and recorded.model.norm is None
    schedule = {"schedule": "linear", "c_start": 0.0, "c_end": 1.0, "steps": 3}
    for start in ([], [f"--config={run}"]):
        flags = ["--config.model.norm=layernorm", "--config.losses.load_balance=0.5",
                 "--config.model.depth_routing.capacity=0.5,0.5",
                 f"--config.losses.z_loss={schedule}"]  # fmt: skip
        c = parse(["efx", *start, "--mode=evaluate", f"--workdir={run}", *flags]).config
        assert c.model.norm == "layernorm" and c.losses.load_balance == 0.5
        assert c.losses.z_loss["c_end"] == 1.0
        assert tuple(c.model.depth_routing.capacity) == (0.5, 0.5)


@pytest.mark.parametrize(
    "flag, value",
    [
        ("model.depth_routing.capacity=0.25", 0.25),
        ("model.depth_routing.capacity=(0.125,0.5)", (0.125, 0.5)),
        ("model.depth_routing.capacity_stages=((0.5,1.0),)", ((0.5, 1.0),)),
        ("model.depth_routing.extra_decisions=('predictor',)", ("predictor",)),
        ("model.depth_routing.blocks=(1,3)", (1, 3)),
        ("model.norm=layernorm", "layernorm"),
        ("model.use_bias=True", True),
        ("train_flops=-1.0", -1.0),
        ("steps=2 --config.steps=3", 3),
    ],
)
def test_a_setting_has_its_type_on_the_command_line(flag, value):
    argv = ["efx", "--config=mod", "--workdir=x", *f"--config.{flag}".split()]
    setting = parse(argv).config
    for name in flag.partition("=")[0].split("."):
        setting = setting[name]
    assert setting == value and type(setting) is type(value)


def test_a_value_may_look_like_a_flag():
    argv = ["efx", "--config", "mod", "--workdir", "x", "--mode=sample", "--prompt", "--confg"]
    values = parse([*argv, "--config.train_flops", "-1.0", "--nodistributed"])
    assert values.prompt == "--confg" and values.config.train_flops == -1.0
    assert values.distributed is False


def test_words_are_the_mode_and_the_run(run):
    for argv, expected in (
        (["sample", f"{run}", "--prompt=x"], ("sample", f"{run}", 2)),
        (["--mode=evaluate", "--config.steps", "3", f"{run}"], ("evaluate", f"{run}", 3)),
        ([f"{run}"], ("train", f"{run}", 2)),
        (["train", "new", "--config=mod:smoke"], ("train", "new", 30)),
    ):
        values = parse(["efx", *argv])
        assert (values.mode, values.workdir, values.config.steps) == expected


# ---- exit statuses -----------------------------------------------------------------------------


def test_help(capsys):
    assert main.main(["efx", "--help"]) == 0
    assert "--workdir" in capsys.readouterr().out
    assert main.main(["efx", "--list"]) == 0
    assert "  mod:dense " in capsys.readouterr().out


def test_the_package_is_the_command_and_needs_its_requirements(root):
    def version(*options):
        command = [sys.executable, *options, "-m", "efx", "--version"]
        return subprocess.run(command, cwd=root, capture_output=True, text=True)

    assert version().stdout == f"efx {efx.__version__}\n"
    bare = version("-S")  # without installed packages
    assert bare.returncode == 2 and not bare.stdout
    assert re.fullmatch(r"efx: error: .*\.venv/bin/activate.*\n", bare.stderr)


def test_a_full_disk_is_one_line(trained, capsys, tmp_path, monkeypatch, one_device):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_replace_end", full)
    assert call("--config=mod", f"--workdir={tmp_path / 'run'}", **trained[2]) == 2
    assert "run/metrics.jsonl: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_silently():
    """As with `| head`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "efx.main", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("address, status", [(None, 75), ("nowhere:1", 2)])
def test_a_cluster_that_does_not_answer_is_temporary_unless_an_address_is_given(
    monkeypatch, capsys, address, status
):
    """Launchers restart a command that ends with 75. A given address may be wrong."""

    def unreached(*arguments, **options):
        raise RuntimeError("DEADLINE_EXCEEDED: 3 of 4 tasks")

    monkeypatch.setattr(jax.distributed, "initialize", unreached)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(main, "run", lambda argv: multihost.connect(address, preemption=False))
    assert main.main([]) == status
    assert "efx: error: " in capsys.readouterr().err
