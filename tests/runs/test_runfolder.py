"""The run folder: its records, which config may go on in it, what a bad one says."""

import contextlib
import errno
import json
import os
import platform
import resource
import subprocess
import sys

import jax
import pytest
from metrics_helpers import environment, make, run_script
from run_files import edit

from efx import atomic, main, run_settings, runfolder, settings
from efx.errors import UsageError

CONFIG = {
    "seed": 0,
    "steps": 100,
    "model": {"depth": 4, "capacity": (0.5, 1), "dropout": None, "options": {}},
    "log": {"every": 10},
}
MAY_DIFFER = ("steps", r"log\..*")


def look(path, config=CONFIG, may_differ=MAY_DIFFER):
    return runfolder.open_run(path, config, command_line=["efx", "--x"], may_differ=may_differ)


def open_run(path, config=CONFIG, may_differ=MAY_DIFFER):
    """A launch that got as far as its first checkpoint."""
    run = look(path, config, may_differ)
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
    assert not open_run(path).is_new
    assert len(json.loads((path / "run.json").read_text())["launches"]) == 2
    assert sorted(p.name for p in path.iterdir()) == ["checkpoints", "config.json", "run.json"]


def test_permitted_changes_are_recorded(tmp_path):
    open_run(tmp_path)
    open_run(tmp_path, changed(steps=200, log__every=5))
    assert runfolder.recorded_config(tmp_path)["steps"] == 200
    launches = json.loads((tmp_path / "run.json").read_text())["launches"]
    assert launches[1]["changed"] == {"steps": [100, 200], "log.every": [10, 5]}


def test_a_run_that_is_older_than_a_setting_goes_on_at_its_default(tmp_path):
    open_run(tmp_path)

    def launch(new):
        def completed(stored):
            return {**stored, "model": {**stored["model"], "new": 1}}

        config = changed(model__new=new)
        runfolder.check_config(tmp_path, config, MAY_DIFFER, completed)
        return runfolder.open_run(
            tmp_path, config, command_line=[], may_differ=MAY_DIFFER, completed=completed
        )

    assert not launch(1).is_new
    with pytest.raises(UsageError, match="config.model.new: 1 in the run, 2 here"):
        launch(2)


@pytest.mark.parametrize(
    "config,said",
    [
        (changed(model__depth=6, steps=5), ["config.model.depth: 4 in the run, 6 here"]),
        (changed(seed=True), ["config.seed: 0 in the run, True here"]),
        (changed(model__new=1), ["config.model.new: '(absent)' in the run, 1 here"]),
        (
            changed(model__capacity=[0.5]),
            ["config.model.capacity: [0.5, 1] in the run, [0.5] here"],
        ),
        (changed(seed=1, model__depth=6), ["config.seed: 0", "config.model.depth: 4"]),
        (changed(**{f"key{i}": i for i in range(9)}), ["config.key0", "and 3 more"]),
    ],
)
def test_a_run_of_another_config_is_refused(tmp_path, config, said):
    open_run(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(UsageError) as error:
        open_run(tmp_path, config)
    line = str(error.value)
    assert all(part in line for part in said) and "use another --workdir" in line
    assert "\n" not in line and "config.steps" not in line
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_equal_numbers_of_another_type_are_the_same(tmp_path):
    open_run(tmp_path)
    open_run(tmp_path, changed(seed=0.0, model__capacity=(0.5, 1.0)))


def test_bad_run_folders(tmp_path):
    cases = {
        "absent": "there is no such folder",
        "empty": "it has no config.json",
        "broken": "config.json is damaged: not JSON",
        "folder": "config.json",
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text('{"seed": 1')
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for name, message in cases.items():
        with pytest.raises(UsageError) as error:
            runfolder.recorded_config(tmp_path / name)
        assert message in str(error.value) and name in str(error.value)
    (tmp_path / "broken" / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(UsageError, match="config.json is damaged"):
        open_run(tmp_path / "broken")
    for name in ("checkpoints", "metrics.jsonl", "run.json", "tokenizer.json", "held_out.json"):
        (tmp_path / "stray" / name).mkdir(parents=True)
        with pytest.raises(UsageError, match=f"has {name} but no config.json"):
            open_run(tmp_path / "stray")
        (tmp_path / "stray" / name).rmdir()
    (tmp_path / "stray" / "slurm-1.out").write_text("")  # what a scheduler leaves is no obstacle
    assert open_run(tmp_path / "stray").is_new


def test_an_unwritable_workdir_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UsageError) as error:
            open_run(path)
        line = str(error.value)
        assert "cannot write" in line and str(tmp_path / "file") in line and "another" in line
    if os.geteuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(UsageError, match="permission denied"):
            open_run(tmp_path / "closed" / "run")


def test_atomic_writes_leave_the_old_file_when_they_fail(tmp_path):
    path = tmp_path / "config.json"
    runfolder.write_atomic(path, "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UsageError, match="cannot write .*config.json"):
            runfolder.write_atomic(path, "x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    folder = tmp_path / "folder"
    with pytest.raises(KeyError), atomic.replacing(folder) as part:
        part.mkdir()
        (part / "a").write_text("half")
        raise KeyError
    assert not list(tmp_path.iterdir())
    with atomic.replacing(folder) as part:
        part.mkdir()
        (part / "a").write_text("whole")
        assert not folder.exists()
    assert (folder / "a").read_text() == "whole" and len(list(tmp_path.iterdir())) == 1


# ---- files that were damaged, edited, or are somebody else's -----------------------------------


def test_a_byte_of_a_record_that_was_changed_is_noticed(tmp_path):
    """Property: config.json and run.json are as they were written, or it is said; 70 of 400 flipped
    bytes gave other values without a word."""
    look(tmp_path).commit({}, tokenizer="a hash", subset="another")
    for name, read in (("config.json", runfolder.recorded_config),
                       ("run.json", runfolder.run_record)):  # fmt: skip
        path = tmp_path / name
        whole, contents = path.read_bytes(), read(tmp_path)
        assert "checksum" not in contents and b'"checksum"' in whole
        noticed = 0
        for i, byte in enumerate(whole):
            for bit in (0, 2, 7):  # a digit becomes another one, a letter another or no text
                path.write_bytes(whole[:i] + bytes([byte ^ 1 << bit]) + whole[i + 1 :])
                try:
                    found = read(tmp_path)  # a blank became another one, or the name "checksum"
                    assert {key: found[key] for key in contents} == contents
                except UsageError as error:
                    noticed += 1
                    assert str(path) in str(error) and "\n" not in str(error)
        assert noticed > 2 * len(whole)
        for end in range(1, len(whole) - 1):
            path.write_bytes(whole[:end])
            with pytest.raises(UsageError, match=name):
                read(tmp_path)
        path.write_bytes(whole)


def test_a_config_that_was_edited_on_purpose(tmp_path):
    """It is told how to say so, once; then the file has a checksum again."""
    path = tmp_path / "config.json"
    open_run(tmp_path)
    path.write_text(path.read_text().replace('"steps": 100', '"steps": 300'))
    with pytest.raises(UsageError, match='edited on purpose, delete its entry "checksum"'):
        open_run(tmp_path)
    edit(path, lambda config: config)
    assert runfolder.recorded_config(tmp_path)["steps"] == 300
    with pytest.raises(UsageError, match="config.model.depth: 4 in the run, 6 here"):
        open_run(tmp_path, changed(model__depth=6))
    open_run(tmp_path, changed(steps=300))
    assert '"checksum"' in path.read_text()


HOSTILE = [
    "null", "[]", "3", '"text"', "{}", '[{"seed": 0}]', "[" * 100_000, "", "\udcff", '{"model": 3}',
    '{"model": {"family": []}}', '{"model": {"family": null}, "a.b": 1}',
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:12])
def test_a_config_that_is_none_is_one_line(tmp_path, text, capsys):
    """In every mode, and whatever reads it for a part; the folder stays as it was."""
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    path = tmp_path / "config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    for mode in ("train", "evaluate", "sample", "cluster", "compose"):
        assert main.main(["efx", f"--mode={mode}", f"--workdir={tmp_path}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("efx: error: ") and str(path) in line
    for key in ("data.source", "model.scan_layers", "adapter.gate", "steps"):
        with pytest.raises(UsageError, match="config.json"):
            runfolder.recorded_setting(tmp_path, key)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["1", "checkpoints", "config.json"]


def test_a_config_that_lacks_a_block_is_one_line(tmp_path, capsys):
    whole = json.loads(json.dumps(settings.as_dict(run_settings.Config())))
    for name in whole:
        for value in ("absent", [], None):
            config = {**whole, name: value}
            if value == "absent":
                del config[name]
            (tmp_path / "config.json").write_text(json.dumps(config))
            status = main.main(["efx", "--mode=sample", f"--workdir={tmp_path}"])
            (line,) = capsys.readouterr().err.splitlines()
            # A config that is right after all (no rules) is of a run without a checkpoint.
            assert status == 2 and (f"config.{name}" in line or "checkpoint" in line), line


RECORDS = [
    "[]", "null", '{"launches": {}}', '{"text": "x"}', '{"text": {}}', '{"origin": {"run": 1}}',
    '{"tokenizer": 3}', '{"subset": []}',
]  # fmt: skip


@pytest.mark.parametrize("text", RECORDS)
def test_a_record_that_is_none_is_one_line(tmp_path, text):
    open_run(tmp_path)
    (tmp_path / "run.json").write_text(text)
    for read in (runfolder.run_record, runfolder.saved_tokenizer, runfolder.recorded_origin):
        with pytest.raises(UsageError, match="run.json") as error:
            read(tmp_path)
        assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match="run.json"):
        open_run(tmp_path)


def test_a_folder_of_another_program_is_left_alone(tmp_path):
    """A model of Hugging Face has a config.json and a tokenizer.json, too; both were replaced."""
    for name, text in (("config.json", '{"model_type": "gpt2"}'), ("tokenizer.json", "{}")):
        (tmp_path / name).write_text(text)
    before = files_of(tmp_path)
    with pytest.raises(UsageError, match="config.json is not a config of efx"):
        look(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(UsageError, match="has tokenizer.json but no config.json"):
        look(tmp_path)
    assert files_of(tmp_path).items() <= before.items()


def test_text_that_is_none_is_not_the_tokenizer_of_the_run(tmp_path):
    look(tmp_path).commit({"tokenizer.json": "mine"}, tokenizer=runfolder.checksum("mine"))
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    (tmp_path / "tokenizer.json").write_bytes(b"min\xe5")  # a flipped bit
    with pytest.raises(UsageError, match="tokenizer.json is missing, or not the tokenizer"):
        runfolder.saved_tokenizer(tmp_path)


# ---- what is written, and when -----------------------------------------------------------------


def files_of(folder):
    return {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_without_a_checkpoint_is_blocked(tmp_path):
    """Property: only what cannot be had again binds a folder to a config."""
    look(tmp_path).commit({"tokenizer.json": "old", "held_out.json": "old"}, origin={"run": "x"})
    other = changed(model__depth=6)
    assert look(tmp_path, other).is_new
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp").mkdir()  # killed in its first save
    run = look(tmp_path, other)
    run.commit({"tokenizer.json": "new", "held_out.json": None})
    assert runfolder.recorded_config(tmp_path)["model"]["depth"] == 6
    assert (tmp_path / "tokenizer.json").read_text() == "new"
    assert not (tmp_path / "held_out.json").exists()
    record = runfolder.run_record(tmp_path)
    assert len(record["launches"]) == 1 and "origin" not in record
    for name in ("checkpoints/3", "checkpoints/damaged_3", "clusters"):
        (tmp_path / name).mkdir()
        if name == "clusters":
            (tmp_path / "clusters/clustering.json").write_text("{}")
        with pytest.raises(UsageError, match="has a run with another config"):
            look(tmp_path)
        if name != "clusters":
            (tmp_path / name).rmdir()


def test_looking_writes(tmp_path):
    """Property: a launch that fails after it has looked leaves the folder as it was."""
    look(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
    open_run(tmp_path / "run")
    before = files_of(tmp_path)
    assert look(tmp_path / "run", changed(steps=200)).changed == {"steps": [100, 200]}
    assert files_of(tmp_path) == before


def test_a_run_that_goes_on_keeps_its_files(tmp_path):
    look(tmp_path).commit({"tokenizer.json": "first"}, tokenizer="a")
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    look(tmp_path).commit({"tokenizer.json": "second", "held_out.json": None}, tokenizer="b")
    assert (tmp_path / "tokenizer.json").read_text() == "first"
    assert runfolder.run_record(tmp_path)["tokenizer"] == "b"


def test_a_tokenizer_or_split_that_was_replaced_is_taken(tmp_path):
    """Property: what a run wrote down of its text is compared with what is there."""
    origin = {"source": "s", "eval_source": None, "of": "s", "held_out": {"bytes": [1, 2]}}
    held_out, text = runfolder.text_entries(origin)
    files = {"tokenizer.json": "mine", "held_out.json": held_out}
    look(tmp_path).commit(files, text=text, tokenizer=runfolder.checksum("mine"))
    assert runfolder.saved_tokenizer(tmp_path) is None  # no run yet
    (tmp_path / "checkpoints/1").mkdir(parents=True)
    assert runfolder.saved_tokenizer(tmp_path).read_text() == "mine"
    assert runfolder.recorded_origin(tmp_path) == origin
    for name, read in (("tokenizer.json", runfolder.saved_tokenizer),
                       ("held_out.json", runfolder.recorded_origin)):  # fmt: skip
        (tmp_path / name).write_text("other")
        with pytest.raises(UsageError, match=name):
            read(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(UsageError, match=name):
            read(tmp_path)


# ---- the lock ----------------------------------------------------------------------------------

HOLD = """if True:
    import sys
    from efx.runfolder import Lock
    with Lock(sys.argv[1]) as lock:
        lock.take()
        print("locked", flush=True)
        sys.stdin.read()
"""


def test_two_launches_in_one_folder(tmp_path):
    """Property: the second is refused by name of the first, which kill -9 makes room for."""
    folder = tmp_path / "run"
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=environment(),
    )  # fmt: skip
    try:
        assert first.stdout.readline() == b"locked\n"
        for take in (lambda: runfolder.Lock(folder).__enter__(),
                     lambda: runfolder.Lock(folder).take()):  # fmt: skip
            with pytest.raises(UsageError) as error:
                take()
            said = f"in use by process {first.pid} on {platform.node()}"
            assert said in str(error.value) and "\n" not in str(error.value)
        assert first.poll() is None
    finally:
        first.kill()
        first.communicate()
    with runfolder.Lock(folder), pytest.raises(UsageError, match=f"process {os.getpid()} on"):
        runfolder.Lock(folder).take()
    with runfolder.Lock(folder) as lock:
        lock.take()  # no second time


def test_a_lock_makes_no_folder_before_it_is_taken(tmp_path):
    with runfolder.Lock(tmp_path / "run") as lock:
        assert not (tmp_path / "run").exists()
        lock.take()
        assert (tmp_path / "run" / ".lock").exists()


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with runfolder.Lock(tmp_path) as lock:
        lock.take()
    said = capsys.readouterr().err
    assert said.count("cannot be locked") == 1 and str(tmp_path) in said and said.count("\n") == 1


def test_process_0_takes_the_lock_for_all(tmp_path, monkeypatch):
    """The others learn from it whether they may go on."""
    from jax.experimental import multihost_utils

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    for answer in (0, -1):
        monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda x, a=answer: a)
        with contextlib.ExitStack() as stack:
            if answer:
                stack.enter_context(pytest.raises(UsageError, match="refused by process 0"))
            runfolder.Lock(tmp_path).take()
        assert not (tmp_path / ".lock").exists()


def test_git_revision_is_of_efx_and_of_nothing_else(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True
        )

    package = tmp_path / "efx"
    package.mkdir()
    (package / "x.py").write_text("1")
    assert runfolder.git_revision(package) is None  # no checkout
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "x")
    measured = package.parent / "results/speed.json"
    measured.parent.mkdir()
    measured.write_text("{}")  # what comes out changes nothing that runs
    found = runfolder.git_revision(package)
    assert len(found["revision"]) == 40 and found["dirty"] is False
    (package / "x.py").write_text("2")
    assert runfolder.git_revision(package)["dirty"] is True
    inside = tmp_path / "venv" / "site-packages" / "efx"
    inside.mkdir(parents=True)
    assert runfolder.git_revision(inside) is None  # someone else's checkout


def test_reading_a_run_needs_no_jax(tmp_path):
    open_run(tmp_path)
    with make(tmp_path) as writer:
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
