"""Benchmarks run at tiny sizes, and judge what they measure."""

import numpy as np
import pytest

pytest.importorskip("pandas", reason="the extra `studies` is not installed")

from benchmarks import accelerator, common, fuzz, step
from efx.logging import tables


def test_models_take_turns_and_ratios_are_medians_of_turns():
    order = []
    calls = {name: lambda turn, name=name: order.append((turn, name)) for name in "ab"}
    times = common.take_turns(calls, rounds=4, warmup=1)
    assert [name for _, name in order] == list("abbaabbaab") and len(times["a"].wall) == 4
    doubled, baseline = (
        common.Times(np.array(wall), np.ones(4)) for wall in ([2, 4, 20, 2], [1, 4, 10, 1])
    )
    assert common.ratio(doubled, baseline) == "2.000 (1.750-2.000)"  # turn 3 is slow for both


@pytest.mark.slow
def test_a_training_step_over_pytorch(capsys, one_device):
    """The same function in both: the losses of the first step agree, or the benchmark fails."""
    pytest.importorskip("torch", reason="the extra `interop` is not installed")
    assert step.main(["--quick", "--parts", "mod", "torch", "--threads=64"]) == 0
    shown = capsys.readouterr().out
    assert "MoD 12.5%" in shown and "over eager PyTorch" in shown
    assert step.main(["--configs", "mod:smoke", "--steps=1", "--threads=64"]) == 0
    assert "mod:smoke" in capsys.readouterr().out


@pytest.mark.slow
def test_the_accelerator_benchmark_at_a_tiny_size(tmp_path, one_device, capsys):
    out = tmp_path / "table.csv"
    parts = ["matmul", "attention", "mod", "latent"]
    assert accelerator.main(["--smoke", "--rounds=1", f"--out={out}", "--parts", *parts]) == 0
    table = tables.read_csv(out)[0].set_index("name")
    assert table.flops_ratio["350M MoD"] < 1 and table.error.max() < accelerator.TOLERANCE
    assert "# command: python -m benchmarks.accelerator" in out.read_text()


@pytest.mark.slow
def test_hostile_input_is_refused_in_one_line(one_device, capsys):
    assert fuzz.main(["--examples=3"]) == 0
    assert capsys.readouterr().out.count("nothing found") == 3
