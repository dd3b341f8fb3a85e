"""Soft experts: the block against its formula in numpy, precision, parameters, cost and cache."""

import dataclasses

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from formulas import linear, mlp, norm
from refusals import refused
from scipy import special

from efx.layers.soft_experts import SoftBlock, merge
from efx.layers.token_context import TokenContext

B, T, WIDTH = 2, 11, 24
SMALL = {
    "soft_experts.num": 3,
    "soft_experts.hidden_multiple": 0.5,
    "positions": "none",
    "width": WIDTH,
    "attention.num_heads": 4,
}
CALL = TokenContext(np.arange(T)[None])


def block(changes):
    """(a block with soft experts, parameters without zeros, input)."""
    module = SoftBlock(families.make({**SMALL, **changes}).specs()[0].blocks[0])
    x_BTD = np.float32(np.random.default_rng(0).normal(size=(B, T, WIDTH)))
    shapes = jax.eval_shape(lambda: nn.unbox(module.init(jax.random.key(0), x_BTD, CALL)))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: np.float32(rng.normal(0.1, 0.4, leaf.shape)), shapes)
    return module, params["params"], x_BTD


def of_channel(p, i):
    """The parameters of one channel, with those that all channels share."""

    def select(path, leaf):
        has_channels = leaf.ndim > (2 if path[-1].key == "kernel" else 1)
        return leaf[i] if has_channels else leaf

    return jax.tree_util.tree_map_with_path(select, p)


def reference(c, p, x):
    """The increment, channel after channel, in float64."""
    p, x = jax.tree.map(np.float64, p), np.float64(x)
    s, width = c.soft.num, c.attention.head_dim
    heads, kv_heads = c.attention.num_heads, c.attention.num_kv_heads
    n = norm(x, p["norm_attention"], c.norm, c.norm_eps)
    query, key, value = (linear(n, p["attention"][name]) for name in ("query", "key", "value"))
    query = query.reshape(B, T, kv_heads, s, heads // kv_heads, width)
    key, value = (y.reshape(B, T, kv_heads, -1, width) for y in (key, value))
    ys = []
    for i in range(s):
        own, shared = of_channel(p, i), i % key.shape[3]
        q, k, v = query[:, :, :, i], key[:, :, :, shared], value[:, :, :, shared]
        if c.attention.qk_norm == "width":
            q, k = (
                norm(y.reshape(B, T, -1), own["attention"][name]).reshape(y.shape)
                for y, name in ((q, "norm_query"), (k, "norm_key"))
            )
        scores = np.einsum("btkgh,bskh->bkgts", q, k) / np.sqrt(width)
        probs = special.softmax(np.where(np.tri(T, dtype=bool), scores, -np.inf), -1)
        out = np.einsum("bkgts,bskh->btkgh", probs, v).reshape(B, T, heads * width)
        h = x + linear(out, own["attention"]["out"])
        n = norm(h, p["norm_mlp"], c.norm, c.norm_eps)
        parts = [own["mlp"][name] for name in ("experts", "shared") if name in p["mlp"]]
        increment = sum(mlp(n, part, c.mlp.activation) for part in parts)
        ys.append(h + linear(increment, p["mlp"]["out"]))
    y = np.stack(ys)
    merged = {"softmax": (special.softmax(y, 0) * y).sum(0), "mean": y.mean(0), "max": y.max(0)}
    return merged[c.soft.merge] - x


OWN = {"soft_experts.tied": False}
GROUPED = {"attention.num_kv_heads": 2, "attention.qk_norm": "width"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"soft_experts.merge": "mean", "soft_experts.shared": 2, "soft_experts.multiple": 2, **OWN},
        {"soft_experts.merge": "max", "soft_experts.shared_kv": True, **GROUPED},
        {"preset": "gpt2", "soft_experts.num": 5, "soft_experts.shared": 1, **GROUPED, **OWN},
        {"preset": "gpt2", "soft_experts.shared": 1, **GROUPED},
    ],
    ids=str,
)
def test_a_block_equals_its_formula(changes):
    module, params, x_BTD = block(changes)
    result = families.jit(module.apply)({"params": params}, x_BTD, CALL)
    expected = reference(module.config, params, x_BTD)
    assert np.abs(expected).mean() > 0.3
    np.testing.assert_allclose(result, expected, atol=2e-5 * np.abs(expected).max())


def test_tied_channels_share_three_parameters():
    """The published form: the first matrices of the MLP, the output matrix of attention and the
    gains of queries and keys; separate ones are s times as many."""

    def sizes(changes):
        leaves = jax.tree_util.tree_leaves_with_path(block({**GROUPED, **changes})[1])
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): x.size for path, x in leaves
        }

    own, tied = sizes(OWN), sizes({})
    shared = {name for name in own if own[name] != tied[name]}
    mlp = {"mlp/experts/gate/kernel", "mlp/experts/up/kernel"}
    norms = {"attention/norm_key/scale", "attention/norm_query/scale"}
    assert shared == {"attention/out/kernel"} | mlp | norms
    assert all(own[name] == 3 * tied[name] for name in shared)
    assert tied["mlp/experts/down/kernel"] == 3 * 12 * 8  # a matrix [F, m D / s] for each channel


def test_channels_in_bfloat16_are_merged_in_float32():
    d = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2, 30, 40)), jnp.bfloat16)
    run = families.jit(lambda d: merge("softmax", d))
    assert np.mean(run(d) == run(d.astype(jnp.float32)).astype(jnp.bfloat16)) > 0.99


def test_blocks_with_soft_experts_and_their_widths():
    model = families.make({"depth": 5, "soft_experts.num": 2, "soft_experts.every": 2})
    assert [spec.blocks[0].soft is not None for spec in model.specs()] == [0, 1, 0, 1, 0]
    soft = model.specs()[1].blocks[0].soft
    features = [
        dataclasses.replace(soft, num=n, multiple=m).features(32)
        for n, m in ((4, 1), (4, 3), (5, 1), (12, 6))
    ]
    assert features == [8, 24, 7, 16]  # m D / s, rounded up


def test_the_cache_has_keys_of_each_channel_unless_they_are_shared():
    soft = {"soft_experts.num": 3}
    dense, separate, shared = (
        families.cache_bytes(families.make(changes), 10)
        for changes in ({}, soft, {**soft, "soft_experts.shared_kv": True})
    )
    assert separate == 3 * dense and shared == dense


def test_a_block_has_one_kind_of_experts():
    both = {"soft_experts.num": 2, "soft_experts.every": 2, "mlp.kind": "moe", "depth": 4}
    refused(lambda: families.make({**both, "mlp.moe.every": 2}), "soft_experts.every=2")
    assert families.make({**both, "soft_experts.every": 3, "mlp.moe.every": 2})
