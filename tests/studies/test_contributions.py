"""The worth of parts: each can be switched off, and its loss is that of the model without it."""

import families
import jax
import numpy as np
import pytest
from study_helpers import error_line, train

pytest.importorskip("pandas", reason="the extra `studies` is not installed")
pytest.importorskip("seaborn", reason="the extra `studies` is not installed")

import pandas as pd

from efx import models
from efx.layers import flops
from efx.logging import read_metrics
from efx.models.parts import find_parts, switch_parts
from efx.studies import contributions

# {row of FAMILIES: names of some of its parts}
ROWS = {
    "mode_staged": ("block_1", "block_1/attention", "block_1/mlp", "block_1/mlp/experts/2"),
    "recursion": ("recursion_1", "block_1/mlp", "routed layers"),
    "streams_masks": ("block_0/encoder_0", "last/block_0/decoder/cross_attention"),
    "latent_parts": ("decoder_0",),
    "dropout_elementwise_mod": ("embedding", "block_0/attention/probs_dropout"),
    "adapter_mod": ("adapters",),
    "soft": ("block_0/attention", "block_0/mlp"),
}


@pytest.mark.parametrize("name", ROWS)
def test_each_part_can_be_switched_off(name):
    model = models.unrolled(families.build(name))
    variables = models.unroll_variables(families.build(name), families.variables_of(name))
    parts = find_parts(model, families.LENGTH)
    assert {*ROWS[name]} <= {part.name for part in parts}

    @jax.jit
    def logits(on):
        with switch_parts(on):
            return model.apply(variables, families.tokens(), rngs=families.keys())

    on = {path: np.ones_like(x) for part in parts for path, x in part.off.items()}
    with_all_BTV = logits(on)
    np.testing.assert_allclose(with_all_BTV, families.logits_of(name, families.tokens()), atol=1e-4)
    for part in parts:
        moved = np.abs(logits(on | part.off) - with_all_BTV).max()
        assert moved > 0.01, part.name


def test_flops_of_the_parts_add_up_to_those_of_the_model():
    model, length = families.build("moe"), families.LENGTH
    count = {part.name: part.flops for part in find_parts(model, length)}
    assert count["block_1"] == count["block_1/attention"] + count["block_1/mlp"]
    experts = sum(count[f"block_1/mlp/experts/{e}"] for e in range(4))
    router = 2 * length * model.config.width * 4
    assert count["block_1/mlp"] == experts + count["block_1/mlp/shared"] + router
    layers = sum(count[f"block_{i}"] for i in range(model.config.depth))
    head = flops.matmul(length, model.config.width, model.padded_vocab)
    assert layers + head == flops.executed(model, length)


def test_worth_of_the_parts_of_a_run(root, tmp_path, one_device, capsys):
    settings = "steps=3", "data.max_bytes=600000", "evaluate.max_batches=4"
    run = train(root, str(tmp_path / "mod"), "mod.py:smoke", *settings)
    assert contributions.main([run, f"--out={tmp_path}/worth", "--batches=4"]) == 0
    table = pd.read_csv(tmp_path / "worth/contributions.csv", index_col="part")
    assert (tmp_path / "worth/contributions.png").exists()
    logged = read_metrics(run)[-1]
    cost = logged["eval/loss_routed_off"] - logged["eval/loss"]
    assert table.nats["routed layers"] == pytest.approx(cost, abs=1e-5)
    assert table.gflops["block_1"] < 0.5 * table.gflops["block_0"]
    capsys.readouterr()
    assert contributions.main([str(tmp_path / "none")]) == 2
    error_line(capsys, "none")
    assert contributions.main([run, "--batches=1"]) == 2
    error_line(capsys, "--batches=1")
