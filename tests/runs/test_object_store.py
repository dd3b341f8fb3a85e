"""Runs and data in an object store, against a stand-in; and addresses that are refused."""

import json
import os
from io import StringIO

import fsspec
import numpy as np
import object_store
import pytest
from refusals import refused
from run_files import tiny

from efx import io, main
from efx.data import load, write_token_shards
from efx.data.tokenizers import ByteTokenizer
from efx.errors import TransientError, UsageError
from efx.logging import read_metrics
from efx.train import inference, trainer

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
            trainer.train_and_evaluate(config(tmp, steps=steps), RUN)
    return tmp


def test_a_run_in_a_bucket_has_the_losses_samples_and_files_of_one_on_a_disk(run, objects):
    (run / "a.txt").write_text(TEXT)
    disk = run / "disk"
    trainer.train_and_evaluate(config(run, source=run / "a.txt", steps=4), disk)
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
    recorded, stream = config(run, steps=4), StringIO()
    metrics = inference.evaluate(recorded, RUN)
    assert metrics["eval/loss"] == pytest.approx(read_metrics(RUN)[-1]["eval/loss"])
    recorded.sample.prompt = "abc"
    inference.sample(recorded, RUN, stream=stream)
    assert stream.getvalue().startswith("abc") and len(stream.getvalue()) > 3


def test_damage_in_a_bucket_is_found(run, objects):
    """A step without its manifest, or without the last file of orbax, was not saved to the end."""
    begin = "bucket/runs/a/checkpoints/4/"
    states = [name for name in objects if name.startswith(f"{begin}state")]
    name = max(states, key=lambda name: len(objects[name][0]))
    before, recorded = dict(objects), config(run, steps=4)
    data = bytearray(before[name][0])
    data[len(data) // 2] ^= 1
    try:
        object_store.put(name, data)
        refused(lambda: inference.sample(recorded, RUN), "checkpoint 4", name.rsplit("/", 1)[1])
        for last in ("efx_manifest.json", "commit_success.txt"):
            objects.update(before)
            del objects[begin + last]
            refused(lambda: inference.sample(recorded, RUN), RUN, "no finished checkpoint")
    finally:
        objects.update(before)


def test_a_save_that_was_cut_off_in_a_bucket_makes_way_for_the_next(run, objects):
    """No object of it is in the new checkpoint: a bucket has no folders to be renamed."""
    begin, expected = "bucket/runs/a/checkpoints/6/", losses(RUN)
    for name in ("state/left", "meta/metadata"):
        object_store.put(begin + name, b"")
    trainer.train_and_evaluate(config(run, steps=6), RUN)
    assert f"{begin}commit_success.txt" in objects and f"{begin}state/left" not in objects
    assert losses(RUN).items() >= expected.items() and max(losses(RUN)) == 6


def test_a_run_whose_first_save_was_cut_off_in_a_bucket_starts_again(run, objects):
    workdir, begin = "gs://bucket/runs/b", "bucket/runs/b/"
    trainer.train_and_evaluate(config(run, steps=2), workdir)
    expected, record = losses(workdir), json.loads(objects[f"{begin}run.json"][0])
    del record["launches"][0]["saved"]
    object_store.put(f"{begin}run.json", json.dumps(record).encode())
    del objects[f"{begin}checkpoints/2/commit_success.txt"]
    trainer.train_and_evaluate(config(run, steps=2), workdir)
    assert losses(workdir) == expected
    assert f"{begin}checkpoints/2/commit_success.txt" in objects


def test_a_run_whose_checkpoints_are_missing_in_a_bucket_is_refused(run, objects):
    before, begin = dict(objects), "bucket/runs/a/checkpoints/"
    try:
        for lost in (begin, "efx_manifest.json"):
            objects.update(before)
            for name in [name for name in objects if name.startswith(begin) and lost in name]:
                del objects[name]
            left = dict(objects)
            refused(lambda: trainer.train_and_evaluate(config(run, steps=9), RUN), RUN, begin[-12:])
            assert objects == left
    finally:
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
    write_token_shards(tmp_path / "tokens", ByteTokenizer(), [TEXT[:5000]], [TEXT[5000:]])
    for path in (tmp_path / "tokens").iterdir():
        object_store.put(f"texts/tokens/{path.name}", path.read_bytes())
    for remote, local in (
        ("tokens:gs://texts/tokens", f"tokens:{tmp_path}/tokens"),
        ("text:s3://texts/two/sub/*.txt", f"text:{tmp_path}/two/sub/b.txt"),
        ("text:s3://texts/two", f"text:{tmp_path}/two"),
    ):
        there, here = (first_inputs(tmp_path, source) for source in (remote, local))
        np.testing.assert_array_equal(there[0], here[0])
        assert there[1].train_tokens == here[1].train_tokens
    object_store.put("texts/two/sub/b.txt", TEXT[:2000].encode())
    again = first_inputs(tmp_path, "text:s3://texts/two")[1]
    assert again.train_tokens < here[1].train_tokens - 500
    missing = "text:gs://texts/no"
    refused(lambda: first_inputs(tmp_path, missing), f"config.data.source={missing!r}")


# ---- uploads ------------------------------------------------------------------------------------


def test_an_upload_that_fails_is_tried_again_and_at_the_end_an_error(objects, monkeypatch, capsys):
    run_directory, begin = io.folder("gs://bucket/runs/mirrored"), "bucket/runs/mirrored/"
    for step in (1, 2):
        object_store.put(f"{begin}samples/step_{step}.txt", b"old")
    with io.Mirror(run_directory, ("samples", "absent")) as mirror:
        local = mirror.path
        assert len(list(local.rglob("*.txt"))) == 2
        (local / "samples/step_2.txt").unlink()
        (local / "metrics.jsonl").write_text("rows")
        with monkeypatch.context() as patch:
            patch.setattr(object_store, "put", None)
            mirror.upload(if_due=True)
            assert capsys.readouterr().err.startswith("efx: warning: gs://bucket/runs/mirrored")
            mirror.upload(if_due=True)  # not due for a minute
            assert capsys.readouterr().err == ""
            with pytest.raises(TransientError, match="runs/mirrored"):
                mirror.upload()
    assert not local.exists()
    kept = {name: data for name, (data, _) in objects.items() if name.startswith(begin)}
    assert kept == {f"{begin}samples/step_1.txt": b"old", f"{begin}metrics.jsonl": b"rows"}


def test_a_download_that_fails_tells_that_a_rerun_may_succeed(objects, monkeypatch):
    object_store.put("bucket/runs/mirrored/samples/a.txt", b"old")

    def fail(self, path, **_):
        raise ConnectionError

    run_directory = io.folder("gs://bucket/runs/mirrored")
    monkeypatch.setattr(object_store.Store, "_open", fail)
    with (
        pytest.raises(TransientError, match="runs/mirrored"),
        io.Mirror(run_directory, ("samples",)),
    ):
        pass


# ---- addresses that are refused -----------------------------------------------------------------


@pytest.mark.parametrize("workdir", ["s3://b/run", "memory://run", "gs://b/run"])
def test_a_workdir_in_another_store_is_refused(workdir, tmp_path, monkeypatch, capsys):
    def missing(name):
        raise ImportError(f"Please install what {name} needs")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fsspec, "filesystem", missing)  # as without the extras
    monkeypatch.setenv("EFX_CACHE", str(tmp_path / "cache"))
    assert main.main(["efx", "--mode=evaluate", f"--workdir={workdir}"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"efx: error: --workdir={workdir}"), line
    assert os.listdir(tmp_path) == []


def test_studies_need_a_disk(capsys):
    pytest.importorskip("pandas", reason="the extra `studies` is not installed")
    from efx.studies import sweep

    assert sweep.main(["--sweep=x", "--workdir=gs://b/study"]) == 2
    assert capsys.readouterr().err.startswith("efx: error: --workdir=gs://b/study")


@pytest.mark.parametrize(
    "error, status", [(PermissionError("of anonymous\nand more"), 2), (ConnectionError("x"), 75)]
)
def test_a_store_that_cannot_be_reached_is_one_line(error, status, objects, monkeypatch):
    """A rerun may reach it if the network failed."""

    def fail(self, path, **_):
        raise error

    monkeypatch.setattr(object_store.Store, "info", fail)
    with pytest.raises(UsageError, match="--workdir=gs://closed/run") as raised:
        io.folder(f"gs://closed/run{status}")
    assert raised.value.status == status and "\n" not in str(raised.value)
