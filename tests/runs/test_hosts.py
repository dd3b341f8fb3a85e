"""Two processes do what one does: train, evaluate, sample, save, resume, stop; one is killed."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from efx import hosts, sharding, train
from efx.configs import common
from efx.metrics import read_metrics

SHARED = {
    "data.seq_len": 16, "data.batch_size": 8, "model.width": 16, "model.depth": 1,
    "model.mlp.kind": "moe", "model.mlp.moe.num_experts": 4, "model.mlp.moe.expert_hidden": 16,
    "optim.schedule.warmup_steps": 1, "optim.schedule.decay_steps": 8, "log.every": 1,
    "log.tensorboard": False, "sample.every": 0, "evaluate.every": 2, "evaluate.batch_size": 8,
    "evaluate.max_batches": 2, "checkpoint.every": 0, "checkpoint.asynchronous": False,
    "sample.max_new_tokens": 20, "mesh.data": 1,
}  # fmt: skip
# One process begins the run; two go on from it, and from each of these to the next: two steps on
# four devices, two of either process.
ALONE = 2
MESHES = (
    {"mesh.data": 2, "mesh.fsdp": 2, "sample.every": 2},
    {"mesh.tensor": 4, "sample.every": 2},
    {"mesh.expert": 4},
    {"mesh.sequence": 4},
)
PROFILED = 2  # number of the launch whose first step is profiled
# Then many steps without a rest, until SIGTERM; and again, until one process is killed.
LONG = {"steps": 10**6, "evaluate.every": 0, "sample.every": 0}
LONG_MESHES = MESHES[:2]

# What `efx.main` does with several launches: it connects the processes once. Of the first tokens
# that each launch reads, every process tells where they begin in the text.
PROCESS = """
import json, sys, jax
rank, port, workdir, launches = int(sys.argv[1]), *sys.argv[2:]
jax.config.update("jax_num_cpu_devices", 2)
from efx import hosts, main, train
from efx.configs import common
from efx.data.stream import Stream
windows, read = Stream.windows, []
def recorded(self, starts, length):
    read.append([int(start) for start in starts])
    return windows(self, starts, length)
Stream.windows = recorded
def run(argv):
    for changes in json.loads(launches):
        read.clear()
        config = common.base()
        common.apply(config, changes)
        train.train_and_evaluate(config, workdir)
        print("read", json.dumps(read[0]), flush=True)
main.run = run
hosts.connect(f"localhost:{port}", 2, rank, preemption=True)
sys.exit(main.main([]))
"""


# Connected, and then without an eye for the other: as on an accelerator, where a step that waits
# for a lost process waits for ever.
HANGING = """
import os, sys, time
import jax, numpy as np
from efx import hosts, runfolder, sharding
from efx.checkpoint import Checkpointer
from efx.errors import UsageError
rank, port, folder = sys.argv[1:]
hosts.connect(f"localhost:{port}", 2, int(rank), preemption=True)
runfolder._SHARED_SECONDS = 1
for name in ("of_both/run", f"of_{rank}/run", "of_both/run"):
    try:
        runfolder.check_shared(f"{folder}/{name}")
    except UsageError as error:
        print("refused:", error)
layout = sharding.replicated(sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1) | {"data": 2}))
x = jax.make_array_from_callback((3,), layout, lambda _: np.arange(3, dtype=np.float32))
os.makedirs(f"{folder}_saved", exist_ok=True)
options = dict(every=0, keep_last=1, keep_best=0, best_metric="", asynchronous=False)
with Checkpointer(f"{folder}_saved/checkpoints", **options) as checkpoints:
    checkpoints.save(1, {"x": x}, {}, {}, force=True)
    restored = checkpoints.restore({"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)})
    print("restored:", np.asarray(restored.state["x"]).tolist())
print("ready", flush=True)
time.sleep(1000)
"""

# A run of one process that is told to stop while it starts.
SINGLE = """
import os, signal, sys, time
from efx import hosts
hosts.connect(f"localhost:{sys.argv[1]}", 1, 0, preemption=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(10)
"""

# Connects and disconnects; fails if the proxy is gone afterwards.
PROXIED = """
import os, sys
from efx import hosts
hosts.connect(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]), preemption=True)
hosts.disconnect()
sys.exit("http_proxy" not in os.environ)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def two_processes(script, arguments, root, folder):
    """Runs a script with the arguments rank, port, *arguments; (processes, their output files)."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    for name in ("compilation_cache_dir", "persistent_cache_min_compile_time_secs"):
        environment[f"JAX_{name.upper()}"] = str(getattr(jax.config, f"jax_{name}"))
    folder.mkdir(exist_ok=True)
    port, outputs = free_port(), [folder / f"process_{rank}.txt" for rank in range(2)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            command = [sys.executable, "-u", "-c", script, str(rank), str(port), *arguments]
            with open(output, "w") as file:
                processes.append(
                    subprocess.Popen(command, env=environment, stdout=file, stderr=file)
                )
        yield processes, outputs
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for(condition, processes, outputs, seconds=400):
    end = time.monotonic() + seconds
    while not condition():
        alive = all(process.poll() is None for process in processes)
        said = "\n".join(output.read_text()[-3000:] for output in outputs)
        assert alive and time.monotonic() < end, said
        time.sleep(0.2)


def rows(workdir, key):
    return {row["step"]: row[key] for row in read_metrics(workdir) if key in row}


def newest(workdir):
    is_begun = (workdir / "metrics.jsonl").exists()
    return max(rows(workdir, "train/loss"), default=0) if is_begun else 0


def saved(workdir):
    names = [path.name for path in (workdir / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


@pytest.fixture(scope="module", autouse=True)
def hanging(tmp_path_factory, root):
    """(the process that is left of two that do little, their output, when the other was killed).
    JAX's runtime waits for heartbeats while the tests before go on."""
    folder = tmp_path_factory.mktemp("hanging")
    with two_processes(HANGING, (str(folder),), root, folder) as (processes, outputs):
        is_ready = lambda: all("ready" in output.read_text() for output in outputs)  # noqa: E731
        wait_for(is_ready, processes, outputs)
        processes[1].kill()
        yield processes[0], outputs, time.monotonic()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, root):
    """(run that one process began and two went on with, its step at SIGTERM, what these said, last
    line and status of one within 30 seconds of the death of the other, run of one process to two
    steps later)."""
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "text.txt").write_text(
        "".join(np.random.default_rng(0).choice(list("abcdefgh "), 6000))
    )
    shared = SHARED | {
        "data.source": f"text:{folder / 'text.txt'}", "data.cache_dir": str(folder)
    }  # fmt: skip
    launches = [shared | mesh | {"steps": ALONE + 2 * i} for i, mesh in enumerate(MESHES, 1)]
    launches[PROFILED] |= {"log.profile_at": ALONE + 2 * PROFILED, "log.profile_steps": 1}
    launches += [shared | mesh | LONG for mesh in LONG_MESHES]
    workdir, short = folder / "two", ALONE + 2 * len(MESHES)

    def one_process(steps, run):
        config = common.base()
        changes = {"steps": steps, "mesh.data": -1, "sample.every": 2, "evaluate.every": 2}
        common.apply(config, shared | changes)
        train.train_and_evaluate(config, run)

    one_process(ALONE, workdir)
    arguments = str(workdir), json.dumps(launches)
    with two_processes(PROCESS, arguments, root, folder) as (processes, outputs):
        watched = processes, outputs
        wait_for(lambda: newest(workdir) > short, *watched)
        processes[1].send_signal(signal.SIGTERM)
        wait_for(lambda: saved(workdir) > short, *watched)
        stopped = saved(workdir)
        wait_for(lambda: newest(workdir) > stopped, *watched)
        processes[1].kill()
        death = time.monotonic()
        status = processes[0].wait(timeout=30)
        last = last_line(outputs[0], death + 30)
        said = [output.read_text() for output in outputs]
    # One process goes on from what two have saved, on eight devices.
    for name in ("two", "one"):
        one_process(stopped + 2, folder / name)
    return workdir, stopped, said, (last, status), folder / "one"


KEYS = (
    "train/loss",
    "train/grad_norm",
    "losses/load_balance",
    "eval/loss",
    "eval/moe/dropped_fraction",
)


@pytest.mark.parametrize("key", KEYS)
def test_two_processes_train_and_evaluate_as_one(runs, key):
    """Losses of every step and evaluation. Rows used to go by the number of the process: where both
    held the same part of a batch, each took other rows for it, and nothing said so."""
    two, one = rows(runs[0], key), rows(runs[-1], key)
    short = ALONE + 2 * len(MESHES)
    assert two.keys() <= one.keys() and set(range(2, short + 1, 2)) <= two.keys()
    for step, value in two.items():
        mesh = (None, *MESHES, *LONG_MESHES)[min((step - 1) // 2, len(MESHES) + 1)]
        # Where thousands of steps add up what is rounded differently, a little more.
        close = 2e-5 if step <= short else 1e-2
        assert value == pytest.approx(one[step], rel=close), f"{key} of step {step} on {mesh}"


def test_two_processes_sample_as_one(runs):
    """Of parameters that are split over both."""
    for step in (ALONE + 2, ALONE + 4):
        two, one = (
            (workdir / "samples" / f"step_{step:08d}.txt").read_text()
            for workdir in (runs[0], runs[-1])
        )
        assert two == one and len(two) > 20


def test_the_profile_of_each_process_is_kept(runs):
    """In one folder, as hosts of one profile. The last to write replaced that of the other: JAX
    names the files by the host."""
    workdir, _, said, *_ = runs
    written = [path for path in (workdir / "profile").rglob("*") if path.is_file()]
    assert {path.parent.relative_to(workdir / "profile").as_posix() for path in written} == {
        f"plugins/profile/step_{ALONE + 2 * PROFILED}"
    }
    for kind in (".xplane.pb", ".trace.json.gz"):
        names = sorted(path.name for path in written if path.name.endswith(kind))
        assert [name.split("_")[:2] for name in names] == [["process", "0"], ["process", "1"]]
        assert all(name.endswith(socket.gethostname() + kind) for name in names), names
    assert "profile of 1 step: " in said[0] and "profile of 1 step: " not in said[1]


def test_a_process_reads_the_rows_that_its_devices_hold(runs):
    read = [
        [json.loads(line[5:]) for line in said.splitlines() if line.startswith("read ")]
        for said in runs[2]
    ]
    splitting = dict(sharding.DEFAULT_RULES)["batch"]
    for i, mesh in enumerate(MESHES):
        first, second = read[0][i], read[1][i]
        if any(f"mesh.{axis}" in mesh for axis in splitting):  # half of the batch in either
            assert len(first) == len(second) == 4 and not set(first) & set(second), mesh
        else:
            assert len(first) == 8 and first == second, mesh


def test_a_notice_to_one_process_stops_both_at_one_step(runs):
    """Each of them saves and comes to an end; the launch after it, with another mesh, goes on."""
    workdir, stopped, said, *_ = runs
    line = f"stopped at step {stopped} by SIGTERM on one of the hosts; the run is saved"
    assert line in said[0]
    assert [text.count("read [") for text in said] == [len(MESHES) + 1] * 2
    assert f"resuming {workdir} at step {stopped}" in said[0]


def test_two_processes_go_on_from_one(runs):
    """Their first steps count on from those of a run that one process began."""
    workdir, _, said, *_ = runs
    assert f"resuming {workdir} at step {ALONE}" in said[0]


def last_line(output, end):
    """Of what a process said, or its observer before `end`, on the clock."""
    lines = output.read_text().splitlines()
    while not lines[-1].startswith("efx: stopped") and time.monotonic() < end:
        time.sleep(0.1)
        lines = output.read_text().splitlines()
    return lines[-1]


def test_the_death_of_a_process_is_told_by_the_other(runs):
    """It took 72 seconds, and ended in a stack trace. As a rule it is an exception; where the
    other device of the process waits for that one, JAX's runtime aborts the process."""
    last, status = runs[3]
    if status == hosts.LOST:
        assert last.startswith("efx: stopped: another process of the run is lost; see the output")
        assert "Traceback" not in runs[2][0] and "Check failure" not in runs[2][0]
    else:
        assert status == -signal.SIGABRT
        assert last.startswith("efx: stopped: process 0 of 2 ended without an error message")


def test_processes_connect_without_the_proxy(tmp_path, root, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    with two_processes(PROXIED, (), root, tmp_path / "processes") as (processes, _):
        assert [process.wait(timeout=60) for process in processes] == [0, 0]


def test_a_process_that_hangs_tells_of_a_death(hanging):
    """JAX's runtime aborts it; the line is that of its observer, which is there in time."""
    process, (output, _), death = hanging
    process.wait(timeout=max(1, death + 30 - time.monotonic()))
    last = last_line(output, death + 30)
    assert process.returncode == -signal.SIGABRT
    assert last.startswith("efx: stopped: process 0 of 2 ended without an error message")


def test_a_run_folder_that_is_not_shared_is_refused(hanging):
    """By both, in one line; one that is shared is not, and nothing is left in any."""
    _, outputs, _ = hanging
    folder = outputs[0].parent
    for rank, output in enumerate(outputs):
        (line,) = [line for line in output.read_text().splitlines() if line.startswith("refused")]
        assert line.startswith(
            f"refused: --workdir={folder}/of_{rank}/run is not shared by all processes:"
            " process 1 does not see the files of process 0"
        )
    assert sorted(path.name for path in folder.iterdir()) == ["process_0.txt", "process_1.txt"]


def test_a_process_that_writes_no_array_saves_with_the_others(hanging):
    """Three numbers do not divide over two devices, and process 0 writes them all. The other looked
    for what it had written in a folder that is not there, and ended both."""
    _, outputs, _ = hanging
    for output in outputs:
        assert "restored: [0.0, 1.0, 2.0]" in output.read_text().splitlines()
    folder = outputs[0].parent
    state = folder.with_name(f"{folder.name}_saved") / "checkpoints" / "1" / "state"
    assert [path.name for path in state.glob("ocdbt.process_*")] == ["ocdbt.process_0"]


def test_one_process_is_ended_before_its_first_step(root):
    """It was connected to no other, as on a TPU of one host, and JAX kept the notice to itself."""
    command = [sys.executable, "-c", SINGLE, str(free_port())]
    environment = os.environ | {"PYTHONPATH": str(root)}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGTERM
