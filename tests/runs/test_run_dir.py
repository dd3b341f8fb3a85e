"""The run directory: its records, the configs that may resume in it, damage, the lock."""

import concurrent.futures
import errno
import json
import os
import platform
import subprocess
import sys

import jax
import pytest
from refusals import refused
from run_files import largest_file, watched_flushes, writer_of

from efx import io, main, run_dir
from efx.errors import UsageError

CONFIG = {
    "seed": 0,
    "steps": 100,
    "model": {"depth": 4, "capacity": (0.5, 1), "dropout": None, "options": {}},
    "log": {"every": 10},
}
MAY_DIFFER = ("steps", r"log\..*")


def look(path, config=CONFIG, add_defaults=None):
    return run_dir.open_run(
        path, config, command_line=["efx", "--x"], may_differ=MAY_DIFFER, add_defaults=add_defaults
    )


def open_run(path, config=CONFIG):
    """A launch that gets as far as its first checkpoint, of which only the record is written."""
    run = look(path, config)
    record, folder = run.commit({}), path / "checkpoints/1"
    (folder / "meta").mkdir(parents=True, exist_ok=True)
    (folder / "meta/metadata").write_text(json.dumps({"record": record}))
    (folder / run_dir.MANIFEST).write_text("{}")
    (path / run_dir.METRICS_FILE).touch()
    return run


def changed(model=None, **changes):
    config = json.loads(json.dumps(CONFIG)) | changes
    config["model"] |= model or {}
    return config


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_new_run_and_its_records(tmp_path):
    path = tmp_path / "runs" / "a"
    run = open_run(path)
    assert run.is_new and run.run.path == path
    config = run_dir.RunDir(path).config
    assert config == json.loads(json.dumps(CONFIG))
    assert list(json.loads((path / "config.json").read_text())) == sorted(config)
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
    names = ["checkpoints", "config.json", "metrics.jsonl", "run.json"]
    assert sorted(p.name for p in path.iterdir()) == names


def test_permitted_changes_are_recorded(tmp_path):
    open_run(tmp_path)
    open_run(tmp_path, changed(steps=200, log={"every": 5}))
    assert run_dir.RunDir(tmp_path).config["steps"] == 200
    launches = json.loads((tmp_path / "run.json").read_text())["launches"]
    assert launches[1]["changed"] == {"steps": [100, 200], "log.every": [10, 5]}
    open_run(tmp_path, changed(seed=0.0))  # an equal number of another type is the same


def test_a_run_that_is_older_than_a_setting_resumes_at_its_default(tmp_path):
    open_run(tmp_path)

    def add_defaults(stored):
        return {**stored, "model": {**stored["model"], "new": 1}}

    assert not look(tmp_path, changed(model={"new": 1}), add_defaults).is_new
    refused(lambda: look(tmp_path, changed(model={"new": 2}), add_defaults), "config.model.new")
    run_dir.RunDir(tmp_path).check_config(changed(model={"new": 1}), MAY_DIFFER, add_defaults)


@pytest.mark.parametrize(
    "config, names",
    [
        (changed(model={"depth": 6}, steps=5), ["config.model.depth: 4 in the run, 6 here"]),
        (changed(model={"new": 1}), ["config.model.new", "absent"]),
        (changed(seed=1, model={"depth": 6}), ["config.seed", "config.model.depth"]),
    ],
)
@pytest.mark.parametrize("copy", ["kept", "edited", "lost"])
def test_a_run_of_another_config_is_refused(tmp_path, config, names, copy):
    """The checkpoint's config counts, whatever became of the copy in config.json."""
    open_run(tmp_path)
    if copy == "edited":
        (tmp_path / "config.json").write_text(json.dumps(config))
    elif copy == "lost":
        (tmp_path / "config.json").unlink()
    assert not look(tmp_path).is_new
    before = files_of(tmp_path)
    refused(lambda: open_run(tmp_path, config), *names, str(tmp_path))
    assert files_of(tmp_path) == before


def test_a_directory_that_is_not_a_run_is_refused_and_left_alone(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("absent", "empty"):
        refused(lambda: run_dir.RunDir(tmp_path / name).config, str(tmp_path / name))  # noqa: B023
    (tmp_path / "stray").mkdir()
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
    io.write_atomic(path, "old")
    with largest_file(1000):
        refused(lambda: io.write_atomic(path, "x" * 5000), str(path))
    with pytest.raises(KeyError), io.replacing(folder) as part:
        part.mkdir()
        (part / "a").write_text("half")
        raise KeyError
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_writers_of_the_same_process_number_do_not_disturb_each_other(tmp_path):
    """Containers that share a disk number their processes alike; so do the threads of one."""
    path, texts = tmp_path / "file", [letter * 200_000 for letter in "abcd"]
    io.write_text(path, texts[0])

    def write(text):
        for _ in range(30):
            io.write_text(path, text)

    with concurrent.futures.ThreadPoolExecutor(len(texts)) as pool:
        writes = [pool.submit(write, text) for text in texts]
        while not all(each.done() for each in writes):
            assert path.read_text() in texts
    assert [each.exception() for each in writes] == [None] * 4
    assert list(tmp_path.iterdir()) == [path]


def test_files_and_folders_are_flushed_before_they_are_renamed_and_their_names_after(tmp_path):
    with watched_flushes() as flushes:
        io.write_text(tmp_path / "file", "text")
        with io.replacing(tmp_path / "folder") as part:
            (part / "inner").mkdir(parents=True)
            (part / "inner/file").write_text("text")
        assert flushes.early == flushes.missing(tmp_path) == []
    other = tmp_path / "other"
    other.write_text("")
    assert (tmp_path / "file").stat().st_mode == other.stat().st_mode


# ---- files that are damaged or of another program ----------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["{}", "", "\udcff", '{"model": 3}', '{"model": {"family": []}}'],
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
        refused(lambda: run_dir.RunDir(tmp_path).setting(key), "config.json")  # noqa: B023
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["1", "checkpoints", "config.json"]


@pytest.mark.parametrize("text", ["[]", '{"launches": {}}', "{"])
def test_a_record_of_another_kind_is_one_line(tmp_path, text):
    open_run(tmp_path)
    (tmp_path / "run.json").write_text(text)
    refused(lambda: run_dir.RunDir(tmp_path).record, "run.json")
    refused(lambda: open_run(tmp_path), "run.json")


# ---- the lock ----------------------------------------------------------------------------------


def test_a_second_launch_is_refused_with_process_and_host_of_the_first(tmp_path):
    """Of a process that was killed the lock is gone: test_launches.py."""
    folder = tmp_path / "run"
    with run_dir.Lock(folder) as lock:
        assert not folder.exists()  # made when the lock is taken
        lock.take()
        lock.take()  # no second time
        holder = f"process {os.getpid()} on {platform.node()}"
        refused(lambda: run_dir.Lock(folder).__enter__(), str(folder), holder)
        refused(lambda: run_dir.Lock(folder).take(), str(folder), holder)
    with run_dir.Lock(folder), pytest.raises(UsageError):
        run_dir.Lock(folder).take()


def test_a_file_system_without_locks_is_one_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with run_dir.Lock(tmp_path) as lock:
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
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    found = run_dir.git_revision(package)
    assert len(found["revision"]) == 40 and found["dirty"] is False
    assert run_dir.git_revision(inside) is None  # the checkout of another project


def test_reading_a_run_needs_no_jax(tmp_path, root):
    open_run(tmp_path)
    with writer_of(tmp_path) as writer:
        writer.write(1, {"loss": 1.0})
    script = """if True:
        import sys
        sys.modules["jax"] = sys.modules["numpy"] = None
        from efx.logging import read_metrics
        from efx.run_dir import RunDir
        print(RunDir(sys.argv[1]).config["steps"], read_metrics(sys.argv[1]))
    """
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.stdout == "100 [{'step': 1, 'loss': 1.0}]\n", done.stderr
