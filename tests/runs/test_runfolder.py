"""The run directory: its records, the configs that may resume in it, damage, the lock."""

import errno
import json
import os
import platform
import subprocess

import jax
import pytest
from refusals import refused
from run_files import largest_file, run_script, writer_of

from efx import atomic, main, run_settings, runfolder, settings
from efx.errors import UsageError

CONFIG = {
    "seed": 0,
    "steps": 100,
    "model": {"depth": 4, "capacity": (0.5, 1), "dropout": None, "options": {}},
    "log": {"every": 10},
}
MAY_DIFFER = ("steps", r"log\..*")


def look(path, config=CONFIG, completed=None):
    return runfolder.open_run(
        path, config, command_line=["efx", "--x"], may_differ=MAY_DIFFER, completed=completed
    )


def open_run(path, config=CONFIG):
    """A launch that gets as far as its first checkpoint."""
    run = look(path, config)
    run.commit({})
    (path / "checkpoints/1").mkdir(parents=True, exist_ok=True)
    return run


def changed(**changes):
    config = json.loads(json.dumps(CONFIG))
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = config
        for parent in parents:
            node = node[parent]
        node[last] = value
    return config


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_new_run_and_its_records(tmp_path):
    path = tmp_path / "runs" / "a"
    run = open_run(path)
    assert run.is_new and run.path == path
    config = runfolder.recorded_config(path)
    assert config == json.loads(json.dumps(CONFIG)) and list(config) == sorted(config)
    record = json.loads((path / "run.json").read_text())["launches"][0]
    assert record["command_line"] == ["efx", "--x"]
    assert record["libraries"]["jax"] == jax.__version__
    assert record["device_count"] == jax.device_count() and record["process_count"] == 1
    assert {"efx", "git", "python", "platform", "devices", "started"} <= record.keys()
    before = files_of(path)
    assert look(path, changed(steps=200)).changed == {"steps": [100, 200]}
    assert files_of(path) == before  # opening writes nothing
    assert not open_run(path).is_new
    assert len(json.loads((path / "run.json").read_text())["launches"]) == 2
    assert sorted(p.name for p in path.iterdir()) == ["checkpoints", "config.json", "run.json"]


def test_permitted_changes_are_recorded(tmp_path):
    open_run(tmp_path)
    open_run(tmp_path, changed(steps=200, log__every=5))
    assert runfolder.recorded_config(tmp_path)["steps"] == 200
    launches = json.loads((tmp_path / "run.json").read_text())["launches"]
    assert launches[1]["changed"] == {"steps": [100, 200], "log.every": [10, 5]}
    # Equal numbers of another type are the same.
    open_run(tmp_path, changed(seed=0.0, model__capacity=(0.5, 1.0)))


def test_a_run_that_is_older_than_a_setting_resumes_at_its_default(tmp_path):
    open_run(tmp_path)

    def completed(stored):
        return {**stored, "model": {**stored["model"], "new": 1}}

    assert not look(tmp_path, changed(model__new=1), completed).is_new
    refused(lambda: look(tmp_path, changed(model__new=2), completed), "config.model.new")
    runfolder.check_config(tmp_path, changed(model__new=1), MAY_DIFFER, completed)


@pytest.mark.parametrize(
    "config, names",
    [
        (changed(model__depth=6, steps=5), ["config.model.depth: 4 in the run, 6 here"]),
        (changed(seed=True), ["config.seed: 0 in the run, True here"]),
        (changed(model__new=1), ["config.model.new", "absent"]),
        (changed(model__capacity=[0.5]), ["config.model.capacity"]),
        (changed(seed=1, model__depth=6), ["config.seed", "config.model.depth"]),
    ],
)
def test_a_run_of_another_config_is_refused(tmp_path, config, names):
    open_run(tmp_path)
    before = files_of(tmp_path)
    refused(lambda: open_run(tmp_path, config), *names, str(tmp_path))
    assert files_of(tmp_path) == before


def test_a_directory_that_is_not_a_run_is_refused_and_left_alone(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text('{"seed": 1')
    (tmp_path / "folder/config.json").mkdir(parents=True)
    for name in ("absent", "empty", "broken", "folder"):
        refused(lambda: runfolder.recorded_config(tmp_path / name), str(tmp_path / name))  # noqa: B023
    (tmp_path / "broken/checkpoints/1").mkdir(parents=True)
    refused(lambda: open_run(tmp_path / "broken"), "config.json")
    for name in ("checkpoints", "metrics.jsonl", "run.json", "tokenizer.json", "held_out.json"):
        (tmp_path / "stray" / name).mkdir(parents=True)
        refused(lambda: open_run(tmp_path / "stray"), str(tmp_path / "stray"), name)
        (tmp_path / "stray" / name).rmdir()
    (tmp_path / "stray/slurm-1.out").write_text("")  # the output of a scheduler is allowed
    assert open_run(tmp_path / "stray").is_new
    # A model of Hugging Face has a config.json, too.
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"model_type": "gpt2"}')
    refused(lambda: look(tmp_path / "hf"), "config.json")
    assert list(files_of(tmp_path / "hf")) == ["config.json"]


def test_an_unwritable_workdir_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        refused(lambda: open_run(path), str(tmp_path / "file"))  # noqa: B023
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        refused(lambda: open_run(tmp_path / "closed/run"), str(tmp_path / "closed"))


def test_atomic_writes_leave_the_old_file_or_no_directory_when_they_fail(tmp_path):
    path, folder = tmp_path / "config.json", tmp_path / "folder"
    runfolder.write_atomic(path, "old")
    with largest_file(1000):
        refused(lambda: runfolder.write_atomic(path, "x" * 5000), str(path))
    with pytest.raises(KeyError), atomic.replacing(folder) as part:
        part.mkdir()
        (part / "a").write_text("half")
        raise KeyError
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["config.json"]
    with atomic.replacing(folder) as part:
        part.mkdir()
        (part / "a").write_text("whole")
        assert not folder.exists()
    assert (folder / "a").read_text() == "whole" and len(list(tmp_path.iterdir())) == 2


# ---- files that are damaged or of another program ----------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["null", "{}", "[" * 100_000, "", "\udcff", '{"model": 3}', '{"model": {"family": []}}'],
    ids=lambda text: text[:12],
)
def test_a_config_of_another_kind_is_one_line_in_every_mode(tmp_path, text, capsys):
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    for mode in ("train", "evaluate", "cluster", "compose"):
        assert main.main(["efx", f"--mode={mode}", f"--workdir={tmp_path}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("efx: error: ") and str(path) in line
    for key in ("data.source", "steps"):
        refused(lambda: runfolder.recorded_setting(tmp_path, key), "config.json")  # noqa: B023
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["1", "checkpoints", "config.json"]


def test_a_config_that_lacks_a_block_is_one_line(tmp_path, capsys):
    whole = json.loads(json.dumps(settings.as_dict(run_settings.Config())))
    for name in whole:
        for config in ({**whole, name: None}, {k: v for k, v in whole.items() if k != name}):
            (tmp_path / "config.json").write_text(json.dumps(config))
            assert main.main(["efx", "--mode=sample", f"--workdir={tmp_path}"]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            # A config that is right after all (no rules) is of a run without a checkpoint.
            assert f"config.{name}" in line or "checkpoint" in line, line


@pytest.mark.parametrize("text", ["[]", '{"launches": {}}', '{"text": {}}', '{"tokenizer": 3}'])
def test_a_record_of_another_kind_is_one_line(tmp_path, text):
    open_run(tmp_path)
    (tmp_path / "run.json").write_text(text)
    for read in (
        runfolder.run_record,
        runfolder.saved_tokenizer,
        runfolder.recorded_origin,
        open_run,
    ):
        refused(lambda: read(tmp_path), "run.json")  # noqa: B023


def test_a_tokenizer_or_split_that_is_lost_or_replaced_is_refused(tmp_path):
    origin = {"source": "s", "eval_source": None, "of": "s", "held_out": {"bytes": [1, 2]}}
    held_out, text = runfolder.text_entries(origin)
    files = {"tokenizer.json": "mine", "held_out.json": held_out}
    look(tmp_path).commit(files, text=text, tokenizer=runfolder.checksum("mine"))
    assert runfolder.saved_tokenizer(tmp_path) is None  # no checkpoint yet
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    assert runfolder.saved_tokenizer(tmp_path).read_text() == "mine"
    assert runfolder.recorded_origin(tmp_path) == origin
    for name, read in (
        ("tokenizer.json", runfolder.saved_tokenizer),
        ("held_out.json", runfolder.recorded_origin),
    ):
        for content in (b"other", b"min\xe5"):
            (tmp_path / name).write_bytes(content)
            refused(lambda: read(tmp_path), name)  # noqa: B023
        (tmp_path / name).unlink()
        refused(lambda: read(tmp_path), name)  # noqa: B023


# ---- what is written, and when -----------------------------------------------------------------


def test_only_a_result_binds_a_directory_to_its_config(tmp_path):
    look(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    look(tmp_path).commit({"tokenizer.json": "old", "held_out.json": "old"}, origin={"run": "x"})
    other = changed(model__depth=6)
    assert look(tmp_path, other).is_new
    (tmp_path / "checkpoints/3.orbax-checkpoint-tmp").mkdir(parents=True)  # killed in its save
    look(tmp_path, other).commit({"tokenizer.json": "new", "held_out.json": None})
    assert runfolder.recorded_config(tmp_path)["model"]["depth"] == 6
    assert (tmp_path / "tokenizer.json").read_text() == "new"
    assert not (tmp_path / "held_out.json").exists()
    record = runfolder.run_record(tmp_path)
    assert len(record["launches"]) == 1 and "origin" not in record
    for name in ("checkpoints/3", "checkpoints/damaged_3", "clusters"):
        (tmp_path / name).mkdir()
        if name == "clusters":
            (tmp_path / "clusters/clustering.json").write_text("{}")
        refused(lambda: look(tmp_path), "config.model.depth")
        if name != "clusters":
            (tmp_path / name).rmdir()


def test_a_run_that_resumes_keeps_its_files(tmp_path):
    look(tmp_path).commit({"tokenizer.json": "first"}, tokenizer="a")
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    look(tmp_path).commit({"tokenizer.json": "second", "held_out.json": None}, tokenizer="b")
    assert (tmp_path / "tokenizer.json").read_text() == "first"
    assert runfolder.run_record(tmp_path)["tokenizer"] == "b"


# ---- the lock ----------------------------------------------------------------------------------


def test_a_second_launch_is_refused_with_process_and_host_of_the_first(tmp_path):
    """Of a process that was killed the lock is gone: test_launches.py."""
    folder = tmp_path / "run"
    with runfolder.Lock(folder) as lock:
        assert not folder.exists()  # made when the lock is taken
        lock.take()
        lock.take()  # no second time
        holder = f"process {os.getpid()} on {platform.node()}"
        refused(lambda: runfolder.Lock(folder).__enter__(), str(folder), holder)
        refused(lambda: runfolder.Lock(folder).take(), str(folder), holder)
    with runfolder.Lock(folder), pytest.raises(UsageError):
        runfolder.Lock(folder).take()


def test_a_file_system_without_locks_is_one_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with runfolder.Lock(tmp_path) as lock:
        lock.take()
    warning = capsys.readouterr().err
    assert str(tmp_path) in warning and warning.count("\n") == 1


def test_git_revision_is_that_of_efx(tmp_path):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    package, inside = tmp_path / "efx", tmp_path / "venv/site-packages/efx"
    inside.mkdir(parents=True)
    package.mkdir()
    (package / "x.py").write_text("1")
    assert runfolder.git_revision(package) is None  # no checkout
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    found = runfolder.git_revision(package)
    assert len(found["revision"]) == 40 and found["dirty"] is False
    (package / "x.py").write_text("2")
    assert runfolder.git_revision(package)["dirty"] is True
    assert runfolder.git_revision(inside) is None  # the checkout of another project


def test_reading_a_run_needs_no_jax(tmp_path):
    open_run(tmp_path)
    with writer_of(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
    script = """if True:
        import sys
        sys.modules["jax"] = sys.modules["numpy"] = None
        from efx.metrics import read_metrics, mean_of
        from efx.runfolder import recorded_config
        print(recorded_config(sys.argv[1])["steps"], read_metrics(sys.argv[1]))
    """
    done = run_script(script, tmp_path)
    assert done.stdout == "100 [{'step': 1, 'loss': 1.0}]\n", done.stderr
