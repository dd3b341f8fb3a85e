"""Two processes train and evaluate as one does, whatever mesh axis goes over their devices."""

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from efx import train
from efx.configs import common
from efx.metrics import read_metrics

SHARED = {
    "data.seq_len": 16, "data.batch_size": 8, "model.width": 16, "model.depth": 1,
    "model.mlp.kind": "moe", "model.mlp.moe.num_experts": 4, "model.mlp.moe.expert_hidden": 16,
    "optim.schedule.warmup_steps": 1, "optim.schedule.decay_steps": 8, "log.every": 1,
    "log.tensorboard": False, "sample.every": 0, "evaluate.every": 2, "evaluate.batch_size": 8,
    "evaluate.max_batches": 2, "checkpoint.every": 0, "checkpoint.asynchronous": False,
    "mesh.data": 1,
}  # fmt: skip
# The run goes on from each to the next: two steps on four devices, two of either process.
MESHES = (
    {"mesh.data": 2, "mesh.fsdp": 2},
    {"mesh.tensor": 4},
    {"mesh.expert": 4},
    {"mesh.sequence": 4},
)

PROCESS = """
import json, sys, jax
rank, port, workdir, launches = int(sys.argv[1]), *sys.argv[2:]
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=rank,
                           heartbeat_timeout_seconds=100)
from efx.configs import common
from efx import train
for changes in json.loads(launches):
    config = common.base()
    common.apply(config, changes)
    train.train_and_evaluate(config, workdir)
jax.distributed.shutdown()
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def two_processes(workdir, launches, root):
    """Runs every launch, {setting: value}, in two processes; what they printed."""
    import json

    environment = os.environ | {"PYTHONPATH": str(root)}
    for name in ("compilation_cache_dir", "persistent_cache_min_compile_time_secs"):
        environment[f"JAX_{name.upper()}"] = str(getattr(jax.config, f"jax_{name}"))
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(rank), str(port), workdir, json.dumps(launches)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-3000:]
    return outputs


def rows(workdir, key):
    return {row["step"]: row[key] for row in read_metrics(workdir) if key in row}


def test_two_processes_train_and_evaluate_as_one(tmp_path, root):
    """Losses of every step and evaluation. Rows used to go by the number of the process: where both
    held the same part of a batch, each took other rows for it, and nothing said so."""
    text = tmp_path / "text.txt"
    letters = np.random.default_rng(0).choice(list("abcdefgh "), 6000)
    text.write_text("".join(letters))
    shared = SHARED | {"data.source": f"text:{text}", "data.cache_dir": str(tmp_path)}
    launches = [shared | mesh | {"steps": 2 * i} for i, mesh in enumerate(MESHES, 1)]
    two_processes(str(tmp_path / "two"), launches, root)
    config = common.base()
    common.apply(config, shared | {"steps": 2 * len(MESHES), "mesh.data": -1})
    train.train_and_evaluate(config, tmp_path / "one")
    for key in (
        "train/loss",
        "train/grad_norm",
        "losses/load_balance",
        "eval/loss",
        "eval/moe/dropped_fraction",
    ):
        one, two = rows(tmp_path / "one", key), rows(tmp_path / "two", key)
        assert one.keys() == two.keys() and one
        for step, value in one.items():
            mesh = MESHES[(step - 1) // 2]
            assert two[step] == pytest.approx(value, rel=2e-5), f"{key} of step {step} on {mesh}"
