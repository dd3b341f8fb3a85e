"""Tokens that a mask has closed are left out at inference, and nothing else changes."""

import types

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from test_controls import Held

from efx import models, sharding
from efx.configs import common
from efx.evaluate import Evaluator, describe
from efx.layers.mask_dropout import open_rows
from efx.layers.mask_dropout.reports import MASKS

CHANGES = {
    "dropout.kind": "attention",
    "dropout.sites": ("attention_output", "mlp_output"),
    "dropout.attention.input": "embedding_linear",
    "dropout.attention.granularity": "token",
}


CALLS = []  # the rows that `Counted` got, each time that it was computed


class Counted(nn.Module):
    """2x."""

    def __call__(self, x_BTD):
        jax.debug.callback(lambda x: CALLS.append(np.asarray(x)), x_BTD)
        return 2 * x_BTD


class Outer(nn.Module):
    tile: int

    @nn.compact
    def __call__(self, x_BTD, open_BT):
        return open_rows.compute(Counted(), x_BTD, open_BT, self.tile)


@pytest.mark.parametrize("tile, share", [(4, 0.0), (3, 0.5), (5, 0.5), (100, 1.0)])
def test_only_open_rows_are_computed(tile, share):
    x_BTD = np.random.default_rng(0).normal(size=(2, 6, 3)).astype(np.float32)
    open_BT = np.random.default_rng(1).permutation(12).reshape(2, 6) < round(12 * share)
    CALLS.clear()
    # A closed token's activations are never touched: not even NaN reaches the result.
    poisoned = np.where(open_BT[..., None], x_BTD, np.nan)
    out = jax.jit(Outer(tile).apply)({}, poisoned, open_BT)
    np.testing.assert_array_equal(out, np.where(open_BT[..., None], 2 * x_BTD, 0))
    jax.effects_barrier()
    assert len(CALLS) == -(-open_BT.sum() // min(tile, 12))
    assert all(call.shape == (1, min(tile, 12), 3) for call in CALLS)


def models_with_and_without(**changes):
    with_skip = families.make({**CHANGES, "dropout.attention.skip_tile": 5, **changes})
    without = families.make({**CHANGES, **changes})
    # About half of the tokens are open.
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.full_like(x, np.pi / 2) if path[-1].key == "mask_shift" else x,
        families.random_params(without),
    )
    return with_skip, without, params


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": "gpt2", "scan_layers": True, "dropout.attention.granularity": "feature"},
        pytest.param(
            {"depth_routing.kind": "mod", "depth_routing.capacity": 0.5}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"family": "encoder_decoder", "dropout.attention.input": "embedding"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_skipping_changes_nothing(changes):
    with_skip, without, params = models_with_and_without(**changes)
    rngs, modes = {"dropout": jax.random.key(1)}, (False, True)

    @families.jit
    def run(params, tokens_BT):
        return [
            [model.apply({"params": params}, tokens_BT, train=train, rngs=rngs) for train in modes]
            for model in (without, with_skip)
        ]

    expected, got = run(params, families.tokens())
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_fraction_of_computed_tokens_is_that_of_open_masks():
    model, _, params = models_with_and_without()
    _, state = families.jit(
        lambda params, tokens_BT: model.apply(
            {"params": params},
            tokens_BT,
            mutable=["stats"],
            capture_intermediates=lambda module, method: method == "mask",
        )
    )(params, families.tokens())
    for block, stats in state["stats"]["layers"].items():
        mask = state["intermediates"]["layers"][block]["dropout_mlp_output"]["mask"][0]
        assert 0.05 < np.mean(mask) < 0.95
        np.testing.assert_allclose(stats["mlp/computed_fraction"][0], np.mean(mask))


@pytest.mark.slow
def test_evaluation_reports_what_is_computed():
    """FLOPs too: without the MLPs of closed tokens."""
    model, _, params = models_with_and_without()
    mesh = sharding.make_mesh(dict.fromkeys(sharding.MESH_AXES, 1), jax.devices()[:1])
    config = common.apply(
        common.base(), {"data.seq_len": families.LENGTH, "evaluate.batch_size": 2}
    )
    evaluator = Evaluator(model, config, Held(), mesh, sharding.DEFAULT_RULES)
    with sharding.use(mesh, sharding.DEFAULT_RULES):
        rows = evaluator(params, {})
    share = rows["eval/mlp/computed_fraction"]
    assert 0.05 < share < 0.95
    assert share == np.mean([rows[f"eval/mlp/computed_fraction/block_{i}"] for i in range(2)])
    parts = model.ledger(families.LENGTH).nominal
    whole = sum(parts.values()) - (1 - share) * parts["mlp"]
    assert rows["eval/flops_per_token"] == pytest.approx(whole / families.LENGTH)
    assert f"; MLPs computed for {share:.1%} of the tokens" in describe(3, rows)


def test_only_mlps_that_skip_cost_less():
    """Experts in every second block compute all tokens. Of levels of latents no block says what
    they cost, so that nothing is said."""
    changes = {**CHANGES, "dropout.attention.skip_tile": 5}
    model = families.make(
        {**changes, "mlp.kind": "moe", "mlp.moe.num_experts": 2, "mlp.moe.every": 2}
    )
    share = "mlp/computed_fraction"
    means = {"causal": {share: 0.25, f"{share}/block_0": 0.25}}
    passes = types.SimpleNamespace(means=means)
    rows = MASKS.rows(model, families.LENGTH, passes)
    parts = model.ledger(families.LENGTH).nominal
    dense = families.make({**CHANGES, "depth": 1}).ledger(families.LENGTH).nominal["mlp"]
    whole = sum(parts.values()) - 0.75 * dense
    assert rows["eval/flops_per_token"] == pytest.approx(whole / families.LENGTH)
    means["causal"][f"{share}/decoder_0/blocks/local_0/block_0"] = 0.5
    assert MASKS.rows(model, families.LENGTH, passes) == {}


@pytest.mark.slow
def test_decoding_skips_and_is_the_full_forward():
    model, _, params = models_with_and_without()
    tokens_BT = families.tokens(batch=2, length=12)
    expected_BTV = families.jit(model.apply)({"params": params}, tokens_BT)
    step, cache = families.decoder(model, {"params": params}, 12), models.init_cache(model, 2, 12)
    calls = families.chunks(np.array([5, 5]), np.array([12, 12]), 5)
    logits_BTV, _ = families.read(step, cache, tokens_BT, calls)
    np.testing.assert_allclose(logits_BTV, expected_BTV, atol=1e-4)
