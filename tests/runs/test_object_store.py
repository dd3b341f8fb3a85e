"""Runs and data in an object store, against a stand-in; and addresses that are refused."""

import io
import os
import threading
from types import SimpleNamespace

import fsspec
import jax
import numpy as np
import object_store
import pytest
from jax.experimental import multihost_utils
from refusals import refused
from run_files import tiny

from efx import main, runfolder, storage, train, use
from efx.data import disk_cache, load, write_token_shards
from efx.data.tokenizers import ByteTokenizer
from efx.errors import PassingError, UsageError
from efx.metrics import read_metrics
from efx.studies import sweep

SMALL = {
    "model.attention.num_heads": 1, "optim.schedule.decay_steps": 8, "log.tensorboard": True,
    "sample.every": 2, "sample.max_new_tokens": 4, "evaluate.max_batches": 1,
    "checkpoint.every": 2, "checkpoint.keep_best": 0, "checkpoint.keep_last": 1, "mesh.data": -1,
}  # fmt: skip
TEXT = "".join(np.random.default_rng(0).choice(list("abcdefgh "), 6000))
RUN = "gs://bucket/runs/a"


@pytest.fixture(scope="module")
def objects(one_device):
    with pytest.MonkeyPatch.context() as patch, object_store.standing_in(patch) as objects:
        object_store.put("texts/one/a.txt", TEXT.encode())
        yield objects


def config(tmp, source="gs://texts/one", **changes):
    return tiny(source, **SMALL, **{"data.cache_dir": str(tmp / "cache")}, **changes)


def losses(workdir):
    return {row["step"]: row["train/loss"] for row in read_metrics(workdir) if "train/loss" in row}


@pytest.fixture(scope="module")
def run(objects, tmp_path_factory):
    """A folder in which nothing is to appear, after a run to step 2 in the bucket, and to 4."""
    tmp = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        (tmp / "cwd").mkdir()
        (tmp / "tmp").mkdir()
        patch.chdir(tmp / "cwd")
        patch.setattr("tempfile.tempdir", str(tmp / "tmp"))
        for steps in (2, 4):
            train.train_and_evaluate(config(tmp, steps=steps), RUN)
    return tmp


def test_a_run_in_a_bucket_has_the_losses_samples_and_files_of_one_on_a_disk(run, objects):
    (run / "a.txt").write_text(TEXT)
    disk = run / "disk"
    train.train_and_evaluate(config(run, source=run / "a.txt", steps=4), disk)
    assert losses(RUN) == losses(disk) and len(losses(RUN)) == 4
    for name in ("step_00000002.txt", "step_00000004.txt"):
        text = objects[f"bucket/runs/a/samples/{name}"][0].decode()
        assert text == (disk / "samples" / name).read_text()
    names = {name.removeprefix("bucket/runs/a/") for name in objects if name.startswith("bucket")}
    folders = {"checkpoints", "samples", "tensorboard"}
    on_disk = {path.name for path in disk.iterdir()} - folders - {".lock"}
    assert {name for name in names if "/" not in name} == on_disk
    assert sum(name.startswith("tensorboard/") for name in names) == 2
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints")} == {"4"}
    assert list((run / "cwd").iterdir()) == list((run / "tmp").iterdir()) == []


def test_a_run_in_a_bucket_is_evaluated_and_sampled_from(run):
    recorded, stream = config(run, steps=4), io.StringIO()
    metrics = use.evaluate(recorded, RUN)
    assert metrics["eval/loss"] == pytest.approx(read_metrics(RUN)[-1]["eval/loss"])
    recorded.sample.prompt = "abc"
    use.sample(recorded, RUN, stream=stream)
    assert stream.getvalue().startswith("abc") and len(stream.getvalue()) > 3


def test_a_bucket_without_locks_is_one_warning(objects, capsys):
    with runfolder.Lock("gs://bucket/runs/locked") as lock:
        lock.take()
        lock.take()
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith("efx: warning: gs://bucket/runs/locked")


def test_damage_in_a_bucket_is_found(run, objects, capsys):
    """A step without its manifest, or without the last file of orbax, was not saved to the end."""
    begin = "bucket/runs/a/checkpoints/4/"
    states = [name for name in objects if name.startswith(f"{begin}state")]
    name = max(states, key=lambda name: len(objects[name][0]))
    lasts = [f"{begin}{last}" for last in ("efx_manifest.json", "commit_success.txt")]
    before = {key: objects[key] for key in (name, *lasts)}
    data = bytearray(before[name][0])
    data[len(data) // 2] ^= 1
    recorded = config(run, steps=4)
    try:
        object_store.put(name, data)
        refused(lambda: use.sample(recorded, RUN), "checkpoint 4", name.rsplit("/", 1)[1])
        for last in lasts:
            objects.update(before)
            del objects[last]
            refused(lambda: use.sample(recorded, RUN), "gs://bucket", "no finished checkpoint")
    finally:
        objects.update(before)


def test_a_save_that_was_cut_off_in_a_bucket_makes_way_for_the_next(run, objects):
    """No object of it is in the new checkpoint: a bucket has no folders to be renamed."""
    before, begin = dict(objects), "bucket/runs/a/checkpoints/"
    expected = losses(RUN)
    try:
        for name in ("state/left", "meta/metadata"):
            object_store.put(f"{begin}6/{name}", b"")
        train.train_and_evaluate(config(run, steps=6), RUN)
        assert f"{begin}6/commit_success.txt" in objects
        assert f"{begin}6/state/left" not in objects
        assert losses(RUN).items() >= expected.items() and max(losses(RUN)) == 6
    finally:
        objects.clear()
        objects.update(before)


# ---- data ---------------------------------------------------------------------------------------


def first_inputs(tmp, source):
    changed = tiny("", **{"data.source": source, "data.cache_dir": str(tmp / "cache")})
    data = load(changed.data, seed=0)
    return next(data.train_iterator())["inputs"], data


def test_data_in_a_bucket_is_that_of_a_disk(objects, tmp_path):
    """A folder, a pattern and tokens; read again when they have changed."""
    object_store.put("texts/two/sub/b.txt", TEXT[:3000].encode())
    object_store.put("texts/two/manifest.json", TEXT[3000:].encode())
    (tmp_path / "two/sub").mkdir(parents=True)
    (tmp_path / "two/sub/b.txt").write_text(TEXT[:3000])
    (tmp_path / "two/manifest.json").write_text(TEXT[3000:])
    tokenizer = ByteTokenizer()
    write_token_shards(tmp_path / "tokens", tokenizer, [TEXT[:5000]], [TEXT[5000:]])
    for path in (tmp_path / "tokens").iterdir():
        object_store.put(f"texts/tokens/{path.name}", path.read_bytes())
    for remote, local in (
        ("tokens:gs://texts/tokens", f"tokens:{tmp_path}/tokens"),
        ("text:s3://texts/two/sub/*.txt", f"text:{tmp_path}/two/sub/b.txt"),
        ("text:s3://texts/two", f"text:{tmp_path}/two"),
    ):
        (there, data), (here, local_data) = (
            first_inputs(tmp_path, source) for source in (remote, local)
        )
        np.testing.assert_array_equal(there, here)
        assert data.train_tokens == local_data.train_tokens
    object_store.put("texts/two/sub/b.txt", TEXT[:2000].encode())
    assert first_inputs(tmp_path, "text:s3://texts/two")[1].train_tokens < data.train_tokens - 500
    refused(
        lambda: first_inputs(tmp_path, "text:gs://texts/no"),
        "config.data.source='text:gs://texts/no'",
    )


def copies_in(tmp_path):
    return [path for path in (tmp_path / "cache/fetched").iterdir() if path.is_dir()]


def test_data_that_does_not_fit_on_the_disk_is_not_copied(objects, tmp_path, monkeypatch):
    for i in range(3):
        object_store.put(f"texts/large/{i}.txt", TEXT.encode())
    usage = SimpleNamespace(free=2 * len(TEXT))
    monkeypatch.setattr(disk_cache.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(object_store.Store, "get_file", lambda *_: pytest.fail("it is copied"))
    refused(
        lambda: first_inputs(tmp_path, "text:gs://texts/large"),
        "config.data.source='text:gs://texts/large'",
        "17.6 KiB",
        "11.7 KiB",
    )
    assert copies_in(tmp_path) == []


def test_a_copy_that_fails_ends_the_others(objects, tmp_path, monkeypatch):
    for i in range(30):
        object_store.put(f"texts/broken/{i:02}.txt", TEXT.encode())
    copied, release = [], threading.Event()

    def get_file(self, address, path):
        copied.append(address)
        if address.endswith("03.txt"):
            raise PermissionError("not this one")
        release.wait(60)

    monkeypatch.setattr(object_store.Store, "get_file", get_file)
    refused(lambda: first_inputs(tmp_path, "text:gs://texts/broken"), "not this one")
    release.set()
    for thread in threading.enumerate():
        if thread.name == "efx-copy":
            thread.join(60)
    assert len(copied) < 15 and copies_in(tmp_path) == []


# ---- uploads ------------------------------------------------------------------------------------


def test_an_upload_that_fails_is_tried_again_and_at_the_end_an_error(objects, monkeypatch, capsys):
    run_folder, begin = storage.folder("gs://bucket/runs/mirrored"), "bucket/runs/mirrored/"
    for step in (1, 2):
        object_store.put(f"{begin}samples/step_{step}.txt", b"old")
    with storage.Mirror(run_folder, ("samples", "absent")) as mirror:
        local = mirror.path
        assert len(list(local.rglob("*.txt"))) == 2
        (local / "samples/step_2.txt").unlink()
        (local / "metrics.jsonl").write_text("rows")
        with monkeypatch.context() as patch:
            patch.setattr(object_store, "put", None)
            mirror.upload(if_due=True)
            mirror.wait()
            assert capsys.readouterr().err.startswith("efx: warning: gs://bucket/runs/mirrored")
            mirror.upload(if_due=True)  # not due for a minute
            assert capsys.readouterr().err == ""
            with pytest.raises(PassingError, match="runs/mirrored") as error:
                mirror.upload()
            assert error.value.status == 75  # a rerun may succeed
    assert not local.exists()
    kept = {name: data for name, (data, _) in objects.items() if name.startswith(begin)}
    assert kept == {f"{begin}samples/step_1.txt": b"old", f"{begin}metrics.jsonl": b"rows"}


def test_an_upload_waits_for_the_one_under_way_and_adds_new_rows(objects, monkeypatch):
    run_folder, put = storage.folder("gs://bucket/runs/slow"), object_store.put
    started, may_end = threading.Event(), threading.Event()

    def slow(name, data):
        started.set()
        assert may_end.wait(5)
        return put(name, data)

    monkeypatch.setattr(object_store, "put", slow)
    with storage.Mirror(run_folder, ()) as mirror:
        (mirror.path / "metrics.jsonl").write_text("one\n")
        mirror.upload(if_due=True)
        assert started.wait(5)
        (mirror.path / "metrics.jsonl").write_text("one\ntwo\n")
        may_end.set()
        mirror.upload()
        assert objects["bucket/runs/slow/metrics.jsonl"][0] == b"one\ntwo\n"


def test_processes_share_a_bucket_that_they_may_not_list(objects, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for name in ("broadcast_one_to_all", "process_allgather"):
        monkeypatch.setattr(multihost_utils, name, np.asarray)
    before = dict(objects)
    runfolder.check_shared("gs://bucket/runs/shared")
    assert objects == before


# ---- addresses that are refused -----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["train", "evaluate"])
@pytest.mark.parametrize("workdir", ["s3://b/run", "memory://run", "gs://b/run"])
def test_a_workdir_in_another_store_is_refused(workdir, mode, tmp_path, root, monkeypatch, capsys):
    def missing(name):
        raise ImportError(f"Please install what {name} needs")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fsspec, "filesystem", missing)  # as without the extras
    monkeypatch.setenv("EFX_CACHE", str(tmp_path / "cache"))
    storage._opened.cache_clear()
    config = [f"--config={root}/configs/mod.py"] * (mode == "train")
    assert main.main(["efx", f"--mode={mode}", f"--workdir={workdir}", *config]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"efx: error: --workdir={workdir}"), line
    assert os.listdir(tmp_path) == []


def test_studies_need_a_disk(capsys):
    assert sweep.main(["--sweep=x", "--workdir=gs://b/study"]) == 2
    assert capsys.readouterr().err.startswith("efx: error: --workdir=gs://b/study")


@pytest.mark.parametrize(
    "problem, kind",
    [
        (PermissionError("anonymous caller\nand more"), UsageError),
        (ConnectionError("anonymous caller\nand more"), PassingError),
    ],
)
def test_a_store_that_cannot_be_reached_is_one_line(problem, kind, objects, monkeypatch):
    """A later launch may reach it if the network failed."""

    def fail(self, path, **_):
        raise problem

    monkeypatch.setattr(object_store.Store, "info", fail)
    storage._opened.cache_clear()
    for call in (
        lambda: storage.folder("gs://closed/run"),
        lambda: storage.remote_files("gs://closed/text", "--workdir=gs://closed/run"),
    ):
        refused(call, "--workdir=gs://closed/run", "anonymous caller")
        with pytest.raises(kind) as error:
            call()
        assert type(error.value) is kind
