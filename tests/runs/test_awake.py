"""A small twin of the README's first run: its routed blocks are awake, and sleep is warned of."""

import jax.numpy as jnp
import pytest

from efx import api
from efx.config.load import config_of_run
from efx.configs import common
from efx.logging import read_metrics
from efx.routing import gates
from efx.train import health, inference, trainer

SMALL = {
    "steps": 250,
    "data.seq_len": 64,
    "data.max_bytes": 1_000_000,
    "model.width": 32,
    "model.depth": 2,
    "model.attention.num_heads": 2,
    "optim.schedule.warmup_steps": 10,
    "checkpoint.every": 0,
    "evaluate.every": 0,
    "evaluate.max_batches": 4,
    "sample.every": 0,
    "log.tensorboard": False,
}


def train_twin(workdir, **changes):
    """Rows of metrics of the quick run, but smaller."""
    config = common.apply(api.load_config("mod:quick"), {**SMALL, **changes})
    trainer.train_and_evaluate(config, workdir)
    return read_metrics(workdir)


@pytest.mark.usefixtures("one_device")
def test_routed_blocks_of_the_quick_run_are_awake(tmp_path, capsys):
    """Switching them off costs; about 8 s."""
    *_, row = train_twin(tmp_path)
    assert row["eval/router/worth"] == row["eval/loss_routed_off"] - row["eval/loss"] > 0.005
    shown = capsys.readouterr()
    gate, routed = row["eval/router/gate/block_1"], row["eval/router/routed_fraction"]
    assert row["eval/router/gate_min"] == row["eval/router/gate_max"] == gate > 0.1
    line = f"routed blocks: {routed:.1%} of tokens, worth {row['eval/router/worth']:.3f} nats, "
    assert line + f"gates {gate:.2g} to {gate:.2g}," in shown.out
    assert "warning" not in shown.err


@pytest.mark.usefixtures("one_device")
def test_closed_gates_are_warned_of_once(tmp_path, capsys, monkeypatch):
    """After the first tenth of the training, and by a later evaluation."""
    monkeypatch.setitem(gates.GATES, "identity", lambda r: 1e-4 * jnp.ones_like(r))
    monkeypatch.setattr(health, "warn", print)
    rows = train_twin(tmp_path, **{"steps": 20, "evaluate.every": 1, "evaluate.max_batches": 1})
    assert sum(abs(row.get("eval/router/worth", 1.0)) < 0.001 for row in rows) == 20
    lines, tried = capsys.readouterr().out.splitlines(), "config.optim.router_rate="
    (start,) = (i for i, line in enumerate(lines) if line.startswith("step 3: held-out loss"))
    worth, gate = [line for line in lines[start:] if "asleep" in line or "closed" in line][:2]
    assert "switching all of them off costs" in worth and "block_1: 0.0001 on the mean" in gate
    assert [line for line in lines if tried in line] == [worth, gate]
    trained = {name for row in rows for name in row if not name.startswith("eval/")}
    assert not [name for name in trained if "gate" in name or "increment" in name]
    inference.evaluate(config_of_run(tmp_path), tmp_path)
    again = [line for line in capsys.readouterr().out.splitlines() if tried in line]
    assert len(again) == 2 and again[1] == gate
