"""Two processes do what one does: train, evaluate, sample, save, resume, stop; one is killed."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from run_files import TINY

from efx import run_dir
from efx.checkpoint.manifest import MANIFEST
from efx.configs import common
from efx.logging import read_metrics
from efx.parallel import multihost
from efx.train import trainer

pytestmark = pytest.mark.usefixtures("one_device")  # of this process
SHARED = TINY | {
    "optim.schedule.decay_steps": 8, "evaluate.every": 2, "evaluate.max_batches": 2,
    "checkpoint.every": 0, "checkpoint.asynchronous": False, "sample.max_new_tokens": 8,
}  # fmt: skip
MOE = {"model.mlp.kind": "moe", "model.mlp.moe.num_experts": 4, "model.mlp.moe.expert_hidden": 16}
ALONE = 2  # steps of one process, from which two resume
KEYS = ("train/loss", "train/grad_norm", "eval/loss", "eval/bits_per_byte")
MOE_KEYS = (*KEYS, "losses/load_balance", "eval/moe/overflow_fraction")

# What `efx.main` does, with several launches.
PROCESS = """
import json, os, sys, types, jax
rank, port, folder, devices, launches = int(sys.argv[1]), *sys.argv[2:]
jax.config.update("jax_num_cpu_devices", int(devices))
from efx import main
from efx.parallel import multihost
from efx.train import trainer
from efx.configs import common
def launch(changes, run="two"):
    trainer.train_and_evaluate(common.apply(common.base(), changes), f"{folder}/{run}")
if rank == 1:  # the clock of process 0 alone decides when to save
    trainer.time = types.SimpleNamespace(monotonic=lambda: 0.0)
def run(argv):
    if "check" in globals():
        check(json.loads(launches)[0])
    for changes in json.loads(launches):
        launch(changes)
main.run = run
multihost.connect(f"localhost:{port}", 2, rank, preemption=True)
sys.exit(main.main([]))
"""

# Before the first launch: refusals, and checkpoints of arrays on both processes.
CHECKS = """
def check(changes):
    import errno
    import pathlib
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, NamedSharding, PartitionSpec
    from efx import run_dir
    from efx.parallel import multihost
    from efx.checkpoint import Checkpointer, manifest
    from efx.errors import TransientError, UsageError

    def refused(call):
        try:
            call()
        except UsageError as error:
            print(f"refused ({error.status}): {error}", flush=True)

    def offline():
        raise TransientError("offline")

    def busy(folder):
        raise OSError(errno.EIO, "Input/output error")

    def make(name):
        return Checkpointer(f"{folder}/{name}", keep_last=2, keep_best=0, scores={},
                            asynchronous=True)

    def array(values):
        return jax.make_array_from_callback(values.shape, split, lambda index: values[index])

    assert "http_proxy" in os.environ  # only the connection is made without it
    multihost._SHARED_SECONDS = manifest._VISIBLE_SECONDS = 1
    multihost.check_shared(f"{folder}/both/run")
    os.mkdir(f"{folder}/of_{rank}")
    refused(lambda: multihost.check_shared(f"{folder}/of_{rank}/run"))
    refused(lambda: run_dir.Lock(f"{folder}/held").take())
    refused(lambda: multihost.run_on_primary("w", offline, "EFX_X"))
    source = {"data.source": f"text:{folder}/text_{rank}.txt"}
    refused(lambda: launch(changes | source, "texts"))

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("data"))
    numbers = np.arange(8 * 64, dtype=np.float32).reshape(8, 64)
    shape = {"x": jax.ShapeDtypeStruct(numbers.shape, numbers.dtype, sharding=split)}
    with make("split") as c:
        for step in (1, 2, 3):
            c.save(step, {"x": array(numbers * step)}, {"next_index": step}, {})
        c.wait()
        restored = c.restore(shape)
        assert restored.step == 3 and c.steps() == [2, 3]
        assert restored.data_state == {"next_index": 3}
        for shard in restored.state["x"].addressable_shards:
            np.testing.assert_array_equal(shard.data, numbers[shard.index] * 3)
    multihost_utils.sync_global_devices("saved")
    if rank == 1:  # a file server fails for one process
        read, manifest.read_manifest = manifest.read_manifest, busy
    with make("split") as c:
        refused(lambda: c.restore(shape, on_damage="fall_back"))
    if rank == 1:
        manifest.read_manifest = read
    with make("absent" if rank else "split") as c:
        refused(lambda: c.restore(shape))
    if rank == 0:
        paths = [path for path in pathlib.Path(folder, "split/3").rglob("*") if path.is_file()]
        largest = max(paths, key=lambda path: path.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(bytes(data))
    multihost_utils.sync_global_devices("damaged")
    with make("split") as c:
        refused(lambda: c.restore(shape))
        assert c.restore(shape, on_damage="fall_back").step == 2
        c.save(3, {"x": array(numbers * 3)}, {"next_index": 3}, {})
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


class Pair:
    """Two processes of a script with the arguments rank, port, folder, devices and launches.

    A context manager: leaving it kills them.
    """

    def __init__(self, script, root, folder, devices, launches):
        environment = os.environ | {"PYTHONPATH": str(root), "http_proxy": "http://127.0.0.1:9"}
        for name in ("compilation_cache_dir", "persistent_cache_min_compile_time_secs"):
            environment[f"JAX_{name.upper()}"] = str(getattr(jax.config, f"jax_{name}"))
        port, self.files = free_port(), [folder / f"process_{rank}.txt" for rank in range(2)]
        self.processes = []
        for rank, path in enumerate(self.files):
            command = [sys.executable, "-u", "-c", script, str(rank), str(port), str(folder)]
            command += [str(devices), json.dumps(launches)]
            with open(path, "w") as file:
                self.processes.append(
                    subprocess.Popen(command, env=environment, stdout=file, stderr=file)
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def outputs(self):
        return [path.read_text() for path in self.files]

    def wait_for_step(self, run, step, seconds=250):
        end = time.monotonic() + seconds
        while newest(run) < step:
            alive = all(process.poll() is None for process in self.processes)
            assert alive and time.monotonic() < end, "\n".join(self.outputs())[-5000:]
            time.sleep(0.1)


def rows(run, key):
    return {row["step"]: row[key] for row in read_metrics(run) if key in row}


def newest(run):
    with contextlib.suppress(Exception):  # it is being written
        return max(rows(run, "train/loss"), default=0)
    return 0


def made(folder, **changes):
    """(settings of the runs, `one_process(steps, run)`) with a text in a new folder."""
    rng = np.random.default_rng(0)
    for name in ("text", "text_0", "text_1"):
        (folder / f"{name}.txt").write_text("".join(rng.choice(list("abcdefgh "), 6000)))
    shared = SHARED | changes | {"data.source": f"text:{folder / 'text.txt'}"}
    shared |= {"data.cache_dir": str(folder / "cache")}

    def one_process(steps, run):
        changes = shared | {"steps": steps, "mesh.data": 1}
        trainer.train_and_evaluate(common.apply(common.base(), changes), folder / run)

    one_process(ALONE, "one")
    shutil.copytree(folder / "one", folder / "two")
    return shared, one_process


def assert_same_metrics(two, one, keys, steps):
    """At these steps, and at no fewer."""
    for key in keys:
        found, expected = rows(two, key), rows(one, key)
        assert set(steps) <= found.keys()
        for step in steps:
            assert found[step] == pytest.approx(expected[step], rel=1e-4), f"{key} of step {step}"


# ---- one mesh, until a signal --------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory, root, one_device):
    """(folder with the runs "two" and "one", step at the SIGTERM, outputs, exit statuses)."""
    folder = tmp_path_factory.mktemp("pair")
    shared, one_process = made(folder)
    launches = [shared | {"steps": 10**6, "mesh.data": 1, "mesh.fsdp": 2}]
    launches[0] |= {"checkpoint.minutes": 1e-9, "checkpoint.keep_last": 10**6}
    with (
        run_dir.Lock(folder / "held") as lock,
        Pair(CHECKS + PROCESS, root, folder, 1, launches) as pair,
    ):
        lock.take()
        pair.wait_for_step(folder / "two", ALONE + 2)
        pair.processes[1].send_signal(signal.SIGTERM)
        statuses = [process.wait(timeout=60) for process in pair.processes]
        outputs = pair.outputs()
    names = [path.name for path in (folder / "two/checkpoints").iterdir()]
    stopped = max(int(name) for name in names if name.isdecimal())
    one_process(stopped, "one")
    return folder, stopped, outputs, statuses


def test_two_processes_train_and_evaluate_as_one(pair):
    """They resume a run of one process; the state is split over both."""
    folder, stopped, _, _ = pair
    assert_same_metrics(folder / "two", folder / "one", KEYS, range(2, stopped + 1, 2))
    assert rows(folder / "two", "train/loss").keys() == set(range(1, stopped + 1))
    assert run_dir.finished_steps(folder / "two/checkpoints") == list(range(ALONE, stopped + 1))


def test_a_notice_to_one_process_saves_and_stops_both_at_one_step(pair):
    _, stopped, outputs, statuses = pair
    assert statuses == [0, 0]
    assert f"stopped at step {stopped} by SIGTERM on one of the hosts" in outputs[0]


def test_refusals_of_one_process_end_both(pair):
    folder, _, outputs, _ = pair
    for rank, output in enumerate(outputs):
        lines = [line for line in output.splitlines() if line.startswith("refused")]
        shared, lock, offline, texts, busy, unseen, damaged = lines
        assert f"--workdir={folder}/of_{rank}/run" in shared
        assert f"--workdir={folder}/held" in lock and (f"{os.getpid()}" in lock) == (rank == 0)
        assert offline.startswith("refused (75)") and ("EFX_X=w" in offline) == (rank == 1)
        assert "texts" in texts
        assert busy.startswith("refused (75)") and "split/3" in busy
        assert unseen.startswith("refused (75)") and "checkpoint 3" in unseen
        assert "checkpoint 3" in damaged and "item state" in damaged
        assert list((folder / f"of_{rank}").iterdir()) == []
    assert not (folder / "both").exists() and not (folder / "texts").exists()
    assert not list(folder.glob(".shared*"))


def test_checkpoints_of_two_processes_are_verified_by_both(pair):
    folder, _, outputs, _ = pair
    manifest = json.loads((folder / "split/3" / MANIFEST).read_text())
    assert any("process_1" in name for name in manifest["files"])
    assert (folder / "split/damaged_3").is_dir()
    assert sum(output.count("efx: warning: checkpoint 3") for output in outputs) == 2


# ---- other meshes, until one process is killed ---------------------------------------------------


@pytest.fixture(scope="module")
def meshes(tmp_path_factory, root, one_device):
    """(folder of the runs "one", "two" and "three", outputs, exit status of the process left).

    Two steps on one mesh, then a launch on another, in which one process is killed; one process
    resumes "three" from "two".
    """
    folder = tmp_path_factory.mktemp("meshes")
    shared, one_process = made(folder, **MOE, **{"sample.every": 2})
    launches = [
        shared | {"mesh.expert": 2, "mesh.sequence": 2, "steps": 4, "sample.every": 0},
        shared | {"mesh.tensor": 4, "steps": 10**6},
    ]
    with Pair(PROCESS, root, folder, 2, launches) as pair:
        pair.wait_for_step(folder / "two", 7)
        pair.processes[1].kill()
        status = pair.processes[0].wait(timeout=30)
        outputs = pair.outputs()
    shutil.copytree(folder / "two", folder / "three")
    for run in ("one", "three"):
        one_process(6, run)
    return folder, outputs, status


@pytest.mark.slow
def test_two_processes_resume_on_tensor_expert_and_sequence_meshes_and_one_resumes(meshes):
    """With the losses, statistics of experts and samples of one process."""
    folder, *_ = meshes
    for run in ("two", "three"):
        assert_same_metrics(folder / run, folder / "one", MOE_KEYS, (2, 4, 6))
        samples = [folder / name / "samples/step_00000006.txt" for name in (run, "one")]
        texts = [path.read_text() for path in samples]
        assert texts[0] == texts[1] and len(texts[0]) > 20


@pytest.mark.slow
def test_the_death_of_a_process_is_reported_by_the_other(meshes):
    """As one line, or by JAX's runtime where a device of the process waits for the lost one."""
    _, outputs, status = meshes
    if status == multihost.LOST:
        assert outputs[0].splitlines()[-1].startswith("efx: stopped: ")
        assert "Traceback" not in outputs[0] and "Check failure" not in outputs[0]
    else:
        assert status == -signal.SIGABRT and "another task died" in outputs[0]
