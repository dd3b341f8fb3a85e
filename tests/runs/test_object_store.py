"""Runs and data in an object store, against a stand-in; and addresses that are refused."""

import io
import os
import socket
import threading
from types import SimpleNamespace

import fsspec
import jax
import numpy as np
import object_store
import pytest
from jax.experimental import multihost_utils

from efx import main, runfolder, storage, train, use
from efx.configs import common
from efx.data import disk_cache, load, write_token_shards
from efx.data.tokenizers import ByteTokenizer
from efx.errors import PassingError, UsageError
from efx.metrics import read_metrics
from efx.profiler import Profile
from efx.studies import sweep

SMALL = {
    "data.seq_len": 16, "data.batch_size": 8, "model.width": 16, "model.depth": 1,
    "optim.schedule.warmup_steps": 1, "optim.schedule.decay_steps": 8, "log.every": 1,
    "sample.every": 2, "sample.max_new_tokens": 4, "evaluate.every": 0, "evaluate.batch_size": 8,
    "evaluate.max_batches": 1, "checkpoint.every": 2, "checkpoint.keep_best": 0,
    "checkpoint.keep_last": 1, "mesh.data": -1,
}  # fmt: skip
TEXT = "".join(np.random.default_rng(0).choice(list("abcdefgh "), 6000))
RUN = "gs://bucket/runs/a"


@pytest.fixture(scope="module")
def objects():
    with pytest.MonkeyPatch.context() as patch, object_store.standing_in(patch) as objects:
        object_store.put("texts/one/a.txt", TEXT.encode())
        yield objects


def config(tmp, **changes):
    made = common.base()
    common.apply(made, SMALL | {"data.cache_dir": str(tmp / "cache")} | changes)
    return made


def losses(workdir):
    return {row["step"]: row["train/loss"] for row in read_metrics(workdir) if "train/loss" in row}


@pytest.fixture(scope="module")
def run(objects, tmp_path_factory):
    """A folder in which nothing is to appear, after a run to step 4 in the bucket, and to 6."""
    tmp = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        (tmp / "cwd").mkdir()
        (tmp / "tmp").mkdir()
        patch.chdir(tmp / "cwd")
        patch.setattr("tempfile.tempdir", str(tmp / "tmp"))
        for steps in (4, 6):
            source = {"data.source": "text:gs://texts/one", "steps": steps}
            train.train_and_evaluate(config(tmp, **source), RUN)
    return tmp


def test_a_run_in_a_bucket_is_that_of_a_disk(run, objects):
    """It used to make a folder of the name `gs:` here."""
    (run / "text").mkdir()
    (run / "text/a.txt").write_text(TEXT)
    for steps in (4, 6):
        source = {"data.source": f"text:{run / 'text'}", "steps": steps}
        train.train_and_evaluate(config(run, **source), run / "disk")
    assert losses(RUN) == losses(run / "disk") and len(losses(RUN)) == 6
    for name in ("step_00000002.txt", "step_00000006.txt"):
        text = objects[f"bucket/runs/a/samples/{name}"][0].decode()
        assert text == (run / "disk/samples" / name).read_text()
    names = {name.removeprefix("bucket/runs/a/") for name in objects if name.startswith("bucket")}
    on_disk = {p.relative_to(run / "disk").as_posix() for p in (run / "disk").rglob("*")}
    assert {name for name in names if "/" not in name} == {
        name for name in on_disk if "/" not in name and name != ".lock"
    } - {"checkpoints", "samples", "tensorboard"}
    assert sum(name.startswith("tensorboard/") for name in names) == 2
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints")} == {"6"}
    assert list((run / "cwd").iterdir()) == list((run / "tmp").iterdir()) == []


def test_use_of_a_run_in_a_bucket(run):
    recorded, stream = (
        config(run, **{"data.source": "text:gs://texts/one", "steps": 6}),
        io.StringIO(),
    )
    metrics = use.evaluate(recorded, RUN)
    assert metrics["eval/loss"] == pytest.approx(read_metrics(RUN)[-1]["eval/loss"])
    recorded.sample.prompt = "abc"
    use.sample(recorded, RUN, stream=stream)
    assert stream.getvalue().startswith("abc") and len(stream.getvalue()) > 3
    # Another run that starts from it, here.
    second = {"data.source": "text:gs://texts/one", "steps": 1, "init.run": RUN}
    train.train_and_evaluate(config(run, **second), run / "second")


def test_a_bucket_has_no_locks(objects, tmp_path, capsys):
    from efx import runfolder

    for _ in range(2):
        with runfolder.Lock("gs://bucket/runs/locked") as lock:
            lock.take()
            lock.take()
        said = capsys.readouterr().err.splitlines()
        assert said == [
            "efx: warning: gs://bucket/runs/locked cannot be locked (an object store has no locks):"
            " make sure that no other launch trains there"
        ]


def test_damage_in_a_bucket(run, objects, capsys):
    """A flipped byte is found; a step without its manifest, or without what orbax writes after it,
    as of a save that was interrupted, is not taken for one. Orbax reads none without the latter,
    and the run could not go on."""
    begin = "bucket/runs/a/checkpoints/6/"
    name = max(
        (n for n in objects if n.startswith(f"{begin}state")), key=lambda n: len(objects[n][0])
    )
    lasts = [f"{begin}{last}" for last in ("efx_manifest.json", "commit_success.txt")]
    before = {key: objects[key] for key in (name, *lasts)}
    data = bytearray(before[name][0])
    data[len(data) // 2] ^= 1
    recorded = config(run, **{"data.source": "text:gs://texts/one", "steps": 6})
    try:
        object_store.put(name, data)
        with pytest.raises(
            UsageError, match="checkpoint 6 in gs://bucket/.* is damaged: item state"
        ):
            use.sample(recorded, RUN)
        for last in lasts:
            objects.update(before)
            del objects[last]
            with pytest.raises(UsageError, match="there is no finished checkpoint in gs://bucket"):
                use.sample(recorded, RUN)
            assert "6 is not a finished checkpoint; ignoring" in capsys.readouterr().err
    finally:
        objects.update(before)


def test_a_save_that_was_cut_off_in_a_bucket(run, objects, capsys):
    """The run goes on from the step before, and what is left of that save is out of the way when
    the step is saved again: object by object, as a bucket has no folders to be renamed."""
    before = dict(objects)
    begin, source = "bucket/runs/a/checkpoints/", {"data.source": "text:gs://texts/one"}
    expected = losses(RUN)
    try:
        # The one of step 4 is no more, as only the newest is kept.
        train.train_and_evaluate(config(run, **source, steps=8), RUN)
        for last in ("efx_manifest.json", "commit_success.txt"):
            del objects[f"{begin}8/{last}"]
        object_store.put(f"{begin}8/state/left", b"")
        capsys.readouterr()
        objects.update({name: data for name, data in before.items() if name.startswith(begin)})
        train.train_and_evaluate(config(run, **source, steps=8), RUN)
        said = capsys.readouterr().err
        assert "checkpoint 8 in gs://bucket/runs/a/checkpoints is not usable; renamed it" in said
        assert f"{begin}8/commit_success.txt" in objects
        assert f"{begin}8/state/left" not in objects  # nothing of one save in another
        assert losses(RUN).items() >= expected.items() and max(losses(RUN)) == 8
    finally:
        objects.clear()
        objects.update(before)


def first_inputs(tmp, source):
    data = load(config(tmp, **{"data.source": source}).data, seed=0)
    return next(data.train_iterator())["inputs"], data


def test_data_in_a_bucket(objects, tmp_path):
    """A file, a folder, a pattern and tokens; copied once, and again when they have changed."""
    object_store.put("texts/two/sub/b.txt", TEXT[:3000].encode())
    object_store.put("texts/two/manifest.json", TEXT[3000:].encode())
    (tmp_path / "two/sub").mkdir(parents=True)
    (tmp_path / "two/sub/b.txt").write_text(TEXT[:3000])
    (tmp_path / "two/manifest.json").write_text(TEXT[3000:])
    for remote, local in (
        ("text:s3://texts/two", f"text:{tmp_path}/two"),
        ("text:s3://texts/two/sub/*.txt", f"text:{tmp_path}/two/sub/b.txt"),
    ):
        (there, data), (here, local_data) = (
            first_inputs(tmp_path, source) for source in (remote, local)
        )
        np.testing.assert_array_equal(there, here)
        assert data.train_tokens == local_data.train_tokens
    object_store.put("texts/two/sub/b.txt", TEXT[:2000].encode())
    assert first_inputs(tmp_path, "text:s3://texts/two")[1].train_tokens < data.train_tokens + 2700
    tokenizer = ByteTokenizer()
    write_token_shards(tmp_path / "tokens", tokenizer, [TEXT[:5000]], [TEXT[5000:]])
    for path in (tmp_path / "tokens").iterdir():
        object_store.put(f"texts/tokens/{path.name}", path.read_bytes())
    there, here = (
        first_inputs(tmp_path, f"tokens:{folder}")[0]
        for folder in ("gs://texts/tokens", tmp_path / "tokens")
    )
    np.testing.assert_array_equal(there, here)
    with pytest.raises(UsageError, match=r"config.data.source='text:gs://texts/no': no such file"):
        first_inputs(tmp_path, "text:gs://texts/no")


def test_data_that_has_no_room_is_not_copied(objects, tmp_path, monkeypatch):
    for i in range(3):
        object_store.put(f"texts/large/{i}.txt", TEXT.encode())
    usage = SimpleNamespace(free=2 * len(TEXT))
    monkeypatch.setattr(disk_cache.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(object_store.Store, "get_file", lambda *_: pytest.fail("it is copied"))
    with pytest.raises(UsageError) as error:
        first_inputs(tmp_path, "text:gs://texts/large")
    assert str(error.value) == (
        f"config.data.source='text:gs://texts/large': 17.6 KiB do not fit into the cache "
        f"{tmp_path}/cache/fetched: its disk has 11.7 KiB free; choose another folder with"
        " config.data.cache_dir or EFX_CACHE, or mount the bucket and use the path of the mount"
    )
    assert [path for path in (tmp_path / "cache/fetched").iterdir() if path.is_dir()] == []


def test_several_files_are_copied_at_a_time(objects, tmp_path, monkeypatch, caplog):
    """All that may be at once, and not more; what is copied is said, once."""
    count = 3 * disk_cache._COPIES
    for i in range(count):
        object_store.put(f"texts/many/{i:02}.txt", TEXT[i : i + 1000].encode())
    together = threading.Barrier(disk_cache._COPIES)
    copied, copying, most = object_store.Store.get_file, [], []

    def get_file(self, address, path):
        copying.append(address)
        together.wait(timeout=60)
        most.append(len(copying))
        copied(self, address, path)
        copying.remove(address)

    monkeypatch.setattr(object_store.Store, "get_file", get_file)
    with caplog.at_level("INFO", logger="efx"):
        for _ in range(2):
            _, data = first_inputs(tmp_path, "text:gs://texts/many")
    assert len(most) == count and max(most) == disk_cache._COPIES
    assert data.train_tokens > 0.8 * count * 1000
    said = [record.getMessage() for record in caplog.records if "copying" in record.getMessage()]
    assert said == [
        "copying config.data.source='text:gs://texts/many': 23.4 KiB in 24 files, to"
        f" {tmp_path}/cache/fetched"
    ]


def test_a_copy_that_fails_ends_the_others(objects, tmp_path, monkeypatch):
    for i in range(3 * disk_cache._COPIES):
        object_store.put(f"texts/broken/{i:02}.txt", TEXT.encode())
    begun, release = [], threading.Event()

    def get_file(self, address, path):
        begun.append(address)
        if address.endswith("03.txt"):
            raise PermissionError("not this one")
        release.wait(60)

    monkeypatch.setattr(object_store.Store, "get_file", get_file)
    with pytest.raises(UsageError, match="cannot be reached: PermissionError: not this one"):
        first_inputs(tmp_path, "text:gs://texts/broken")
    release.set()
    for thread in threading.enumerate():
        if thread.name == "efx-copy":
            thread.join(60)
    assert len(begun) <= disk_cache._COPIES + 1
    assert [path for path in (tmp_path / "cache/fetched").iterdir() if path.is_dir()] == []


def test_an_upload_that_fails(objects, monkeypatch, capsys):
    """While training goes on it is tried again, with what was missed; at the end it is an error."""
    run_folder = storage.folder("gs://bucket/runs/mirrored")
    object_store.put("bucket/runs/mirrored/samples/step_1.txt", b"old")
    object_store.put("bucket/runs/mirrored/samples/step_2.txt", b"old")
    with storage.Mirror(run_folder, ("samples", "absent")) as mirror:
        assert sorted(path.name for path in mirror.path.rglob("*.txt")) == [
            "step_1.txt",
            "step_2.txt",
        ]
        (mirror.path / "samples/step_2.txt").unlink()
        (mirror.path / "metrics.jsonl").write_text("rows")
        with monkeypatch.context() as patch:
            patch.setattr(object_store, "put", None)
            mirror.upload(if_due=True)
            mirror.wait()
            said = capsys.readouterr().err
            assert said.startswith(
                "efx: warning: gs://bucket/runs/mirrored cannot be reached: Type"
            )
            mirror.upload(if_due=True)  # not due for a minute
            assert capsys.readouterr().err == ""
            # Launchers start again after it: the run is sound, and the store may be back.
            with pytest.raises(PassingError, match="runs/mirrored cannot be reached") as error:
                mirror.upload()
            assert error.value.status == 75
        local = mirror.path
    assert not local.exists()
    kept = {name: data for name, (data, _) in objects.items() if "mirrored" in name}
    assert kept == {
        "bucket/runs/mirrored/samples/step_1.txt": b"old",
        "bucket/runs/mirrored/metrics.jsonl": b"rows",
    }


def test_an_upload_that_takes_long(objects, monkeypatch):
    """Training goes on beside it; one that has to be done waits for it and adds what is new."""
    run_folder, put = storage.folder("gs://bucket/runs/slow"), object_store.put
    begun, may_end, waited = threading.Event(), threading.Event(), []

    def slow(name, data):
        begun.set()
        waited.append(may_end.wait(5))
        return put(name, data)

    monkeypatch.setattr(object_store, "put", slow)
    with storage.Mirror(run_folder, ()) as mirror:
        (mirror.path / "metrics.jsonl").write_text("one\n")
        mirror.upload(if_due=True)
        assert begun.wait(5)
        (mirror.path / "metrics.jsonl").write_text("one\ntwo\n")
        monkeypatch.setattr(mirror, "_next", 0.0)
        mirror.upload(if_due=True)  # not beside another one
        may_end.set()
        mirror.upload()
        assert waited == [True, True]
        assert objects["bucket/runs/slow/metrics.jsonl"][0] == b"one\ntwo\n"


def test_a_bucket_that_processes_share(objects, monkeypatch):
    """Nobody may list all buckets, for which process 0 asked, and every such run was refused."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for name in ("broadcast_one_to_all", "process_allgather"):
        monkeypatch.setattr(multihost_utils, name, np.asarray)
    before = dict(objects)
    runfolder.check_shared("gs://bucket/runs/shared")
    assert objects == before


def test_profiles_of_two_processes(objects, monkeypatch):
    """Each process uploads its own from a folder of its own; none replaces that of the other."""
    run_folder = storage.folder("gs://bucket/runs/profiled")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        with storage.Mirror(run_folder, ()) as mirror:
            profile = Profile(mirror.path / "profile", 7)
            jax.block_until_ready(jax.numpy.ones(3) + process)
            profile.end()
    names = {name.removeprefix("bucket/runs/profiled/") for name in objects if "profiled" in name}
    kinds = (".trace.json.gz", ".xplane.pb")
    assert names == {
        f"profile/plugins/profile/step_7/process_{process}_{socket.gethostname()}{kind}"
        for process in range(2)
        for kind in kinds
    }


# ---- addresses that are refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--workdir=s3://b/run"], "--workdir=s3://b/run: checkpoints cannot be written to s3://"),
        (["--workdir=memory://run"], "--workdir=memory://run: checkpoints cannot be written to memory://"),
        (["--workdir=gs://b/run"], "--workdir=gs://b/run: gs:// needs the extra `gcs`"),
        (["--workdir=x", "--config.data.source=text:s3://b/t"],
         "config.data.source='text:s3://b/t': s3:// needs the extra `s3`"),
        (["--workdir=x", "--config.data.source=tokens:ftp://b/t"],
         "config.data.source='tokens:ftp://b/t': ftp:// is not supported; use a path, gs:// or s3://"),
        (["--workdir=x", "--config.init.run=s3://b/run"],
         "config.init.run=s3://b/run: checkpoints cannot be written to s3://"),
        (["--workdir=x", "--config.data.cache_dir=gs://b/c"],
         "config.data.cache_dir=gs://b/c: the cache must be on a local disk"),
    ],
)  # fmt: skip
def test_refused_addresses(arguments, line, tmp_path, root, monkeypatch, capsys):
    """In one line, before training or reading, and nothing is made."""

    def missing(name):
        raise ImportError(f"Please install what {name} needs")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fsspec, "filesystem", missing)  # as without the extras
    monkeypatch.setenv("EFX_CACHE", str(tmp_path / "cache"))
    storage._opened.cache_clear()
    modes = [[f"--config={root}/configs/mod.py", "--config.mesh.data=-1"]]
    if len(arguments) == 1:
        modes += [["--mode=evaluate"], ["--mode=sample"]]
    for mode in modes:
        assert main.main(["efx", *arguments, *mode]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1 and said[0].startswith(f"efx: error: {line}"), said
    assert os.listdir(tmp_path) == []


def test_other_launches_beside_the_question_whether_a_folder_is_shared(monkeypatch, tmp_path):
    """Process 0 makes folders for it, and takes them away again if nobody uses them."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", np.asarray)

    def gathered(seen):
        (tmp_path / "runs/b").mkdir()
        return np.asarray(seen)[None]

    monkeypatch.setattr(multihost_utils, "process_allgather", gathered)
    runfolder.check_shared(tmp_path / "runs/a")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["b"]


def test_studies_want_a_disk(capsys):
    assert sweep.main(["--sweep=x", "--workdir=gs://b/study"]) == 2
    line = "efx: error: --workdir=gs://b/study: must be a folder on a disk"
    assert capsys.readouterr().err.startswith(line)


@pytest.mark.parametrize(
    "problem, kind",
    [
        (PermissionError("anonymous caller\nand more"), UsageError),
        (ConnectionError("anonymous caller\nand more"), PassingError),
    ],
)
def test_a_store_that_cannot_be_reached(problem, kind, objects, monkeypatch):
    """A later launch may reach it if the network failed."""

    def refused(self, path, **_):
        raise problem

    monkeypatch.setattr(object_store.Store, "info", refused)
    storage._opened.cache_clear()
    for call in (
        lambda: storage.folder("gs://closed/run"),
        lambda: storage.remote_files("gs://closed/text", "--workdir=gs://closed/run"),
    ):
        with pytest.raises(UsageError) as error:
            call()
        assert type(error.value) is kind and str(error.value) == (
            f"--workdir=gs://closed/run cannot be reached: {type(problem).__name__}: anonymous"
            " caller; check the name, the network and the credentials"
        )
