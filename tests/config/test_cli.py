"""The command line: bad input is one line and status 2; variants, overrides, run folders."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys

import devices
import numpy as np
import pytest

from efx import main
from efx.config import config_of_run, load_config
from efx.data.tokenizers import CharTokenizer
from efx.metrics import writer

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


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return path


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


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"modle.depth": 3}, r"--config\.modle is not a setting \(did you mean 'model'\?\)"),
        ({"model.dept": 3}, r"--config\.model\.dept is not a setting \(did you mean 'depth'\?\)"),
        (
            {"optim.schedule.warmup": 3},
            r"warmup is not a setting \(did you mean 'config.optim.schedule.warmup_steps'\?\)",
        ),
        ({"model": 3}, r"--config\.model is a block of settings"),
        ({"model.depth": "deep"}, r"config\.model\.depth"),
        ({"data.source": "text:nowhere.txt"}, r"nowhere\.txt"),
        ({"data.source": "txt:nowhere.txt"}, r"config\.data\.source"),
        ({"data.tokenizer": "byte"}, r"config\.data\.tokenizer.*'bytes'"),
        (
            {"model.attention.num_heads": 3},
            r"config\.model\.width=16 is not divisible by config\.model\.attention\.num_heads=3",
        ),
        ({"model.depth_routing.capacity": 1.5}, r"config\.model\.depth_routing\.capacity=1\.5"),
        ({"optim.frozen": "nothing/.*"}, r"config\.optim\.frozen"),
        ({"data.seq_len": 100_000}, r"config\.data\.seq_len=100000: .*use a longer text"),
        ({"data.batch_size": 9}, r"config\.data\.batch_size=9"),
        ({"mesh.data": 3}, r"config\.mesh"),
    ],
)
def test_bad_settings(text, tmp_path, capsys, settings, words):
    workdir = tmp_path / "run"
    given = {**SETTINGS, "data.source": f"text:{text}", **settings}
    assert call(f"--workdir={workdir}", **given) == 2
    assert re.search(words, error_line(capsys))
    assert not workdir.exists()


@pytest.mark.parametrize(
    "arguments, config, words",
    [
        ([], "configs/mod.py", "--workdir is missing"),
        ([], None, "--config is missing"),
        (["--workdir=x"], "/etc/passwd", "--config=/etc/passwd: this is not a Python file"),
        (["--workdir=x", "--config.sample.prompt=\0"], "configs/mod.py", "config.sample.prompt="),
        (["--workdir=x", "--mode=trian"], "configs/mod.py", r"--mode=trian.*did you mean 'train'"),
        (["--workdir=x"], "configs/none.py", r"--config=configs/none\.py: there is no such file"),
        (["--workdir=x"], "configs/mod.py:smok", r"variant 'smok'.*did you mean 'smoke'"),
        (["--workdir=x", "--wrkdir=y"], "configs/mod.py", "wrkdir"),
        (["--workdir=x", "stray"], "configs/mod.py", "unexpected argument 'stray'"),
        (
            ["--workdir=x", "--", "--config.nothing.x=3"],
            "configs/mod.py",
            "unexpected argument '--'",
        ),
        (["--workdir=x", "--num_processes=2"], "configs/mod.py", "--coordinator_address"),
        (["--workdir=nowhere", "--mode=sample"], None, "nowhere is not a run folder"),
        (["--workdir=nowhere", "--mode=evaluate"], None, "nowhere is not a run folder"),
    ],
)
def test_bad_command_lines(capsys, arguments, config, words):
    assert call(*arguments, config=config) == 2
    assert re.search(words, error_line(capsys))


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "empty"),
        (b"\0\1\2\3" * 500, "binary"),
    ],
)
def test_bad_files(tmp_path, capsys, content, words):
    path = tmp_path / "bad"
    path.write_bytes(content)
    given = {**SETTINGS, "data.source": f"text:{path}", "data.tokenizer": "chars"}
    assert call(f"--workdir={tmp_path / 'run'}", **given) == 2
    line = error_line(capsys)
    assert words in line and str(path) in line


def test_help(capsys):
    assert main.main(["efx", "--help"]) == 0
    assert "--workdir" in capsys.readouterr().out


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["main", "studies.plot"])
def test_nobody_reads_what_is_written(tmp_path, command, unbuffered):
    """As with `| head`: the command ends without a word."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    rows = [{"step": step, "tokens": 8 * step, "eval/loss": 1.0} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--help"] if command == "main" else [str(run), f"--out={tmp_path / 'a.png'}"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", f"efx.{command}", *arguments],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_train_evaluate_sample_and_what_a_run_folder_refuses(text, tmp_path, capsys, one_of_eight):
    """One tiny run, then everything that may be asked of its folder."""
    run = tmp_path / "run"
    given = {**SETTINGS, "data.source": f"text:{text}", "data.tokenizer": "chars"}
    given |= {"data.eval_fraction": 0.5, "log.profile_at": 1}
    assert call(f"--workdir={run}", **given) == 0
    said = capsys.readouterr().out
    # A window of five steps, in which the run ends.
    assert f"profile of 1 step: {run / 'profile'}\n" in said
    assert list((run / "profile").rglob("*.xplane.pb"))
    # Read as people read: no "1.35 ktraining tokens", and not as if all held-out text were scored.
    assert re.search(r": [\d.]+k parameters, 1\.35k training tokens, .* \d cpu devices?\n", said)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    fraction = rows[-1]["eval/split_fraction"]
    assert fraction == rows[-1]["eval/tokens"] / 1349 == 128 / 1349
    assert said.count(f"bits per byte over {100 * fraction:.3g}% of the held-out split") == 1
    assert said.count(f"bits per byte) over {100 * fraction:.3g}% of the held-out split") == 1
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.name != "run.json"}

    assert call(f"--workdir={run}", "--mode=evaluate", config=None) == 0
    said = capsys.readouterr().out
    assert "bits per byte" in said and "not the model" not in said
    # Another model of the same parameters was evaluated without a word.
    changed = {"model.norm_eps": 0.5, "seed": 3, "model.attention.chunk": 8}
    assert call(f"--workdir={run}", "--mode=evaluate", config=None, **changed) == 0
    words = "config.model.norm_eps=0.5 (trained with 1e-05), config.seed=3 (trained with 0)\n"
    assert words in capsys.readouterr().out
    for mode in ("evaluate", "sample"):
        other = {"data.tokenizer": "bytes"}
        assert call(f"--workdir={run}", f"--mode={mode}", config=None, **other) == 2
        words = f"config.data.tokenizer='bytes': --workdir={run} was trained with 'chars'; use"
        assert words in error_line(capsys)
    # Its file is the same tokenizer by another name.
    same = {"data.tokenizer": str(run / "tokenizer.json")}
    # A run that is older than a setting was another model of that run.
    kept = shutil.copy2(run / "config.json", tmp_path / "config.json")
    older = json.loads(kept.read_text())
    del older["checksum"], older["model"]["norm_eps"]
    (run / "config.json").write_text(json.dumps(older))
    assert call(f"--workdir={run}", "--mode=evaluate", config=None, **same) == 0
    said = capsys.readouterr().out
    assert "bits per byte" in said and "not the model" not in said
    shutil.copy2(kept, run / "config.json")
    assert (
        call(
            f"--workdir={run}",
            "--mode=sample",
            "--prompt=the ",
            config=None,
            **{"sample.max_new_tokens": 5, "sample.temperature": 0.0},
        )
        == 0
    )
    said = capsys.readouterr()
    assert said.out.startswith("the ") and "not the model" not in said.err
    # Text of another model looked like the run's.
    given_too = {"model.norm_eps": 0.5, "sample.max_new_tokens": 1}
    arguments = (f"--workdir={run}", "--mode=sample", "--prompt=the ")
    assert call(*arguments, config=None, **given_too) == 0
    words = "config.model.norm_eps=0.5 (trained with 1e-05)\n"
    said = capsys.readouterr()
    assert words in said.err and "not the model" not in said.out

    assert (
        call(f"--workdir={run}", "--mode=sample", "--prompt=" + "the quick " * 9, config=None) == 2
    )
    line = error_line(capsys)
    assert "prompt" in line and "16" in line
    assert call(f"--workdir={run}", "--mode=sample", "--prompt=Zürich", config=None) == 2
    assert "config.sample.prompt: the character 'Z' at 0" in error_line(capsys)
    assert call(f"--workdir={run}", "--mode=evaluate", "--step=77", config=None) == 2
    assert "77" in error_line(capsys)

    other = {**given, "model.depth": 4, "optim.learning_rate": 0.5}
    assert call(f"--workdir={run}", **other) == 2
    line = error_line(capsys)
    assert "config.model.depth: 2 in the run, 4 here" in line and "learning_rate" in line

    (run / "tokenizer.json").write_text("{}")
    assert call(f"--workdir={run}", "--mode=sample", config=None) == 2
    assert "tokenizer.json" in error_line(capsys)
    after = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.name != "run.json"}
    changed = {p.name for p in before if before[p] != after.get(p)}
    assert changed <= {"tokenizer.json", ".lock"}


def test_a_tokenizer_that_does_not_match_the_checkpoint(text, tmp_path, capsys, one_of_eight):
    run = tmp_path / "run"
    given = {**SETTINGS, "data.source": f"text:{text}", "data.tokenizer": "chars"}
    assert call(f"--workdir={run}", **given) == 0
    capsys.readouterr()
    CharTokenizer("ABCDEFGH the quick brown fox jumps over the lazy dog.").save(
        run / "tokenizer.json"
    )
    assert call(f"--workdir={run}", "--mode=sample", config=None) == 2
    assert "tokenizer" in error_line(capsys)


@pytest.mark.skipif(os.geteuid() == 0 and not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_workdir_that_cannot_be_written(text, capsys, one_of_eight):
    given = {**SETTINGS, "data.source": f"text:{text}"}
    assert call("--workdir=/proc/efx", **given) == 2
    assert "/proc/efx" in error_line(capsys)


def test_a_workdir_on_a_full_disk(text, capsys, tmp_path, monkeypatch, one_of_eight):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "_write_at", full)
    given = {**SETTINGS, "data.source": f"text:{text}"}
    assert call(f"--workdir={tmp_path / 'run'}", **given) == 2
    assert "run/metrics.jsonl: the disk is full" in error_line(capsys)


def test_overrides_reach_what_a_run_recorded(text, tmp_path, capsys, one_of_eight):
    """Its config has the types of a config file's, though null and numbers are all that is in it.
    They ended in a traceback, or were refused."""
    schedule = "{'schedule':'linear','c_start':0.0,'c_end':1.0,'steps':3}"
    run, given = tmp_path / "run", {**SETTINGS, "data.source": f"text:{text}", "steps": 1}
    assert call(f"--workdir={run}", **given, **{"losses.load_balance": schedule}) == 0
    recorded = config_of_run(run)
    assert recorded.to_dict() == load_config(f"{run}").to_dict() and recorded.model.norm is None
    for start in ([], [f"--config={run}"]):
        flags = ["--config.model.norm=layernorm", "--config.losses.load_balance=0.5",
                 "--config.model.depth_routing.capacity=0.5,0.5", "--config.steps=2",
                 f"--config.losses.z_loss={schedule}"]  # fmt: skip
        c = main.parse(["efx", *start, "--mode=evaluate", f"--workdir={run}", *flags]).config
        assert c.model.norm == "layernorm" and c.losses.load_balance == 0.5 and c.steps == 2
        assert c.losses.z_loss["c_end"] == 1.0
        assert tuple(c.model.depth_routing.capacity) == (0.5, 0.5)
    capsys.readouterr()
    assert call(f"--workdir={run}", config=None, **{"model.attention.bias": "nope"}) == 2
    assert "config.model.attention.bias='nope': expected one of" in capsys.readouterr().err


def test_overrides_reach_tuples_and_placeholders(text, tmp_path):
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


def test_retries_of_the_hub_are_not_printed():
    """A failure that lasts is efx's own line."""
    script = (
        "import logging, sys; from efx import main; main.main(['efx', '--help'])\n"
        "from huggingface_hub import hf_hub_download\n"
        "logging.getLogger('huggingface_hub.utils._http').warning('Retrying in 1s [Retry 1/5].')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "Retrying" not in done.stderr + done.stdout
