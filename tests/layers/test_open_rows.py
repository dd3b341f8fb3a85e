"""Tokens that a mask has closed are left out at inference, and nothing else changes."""

import functools
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
from efx.errors import UsageError
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


@pytest.mark.parametrize("tile", [1, 3, 4, 12, 100])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
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
        {},
        {"dropout.attention.granularity": "feature"},
        {"dropout.attention.input": "embedding"},
        {"preset": "gpt2", "scan_layers": True},
        {"depth_routing.kind": "mod", "depth_routing.capacity": 0.5},
        {"family": "encoder_decoder"},
        {"mlp.kind": "moe", "mlp.moe.every": 2},
    ],
)
def test_skipping_changes_nothing(changes):
    with_skip, without, params = models_with_and_without(**changes)
    tokens_BT = families.tokens()
    for train in (False, True):
        expected, got = (
            families.jit(functools.partial(model.apply, train=train))(
                {"params": params}, tokens_BT, rngs={"dropout": jax.random.key(1)}
            )
            for model in (without, with_skip)
        )
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_share_is_that_of_the_masks():
    with_skip, _, params = models_with_and_without()
    _, state = families.jit(
        lambda p, t: with_skip.apply(
            {"params": p},
            t,
            mutable=["stats"],
            capture_intermediates=lambda m, name: name == "mask",
        )
    )(params, families.tokens())
    assert (
        0.05
        < float(
            np.mean(
                [
                    state["stats"]["layers"][f"block_{i}"]["mlp/computed_fraction"][0]
                    for i in range(2)
                ]
            )
        )
        < 0.95
    )
    for i in range(2):
        masks = state["intermediates"]["layers"][f"block_{i}"]["dropout_mlp_output"]["mask"]
        np.testing.assert_allclose(
            state["stats"]["layers"][f"block_{i}"]["mlp/computed_fraction"][0], np.mean(masks[0])
        )


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


def test_decoding_skips_and_is_the_full_forward():
    model, _, params = models_with_and_without()
    tokens_BT = families.tokens(batch=2, length=12)
    expected_BTV = families.jit(model.apply)({"params": params}, tokens_BT)
    cache = models.init_cache(model, 2, 12)
    decode = families.jit(
        lambda cache, t, p: model.apply(
            {"params": params, "cache": cache}, t, p, decode=True, cache_size=12, mutable=["cache"]
        )
    )
    for start, stop in ((0, 5), *((t, t + 1) for t in range(5, 12))):
        positions_BT = np.tile(np.arange(start, stop), (2, 1))
        logits_BTV, state = decode(cache, tokens_BT[:, start:stop], positions_BT)
        cache = state["cache"]
        np.testing.assert_allclose(logits_BTV, expected_BTV[:, start:stop], atol=1e-4)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"dropout.attention.input": "hidden"}, "skip_tile=5: needs masks known before"),
        ({"dropout.attention.rounding": "sigmoid"}, "skip_tile=5: .*exactly 0"),
        ({"dropout.attention.skip_tile": -1}, "skip_tile=-1: must be at least 0"),
        ({"dropout.attention.granularity": "row"}, "granularity='row'.*feature, token"),
    ],
)
def test_bad_settings_are_named(changes, message):
    with pytest.raises(UsageError, match=message):
        families.make({**CHANGES, "dropout.attention.skip_tile": 5, **changes})


def test_jit_compiles_one_program_whatever_is_open():
    model, _, params = models_with_and_without()
    forward = jax.jit(model.apply)
    for seed in range(3):
        tokens = jax.random.randint(jax.random.key(seed), (2, 12), 0, families.VOCAB)
        forward({"params": params}, jnp.asarray(tokens))
    assert forward._cache_size() == 1
