"""`--mode=compile`: the programs of a run, compiled for devices that are not there."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import jax
import pytest
from refusals import refused

from efx import main
from efx.ahead_of_time import compile as compile_lib
from efx.ahead_of_time import topology
from efx.config.load import load_config
from efx.layers import flops

SMALL = {
    "model.width": 16,
    "model.depth": 1,
    "model.attention.num_heads": 2,
    "model.depth_routing.every": 1,
    "model.depth_routing.capacity": 0.25,
    "model.depth_routing.capacity_stages": ((0.5, 1.0),),
    "data.seq_len": 16,
    "data.batch_size": 2,
    "evaluate.batch_size": 2,
    "sample.every": 1,
}


def test_all_programs_of_a_run_are_compiled_and_reported(monkeypatch, capsys):
    """Also where they do not fit. While a run evaluates, it keeps the training state in memory."""
    chip = topology.Chip("cuda", 1024, 1e12, 1e11)
    here = topology.Topology("here", chip, tuple(jax.devices()[:1]), 1)
    monkeypatch.setattr(topology, "describe", lambda name: here)
    monkeypatch.setattr(flops, "device_peak", lambda dtype, device: 1e12)
    config = load_config("mod", SMALL)
    compile_lib.compile_and_report(config, "here", vocab_size=45, as_json=True)
    step = json.loads(capsys.readouterr().out)
    first_stage, *others = step["programs"]
    assert first_stage["name"] == "training step at capacity 1"
    assert [program["name"] for program in others] == [
        "evaluation with causal routing",
        "evaluation with topk routing",
        "evaluation with off routing",
        "sampling: prefill",
        "sampling: decoding",
    ]
    assert step["devices"] == 1
    assert first_stage["executed_flops"] > step["executed_flops"] > 0
    for program in (step, *step["programs"]):
        assert not program["memory"]["fits"] and program["error"] == ""
    for program in others:
        assert program["memory"]["beside"] > 8 * step["parameters"]  # the optimiser's moments


@pytest.mark.parametrize(
    "arguments, name",
    [
        (["--config=mod"], "--topology"),
        (["--topology=v5e:2x2"], "--config"),
        (["--config=mod", "--topology=v5e:2x0"], "--topology=v5e:2x0"),
        (["--config=mod", "--topology=v5e:2x2", "--vocab_size=0"], "--vocab_size=0"),
        (
            ["--config=mod", "--topology=v5e:2x2", "--config.data.tokenizer=chars"],
            "config.data.tokenizer='chars'",
        ),
    ],
)
def test_bad_command_lines_are_refused(root, monkeypatch, arguments, name):
    monkeypatch.chdir(root)
    refused(lambda: main.run(["efx", "--mode=compile", *arguments]), name)
    refused(lambda: main.run(["efx", "--config=mod", "--workdir=x", "--topology=x"]), "--topology")


def test_a_missing_compiler_names_its_extra(monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    refused(lambda: topology.describe("v5e:2x2"), "--topology=v5e:2x2", "`tpu`")


@pytest.mark.slow
def test_a_small_model_for_a_tpu(root):
    """A MoD model split over four chips, with splash attention; sampling copies no KV cache."""
    if find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed (extra tpu)")
    rows, length, width = 32, 512, 128
    changes = {
        "model.width": width,
        "model.depth": 2,
        "model.attention.num_heads": 2,
        "model.scan_layers": True,
        "model.depth_routing.every": 1,
        "data.seq_len": length,
        "data.batch_size": 8,
        "evaluate.batch_size": 8,
        "sample.num_samples": rows,
        "train.dtype": "bfloat16",
        "mesh.data": 1,
        "mesh.fsdp": -1,
    }
    command = [sys.executable, "-m", "efx.main", "--config=mod", "--mode=compile", "--json"]
    command += ["--topology=v5e:2x2"]
    command += [f"--config.{key}={value}" for key, value in changes.items()]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["devices"] == 4 and found["mesh"] == {"fsdp": 4} and found["memory"]["fits"]
    assert found["memory"]["arguments"] > 12 * found["parameters"] / 4
    assert found["kernel_runs"].keys() == {"splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"}
    programs = {program["name"]: program for program in found["programs"]}
    assert "evaluation with causal routing" in programs
    for name, program in programs.items():
        assert program["memory"]["fits"] and program["error"] == "", name
        assert program["memory"]["beside"] > 8 * found["parameters"] / 4, name
    keys = 2 * rows * length * width  # of one block
    for name in ("sampling: prefill", "sampling: decoding"):
        assert programs[name]["memory"]["temporaries"] < keys, (name, programs[name]["memory"])
