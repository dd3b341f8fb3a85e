"""`--mode=compile`: programs of a run compiled for devices that are absent."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import jax
import pytest
from refusals import refused

from efx import aot, main
from efx.config.load import load_config

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


def test_every_program_is_compiled_and_the_training_state_counts_in_all(monkeypatch, capsys):
    monkeypatch.setattr(aot, "describe", lambda name: (jax.devices()[:1], 1024))
    config = load_config("mod", SMALL)
    aot.compile_and_report(config, "here:1", vocab_size=45, as_json=True)
    report = json.loads(capsys.readouterr().out)
    step, first_stage, *others = report["programs"]
    assert [step["name"], first_stage["name"]] == ["training step", "training step at capacity 1"]
    assert [one["name"].split()[0] for one in others] == ["evaluation", "prefill", "decoding"]
    assert first_stage["flops"] > step["flops"] > 0
    for program in others:
        assert program["held"] > 8 * report["parameters"]  # the optimiser's moments
    assert not report["fits"] and report["needed"] == max(p["needed"] for p in report["programs"])
    aot.compile_and_report(load_config("mod", SMALL | {"sample.every": 0}), "here:1", vocab_size=45)
    printed = capsys.readouterr().out
    assert "evaluation" in printed and "prefill" not in printed
    assert printed.splitlines()[-1].startswith("does not fit: needs ")


@pytest.mark.parametrize("lines, expected", [
    (["  %a = bf16[4,32]{1,0} all-gather(%p), channel_id=1"], {"all-gather": (1, 256)}),
    (["  %a = (f32[8], pred[3]) all-reduce(%p, %q), channel_id=1",
      "  ROOT %b = f32[] all-reduce(%p), channel_id=2"], {"all-reduce": (2, 39)}),
    # One asynchronous collective: a start and a done, or several parts with one channel.
    (["  %a = (f32[2], f32[8]) all-gather-start(%p), channel_id=1",
      "  %b = f32[8] all-gather-done(%a)"], {"all-gather": (1, 32)}),
    (["  %a = f32[8] all-gather(%p), channel_id=4", "  %b = f32[8] all-gather(%q), channel_id=4"],
     {"all-gather": (1, 32)}),
    (["%all-reduce-scatter.1 (p: f32[8]) -> f32[2] {", "  %a = f32[8] all-reduce(%p), channel_id=1",
      "}", "%main (p: f32[8]) -> f32[8] {", "  %b = f32[8] all-reduce(%p), channel_id=2"],
     {"all-reduce": (1, 32), "reduce-scatter": (1, 32)}),
    (["  %all-gather.1 = f32[8] fusion(%p)"], {}),
])  # fmt: skip
def test_collectives_are_counted_by_kind(lines, expected):
    found = aot.collectives("\n".join(lines))
    assert {kind: (each["count"], each["bytes"]) for kind, each in found.items()} == expected


@pytest.mark.parametrize("message, gib", [
    ("Ran out of memory in memory space hbm. Used 17.90G of 15.75G hbm.", 17.9),
    ("the total memory required for HLO temporaries (1.50T) exceeds available HBM (15.75G)", 1536),
    ("the kernel has a bug", None),
])  # fmt: skip
def test_a_program_that_the_compiler_refuses_for_its_size_has_a_size(message, gib):
    found = aot.bytes_refused(message)
    assert found == gib if gib is None else found == pytest.approx(gib * 2**30)


COMPILE = ["--mode=compile", "--config=mod"]


@pytest.mark.parametrize("arguments, name", [
    (COMPILE, "--topology"),
    (["--mode=compile", "--topology=v5e:2x2"], "--config"),
    ([*COMPILE, "--topology=v5e:2x0"], "--topology=v5e:2x0"),
    ([*COMPILE, "--topology=v5e:2x2", "--vocab_size=0"], "--vocab_size=0"),
    ([*COMPILE, "--topology=v5e:2x2", "--config.data.tokenizer=chars"],
     "config.data.tokenizer='chars'"),
    (["--config=mod", "--workdir=x", "--topology=x"], "--topology"),
])  # fmt: skip
def test_bad_command_lines_are_refused(root, monkeypatch, arguments, name):
    monkeypatch.chdir(root)
    refused(lambda: main.run(["efx", *arguments]), name)


def test_a_missing_compiler_names_its_extra(monkeypatch):
    monkeypatch.setattr(aot, "find_spec", lambda name: None)
    refused(lambda: aot.describe("v5e:2x2"), "--topology=v5e:2x2", "`tpu`")


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
        "model.depth_routing.kv_for_skipped": False,  # splash has as many queries as keys
        "data.seq_len": length,
        "data.batch_size": 8,
        "evaluate.batch_size": 8,
        "sample.num_samples": rows,
        "train.dtype": "bfloat16",
        "mesh.data": 1,
        "mesh.fsdp": -1,
    }
    command = [sys.executable, "-m", "efx.main", "--config=mod", "--mode=compile", "--json"]
    command += ["--topology=v5e:2x2", *(f"--config.{key}={x}" for key, x in changes.items())]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["devices"] == 4 and report["mesh"] == {"fsdp": 4} and report["fits"]
    step, evaluation, *sampling = report["programs"]
    assert step["arguments"] > 12 * report["parameters"] / 4
    assert "attention by splash" in done.stdout + done.stderr
    assert step["collectives"]["all-gather"]["count"] > 4
    for program in (evaluation, *sampling):
        assert program["held"] > 8 * report["parameters"] / 4, program
    keys = 2 * rows * length * width  # bytes of one block in bfloat16
    assert all(program["temporaries"] < keys for program in sampling), sampling
